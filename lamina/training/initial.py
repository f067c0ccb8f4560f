"""The model that a run starts from."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lamina.data.blocks import Splits
from lamina.modeling.building import build
from lamina.training import source
from lamina.training.objectives.objective import Processor
from lamina.training.optimization.optimizer import rate_factors
from lamina.training.resolve import ResolvedRun


def initial_model(
    resolved: ResolvedRun, splits: Splits, processor: Processor
) -> tuple[PreTrainedModel, dict[str, float] | None]:
    """A run's model before its first step, and under width scaling each parameter's factor on the learning rate."""
    settings, scaling, objective = resolved.settings, resolved.width_scaling, resolved.objective
    config = objective.complete(resolved.backbone, splits, processor, settings.from_model)
    torch.manual_seed(settings.seed)
    profile = splits.train.sample(settings.batch_size)
    if settings.from_model is None:
        model = build(
            config,
            resolved.plan,
            head=objective.head,
            init=settings.init,
            profile_ids=profile,
            width_scaling=scaling,
        )
    else:
        model = source.load(settings.from_model, config, objective.head)
    return model, None if scaling is None else rate_factors(model, scaling)
