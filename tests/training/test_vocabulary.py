"""What a tokenizer decides of a model: the size of the vocabulary, and the padding."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, PreTrainedTokenizerFast

import lamina
from lamina.data.tokenizers import load_tokenizer
from lamina.modeling.modeling_lamina import LaminaForCausalLM
from lamina.training.objectives.objective import objective_of


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
