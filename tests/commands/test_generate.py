"""`lamina generate`: what it says, and what it never does."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, GPT2Config, LlamaConfig, OPTConfig

import lamina
from lamina.cli import main
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.modeling.generation import Speaker, Teller, until


def test_code_beside_a_model_runs_only_where_it_is_asked_for(tmp_path, monkeypatch, refused):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "config.json").write_text('{"model_type": "mystery", "auto_map": {"AutoConfig": "evil.Config"}}')
    assert "--trust-remote-code" in refused("generate", tmp_path)
    assert not (tmp_path / "ran").exists()
    assert main(["generate", str(tmp_path), "--trust-remote-code"]) == 2  # the code has no class Config
    assert (tmp_path / "ran").exists()


def saved(folder, **head):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, vocab_size=257, max_position_embeddings=32, pad_token_id=256)
    lamina.build(config, "mix_ln", **head).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return str(folder)


def test_a_model_without_a_tokenizer_generates_with_the_one_that_is_named(tmp_path, refused, capsys, caplog):
    """256 rows are enough for bytes: no text becomes the end-of-text token 256."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    for rows in (256, 200, 600):
        lamina.build(LlamaConfig(**sizes, vocab_size=rows), "mix_ln").save_pretrained(tmp_path / str(rows))
    assert "holds no tokenizer. Name a tokenizer with --tokenizer" in refused("generate", tmp_path / "256")
    assert main(["generate", str(tmp_path / "256"), "--tokenizer", "bytes", "--prompt", "Keel"]) == 0
    assert capsys.readouterr().out.startswith("Keel")
    load_tokenizer("bytes").save_pretrained(tmp_path / "256")
    same = {"prompt": "Keel", "max_new_tokens": 20}
    assert lamina.generate(tmp_path / "256", **same) == lamina.generate(tmp_path / "256", **same, tokenizer="bytes")
    line = refused("generate", tmp_path / "200", "--tokenizer", "bytes")
    assert "tokenizer: the tokenizer has 257 tokens, but the model has only 200" in line
    assert "no such file or folder" in refused("generate", tmp_path / "256", "--tokenizer", "./gone")
    caplog.clear()
    lamina.generate(tmp_path / "600", **same, tokenizer="bytes")
    assert "gives ids up to 256, but the model's vocabulary has 600 tokens" in caplog.text


def test_a_prompt_that_fills_the_context_is_refused(tmp_path, refused):
    folder = saved(tmp_path)
    assert main(["generate", folder, "--prompt", "a" * 31, "--max-new-tokens", "1"]) == 0
    said = refused("generate", folder, "--prompt", "a" * 32)
    assert "prompt: the prompt's 32 tokens fill the model's context of 32" in said


@pytest.mark.parametrize("kind", [GPT2Config, OPTConfig])
def test_a_text_ends_where_learned_positions_do(tmp_path, kind, capsys):
    own = {"ffn_dim": 16, "word_embed_proj_dim": 16} if kind is OPTConfig else {}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    config = kind(vocab_size=257, pad_token_id=None, bos_token_id=None, eos_token_id=None, **sizes, **own)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_tokenizer("bytes").save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "a" * 20]) == 0
    assert capsys.readouterr().out.startswith("a" * 20)


def test_rotary_positions_go_on_beyond_the_context(tmp_path):
    speaker = Speaker(saved(tmp_path), max_new_tokens=50, temperature=0.8)
    ids = speaker._generated(dict(speaker.tokenizer("a" * 20, return_tensors="pt")))
    assert ids.shape[1] > speaker.longest


def test_a_reward_model_is_refused_as_such(tmp_path, refused):
    said = refused("generate", saved(tmp_path, head="sequence_classification"))
    assert "is a LaminaForSequenceClassification, which returns scores" in said


def test_an_answer_ends_at_a_stop_after_the_system_s_turn(tmp_path, monkeypatch, capsys):
    folder, asked = saved(tmp_path), []
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)

    def generated(self, input_ids, **sampling):
        asked.append((tokenizer.decode(input_ids[0]), sampling["stop_strings"], sampling["top_p"]))
        return torch.cat([input_ids, torch.tensor([list(b"It is. END")])], 1)

    monkeypatch.setattr(GenerationMixin, "generate", generated)
    chat = ["generate", folder, "--chat", "--prompt", "Is it?", "--system", "Be brief.", "--top-p", "0.9"]
    assert main([*chat, "--stop", "\n\n", "--stop", "END"]) == 0
    assert capsys.readouterr().out == "It is.\n"
    assert asked == [("sBe brief.uIs it?", ["\n\n", "END"], 0.9)]
    assert lamina.generate(folder, "Is it?", chat=True, system="Be brief.", stop=["END"], top_p=0.9) == "It is."
    assert lamina.generate(folder, "Is it?", chat=True, stop=["END"], top_p=0.9) == "It is."
    assert [said for said, _, _ in asked[1:]] == ["sBe brief.uIs it?", "uIs it?"]
    with pytest.raises(UserError, match="system: 'S' has no effect here"):
        lamina.generate(folder, "Is it?", system="S")
    assert lamina.generate(folder, "So: ", top_p=0.9, stop=["END"]) == "So: It is. "


def test_a_small_top_p_leaves_the_likeliest_token_only(tmp_path):
    folder = saved(tmp_path)
    likeliest = lamina.generate(folder, "U", max_new_tokens=8, temperature=0)
    assert lamina.generate(folder, "U", max_new_tokens=8, temperature=1.0, top_p=1e-6) == likeliest


@pytest.mark.parametrize("stops", [(), ("END",), ("\n\n", "ab")])
def test_an_answer_is_told_while_it_is_written(tmp_path, stops, monkeypatch):
    """Whatever the parts, together they are the answer, and no part of a text that stops it is shown."""
    answer, said = "  It is level, \n\nab and END not more  ", []
    teller = Teller(load_tokenizer("bytes"), stops, said.append)
    for begin in range(0, len(answer), 3):
        teller.on_finalized_text(answer[begin : begin + 3])
    teller.on_finalized_text("", stream_end=True)
    assert "".join(said) == answer[: until(answer, stops)].strip()
    assert len(said) > 1
    folder, parts = saved(tmp_path), []
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    speaker = Speaker(folder, max_new_tokens=40, temperature=0.0, stop=stops)
    assert speaker.answer([{"role": "user", "content": "So"}], parts.append) == "".join(parts)
    parts.clear()
    monkeypatch.setattr(speaker.model, "generate", lambda **options: options["streamer"].on_finalized_text(1))
    with pytest.raises(UserError, match="does not run"):
        speaker.answer([{"role": "user", "content": "So"}], parts.append)
    monkeypatch.undo()
    speaker.answer([{"role": "user", "content": "So"}])
    assert parts == []
