"""The model that a run starts from."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lamina.data import Blocks
from lamina.modeling.building import build
from lamina.training import source
from lamina.training.optimization.optimizer import rate_factors
from lamina.training.resolve import ResolvedRun


def initial_model(
    resolved: ResolvedRun, blocks: Blocks, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, dict[str, float] | None]:
    """A run's model before its first step, and under width scaling each parameter's factor on the learning rate."""
    settings, scaling = resolved.settings, resolved.width_scaling
    config = resolved.with_tokenizer(tokenizer)
    torch.manual_seed(settings.seed)
    profile = blocks.train.sample(settings.batch_size)
    if settings.from_model is None:
        model = build(
            config, resolved.plan, head="causal_lm", init=settings.init, profile_ids=profile, width_scaling=scaling
        )
    else:
        model = source.load(settings.from_model, config.max_position_embeddings)
    return model, None if scaling is None else rate_factors(model, scaling)
