"""`lamina pretrain --from MODEL`: its weights, its plan, its tokenizer; new data and a new schedule."""

import json

import pytest
import torch
from posttraining.tiny import write_model
from safetensors.torch import load_file
from training.tiny_runs import SMALL, cut_back, flags, records
from transformers import LlamaConfig, LlamaForCausalLM

from lamina.cli import main
from lamina.data.tokenizers import load_tokenizer
from lamina.training import source

NEW = {"steps": 3, "sequence_length": 16, "batch_size": 2, "eval_blocks": 4, "threads": 1}


@pytest.fixture
def first(corpus, tmp_path):
    argv = flags(**SMALL, corpus=corpus, output=tmp_path / "first", learning_rate=1e-2)
    assert main(["pretrain", *argv, "--placement", "mix_ln(alpha=0.5)"]) == 0
    return tmp_path / "first"


def going_on(corpus, source, output, *more, **changed):
    return main(["pretrain", "--from", str(source), *flags(**{**NEW, **changed}, corpus=corpus, output=output), *more])


def test_it_starts_with_the_checkpoints_weights_and_keeps_its_plan(first, corpus, tmp_path, before_step):
    seen = {}
    before_step(1, lambda _, model: seen.update({n: p.detach().clone() for n, p in model.named_parameters()}))
    assert going_on(corpus, first, tmp_path / "second", steps=2, learning_rate=1e-3) == 0
    saved = load_file(first / "model" / "model.safetensors")
    assert saved.keys() == seen.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, seen[name]), name
    plans = [json.loads((folder / "plan.json").read_text()) for folder in (first, tmp_path / "second")]
    assert plans[0] == plans[1]
    result = json.loads((tmp_path / "second" / "result.json").read_text())
    assert (result["init"], result["from"]) == ("checkpoint", str(first))
    steps = [r["step"] for r in records(tmp_path / "second") if "loss" in r]
    assert steps[-1] == 2  # a schedule of its own
    moved = load_file(tmp_path / "second" / "model" / "model.safetensors")
    assert any(not torch.equal(moved[name], saved[name]) for name in saved)


def test_a_folder_that_is_written_anew_is_read_anew(tmp_path):
    for placement in ("pre_ln", "keel"):
        write_model(tmp_path / "model", placement)
        assert source.stored_plan(str(tmp_path / "model")).placement == placement


def test_a_source_on_the_hub_is_not_asked_for_again_and_again(tmp_path, corpus, capsys, monkeypatch):
    monkeypatch.setattr("lamina.core.hub_access.hub_resolves", lambda: False)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("the hub's client waits to ask again"))
    assert going_on(corpus, "no-such-model", tmp_path / "run") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_transformers_checkpoint_is_taken_as_convert_does(corpus, tmp_path, before_step):
    torch.manual_seed(5)
    sizes = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=257, hidden_size=16, **sizes)).eval()
    theirs.save_pretrained(tmp_path / "llama")
    load_tokenizer("bytes").save_pretrained(tmp_path / "llama")
    ids = torch.arange(12)[None]
    logits = {}
    before_step(1, lambda _, model: logits.update(ours=model(input_ids=ids).logits.detach()))
    assert going_on(corpus, tmp_path / "llama", tmp_path / "run") == 0
    torch.testing.assert_close(logits["ours"], theirs(ids).logits, atol=1e-5, rtol=1e-5)
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "placement: pre_ln" in config
    assert "hidden_size: 16" in config


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--placement", "pre_ln"], "placement: 'pre_ln', but the checkpoint"),  # the default, but given
        (["--placement", "mix_ln(alpha=0.25)"], "placement: 'mix_ln(alpha=0.25)'"),
        (["--num-layers", "3"], "num_layers: 3, but the checkpoint"),
        (["--hidden-size", "32"], "hidden_size: 32"),
        (["--num-heads", "4"], "num_heads: 4"),
        (["--backbone", "llama-1.5b"], "backbone: 'llama-1.5b'"),
        (["--init", "small"], "init: 'small'"),
        (["--tokenizer", "bpe:300"], "tokenizer: 'bpe:300'"),
    ],
)
def test_what_the_checkpoint_decides_is_refused_if_given_and_different(first, corpus, tmp_path, capsys, more, message):
    capsys.readouterr()
    assert going_on(corpus, first, tmp_path / "second", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "second").exists()


def test_the_same_given_again_is_fine_and_so_is_a_mix(first, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("few words, other ones\n" * 200)
    same = ["--placement", "mix_ln(alpha=0.5)", "--num-layers", "2", "--hidden-size", "16", "--tokenizer", "bytes"]
    assert going_on(f"{corpus}:1,{other}:3", first, tmp_path / "second", *same, batch_size=4) == 0
    result = json.loads((tmp_path / "second" / "result.json").read_text())
    assert result["mix"][str(other)]["share"] == 0.75


def test_it_can_be_resumed(first, corpus, tmp_path):
    given = {"steps": 4, "save_steps": 2, "logging_steps": 1}
    assert going_on(corpus, first, tmp_path / "whole", **given) == 0
    assert going_on(corpus, first, tmp_path / "cut", **given) == 0
    cut_back(tmp_path / "cut", 2)
    assert main(["pretrain", "--output", str(tmp_path / "cut"), "--resume"]) == 0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


@pytest.mark.parametrize("output", ["first", "first/model", "."])
def test_the_folder_that_holds_the_source_is_no_output(first, corpus, tmp_path, capsys, output):
    capsys.readouterr()
    assert going_on(corpus, first, tmp_path / output, "--overwrite") == 2
    assert "holds the model to read" in capsys.readouterr().err
    assert (first / "model" / "model.safetensors").is_file()
