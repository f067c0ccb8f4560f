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
    """Mark the spikes in a run's series: a boolean array [values].

    A value is a spike if it is at least ``sigmas`` standard deviations (divisor n) above the mean of the ``window``
    values before it. The window excludes the value itself, because an outlier in its own window raises the window's
    deviation. Lamina does not judge the first ``fewest`` values. NaN and infinity are spikes, and windows exclude NaN
    and infinity. If all values in the window are equal, any larger value is a spike.
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
    """Mark the surges in a series: a boolean array [values]. Use surges for runs of a hundred steps, which are too
    short for ``spikes``.

    A value is a surge if it is not finite, or if it is above 3 times the median of the preceding 20 finite values.
    Lamina needs at least 10 preceding values.
    """
    surge, before = [], []
    for value in series:
        recent = before[-20:]
        high = len(recent) >= 10 and value > 3.0 * float(np.median(recent))
        surge.append(high or not math.isfinite(value))
        before += [value] if math.isfinite(value) else []
    return np.asarray(surge, dtype=bool)


def spike_scores(run: Path) -> dict[str, tuple[float, int]]:
    """Return the share of ``spikes`` and the number of values, for "loss" and "grad_norm" in a run's metrics.jsonl.

    OLMo 2's spike score (arXiv 2501.00656, Sec 3.1) is the percentage of outliers. An outlier is at least seven
    standard deviations away from a rolling average of the last 1,000 values. Lamina counts only values above the
    average, because a fast fall of the loss is not a spike. The result is a share from 0 to 1, not a percentage.

    Lamina leaves out an incomplete last line. If a step is logged twice (a resumed run), the later line counts. A
    series that the run did not log is absent. If there is no file, the result is empty.
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
