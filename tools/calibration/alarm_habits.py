"""Healthy habits of training that must raise no alarm, such as skipped layers, frozen parameters and averaging."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Run = Any
"""A run of `alarm_runs.py`."""


@dataclass(frozen=True, kw_only=True)
class Habit:
    """The hooks that change a training loop. ``batch`` changes the token ids and labels of each step."""

    begin: Callable[[Run], None] | None = None
    before: Callable[[Run, int], None] | None = None
    after: Callable[[Run, int], None] | None = None
    batch: Callable[[int, torch.Tensor], torch.Tensor] | None = None


def _layers(run: Run) -> list[nn.Module]:
    return [run.parts.layer(run.model, index) for index in range(run.setup.layers)]


def _leaving_out(run: Run, skips: Callable[[int], bool]) -> None:
    """Skip layers in training passes. ``skips`` takes a layer's number, and returns whether to skip this layer."""
    for index, layer in enumerate(_layers(run)):
        kind: type = type(layer)

        def call(self: Any, x: torch.Tensor, *args: Any, kind: type = kind, index: int = index, **kwargs: Any) -> Any:
            return x if torch.is_grad_enabled() and skips(index) else kind.__call__(self, x, *args, **kwargs)

        layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def layer_drop(share: float) -> Habit:
    """Skip each layer with this probability. Mixture-of-Depths looks the same to the monitor."""

    def begin(run: Run) -> None:
        draw = torch.Generator().manual_seed(1)
        _leaving_out(run, lambda _: float(torch.rand((), generator=draw)) < share)

    return Habit(begin=begin)


def early_exit(share: float) -> Habit:
    """With this probability, skip all layers from a random layer on."""

    def begin(run: Run) -> None:
        _leaving_out(run, lambda index: index >= run.held["exit"])

    def before(run: Run, step: int) -> None:
        draw, layers = random.Random(step), run.setup.layers
        run.held["exit"] = draw.randint(1, layers - 1) if draw.random() < share else layers

    return Habit(begin=begin, before=before)


def stochastic_depth(share: float, *, linear: bool = False, over: int = 1, only: str = "") -> Habit:
    """Multiply the output of each sub-layer by 0 with this probability.

    With ``linear``, the probability grows with depth. The probability reaches its full value at step ``over``. ``only``
    is a part of the names of the affected sub-layers.
    """

    def begin(run: Run) -> None:
        draw, layers = torch.Generator().manual_seed(2), _layers(run)

        def dropping(chance: float) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, output: Any) -> Any:
                if not torch.is_grad_enabled():
                    return output
                now = chance * min(1.0, run.number / over)
                factor = 0.0 if float(torch.rand((), generator=draw)) < now else 1.0 / (1.0 - now)
                return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

            return hook

        for index, layer in enumerate(layers):
            for name, module in layer.named_children():
                if "norm" not in type(module).__name__.lower() and only in name:
                    module.register_forward_hook(dropping(share * (index + 1) / len(layers) if linear else share))

    return Habit(begin=begin)


def _copies(run: Run) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


@torch.no_grad()
def _write(run: Run, values: Iterable[torch.Tensor]) -> None:
    for parameter, value in zip(run.model.parameters(), values, strict=True):
        parameter.copy_(value)


def outer_steps(every: int, rate: float, momentum: float = 0.0) -> Habit:
    """Every few steps, take an outer step from the earlier weights (look-ahead, Reptile; with momentum, DiLoCo)."""

    def after(run: Run, step: int) -> None:
        if step == 1:
            run.held["slow"], run.held["speed"] = _copies(run), [torch.zeros_like(p) for p in run.model.parameters()]
        if step % every == 0:
            for parameter, slow, speed in zip(run.model.parameters(), run.held["slow"], run.held["speed"], strict=True):
                way = slow - parameter.detach()
                speed.mul_(momentum).add_(way)
                slow.sub_(rate * (way + momentum * speed))
            _write(run, run.held["slow"])

    return Habit(after=after)


def average(at: int, decay: float | None = None) -> Habit:
    """At step ``at``, continue from the mean of all weights so far (SWA), or from the moving average (EMA)."""

    def after(run: Run, step: int) -> None:
        if step == 1:
            run.held["mean"] = _copies(run)
        for mean, parameter in zip(run.held["mean"], run.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1.0 / step if decay is None else 1.0 - decay)
        if step == at:
            _write(run, run.held["mean"])

    return Habit(after=after)


def evaluated_average(every: int, decay: float) -> Habit:
    """Every few steps, calculate a loss with the moving average of the weights, then restore the weights."""

    def after(run: Run, step: int) -> None:
        if step == 1:
            run.held["mean"] = _copies(run)
        for mean, parameter in zip(run.held["mean"], run.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1.0 - decay)
        if step % every == 0:
            own = _copies(run)
            _write(run, run.held["mean"])
            with torch.no_grad():
                run.model(torch.arange(16)[None])
            _write(run, own)

    return Habit(after=after)


