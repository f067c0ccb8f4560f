"""Models with a norm placement. Importing this package registers LaminaConfig and the models with the Auto classes."""

import transformers

from lamina.modeling.configuration_lamina import LaminaConfig
from lamina.modeling.modeling_lamina import (
    HEADS,
    LaminaForCausalLM,
    LaminaForImageClassification,
    LaminaForMaskedLM,
    LaminaForSequenceClassification,
    LaminaModel,
)
from lamina.modeling.wiring_lamina import Block, LaminaNorm, Residual

transformers.AutoConfig.register("lamina", LaminaConfig, exist_ok=True)
LaminaConfig.register_for_auto_class()
for _name, _model in (("AutoModel", LaminaModel), *((head.auto_class, head.model) for head in HEADS.values())):
    getattr(transformers, _name).register(LaminaConfig, _model, exist_ok=True)
    _model.register_for_auto_class(_name)

__all__ = [
    "Block",
    "LaminaConfig",
    "LaminaForCausalLM",
    "LaminaForImageClassification",
    "LaminaForMaskedLM",
    "LaminaForSequenceClassification",
    "LaminaModel",
    "LaminaNorm",
    "Residual",
]
