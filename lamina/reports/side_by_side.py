"""Compare two runs, and find the first step and the first layer at which the runs differ by more than noise."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lamina.core.text import in_units, ranges
from lamina.errors import UserError
from lamina.reports.histories import History, is_history, read_history
from lamina.training.monitor.alarms import in_words, place_in_words
from lamina.training.monitor.loss_chart import noise_of
from lamina.training.monitor.writers import LOSS, NORM, RATE, read_about, read_rows

Course: TypeAlias = Mapping[int, float]
"""The values of a series, by step."""

_METRICS = (LOSS, NORM, RATE, "gradient_norm", "update_norm", "weight_norm", "hidden_variance", "hidden_abs_max")
_FORWARD = ("hidden_variance", "hidden_abs_max")  # the lowest layer with a difference in these comes first
_NOISES = 4.0  # the smallest difference that counts, as a multiple of the noise
_LEAST = {LOSS: 0.01, RATE: 0.001}  # the smallest difference that counts: nats, and a fraction of the learning rate
_SHARE = 0.05  # the smallest difference that counts for other metrics, as a fraction of the value
_STAY, _PAST = 5, 32  # records: how long a difference must last, and how many earlier records show the noise
_SAME = 1e-6  # the largest relative difference between two equal values


class SeriesKey(NamedTuple):
    """The layer, sub-layer, role and metric of a series."""

    layer: int
    sublayer: str
    role: str
    metric: str


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first step at which two runs differ in one series, and the two values at this step."""

    step: int
    series: SeriesKey
    first: float
    second: float

    def __str__(self) -> str:
        layer, sublayer, role, metric = self.series
        if layer < 0 and metric in _FORWARD:
            role = "embedding"  # the value describes the embedding's output
        where = "" if metric in (LOSS, NORM, RATE) else f", {place_in_words((layer, sublayer, role))}"
        return f"step {self.step}{where}: {in_words(metric)} is {self.first:.4g} against {self.second:.4g}"


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    names: tuple[str, str]  # the runs' names
    series: Mapping[SeriesKey, tuple[Course, Course]]  # the two runs' values by step, for each series in both runs
    # the layers that only the first run has, and the layers that only the second run has
    alone: tuple[Collection[int], Collection[int]]
    same_until: int | None  # the last step up to which all series are equal, or None if the runs differ from the start
    whole: Parting | None  # the first difference in a series of the whole model, or None
    layer: Parting | None  # the first difference in a layer, or None
    rate: Parting | None  # the first difference in the learning rate, or None
    unit: str = "step"  # "record" if one of the records has no steps
    lags: bool = False  # whether a progress bar shows the steps of one of the records

    @property
    def first(self) -> Parting | None:
        """Return the earliest difference except in the learning rate, or None."""
        return min(
            (part for part in (self.whole, self.layer) if part is not None), key=lambda one: one.step, default=None
        )

    @property
    def title(self) -> str:
        if self.first is None:
            return "The two runs do not differ"
        return in_units(f"The two runs differ from step {self.first.step} on", self.unit, lags=self.lags)

    def sentences(self) -> list[str]:
        return [in_units(text, self.unit, lags=self.lags) for text in self._sentences()]

    def _sentences(self) -> list[str]:
        steps = sorted({step for first, _ in self.series.values() for step in first})
        at = f"{len(steps):,} {self.unit}s, {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        texts = [f"Lamina compared {len(self.series)} series of {self.names[0]} and {self.names[1]} at {at}."]
        for name, layers in zip(self.names, self.alone, strict=True):
            if layers:
                texts.append(f"Only {name} has layer{'s' * (len(layers) > 1)} {ranges(layers)}.")
        if self.same_until == steps[-1]:
            return [*texts, "The runs are equal at all steps."]
        if self.same_until is not None:
            texts.append(f"The runs are equal up to step {self.same_until}.")
        if self.first is None:
            texts.append("The runs differ by no more than the noise in each series.")
            return texts if self.rate is None else [*texts, f"But the learning rates differ first at {self.rate}."]
        if self.whole is not None:
            texts.append(f"The whole model differs first at {self.whole}.")
        if self.layer is not None:
            texts.append(f"The first layer that differs is at {self.layer}.")
        elif not any(series.layer >= 0 for series in self.series):
            texts.append(
                "Neither run has records by layer. To find the first layer that differs, record both with lamina.watch."
            )
        if self.rate is not None:
            earlier = self.rate.step <= self.first.step
            advice = " Set the learning rates equal before you compare the layers." if earlier else ""
            texts.append(f"The learning rates differ first at {self.rate}.{advice}")
        return texts