def _train(parameters: Iterable[nn.Parameter], on: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(on)


def unfreezing(every: int) -> Habit:
    """Train the embedding and output head first. Then unfreeze one more layer every few steps, from the last layer."""

    def before(run: Run, step: int) -> None:
        layers = _layers(run)
        if step == 1:
            for layer in layers:
                _train(layer.parameters(), False)
        elif step % every == 0 and step // every <= len(layers):
            _train(layers[-(step // every)].parameters(), True)

    return Habit(before=before)


def freezing(at: int, first: bool) -> Habit:
    """With ``first``, freeze all layers but the last until step ``at``. Otherwise, freeze layer 2 from then on."""

    def before(run: Run, step: int) -> None:
        layers = _layers(run)
        if first and step in (1, at):
            for layer in layers[:-1]:
                _train(layer.parameters(), step == at)
        elif not first and step == at:
            _train(layers[1].parameters(), False)

    return Habit(before=before)


def freezing_upward(every: int) -> Habit:
    """Freeze one more layer every few steps, from the first layer upward."""

    def before(run: Run, step: int) -> None:
        if step % every == 0 and step // every < run.setup.layers:
            _train(_layers(run)[step // every - 1].parameters(), False)

    return Habit(before=before)


def lisa(every: int) -> Habit:
    """Train the embedding, the head and one random layer, drawn every few steps (Pan et al. 2024, arXiv 2403.17919)."""

    def before(run: Run, step: int) -> None:
        if step % every == 1:
            layers = _layers(run)
            for layer in layers:
                _train(layer.parameters(), False)
            _train(random.Random(step).choice(layers).parameters(), True)

    return Habit(before=before)


def embedding_later(at: int) -> Habit:
    """Train the embedding only from a given step on."""

    def before(run: Run, step: int) -> None:
        if step in (1, at):
            _train([run.model.get_parameter(run.parts.embedding)], step == at)

    return Habit(before=before)


def added_group(at: int) -> Habit:
    """Train the layers only from a given step on, as a new group of the optimizer."""

    def begin(run: Run) -> None:
        layers = {id(p) for layer in _layers(run) for p in layer.parameters()}
        (group,) = run.optimizers[0].param_groups
        group["params"] = [p for p in group["params"] if id(p) not in layers]

    def before(run: Run, step: int) -> None:
        parameters = [p for layer in _layers(run) for p in layer.parameters()]
        if step in (1, at):
            _train(parameters, step == at)
        if step == at:
            (group,) = run.optimizers[0].param_groups
            run.optimizers[0].add_param_group({**group, "params": parameters})
            run.peaks = [2 * run.peaks[0]]

    return Habit(begin=begin, before=before)


def longer(least: int, over: int) -> Habit:
    """Begin with short sequences, and make the sequences longer until step ``over``."""
    return Habit(batch=lambda step, ids: ids[:, : least + (ids.shape[1] - least) * min(step, over) // over])


def more(over: int) -> Habit:
    """Begin with one sequence per batch, and add sequences until step ``over``."""
    return Habit(batch=lambda step, ids: ids[: 1 + (len(ids) - 1) * min(step, over) // over])


HABITS: Mapping[str, Habit] = {
    "layerdrop": layer_drop(0.2),
    "lookahead": outer_steps(5, 0.5),
    "unfreezing": unfreezing(30),
    "layerdrop-half": layer_drop(0.5),
    "stochastic-depth": stochastic_depth(0.1),
    "stochastic-linear": stochastic_depth(0.5, linear=True),
    "reptile": outer_steps(10, 0.1),
    "diloco": outer_steps(25, 0.7, 0.9),
    "swa": average(120),
    "ema": average(130, 0.98),
    "head-first": freezing(70, first=True),
    "freezing": freezing(90, first=False),
    "lisa": lisa(10),
    "embedding-later": embedding_later(80),
    "added-group": added_group(80),
    "layerdrop-10": layer_drop(0.1),
    "layerdrop-30": layer_drop(0.3),
    "layerdrop-40": layer_drop(0.4),
    "stochastic-30": stochastic_depth(0.3),
    "early-exit": early_exit(0.5),
    "stochastic-grows": stochastic_depth(0.4, over=120),
    "stochastic-attention": stochastic_depth(0.3, only="att"),
    "lookahead-10": outer_steps(10, 0.5),
    "diloco-10": outer_steps(10, 0.7, 0.9),
    "diloco-50": outer_steps(50, 0.7, 0.9),
    "ema-evaluated": evaluated_average(15, 0.95),
    "freezing-upward": freezing_upward(40),
    "lisa-20": lisa(20),
    "longer": longer(8, 100),
    "more": more(100),
}
FITTED = ("layerdrop", "lookahead", "unfreezing")
SKIPPING = tuple(habit for habit in HABITS if habit.startswith(("layerdrop-", "stochastic-", "early-")))
"""Habits that skip layers or sub-layers at random. These habits get two more model families and four seeds."""
