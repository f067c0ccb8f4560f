"""Count the spikes in a run's loss or gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lamina.jobs.run_folder import RunFolder

WINDOW, SIGMAS, FEWEST = 1000, 7.0, 32


def spikes(
    series: Iterable[float], *, window: int = WINDOW, sigmas: float = SIGMAS, fewest: int = FEWEST
) -> np.ndarray:
    """Return a boolean array [values] that marks the spikes in a series of values.

    A spike is at least ``sigmas`` standard deviations (divisor n) above the mean of the ``window`` finite values before
    the spike. NaN and infinity are spikes, too. If all values in the window are equal, any larger value is a spike. The
    first ``fewest`` finite values are no spikes.
    """
    values = np.asarray(list(series), dtype=np.float64)
    spike = ~np.isfinite(values)
    finite = np.flatnonzero(~spike)
    padded = np.concatenate([np.full(window, np.nan), values[finite]])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)  # row i: before the i-th finite value
    for start in range(fewest, len(finite), 4096):  # a few megabytes of windows at a time
        rows = finite[start : start + 4096]
        before = windows[start : start + len(rows)]
        mean, deviation = np.nanmean(before, axis=1), np.nanstd(before, axis=1)
        above = values[rows] - mean
        spike[rows] = (above >= sigmas * deviation) & (above > 1e-12 * np.abs(mean))
    return spike


def surges(series: Iterable[float]) -> np.ndarray:
    """Return a boolean array [values] that marks the surges in a short series of about a hundred values.

    A surge is a value above 3 times the median of the 20 finite values before the surge, or a value that is not finite.
    The first 10 finite values never count as surges.
    """
    surge, before = [], []
    for value in series:
        recent = before[-20:]
        high = len(recent) >= 10 and value > 3.0 * float(np.median(recent))
        surge.append(high or not math.isfinite(value))
        before += [value] if math.isfinite(value) else []
    return np.asarray(surge, dtype=bool)


def spike_scores(run: Path) -> dict[str, tuple[float, int]]:
    """Return the share of spikes and the number of values, for "loss" and "grad_norm" in a run's metrics.jsonl.

    The share is OLMo 2's spike score (arXiv 2501.00656, Sec 3.1), as a number from 0 to 1. OLMo 2 also counts values
    far below the average. Lamina does not count these values, because a fast fall of the loss is not a spike.

    If a resumed run logs a step twice, the later value counts. Lamina omits a series that the run did not log.
    """
    scores: dict[str, dict[int, float]] = {"loss": {}, "grad_norm": {}}
    for record in RunFolder(run).metrics:
        for name, values in scores.items():
            if name in record:
                value = record[name]
                values[record["step"]] = math.nan if value is None else float(value)  # JSON has no NaN: null is one
    series = {name: [values[step] for step in sorted(values)] for name, values in scores.items()}
    logged = {name: values for name, values in series.items() if any(map(math.isfinite, values))}
    return {name: (float(spikes(values).mean()), len(values)) for name, values in logged.items()}
