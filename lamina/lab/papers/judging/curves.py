"""Compute one number per seed from the tables of a study's runs."""

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
    """Split runs by the values of a compared setting. Without this setting, return one part with all runs."""
    if axis not in trials.axes:
        return [trials]
    return [trials.where(**{axis: value}) for value in trials.values(axis)]


def at_stage(trials: Trials, stage: str) -> Trials:
    """Return the runs of one job, such as "sft". In a study with one job, return all runs."""
    return trials.where(stage=stage) if "stage" in trials.axes else trials


def trained(trials: Trials) -> Trials:
    """Keep the runs with the status "finished" or "short". In a study without training, keep all runs."""
    if trials.statuses().isna().all():
        return trials
    present = [status for status in TRAINED if status in trials.values("status")]
    return trials.where(status=present)


def at_rate_of(trials: Trials, arm: Arm, like: Arm) -> Trials:
    """Return a configuration's runs at the learning rate nearest to the chosen learning rate of ``like``."""
    [chosen] = {float(str(rate)) for rate in trials.arm(like).tuned().values("learning_rate")}
    ours = trials.arm(arm)
    rates = [float(str(rate)) for rate in ours.values("learning_rate")]
    return ours.where(learning_rate=min(rates, key=lambda rate: abs(math.log(rate / chosen))))


def numbers(trials: Trials, arm: Arm, probe: str, value: Callable[[Frame], float], *, at: str = "end") -> BySeed:
    """Compute a number from each seed's table of a probe or training record.

    The result leaves out numbers that are not finite. Except at "init", the result also leaves out failed runs. If most
    runs ended before they had learned, the result is empty except at "init".

    Args:
        value: a function that computes the number from a table.
        at: "init" or "end" for a probe, and "records" for a training record.
    """
    chosen = trials.arm(arm)
    chosen = chosen if at == "init" else trained(chosen)
    short = int(chosen.statuses().eq(Status.SHORT.value).sum()) if at != "init" else 0
    if not len(chosen) or (at != "init" and short >= MOST * len(chosen)):
        return {}
    by_seed = {int(str(seed)): float(value(part)) for seed, part in chosen.measure(probe, at=at).groupby("seed")}
    return {seed: number for seed, number in by_seed.items() if math.isfinite(number)}


def rows(table: Frame, **values: object) -> Frame:
    """Return the rows with the given values in the given columns. A list of values allows each of these values."""
    for column, value in values.items():
        table = table[table[column].isin(value if isinstance(value, list | tuple) else [value])]
    return table


def layer_means(table: Frame, column: str = "layer") -> Frame:
    """Return the mean of the column "value" for each layer. Lamina leaves out rows about the whole model (layer -1)."""
    return table[table[column] >= 0].groupby(column)["value"].mean().sort_index()


def shallow(by_layer: Frame, share: float = 1 / 3) -> Frame:
    """Return the rows of the first layers: a fraction of all layers, but at least one layer."""
    return by_layer.iloc[: max(1, round(share * len(by_layer)))]


def deep(by_layer: Frame, share: float = 1 / 3) -> Frame:
    """Return the rows of the last layers: a fraction of all layers, but at least one layer."""
    return by_layer.iloc[-max(1, round(share * len(by_layer))) :]


def log10_mean(values: Frame) -> float:
    """Return the mean of the values' log10, or minus infinity if a value is 0."""
    return sum(math.log10(value) if value > 0 else -math.inf for value in values) / len(values)


def power(points: dict[float, float]) -> float:
    """Fit a power law y = c x^a to points (x: y) by least squares on logarithms. Returns the exponent ``a``."""
    return statistics.linear_regression([*map(math.log, points)], [*map(math.log, points.values())]).slope


def exponents(values: dict[float, BySeed]) -> BySeed:
    """Fit a power law y = c x^a for each seed. Returns each seed's exponent ``a``."""
    seeds = set.intersection(*(set(by_seed) for by_seed in values.values()))
    return {seed: power({x: by_seed[seed] for x, by_seed in values.items()}) for seed in sorted(seeds)}


def along(trials: Trials, axis: str) -> Iterator[tuple[float, Trials]]:
    """Yield each value of a numeric setting, with the runs at this value, in ascending order."""
    for value in sorted(trials.values(axis), key=lambda value: float(str(value))):
        yield float(str(value)), trials.where(**{axis: value})
