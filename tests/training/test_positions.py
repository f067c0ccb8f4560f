"""A saved model and its tokenizer state the context that was trained; a folder's backbone keeps its own."""

import json

from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from lamina.training.resolve import backbone_config


def positions(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return json.loads((folder / "config.json").read_text())["backbone_config"]["max_position_embeddings"], (
        tokenizer.model_max_length
    )


def test_a_presets_positions_are_the_ones_trained(trained, tmp_path):
    trained(steps=1)  # sequences of 16 tokens; Llama's default is 2,048
    assert positions(tmp_path / "run" / "model") == (16, 16)
    assert AutoConfig.from_pretrained(tmp_path / "run" / "model").get_text_config().max_position_embeddings == 16


def test_a_folders_positions_are_its_own(tiny, tmp_path):
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=128)
    config.save_pretrained(tmp_path / "backbone")
    settings = tiny(backbone=str(tmp_path / "backbone"))
    assert backbone_config(settings).max_position_embeddings == 128
    longer = tiny(backbone=str(tmp_path / "backbone"), sequence_length=256)
    assert backbone_config(longer).max_position_embeddings == 256