def side_by_side(first: Path, second: Path) -> SideBySide:
    """Compare two runs (folders from Lamina, or other tools' logs). Raises UserError if no series is in both."""
    histories = [read_history(path) if is_history(path) else None for path in (first, second)]
    courses = [_courses(path, history) for path, history in zip((first, second), histories, strict=True)]
    shared: dict[SeriesKey, tuple[Course, Course]] = {}
    for series in courses[0].keys() & courses[1].keys():
        steps = sorted(courses[0][series].keys() & courses[1][series].keys())
        if steps:
            first_course, second_course = ({step: course[series][step] for step in steps} for course in courses)
            shared[series] = first_course, second_course
    if not shared:
        raise UserError(
            f"against: {str(second)!r} has no series at the steps of {str(first)!r}. Give two runs that recorded the "
            "loss or the gradient norm at the same steps."
        )
    layers_of = [{series.layer for series in each if series.layer >= 0} for each in courses]
    both = all(layers_of)  # a record without layers is no model without them
    parted = [part for series, pair in shared.items() if (part := parting(series, *pair)) is not None]
    whole = [part for part in parted if part.series.metric in (LOSS, NORM)]
    layers = [part for part in parted if part.series.metric not in (LOSS, NORM, RATE)]
    return SideBySide(
        names=(str(first), str(second)),
        series=shared,
        alone=(layers_of[0] - layers_of[1], layers_of[1] - layers_of[0]) if both else ((), ()),
        same_until=_same_until(shared),
        whole=min(whole, key=lambda one: (one.step, one.series.metric == LOSS), default=None),
        layer=min(layers, key=_order, default=None),
        rate=next((part for part in parted if part.series.metric == RATE), None),
        unit="step" if all(history is None or history.clock for history in histories) else "record",
        lags=any(history is not None and history.lags for history in histories),
    )


def _courses(path: Path, history: History | None) -> dict[SeriesKey, dict[int, float]]:
    if history is not None:
        rows = [*history.rows]
    else:
        read_about(path)  # refuses records of another version
        rows = read_rows(path, _METRICS)
    if not rows:
        raise UserError(f"run: {str(path)!r} holds no records. Give the folder of a run, or another tool's record.")
    courses: dict[SeriesKey, dict[int, float]] = {}
    for row in rows:
        if row.metric in _METRICS and not row.number:
            courses.setdefault(SeriesKey(*row.location, row.metric), {})[row.step] = row.value
    return courses


def parting(series: SeriesKey, first: Course, second: Course) -> Parting | None:
    """Return the first step at which two series differ, and the two values at this step, or None.

    Two series differ if five successive differences have the same sign and exceed the noise, or if only one value is
    finite. Learning rates have no noise, so one difference above 0.1 % is enough. Lamina subtracts losses. For other
    metrics, Lamina takes the logarithm of the ratio.
    """
    steps, ratio = sorted(first), series.metric != LOSS
    least, stay = _LEAST.get(series.metric, _SHARE), 1 if series.metric == RATE else _STAY
    distances = [_distance(first[step], second[step], ratio=ratio) for step in steps]
    for at, step in enumerate(steps):
        after = distances[at : at + stay]
        if math.isinf(after[0]):
            return Parting(step=step, series=series, first=first[step], second=second[step])
        if len(after) < min(stay, len(steps)) or not all(map(math.isfinite, after)):
            continue
        finite = [each for each in distances[max(0, at - _PAST) : at + _STAY] if math.isfinite(each)]
        limit = least if stay == 1 else max(least, _NOISES * noise_of(finite))
        if all(each > limit for each in after) or all(each < -limit for each in after):
            return Parting(step=step, series=series, first=first[step], second=second[step])
    return None


def _distance(first: float, second: float, *, ratio: bool) -> float:
    """Return ``second - first`` or, with ``ratio``, ``log(second / first)``."""
    # only one value is finite or, with ``ratio``, positive
    if math.isfinite(first) != math.isfinite(second) or (ratio and (first > 0) != (second > 0)):
        return math.inf
    if not math.isfinite(first) or (ratio and not first > 0):
        return 0.0
    return math.log(second / first) if ratio else second - first


def _order(one: Parting) -> tuple[float, ...]:
    """Return the sort key for differences by layer: the step, then hidden states by layer, then the largest ratio."""
    layer, _, _, metric = one.series
    forward = metric in _FORWARD
    return one.step, not forward, layer if forward else -abs(_distance(one.first, one.second, ratio=True)), layer


def _same_until(series: Mapping[SeriesKey, tuple[Course, Course]]) -> int | None:
    steps = sorted({step for first, _ in series.values() for step in first})
    last = None
    for step in steps:
        pairs = [(first[step], second[step]) for first, second in series.values() if step in first]
        if not all(math.isclose(a, b, rel_tol=_SAME) or (math.isnan(a) and math.isnan(b)) for a, b in pairs):
            return last
        last = step
    return last
