"""Group parameters for width and depth scaling, schedule the learning rate, and average weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.optimizer import StateDict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.modeling.parts import decaying
from lamina.modeling.scaling import DEPTH_SCHEMES, SCHEMES, ScaledWeight, Scaling, StepFactors, scaled_weights
from lamina.training.setting_groups import in_steps
from lamina.training.settings import RunSettings


def scaling_of(settings: RunSettings) -> Scaling | None:
    """Return the width and depth scaling of the settings, or None."""
    if settings.width_scaling == settings.depth_scaling == "none":
        return None
    return Scaling(
        width=settings.width_scaling,
        base_width=settings.base_width or 1,  # the settings require base_width for each scheme
        k_embedding=settings.k_embedding,
        k_hidden=settings.k_hidden,
        k_readout=settings.k_readout,
        depth=settings.depth_scaling,
        base_depth=settings.base_depth or 1,
    )


def step_factors(model: PreTrainedModel, scaling: Scaling, optimizer: str = "adamw") -> dict[str, StepFactors]:
    """Return each parameter's factors on the learning rate and on Adam's epsilon, by name."""
    scaled = {each.weight.name: each for each in scaled_weights(model, scaling)}
    if optimizer == "adamw":
        return {name: each.factors for name, each in scaled.items()}
    matrices = {name for name, weight in model.named_parameters() if weight.ndim == 2}
    return {name: muon_factors(each, scaling) if name in matrices else each.factors for name, each in scaled.items()}


def muon_factors(scaled: ScaledWeight, scaling: Scaling) -> StepFactors:
    """Return a weight's learning-rate factors: Muon's for a matrix in the blocks, and AdamW's for any other weight.

    The spectral condition (Yang et al. 2023, arXiv 2310.17813, Condition 1) requires updates of norm sqrt(out / in).
    Muon's updates have the norm 0.2 sqrt(max(out, in)) times the learning rate. If in and out both grow by the factor
    m, the learning rate must therefore change by the factor 1 / sqrt(m). For depth, Muon uses the same factors as Adam.
    """
    if scaled.kind != "hidden" or scaled.weight.layer < 0:
        return scaled.factors
    width = 1.0
    if scaling.width != "none":
        wide, narrow = (
            math.sqrt(w.fan_out / w.fan_in / max(w.fan_out, w.fan_in)) for w in (scaled.weight, scaled.base)
        )
        width = scaling.k_hidden * wide / narrow
    depth = scaled.factors.rate / scaled.factors.width_rate
    return StepFactors(rate=width * depth, width_rate=width, muon=True)


class MuonAdamW(torch.optim.Optimizer):
    """Combine PyTorch's Muon and AdamW in one optimizer with one state.

    Muon and AdamW use the same learning rate and weight decay, because their updates have the same root mean square
    (Liu et al. 2025, arXiv 2502.16982, Eq 4).

    Args:
        groups: parameter groups with learning rate and weight decay. Groups for Muon have ``muon=True``.
        adamw: further options of AdamW.
    """

    def __init__(self, groups: list[Json], **adamw: Any):
        self._parts = (
            torch.optim.Muon([group for group in groups if group.get("muon")], adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([group for group in groups if not group.get("muon")], **adamw),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        for part, muon in zip(self._parts, (True, False), strict=True):
            part.param_groups = [group for group in self.param_groups if bool(group.get("muon")) == muon]
            part.state = self.state

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def parameter_groups(
    model: nn.Module,
    factors: dict[str, StepFactors],
    *,
    learning_rate: float,
    weight_decay: float,
    epsilon: float = 1e-8,
) -> list[Json]:
    """Group the parameters by learning rate and weight decay. Groups with an unscaled learning rate come first.

    Gains, biases and learned scales have no weight decay. ``factors`` scale each parameter's learning rate and
    ``epsilon``.
    """
    groups: dict[tuple[float, bool, float, float, bool], Json] = {}
    decay = set(decaying(model))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own, decays = factors[name.replace("_orig_mod.", "")], name in decay
        options = {"lr": learning_rate * own.rate, "weight_decay": weight_decay / own.width_rate if decays else 0.0}
        if own.epsilon != 1.0:
            options["eps"] = epsilon * own.epsilon
        if own.muon:
            options["muon"] = True
        key = (own.rate, decays, own.width_rate, own.epsilon, own.muon)
        groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: (abs(key[0] - 1.0), key))]


def check_optimizer(arguments: TrainingArguments) -> None:
    """Raise UserError for an optimizer other than Adam, because the scaling exponents are for Adam."""
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if "adam" not in name:
        raise UserError(
            f"width_scaling, depth_scaling: the exponents of these scalings ({', '.join((*SCHEMES, *DEPTH_SCHEMES))}) "
            f"are for Adam, but trainer.optim is {name!r}. Choose an adamw optimizer, or turn both scalings off"
        )


def schedule_of(settings: RunSettings) -> Callable[[int], float] | None:
    """Return the wsd schedule, a function of the number of finished steps, or None for the cosine schedule."""
    if settings.schedule == "cosine":
        return None
    return partial(
        warmup_stable_decay,
        warmup=in_steps(settings.warmup, settings.steps),
        decay=in_steps(settings.decay, settings.steps),
        steps=settings.steps,
        low=settings.min_learning_rate,
        shape=settings.decay_shape,
    )


def planned_shares(settings: RunSettings) -> Callable[[int], float]:
    """Return the schedule: a function from the number of finished steps to a fraction of the peak learning rate."""
    schedule = schedule_of(settings)
    if schedule is not None:
        return schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    warmup = in_steps(settings.warmup, settings.steps)
    return get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup, settings.steps, min_lr_rate=settings.min_learning_rate
    ).lr_lambdas[0]


def with_shorter_warmup(shares: Callable[[int], float], done: int, *, warmup: int, planned_warmup: int) -> float:
    """Return the fraction of the peak learning rate after ``done`` steps, with a shorter warm-up than planned."""
    return done / warmup if done < warmup else shares(done - warmup + planned_warmup)


def warmup_stable_decay(done: int, *, warmup: int, decay: int, steps: int, low: float, shape: str) -> float:
    """Return the fraction of the peak learning rate in a schedule with warm-up, constant phase and decay.

    The warm-up is linear. In the decay, the fraction falls from 1 to ``low``. With u as the finished part of the decay,
    the fraction above ``low`` is proportional to:

    - linear: 1 - u
    - 1-sqrt: 1 - sqrt(u) (Hägele et al., arXiv 2405.18392)
    - cosine: (1 + cos(pi u)) / 2

    The schedule's name is from MiniCPM (arXiv 2404.06395).
    """
    if done < warmup:
        return done / warmup
    over = min(1.0, max(0.0, (done - (steps - decay)) / max(1, decay)))
    share = {
        "linear": 1.0 - over,
        "1-sqrt": 1.0 - math.sqrt(over),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * over)),
    }
    return low + (1.0 - low) * share[shape]


AVERAGE = "average.safetensors"
_STEPS = "steps"


class WeightAverage(TrainerCallback):
    """An exponential moving average of the weights. After the first step, the average equals the weights.

    ``decay`` is the factor on the old average at each step, below 1. Lamina copies ``model`` before the first step.
    """

    def __init__(self, model: PreTrainedModel, decay: float):
        self.trained, self.averaged = model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    @property
    def model(self) -> PreTrainedModel:
        """The model with the averaged weights, on the trained model's device."""
        self._follow()
        return cast(PreTrainedModel, self.averaged.module)

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._follow()
        self.averaged.update_parameters(self.trained)

    def _follow(self) -> None:
        """Move the average to the trained model's device. Trainer moves the trained model after ``__init__``."""
        device = next(self.trained.parameters()).device
        if next(self.averaged.parameters()).device != device:
            torch.nn.Module.to(self.averaged, device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averaged weights and the number of averaged steps, for a checkpoint."""
        return {**dict(self.model.named_parameters()), _STEPS: self.averaged.n_averaged}

    def read(self, folder: Path) -> None:
        """Restore a checkpoint's average. Raises UserError if the checkpoint has no average."""
        if not (folder / AVERAGE).is_file():
            raise UserError(f"ema_decay: {str(folder)!r} holds no averaged weights. Resume with --ema-decay 0.")
        stored = load_file(folder / AVERAGE)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(stored[name])
            for own, trained in zip(self.model.buffers(), self.trained.buffers(), strict=True):
                own.copy_(trained)  # buffers, such as the experts' bias, are not averaged
