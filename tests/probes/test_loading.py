"""Checkpoints from paths: what loads, and what is said where one doesn't."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_inputs, small_model
from transformers import LlamaConfig

import lamina
from lamina.errors import UserError
from lamina.jobs.manifest import seal
from lamina.modeling.checkpoint import load


@pytest.fixture
def saved(tmp_path):
    model = small_model("llama")
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def test_a_checkpoint_of_transformers(saved):
    folder, model = saved
    again = load(folder)
    assert again.notes == []
    assert again.run is None
    inputs = small_inputs(model)
    with torch.no_grad():
        assert torch.equal(again.model(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("name", ["bert", "albert", "vit"])
def test_the_class_that_saved_it_is_the_one_that_loads(tmp_path, name):
    model = small_model(name)
    model.save_pretrained(tmp_path)
    assert type(load(tmp_path).model) is type(model)


def test_a_lamina_checkpoint_and_the_folder_of_its_run(tmp_path):
    model = lamina.build(LlamaConfig(**{**_sizes(), "vocab_size": 40}), "keel")
    model.save_pretrained(tmp_path / "model")
    seal(tmp_path / "model")
    (tmp_path / "result.json").write_text("{}")
    for path in (tmp_path / "model", tmp_path):
        assert torch.equal(load(path).model.lm_head.weight, model.lm_head.weight)
    assert load(tmp_path).run == tmp_path


def test_a_run_without_a_model_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(UserError, match="has saved no model yet"):
        load(tmp_path)


def test_pickled_weights_are_read_as_tensors_only(tmp_path):
    model = small_model("bert")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(load(tmp_path).model.bert.embeddings.word_embeddings.weight, model.get_input_embeddings().weight)

    class Trap:
        def __reduce__(self):
            return (print, ("this must never run",))

    torch.save({"weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="checkpoint"):
        load(tmp_path)


def test_weights_that_are_not_finite_are_named(saved):
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"'model.layers.1.mlp.up_proj.weight' holds 1 values.*\[3, 5\]"):
        load(folder)


def test_a_missing_layer_is_refused_a_missing_head_noted(saved):
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    without_head = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    save_file(without_head, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder).notes == ["not in the checkpoint, so random: lm_head.weight"]
    del without_head["model.layers.2.mlp.up_proj.weight"]
    save_file(without_head, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing tensor '.*layers\.2\.mlp\.up_proj"):
        load(folder)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="is neither a folder nor a readable model"):
        load(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is a file"):
        load(tmp_path / "config.json")


def _sizes():
    return {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
