"""Compute one number per seed from the tables of a study's trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

from lamina.core.frames import Frame
from lamina.jobs.status import Status
from lamina.lab.papers.judging.checks import TRAINED
from lamina.lab.papers.judging.findings import MOST
from lamina.lab.papers.judging.trials import Arm, Trials

BySeed = dict[int, float]


def split(trials: Trials, axis: str) -> list[Trials]:
    """Split trials by the values of an axis. If the study lacks the axis, the result has one part with all trials."""
    if axis not in trials.axes:
        return [trials]
    return [trials.where(**{axis: value}) for value in trials.values(axis)]


def at_stage(trials: Trials, stage: str) -> Trials:
    """Return the trials of a stage. In a study without stages, return all trials."""
    return trials.where(stage=stage) if "stage" in trials.axes else trials


def trained(trials: Trials) -> Trials:
    """Keep the trials that trained to the end. In a study without training, keep all trials."""
    if trials.statuses().isna().all():
        return trials
    present = [status for status in TRAINED if status in trials.values("status")]
    return trials.where(status=present)


def at_rate_of(trials: Trials, arm: Arm, like: Arm) -> Trials:
    """Return the trials of ``arm`` at the learning rate chosen for ``like``, or at the arm's nearest learning rate.

    The papers compare settings at one learning rate. If Lamina widened a sweep, ``arm`` may lack the learning rate of
    ``like``.
    """
    [chosen] = {float(str(rate)) for rate in trials.arm(like).tuned().values("learning_rate")}
    ours = trials.arm(arm)
    rates = [float(str(rate)) for rate in ours.values("learning_rate")]
    return ours.where(learning_rate=min(rates, key=lambda rate: abs(math.log(rate / chosen))))


def numbers(trials: Trials, arm: Arm, probe: str, value: Callable[[Frame], float], *, at: str = "end") -> BySeed:
    """Apply ``value`` to each seed's table: a probe's table (at="init" or "end"), or a training record (at="records").

    At the end of training, Lamina leaves out runs that did not train, because an untrained model's layers show nothing.
    Lamina also leaves out an arm if most of its runs are ``short``: they ended before they had learned. Lamina also
    leaves out seeds with a number that is not finite.
    """
    chosen = trials.arm(arm)
    chosen = chosen if at == "init" else trained(chosen)
    short = int(chosen.statuses().eq(Status.SHORT.value).sum()) if at != "init" else 0
    if not len(chosen) or (at != "init" and short >= MOST * len(chosen)):
        return {}
    by_seed = {int(str(seed)): float(value(part)) for seed, part in chosen.measure(probe, at=at).groupby("seed")}
    return {seed: number for seed, number in by_seed.items() if math.isfinite(number)}


def rows(table: Frame, **values: object) -> Frame:
    """Return the rows with these values in these columns. For a column with several allowed values, give a list."""
    for column, value in values.items():
        table = table[table[column].isin(value if isinstance(value, list | tuple) else [value])]
    return table


def layer_means(table: Frame, column: str = "layer") -> Frame:
    """Return the mean of the column ``value`` for each layer from 0 on, in the order of the layers."""
    return table[table[column] >= 0].groupby(column)["value"].mean().sort_index()


def shallow(by_layer: Frame, share: float = 1 / 3) -> Frame:
    """Return the rows of the first layers: a ``share`` of all layers, but at least one layer."""
    return by_layer.iloc[: max(1, round(share * len(by_layer)))]


def deep(by_layer: Frame, share: float = 1 / 3) -> Frame:
    """Return the rows of the last layers: a ``share`` of all layers, but at least one layer."""
    return by_layer.iloc[-max(1, round(share * len(by_layer))) :]


def log10_mean(values: Frame) -> float:
    """Return the mean of log10 of the values. If a value is 0, the mean is minus infinity."""
    return sum(math.log10(value) if value > 0 else -math.inf for value in values) / len(values)


def power(points: dict[float, float]) -> float:
    """Fit the exponent of a power law: the slope of log value over log x, by least squares."""
    return statistics.linear_regression([*map(math.log, points)], [*map(math.log, points.values())]).slope


def exponents(values: dict[float, BySeed]) -> BySeed:
    """Fit each seed's exponent of a power law over x. ``values`` maps each x to values by seed."""
    seeds = set.intersection(*(set(by_seed) for by_seed in values.values()))
    return {seed: power({x: by_seed[seed] for x, by_seed in values.items()}) for seed in sorted(seeds)}


def along(trials: Trials, axis: str) -> Iterator[tuple[float, Trials]]:
    """Yield each value of an axis as a number, together with its trials, in ascending order."""
    for value in sorted(trials.values(axis), key=lambda value: float(str(value))):
        yield float(str(value)), trials.where(**{axis: value})
