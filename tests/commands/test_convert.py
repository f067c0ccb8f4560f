"""`lamina convert`: both ways with a measured difference; what is in the way stays as it is."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lamina
from lamina.cli import main
from lamina.modeling.backbones import conversion


@pytest.fixture
def source(tmp_path, tiny_llama):
    model = LlamaForCausalLM(tiny_llama).eval()
    model.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return tmp_path / "llama"


def ran(*argv):
    assert main(["convert", *map(str, argv)]) == 0


def test_there_and_back(source, tmp_path, capsys):
    ours, back = tmp_path / "new" / "ours", tmp_path / "back"
    ran(source, ours)
    assert "llama -> pre_ln on llama" in (out := capsys.readouterr().out)
    assert f"random tokens: 0\nthe model: {ours} (LaminaForCausalLM)\nto load it: import lamina, trans" in out
    assert json.loads((ours / "conversion.json").read_text())["largest_difference"] == 0.0
    assert (ours / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()
    assert (ours / "modeling_lamina.py").is_file()
    assert [p.name for p in ours.parent.iterdir()] == ["ours"]  # no draft is left
    ran(ours, back, "--no-verify")
    assert f"not measured (--no-verify)\nthe model: {back} (LlamaForCausalLM)\n" in capsys.readouterr().out
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (source, back))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_runs_folder_stands_for_its_model(source, tmp_path):
    (tmp_path / "run").mkdir()
    source.rename(tmp_path / "run" / "model")
    ran(tmp_path / "run", tmp_path / "ours")
    assert (tmp_path / "ours" / "config.json").is_file()


def test_a_folder_in_use_is_refused(source, refused, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    assert "is not empty" in refused("convert", source, target)
    assert "did not write" in refused("convert", source, target, "--overwrite")
    (target / "mine.txt").unlink()
    ran(source, target)
    assert "is not empty. Choose an empty or new folder, or add --overwrite" in refused("convert", source, target)
    (target / "stale").write_text("")
    ran(source, target, "--overwrite")
    assert not (target / "stale").exists()
    assert "contains the source model" in refused("convert", target, target, "--overwrite")
    (source / "model.safetensors").write_bytes(b"")
    refused("convert", source, target, "--overwrite")  # what was there stays when the source is no good


def test_logits_that_differ_are_refused(source, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "largest_difference", lambda one, other: (0.5, 1.0))
    assert "verify: the logits differ by up to 0.5" in refused("convert", source, tmp_path / "out")
    monkeypatch.setattr(conversion, "largest_difference", lambda one, other: (float("nan"), float("nan")))
    assert "not finite" in refused("convert", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_cannot_be_converted(source, refused, tmp_path):
    out = tmp_path / "out"
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=61)).save_pretrained(tmp_path / "gpt2")
    assert "model_type: Lamina cannot convert 'gpt2'" in refused("convert", tmp_path / "gpt2", out)
    lamina.build(LlamaConfig(**SMALL), "keel").save_pretrained(tmp_path / "keel")
    assert "transformers has no model class with the norms and scales of this placement, 'keel'" in refused(
        "convert", tmp_path / "keel", out
    )
    assert "is already a transformers checkpoint" in refused("convert", source, out, "--to", "transformers")
    assert "is already a lamina checkpoint" in refused("convert", tmp_path / "keel", out, "--to", "lamina")
    assert "did you mean 'lamina'" in refused("convert", source, out, "--to", "lamin")
    assert "dtype: 'int8' (allowed: auto, " in refused("convert", source, out, "--dtype", "int8")
    assert "--placement: 'keel' has no effect without --from" in refused("convert", source, out, "--placement", "keel")
    assert "no/such/folder" in refused("convert", "no/such/folder", out)
    assert "config.json is missing" in refused("convert", tmp_path, out)
    assert not out.exists()


SMALL = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
