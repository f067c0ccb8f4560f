"""The model to measure: the planned one, or one of the same depth that is narrow enough to train quickly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lamina.errors import UserError
from lamina.modeling.backbones import count_parameters
from lamina.modeling.building import build, make_plan
from lamina.modeling.width import WidthScaling
from lamina.placements import Plan
from lamina.training.objectives.causal_lm import CausalLM
from lamina.training.optimization.optimizer import width_scaling_of
from lamina.training.resolve import backbone_config
from lamina.training.settings import PretrainSettings

NARROWEST, FEWEST_TOKENS = 64, 256


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """A stand-in for the planned run: its settings, its plan, and how weights and rates scale with the width.

    ``settings`` are the planned ones except for width, heads and blocks per step; ``scaling`` is the planned run's
    own or, for a narrower stand-in, the standard parametrization's with the planned width as its base.
    """

    settings: PretrainSettings
    plan: Plan
    hidden_size: int
    planned_hidden_size: int
    planned_blocks: int
    scaling: WidthScaling | None

    @property
    def note(self) -> str:
        """A sentence about the differences from the planned run; empty if there are none."""
        parts = []
        if self.hidden_size != self.planned_hidden_size:
            parts.append(
                f"width {self.hidden_size} in place of {self.planned_hidden_size} (weights and rates scaled as in "
                "Everett et al. 2024 for the standard parametrization)"
            )
        blocks = self.settings.batch_size * self.settings.gradient_accumulation
        if blocks != self.planned_blocks:
            parts.append(f"{blocks} blocks per step in place of {self.planned_blocks}")
        return f"measured at {' and '.join(parts)}" if parts else ""


def choose(planned: PretrainSettings, vocab_size: int, steps: int, flops: float) -> Proxy:
    """The planned run, with fewer blocks per step and then a narrower model until ``steps`` take at most ``flops``.

    Depth is never reduced; a step keeps at least 256 tokens; the width is halved as long as the backbone allows it,
    down to 64.
    """
    config = backbone_config(planned, vocab_size)
    plan = make_plan(planned.placement, config.num_hidden_layers)
    wide = int(config.hidden_size)
    blocks = planned.batch_size * planned.gradient_accumulation
    fewest = max(1, FEWEST_TOKENS // planned.sequence_length)
    scaling = width_scaling_of(planned)
    settings = planned
    while True:
        cost = 6.0 * count_parameters(config).active * planned.sequence_length * steps
        affordable = min(blocks, max(fewest, int(min(flops / cost, blocks))))
        batch, micro_batches = min(planned.batch_size, affordable), max(1, affordable // planned.batch_size)
        width = int(config.hidden_size)
        narrower = None if cost * batch * micro_batches <= flops else _narrower(planned, width, vocab_size)
        if narrower is None:
            break
        # a tied tensor could not have both the rate of an embedding and that of a readout
        settings, config = narrower
        scaling = width_scaling_of(planned) or WidthScaling(scheme="standard", base_width=wide)
    return Proxy(
        settings=replace(settings, batch_size=batch, gradient_accumulation=micro_batches),
        plan=plan,
        hidden_size=width,
        planned_hidden_size=wide,
        planned_blocks=blocks,
        scaling=scaling,
    )


def _narrower(
    planned: PretrainSettings, width: int, vocab_size: int
) -> tuple[PretrainSettings, PreTrainedConfig] | None:
    if width % 2 or width // 2 < NARROWEST:
        return None
    settings = replace(planned, hidden_size=width // 2, num_heads=None, untie_embeddings=True)
    try:
        return settings, backbone_config(settings, vocab_size)
    except UserError:
        return None


def build_model(proxy: Proxy, vocab_size: int, profile: torch.Tensor) -> PreTrainedModel:
    """The model to measure, initialized as `lamina pretrain` does for this seed.

    Raises UserError for a width that is invalid for the placement or the backbone.
    """
    torch.manual_seed(proxy.settings.seed)
    return build(
        backbone_config(proxy.settings, vocab_size),
        proxy.plan,
        head=CausalLM.head,
        init=proxy.settings.init,
        profile_ids=profile,
        width_scaling=proxy.scaling,
    )
