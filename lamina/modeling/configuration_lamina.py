"""The configuration of a Lamina model: a transformers backbone, and a norm placement layer by layer.

This file imports nothing from the package, because transformers copies this file beside a checkpoint.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import AutoConfig, PreTrainedConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

# The entry of config.json that names the code beside a checkpoint; modeling_lamina adds its heads.
AUTO_MAP = {"AutoConfig": "configuration_lamina.LaminaConfig", "AutoModel": "modeling_lamina.LaminaModel"}

# Fields of the backbone that other tools expect at the top level of config.json. Lamina writes copies of these fields.
# In Python, every field of the backbone can be read and set at the top level.
FLAT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "image_size", "patch_size", "num_channels"),
)

_TWO_LABELS = {0: "LABEL_0", 1: "LABEL_1"}  # what transformers gives a configuration without labels

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")  # the model's tokens may differ from the backbone's


class LogitsStyle(NamedTuple):
    """How a backbone changes the logits: by a factor (Cohere), a divisor (Granite) or a soft-cap (Gemma 2).

    None means no change. ``states`` is the divisor of the output head's input (MiniCPM).
    """

    factor: float | None
    divisor: float | None
    softcap: float | None
    states: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitsStyle:
        fields = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        factor, scaling, softcap = (getattr(config, name, None) or None for name in fields)
        if config.model_type == "hyperclovax":  # here this field is a factor
            return cls(scaling, None, softcap)
        return cls(factor, None, softcap, scaling) if config.model_type == "minicpm3" else cls(factor, scaling, softcap)

    @property
    def scale(self) -> float:
        return float(self.factor or 1.0) / float(self.divisor or 1.0) / float(self.states or 1.0)

    def apply(self, head: nn.Module, states: torch.Tensor) -> torch.Tensor:
        logits = head(states / self.states if self.states else states)
        if self.factor:
            logits = logits * self.factor
        if self.divisor:
            logits = logits / self.divisor
        return self.softcap * (logits / self.softcap).tanh() if self.softcap else logits


class LaminaConfig(PreTrainedConfig):
    """The configuration of a backbone and its norm placement.

    Fields of the backbone, such as ``config.hidden_size``, are also fields of this configuration. ``backbone_of``
    returns the backbone's configuration. For serving engines, config.json also has copies of the fields in ``FLAT``,
    and the total factor on the logits (``logit_scale``). A copy with another value raises ValueError.

    Args:
        backbone_config: the transformers configuration of the backbone, or its dict (with ``model_type``).
        plan: the norm placement, as ``lamina.placements.Plan.to_dict`` writes it. Raises ValueError if the placement's
            number of layers is not ``num_hidden_layers``.
    """

    model_type = "lamina"
    # transformers reads this attribute of the class. Newer versions have a property of the same name
    sub_configs = {"backbone_config": AutoConfig}  # pyright: ignore
    keys_to_ignore_at_inference = ["past_key_values"]

    backbone_config: dict | PreTrainedConfig | None = None
    plan: dict | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Create the backbone's configuration. Raises ValueError if fields contradict each other."""
        if self.backbone_config is None:
            self.backbone_config = AutoConfig.for_model("llama")
        elif isinstance(self.backbone_config, dict):
            fields = dict(self.backbone_config)
            self.backbone_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        else:
            self.backbone_config = copy.deepcopy(self.backbone_config)  # the lines below change the copy
        backbone = self.backbone_config
        for name in FLAT:
            if name in kwargs and hasattr(backbone, name) and (value := kwargs.pop(name)) != getattr(backbone, name):
                raise ValueError(
                    f"{name}: {value!r}, but backbone_config.{name} is {getattr(backbone, name)!r}. Make the values "
                    "equal."
                )
        scale = LogitsStyle.of(backbone).scale
        if (value := kwargs.pop("logit_scale", scale)) != scale:
            raise ValueError(
                f"logit_scale is {value!r}, but backbone_config scales the logits by {scale!r}. Make the two values "
                "equal."
            )
        # The last of the hidden_states is the stream before the final norm, like the others.
        backbone.tie_last_hidden_states = False
        # The head looks at the outer configuration, the backbone at its own: one value for both.
        backbone.tie_word_embeddings = self.tie_word_embeddings or bool(getattr(backbone, "tie_word_embeddings", False))
        self.tie_word_embeddings = backbone.tie_word_embeddings
        for name in _TOKENS:
            if kwargs.get(name) is None:
                kwargs[name] = getattr(backbone, name, None)
        if self.id2label is None and "num_labels" not in kwargs and (backbone.id2label or {}) != _TWO_LABELS:
            self.id2label, self.label2id = copy.copy(backbone.id2label), copy.copy(backbone.label2id)
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        if self.plan is not None and len(self.plan["layers"]) != backbone.num_hidden_layers:
            raise ValueError(
                f"plan: the plan has {len(self.plan['layers'])} layers, but the backbone has num_hidden_layers = "
                f"{backbone.num_hidden_layers}. Make the numbers equal."
            )
        super().__post_init__(**kwargs)

    def convert_rope_params_to_dict(self, **kwargs: object) -> dict[str, object]:
        """Return the fields unchanged. The backbone's configuration has already converted the rotary parameters."""
        return kwargs

    def __getattr__(self, name: str) -> Any:
        """Return the value in the backbone's configuration, for a field that LaminaConfig does not have."""
        backbone = self.__dict__.get("backbone_config")
        if not name.startswith("_") and isinstance(backbone, PreTrainedConfig):
            if name == "logit_scale" and (scale := LogitsStyle.of(backbone).scale) != 1.0:
                return scale
            if hasattr(backbone, name):
                return getattr(backbone, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field of LaminaConfig. If only the backbone's configuration has the field, set it there."""
        backbone = self.__dict__.get("backbone_config")
        again = name in self.__dict__
        own = name in self.__dict__ or hasattr(type(self), name) or name in _TOKENS or name.startswith("_")
        if not own and isinstance(backbone, PreTrainedConfig) and hasattr(backbone, name):
            setattr(backbone, name, value)
        else:
            super().__setattr__(name, value)
        if again and name == "tie_word_embeddings" and isinstance(backbone, PreTrainedConfig):
            backbone.tie_word_embeddings = value  # both configurations have the same value

    def to_dict(self) -> dict:
        return {**super().to_dict(), **self._copies()}

    def to_diff_dict(self) -> dict:
        """Return the content of config.json: all non-default fields, and copies of the backbone's fields."""
        return {**super().to_diff_dict(), **self._copies()}

    def _copies(self) -> dict[str, object]:
        backbone = backbone_of(self)
        copies = {name: value for name in FLAT if (value := getattr(backbone, name, None)) is not None}
        scale = LogitsStyle.of(backbone).scale
        return copies if scale == 1.0 else {**copies, "logit_scale": scale}


def backbone_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a Lamina model's backbone configuration, or the text part of any other model's configuration."""
    lamina = (
        config.model_type == LaminaConfig.model_type
    )  # by name, because code beside a checkpoint defines another class
    inner = config.backbone_config if lamina else config.get_text_config()
    assert isinstance(inner, PreTrainedConfig)
    return inner
