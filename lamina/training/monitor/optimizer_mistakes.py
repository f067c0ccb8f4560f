"""Mistakes in a training's optimizers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import is_norm
from lamina.training.monitor.before_training import NARROW, BeforeTraining, Mistake, checks, whole

HEAD_ONLY = 0.1  # of the trainable elements: an optimizer that has fewer of them trains a head on purpose
DECAY = 0.05  # a weight decay that shrinks a gain within a run; torch's default is 0.01
LARGE_STEP = 2.0  # times a matrix's root mean square: a step of Adam that replaces the weights


@checks
def in_no_optimizer(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find trainable parameters that are in no optimizer, unless the optimizers train only a small part on purpose."""
    missing = [p for p in setup.trained if id(p) not in setup.groups] if setup.optimizers else []
    all_of, left_out = (sum(p.numel() for p in part) for part in (setup.trained, missing))
    if missing and (left_out == all_of or all_of - left_out >= HEAD_ONLY * all_of):
        yield Mistake(
            what=f"{len(missing)} trainable parameters are in no optimizer ({setup.listed(missing)})",
            why="they get a gradient but never change",
            do="Create the optimizer from all parameters after your last change of the model, or set their "
            "requires_grad to False",
        )


@checks
def of_another_model(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters of the optimizer that the model does not have."""
    every = [p for optimizer in setup.optimizers for group in optimizer.param_groups for p in group["params"]]
    parameter_ids = {id(p) for p in setup.model.parameters()}
    foreign = sum(id(p) not in parameter_ids for p in every)
    if foreign and foreign < len(every) and any(id(p) not in setup.groups for p in setup.trained):
        yield Mistake(
            what=f"{foreign} of the optimizer's {len(every)} parameters do not belong to the model",
            why="a part of the model was replaced, resized or wrapped after the optimizer was created, so this part "
            "does not learn",
            do="Create the optimizer again after this change",
        )


@checks
def in_two_optimizers(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters that each step updates twice."""
    twice = [p for p in setup.trained if len(setup.groups.get(id(p), ())) > 1]
    if twice:
        yield Mistake(
            what=f"{len(twice)} parameters are in two groups or optimizers ({setup.listed(twice)})",
            why="each step updates them twice",
            do="Give each parameter to one group of one optimizer",
        )


@checks
def decayed_gains(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find norms' gains and biases that weight decay pulls to 0, except gains stored as a difference from 1."""
    gains: list[nn.Parameter] = []
    decay = 0.0
    for module in setup.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            gain = is_norm(module) and name == "weight" and parameter.ndim == 1 and float(whole(parameter).mean()) > 0.5
            values = [float(group.get("weight_decay") or 0.0) for group in setup.groups.get(id(parameter), ())]
            if (gain or name == "bias") and parameter.requires_grad and max(values, default=0.0) >= DECAY:
                gains.append(parameter)
                decay = max(decay, *values)
    if any(p.ndim == 1 for p in gains):
        yield Mistake(
            what=f"{len(gains)} norms' gains or biases have a weight decay of {decay:g} ({setup.listed(gains)})",
            why="weight decay pulls a gain and so the layer's contribution toward 0",
            do="Put them into a group with weight_decay=0.0",
        )


@checks
def float16_gradients(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find float16 without a loss scaler, and trainable weights in float16."""
    weights = [p for p in setup.trained if p.dtype == torch.float16]
    if weights:
        yield Mistake(
            what=f"{len(weights)} trainable parameters are float16 ({setup.listed(weights)})",
            why="small gradients and updates round to 0, and a GradScaler rejects float16 gradients",
            do="Keep weights in float32 and compute under autocast, or load the model in bfloat16",
        )
    elif setup.half and setup.scaler is False:
        yield Mistake(
            what="autocast computes in float16 without a GradScaler",
            why="gradients below 6e-8 become 0",
            do="Scale the loss (torch.amp.GradScaler), or use bfloat16",
        )


def _rate_of(groups: Iterable[Mapping[str, Output]]) -> float:
    """Return the highest rate of groups, before a schedule lowered it; infinity if an optimizer sets its own."""
    rates = [group.get(name, 0.0) for group in groups for name in ("lr", "initial_lr")]
    return max(math.inf if rate is None else float(rate) for rate in rates)


@checks
def idle_groups(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters whose learning rate is 0 while others have one; a schedule that starts at 0 is no mistake."""
    rates = {id(p): _rate_of(setup.groups[id(p)]) for p in setup.trained if id(p) in setup.groups}
    idle = [p for p in setup.trained if rates.get(id(p)) == 0]
    if idle and any(rates.values()):
        yield Mistake(
            what=f"{len(idle)} trainable parameters have a learning rate of 0 ({setup.listed(idle)})",
            why="they get a gradient but never change",
            do="Give their group a learning rate, or set their requires_grad to False",
        )


@checks
def rate_of_adam(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an Adam that changes most layers' weights by more than their size in a single step."""
    adam = {
        id(p): _rate_of([group])
        for optimizer in setup.optimizers
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam | torch.optim.RAdam)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    inside = [p for _, layers in setup.blocks for layer in layers for p in layer.parameters()]
    matrices = [p for p in inside if p.ndim > 1 and p.requires_grad and id(p) in adam]
    sizes = [(adam[id(p)], float(whole(p).float().square().mean().sqrt()), p.shape[-1]) for p in matrices]
    over = [(rate, size) for rate, size, inputs in sizes if rate > LARGE_STEP * max(size, NARROW * inputs**-0.5)]
    if len(over) > len(sizes) / 2:
        rate, size = statistics.median_low(over)
        yield Mistake(
            what=f"the learning rate is {rate:g}, and the layers' weights are about {size:.2g}",
            why=(
                "a step of Adam changes each weight by about the learning rate, which is more than the weights' size "
                "here"
            ),
            do="Lower the learning rate, to 1e-2 or less",
        )
