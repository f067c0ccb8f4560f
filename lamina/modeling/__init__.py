"""How a plan is executed. Importing this registers LaminaConfig and the models with transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from lamina.modeling.configuration_lamina import LaminaConfig
from lamina.modeling.modeling_lamina import (
    Block,
    LaminaForCausalLM,
    LaminaForImageClassification,
    LaminaForMaskedLM,
    LaminaForSequenceClassification,
    LaminaModel,
    Residual,
)

AutoConfig.register("lamina", LaminaConfig, exist_ok=True)
AutoModel.register(LaminaConfig, LaminaModel, exist_ok=True)
AutoModelForCausalLM.register(LaminaConfig, LaminaForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(LaminaConfig, LaminaForMaskedLM, exist_ok=True)
AutoModelForImageClassification.register(LaminaConfig, LaminaForImageClassification, exist_ok=True)
AutoModelForSequenceClassification.register(LaminaConfig, LaminaForSequenceClassification, exist_ok=True)
LaminaConfig.register_for_auto_class()
LaminaModel.register_for_auto_class("AutoModel")
LaminaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LaminaForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
LaminaForImageClassification.register_for_auto_class("AutoModelForImageClassification")
LaminaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")

__all__ = [
    "Block",
    "LaminaConfig",
    "LaminaForCausalLM",
    "LaminaForImageClassification",
    "LaminaForMaskedLM",
    "LaminaForSequenceClassification",
    "LaminaModel",
    "Residual",
]
