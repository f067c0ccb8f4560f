"""Whether a run ended while its loss still fell: then it was too short to tell whether it is stuck."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, variance
from typing import Any

STILL_FALLING = 0.2  # nats by which as many steps again would lower the loss, at the pace of the last fifth
WINDOW = 0.2  # share of the run over which a pace is measured
NOTICED = 0.005  # nats: a smaller fall in the last fifth does not count
UNSLOWED = 0.25  # share of the run's mean pace: a run above the unigram entropy that keeps it is still falling
_SURE = 2.0  # standard errors: a smaller difference of mean training losses is noise

Point = tuple[float, float]  # step, loss


def still_falling(records: Iterable[Mapping[str, Any]], steps: int, entropy: float = math.inf) -> str | None:
    """A clause with two losses if the loss still falls at the end of a run of ``steps``; else None.

    It still falls if, at the pace of the end, as many steps again would lower it by STILL_FALLING nats; or, for a loss
    above ``entropy`` (the plateau on which runs get stuck), if that pace is at least UNSLOWED of the whole run's.

    ``records`` are the lines of metrics.jsonl. The pace of the end is that of the eval loss over the last fifth of the
    run (up to two fifths if none was measured in between); without such evaluations, that of the training loss,
    averaged over the last fifth and the one before. A run with a single recorded loss counts as still falling.
    """
    records = list(records)
    evaluated, trained = _points(records, "eval_loss"), _points(records, "loss")
    if len({step for step, _ in (*evaluated, *trained)}) < 2:
        return "only one loss was recorded"
    pair = _evaluations(evaluated, steps)
    kind = "eval loss" if pair else "training loss"
    pair = pair or _means(trained, steps) or trained[-2:]
    if len(pair) < 2:
        return None
    (first, before), (last, after) = pair
    fallen, pace = before - after, (before - after) / (last - first)
    (start, highest), *_ = evaluated if kind == "eval loss" else trained
    unslowed = after > entropy and fallen >= NOTICED and pace * (last - start) >= UNSLOWED * (highest - after)
    if pace * steps < STILL_FALLING and not unslowed:
        return None
    return f"the {kind} still falls, from {before:.3f} at step {first:g} to {after:.3f} at step {last:g}"


def _evaluations(points: list[Point], steps: int) -> list[Point]:
    """The last evaluation, and the latest one that is a fifth to two fifths of the run earlier."""
    for step, loss in reversed(points[:-1]):
        if WINDOW * steps <= points[-1][0] - step:
            return [(step, loss), points[-1]] if points[-1][0] - step <= 2 * WINDOW * steps else []
    return []


def _means(points: list[Point], steps: int) -> list[Point]:
    """The mean losses of the last two fifths of the run; a difference within their noise counts as 0."""
    last = [p for p in points if p[0] > (1 - WINDOW) * steps]
    before = [p for p in points if (1 - 2 * WINDOW) * steps < p[0] <= (1 - WINDOW) * steps]
    if not last or not before:
        return []
    means = [(fmean(step for step, _ in part), fmean(loss for _, loss in part)) for part in (before, last)]
    noise = math.sqrt(sum(variance(loss for _, loss in p) / len(p) if len(p) > 1 else 0.0 for p in (before, last)))
    if means[0][1] - means[1][1] < _SURE * noise:
        return [(means[0][0], means[1][1]), means[1]]
    return means


def _points(records: list[Mapping[str, Any]], name: str) -> list[Point]:
    values = [(record.get("step"), record.get(name)) for record in records]
    return [(step, loss) for step, loss in values if isinstance(loss, int | float) and math.isfinite(loss) and step]
