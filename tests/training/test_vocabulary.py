"""What a tokenizer and a context length decide of a model: the vocabulary, the padding and the positions."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, Gemma2Config, LlamaConfig, PreTrainedTokenizerFast

import lamina
from lamina.data.tokenizers import load_tokenizer
from lamina.modeling.modeling_lamina import LaminaForCausalLM
from lamina.training.objectives.objective import objective_of
from lamina.training.resolve import backbone_config


def completed(config, tokenizer):
    return objective_of(config).complete(config, None, tokenizer, None)


@pytest.mark.parametrize("padding", [0, 128_004])
def test_a_backbone_s_padding_does_not_silence_a_token_of_another_vocabulary(tmp_path, padding):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=200_000, pad_token_id=padding)
    tokenizer = load_tokenizer("bytes")
    fitted = completed(config, tokenizer)
    assert (fitted.pad_token_id, config.pad_token_id) == (None, padding)
    model = lamina.build(fitted, "pre_ln")
    assert bool(model.get_input_embeddings().weight.abs().sum(1).all())
    model.save_pretrained(tmp_path)
    assert LaminaForCausalLM.from_pretrained(tmp_path).get_input_embeddings().padding_idx is None
    tokenizer.pad_token = "a"
    assert completed(config, tokenizer).pad_token_id == ord("a")


@pytest.fixture
def gaps(tmp_path):
    """A folder with a tokenizer of 19 tokens whose largest id is 57."""
    words = "the norm sits before after and between every layer of a deep model whose stream carries what it adds"
    vocabulary = {"[UNK]": 0} | {word: 3 * n + 3 for n, word in enumerate(words.split()[:18])} | {"adds": 57}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "[UNK]", "eos_token": "[UNK]", "pad_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(tmp_path / "gaps")
    return str(tmp_path / "gaps")


def test_a_tokenizer_whose_ids_have_gaps_trains_a_model(gaps, trained, tmp_path):
    trained(tokenizer=gaps, steps=1)
    model = LaminaForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.get_text_config().vocab_size == 58


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
