"""The tokens that end an answer, and the padding, are the model's own after every job that writes a model."""

from __future__ import annotations

import json

import pytest
import torch
from lab.posttraining.tiny import preferences, write_reward
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.data.tokenizers import load_tokenizer
from lamina.modeling.checkpoint import load

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END, PAD = 257, 258, 259
ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 6
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


def write_chat_model(folder, ends, pad=PAD):
    """A model of transformers whose answers end with <|im_end|>, or with the text's end, 256."""
    tokenizer = load_tokenizer("bytes")
    tokens = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, max_position_embeddings=128, bos_token_id=256, eos_token_id=256, **SIZES)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = pad
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(tokens) == [START, END, PAD]
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model", [256, END])


def ends_of(folder):
    generation = json.loads((folder / "generation_config.json").read_text())
    return generation["eos_token_id"], generation.get("pad_token_id")


TUNED = {"steps": 1, "batch_size": 2, "bar": False, "eval_fraction": 0.34}


def test_after_sft_both_ends_are_left_and_an_answer_stops_at_the_templates(chat, tmp_path):
    lamina.sft(from_model=chat, data=ROWS, output=tmp_path / "run", **TUNED)
    assert ends_of(tmp_path / "run" / "model") == ([256, END], PAD)
    model = load(tmp_path / "run").model

    def only_the_end(module, args, output):
        output.logits[..., END] = output.logits.max() + 100
        return output

    model.register_forward_hook(only_the_end)
    answer = model.generate(torch.tensor([[START, 65]]), max_new_tokens=20, do_sample=False)
    assert answer[0].tolist() == [START, 65, END]


@pytest.mark.parametrize("ends", [256, [256]])
def test_after_sft_the_templates_own_end_has_joined(ends, tmp_path):
    model = write_chat_model(tmp_path / "model", ends)
    lamina.sft(from_model=model, data=ROWS, output=tmp_path / "run", **TUNED)
    assert ends_of(tmp_path / "run" / "model")[0] == [256, END]


@pytest.mark.slow
def test_texts_without_a_template_leave_one_end(tmp_path):
    model = write_chat_model(tmp_path / "model", 256)
    rows = [{"prompt": "a", "completion": "b"}] * 6
    lamina.sft(from_model=model, data=rows, output=tmp_path / "run", **TUNED)
    assert ends_of(tmp_path / "run" / "model")[0] == 256


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft with LoRA", "dpo", "rlhf"])
def test_after_every_job_both_ends_are_left(job, chat, tmp_path):
    data, more = (ROWS, {"lora_rank": 2}) if "sft" in job else (preferences(6), {})
    more |= {"max_answer": 4, "reward_function": write_reward(tmp_path, "float(len(answer))")} if job == "rlhf" else {}
    getattr(lamina, job.split()[0])(from_model=chat, data=data, output=tmp_path / "run", **more, **TUNED)
    assert ends_of(tmp_path / "run" / "model") == ([256, END], PAD)


@pytest.mark.slow
def test_after_prune_graft_and_convert(chat, tmp_path):
    lamina.prune(chat, tmp_path / "pruned", layers=[1], sequences=2, sequence_length=16)
    lamina.graft(chat, tmp_path / "grafted", placement="peri_ln", sequences=4, sequence_length=16)
    lamina.convert(chat, tmp_path / "converted")
    lamina.convert(tmp_path / "converted", tmp_path / "back")
    lamina.graft(tmp_path / "converted", tmp_path / "again", placement="keel", sequences=4, sequence_length=16)
    for name in ("pruned", "grafted", "converted", "back", "again"):
        assert ends_of(tmp_path / name) == ([256, END], PAD), name


@pytest.mark.slow
def test_after_training_goes_on_from_the_model(chat, tmp_path):
    settings = {"corpus": "embedded", "steps": 1, "batch_size": 2, "sequence_length": 16, "bar": False}
    lamina.pretrain(from_model=chat, output=tmp_path / "run", **settings)
    assert ends_of(tmp_path / "run" / "model") == ([256, END], PAD)
