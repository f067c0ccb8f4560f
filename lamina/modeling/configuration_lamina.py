"""The configuration of a Lamina model: a transformers backbone and the resolved plan, saved layer by layer.

Copied beside a checkpoint by transformers, so it imports nothing of the package.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

# The entry of config.json that names the code beside a checkpoint; modeling_lamina adds its heads.
AUTO_MAP = {"AutoConfig": "configuration_lamina.LaminaConfig", "AutoModel": "modeling_lamina.LaminaModel"}

_TWO_LABELS = {0: "LABEL_0", 1: "LABEL_1"}  # what transformers gives a configuration without labels


class LaminaConfig(PreTrainedConfig):
    """A backbone's configuration and a plan.

    Args:
        backbone_config: the transformers configuration of the backbone, or its dict (with ``model_type``).
        plan: a plan as ``lamina.placements.Plan.to_dict`` writes it; one entry of ``layers`` for each of the backbone's
            ``num_hidden_layers``. Raises ValueError if the two numbers differ.
    """

    model_type = "lamina"
    # transformers reads it off the class; newer versions have a property of the name
    sub_configs = {"backbone_config": AutoConfig}  # pyright: ignore
    keys_to_ignore_at_inference = ["past_key_values"]

    backbone_config: dict | PreTrainedConfig | None = None
    plan: dict | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Build the backbone's configuration and check that the plan is one for its depth."""
        if self.backbone_config is None:
            self.backbone_config = AutoConfig.for_model("llama")
        elif isinstance(self.backbone_config, dict):
            fields = dict(self.backbone_config)
            self.backbone_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        else:
            self.backbone_config = copy.deepcopy(self.backbone_config)  # it is changed below
        backbone = self.backbone_config
        # The last hidden state is to be the stream before the final norm, as it is in every other layer.
        backbone.tie_last_hidden_states = False
        # The head looks at the outer configuration, the backbone at its own: one value for both.
        backbone.tie_word_embeddings = self.tie_word_embeddings or bool(getattr(backbone, "tie_word_embeddings", False))
        self.tie_word_embeddings = backbone.tie_word_embeddings
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            kwargs.setdefault(name, getattr(backbone, name, None))
        if self.id2label is None and "num_labels" not in kwargs and (backbone.id2label or {}) != _TWO_LABELS:
            self.id2label, self.label2id = copy.copy(backbone.id2label), copy.copy(backbone.label2id)
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        if self.plan is not None and len(self.plan["layers"]) != backbone.num_hidden_layers:
            raise ValueError(
                f"plan: it has {len(self.plan['layers'])} layers, the backbone has num_hidden_layers = "
                f"{backbone.num_hidden_layers} (they must be equal)"
            )
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The backbone's configuration, which has vocab_size, hidden_size and num_hidden_layers."""
        assert isinstance(self.backbone_config, PreTrainedConfig)
        return self.backbone_config
