"""The table of model types: its two halves agree, and every list of model types is made from it."""

import transformers
from test_backbone_parity import BACKBONES

from lamina.core.architectures import ARCHITECTURES
from lamina.modeling import LaminaConfig
from lamina.modeling.modeling_lamina import ADAPTERS, HEADS


def test_what_travels_and_what_stays_are_rows_of_the_same_model_types():
    assert list(ADAPTERS) == list(ARCHITECTURES)
    assert set(ARCHITECTURES) == {*BACKBONES, "vit", "modernbert"}  # those two in test_encoders.py


def test_the_heads_of_every_row_exist():
    for adapter in ADAPTERS.values():
        assert adapter.is_decoder == ("causal_lm" in adapter.heads)
        assert set(adapter.heads) <= set(HEADS)


def test_every_head_is_loaded_by_its_auto_class():
    config = LaminaConfig()
    for head in HEADS.values():
        auto = getattr(transformers, head.auto_class)
        assert auto._model_mapping[LaminaConfig] is head.model
        assert config.auto_map[head.auto_class] == f"modeling_lamina.{head.model.__name__}"
