"""Parameter groups under width scaling: each role has its own learning rate; rate times decay is the same in all."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.modeling.width import SCHEMES, WidthScaling, scaled_weights
from lamina.training.settings import RunSettings


def width_scaling_of(settings: RunSettings) -> WidthScaling | None:
    """The scheme of the settings, or None."""
    if settings.width_scaling == "none":
        return None
    assert settings.base_width is not None  # the settings' own check
    return WidthScaling(
        scheme=settings.width_scaling,
        base_width=settings.base_width,
        k_embedding=settings.k_embedding,
        k_hidden=settings.k_hidden,
        k_readout=settings.k_readout,
    )


def rate_factors(model: PreTrainedModel, scaling: WidthScaling) -> dict[str, float]:
    """Each parameter's factor on the learning rate, by name. Raises UserError as ``scaled_weights`` does."""
    return {scaled.weight.name: scaled.rate for scaled in scaled_weights(model, scaling)}


def parameter_groups(
    model: nn.Module, factors: dict[str, float], *, learning_rate: float, weight_decay: float
) -> list[Json]:
    """The optimizer's groups: one per factor, with and without decay; the factor nearest to 1 comes first.

    AdamW shrinks a weight by the share ``lr * weight_decay`` per step. So where a group's rate is divided by m, its
    decay is multiplied by m; otherwise a wider model would decay less. Gains, biases and learned scales do not decay.
    """
    groups: dict[tuple[float, bool], Json] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor, decays = factors[name.replace("_orig_mod.", "")], parameter.ndim >= 2
        options = {"lr": learning_rate * factor, "weight_decay": weight_decay / factor if decays else 0.0}
        groups.setdefault((factor, decays), {"params": [], **options})["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: (abs(key[0] - 1.0), key))]


def check_optimizer(arguments: TrainingArguments) -> None:
    """Raise UserError for an optimizer other than Adam: the exponents are Adam's."""
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if "adam" not in name:
        raise UserError(
            f"width_scaling: its exponents ({', '.join(SCHEMES)}) are Adam's, trainer.optim is {name!r} (allowed: one "
            "of the adamw kind, or --width-scaling none)"
        )
