"""A reader that looks for a model's sizes at the top of its configuration finds the backbone's."""

import copy
import json
import pickle

import pytest
import torch
from modeling.tiny import OF_TEXT, SIZES, built, llama, token_ids
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, ViTConfig

import lamina
from lamina.modeling.configuration_lamina import FLAT, backbone_of

BACKBONES = {
    "llama": llama(),
    "qwen3": Qwen3Config(**OF_TEXT, head_dim=8),
    "vit": ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_fields_are_the_backbones_in_python_and_in_json(name, tmp_path):
    config = lamina.build(BACKBONES[name], "keel").config
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    backbone = backbone_of(config)
    fields = [field for field in FLAT if getattr(backbone, field, None) is not None]
    assert {"hidden_size", "num_hidden_layers"} < set(fields)
    for field in fields:
        assert getattr(config, field) == getattr(backbone, field) == written[field] == config.to_dict()[field]
    assert config.hidden_act == backbone.hidden_act
    assert config.get_text_config() is config
    assert not hasattr(config, "no_such_field")
    assert not hasattr(config, "_no_such_field")


def test_there_is_one_value_whoever_sets_it(tmp_path):
    model = built("keel")
    model.config.max_position_embeddings = 128
    assert backbone_of(model.config).max_position_embeddings == 128
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.config.vocab_size == 70
    model.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, max_position_embeddings=256)
    assert (loaded.vocab_size, backbone_of(loaded).max_position_embeddings) == (70, 256)
    for copied in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert copied.to_dict() == loaded.to_dict()


def test_a_copy_that_says_something_else_is_refused(tmp_path):
    built("keel").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 64}))
    with pytest.raises(ValueError, match=r"hidden_size: 64, but backbone_config.hidden_size is 32"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_checkpoint_without_copies_loads(tmp_path):
    model = built("mix_ln", 4)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    older = {name: value for name, value in json.loads(path.read_text()).items() if name not in FLAT}
    path.write_text(json.dumps(older))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(token_ids()).logits, model(token_ids()).logits)
    assert loaded.config.hidden_size == 32


def test_the_tokens_stay_the_models_own():
    config = built("keel").config
    config.pad_token_id = 7
    assert backbone_of(config).pad_token_id != 7
    assert isinstance(config.backbone_config, PreTrainedConfig)
