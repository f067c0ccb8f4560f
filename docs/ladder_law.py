"""The analysis of the ladder, for its pre-registration: how the loss, and the gap between two arms, change with size.

The joint fit is Hoffmann et al.'s parametric form (arXiv 2203.15556, Eq 2 and App D.2) with exponents
that all arms share:

    L = E + A_arm / N^a + B_arm / D^b        N parameters without embedding, D tokens

fitted by the Huber loss on log L. studies/preregistration/ladder.md says what is tested on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from lamina.core.frames import Frame
from lamina.core.intervals import CONFIDENCE

if TYPE_CHECKING:
    import numpy as np

COLUMNS = ("arm", "size", "seed", "parameters", "tokens", "flops", "seconds", "eval_loss")
_HUBER = 1e-3  # Hoffmann et al.'s delta
_STARTS = tuple(itertools.product((0.3, 0.6, 0.9), (0.2, 0.5), (0.2, 0.5)))  # of E over the lowest loss, a, and b


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """L = floor + size[arm] * N^-size_exponent + data[arm] * D^-data_exponent, in nats.

    Attributes:
        floor: E, the loss that no size and no data get below; the same for all arms.
        size_exponent, data_exponent: a and b, the same for all arms.
        size, data: A and B by arm.
        error: the root mean square of the residuals of log L.
    """

    floor: float
    size_exponent: float
    data_exponent: float
    size: Mapping[str, float]
    data: Mapping[str, float]
    error: float

    def loss(self, arm: str, parameters: float, tokens: float) -> float:
        """The fitted loss of an arm with so many parameters after so many tokens."""
        return (
            self.floor + self.size[arm] * parameters**-self.size_exponent + self.data[arm] * tokens**-self.data_exponent
        )


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A straight line of a gap over the decades of compute.

    Attributes:
        slope: of the gap, in nats per decade of FLOPs.
        interval: 95 % t interval of the slope.
        center: the gap at the mean of log10 FLOPs, with ``center_interval``.
        points: how many (size, seed) pairs it rests on.
    """

    slope: float
    interval: tuple[float, float]
    center: float
    center_interval: tuple[float, float]
    points: int


def fit_law(trials: Frame) -> ScalingLaw:
    """Fit the law to trials with the columns arm, parameters, tokens, and eval_loss.

    Raises ValueError for trials of fewer than two sizes or two numbers of tokens, which leave an exponent open.
    """
    import numpy as np
    from scipy import optimize

    if trials["parameters"].nunique() < 2 or trials["tokens"].nunique() < 2:
        raise ValueError("the law needs trials of at least two sizes and of two numbers of tokens")
    arms = sorted(set(trials["arm"]))
    place = np.array([arms.index(arm) for arm in trials["arm"]])
    size, data, loss = (np.log(trials[name].to_numpy(dtype=float)) for name in ("parameters", "tokens", "eval_loss"))

    def residuals(free: np.ndarray) -> np.ndarray:
        floor, a, b = free[:3]
        by_size, by_data = free[3 : 3 + len(arms)][place] - a * size, free[3 + len(arms) :][place] - b * data
        return np.logaddexp(np.logaddexp(floor, by_size), by_data) - loss

    lowest, best = float(np.exp(loss).min()), cast(Any, None)
    for share, a, b in _STARTS:
        rest = math.log(lowest * (1 - share) / 2)
        start = [math.log(lowest * share), a, b]
        start += [rest + power * float(x.mean()) for power, x in ((a, size), (b, data)) for _ in arms]
        found = optimize.least_squares(residuals, start, x_scale="jac", max_nfev=2000)  # Huber's slopes lead nowhere
        found = optimize.least_squares(residuals, found.x, loss="huber", f_scale=_HUBER, x_scale="jac", max_nfev=2000)
        if best is None or found.cost < best.cost:
            best = found
    floor, a, b = (float(value) for value in best.x[:3])
    by_arm = np.exp(best.x[3:])
    return ScalingLaw(
        floor=math.exp(floor),
        size_exponent=a,
        data_exponent=b,
        size=dict(zip(arms, map(float, by_arm[: len(arms)]), strict=True)),
        data=dict(zip(arms, map(float, by_arm[len(arms) :]), strict=True)),
        error=float(np.sqrt(np.mean(residuals(best.x) ** 2))),
    )


def left_out(trials: Frame, size: str) -> float:
    """Return the law's mean error in nats for the losses of a size that it was not fitted on."""
    rest, out = trials[trials["size"] != size], trials[trials["size"] == size]
    law = fit_law(rest)
    columns = (out[name] for name in ("eval_loss", "arm", "parameters", "tokens"))
    return fmean(loss - law.loss(arm, size, tokens) for loss, arm, size, tokens in zip(*columns, strict=True))


def gap_trend(trials: Frame, arm: str, than: str) -> Trend:
    """Fit a line to the gap between two arms over log10 of the FLOPs, by least squares over (size, seed) pairs.

    Trials of one number of tokens per parameter: points of one run are not independent of one another.

    Raises ValueError for fewer than three pairs or a single size.
    """
    import numpy as np
    from scipy import stats

    index = ["size", "seed"]
    ours, theirs = (trials[trials["arm"] == name].set_index(index) for name in (arm, than))
    if not ours.index.is_unique:
        raise ValueError("more than one trial of a size and seed: give those of one number of tokens per parameter")
    both = ours.index.intersection(theirs.index)
    gaps = (ours.loc[both, "eval_loss"] - theirs.loc[both, "eval_loss"]).to_numpy(dtype=float)
    decades = np.log10(theirs.loc[both, "flops"].to_numpy(dtype=float))
    if len(gaps) < 3 or np.ptp(decades) == 0:
        raise ValueError(f"{len(gaps)} pairs at {len(set(decades))} sizes (a trend needs 3 pairs and 2 sizes)")
    line = cast(Any, stats.linregress(decades, gaps))
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(gaps) - 2))
    noise = float(np.sqrt(np.sum((gaps - line.intercept - line.slope * decades) ** 2) / (len(gaps) - 2)))
    center, half = float(gaps.mean()), t * noise / math.sqrt(len(gaps))
    return Trend(
        slope=float(line.slope),
        interval=(float(line.slope - t * line.stderr), float(line.slope + t * line.stderr)),
        center=center,
        center_interval=(center - half, center + half),
        points=len(gaps),
    )


def compute_gain(trials: Frame, arm: str, than: str, *, cost: str = "flops") -> dict[str, float]:
    """Return by size how many times the cost of ``arm`` the other arm needs for the same mean loss.

    Above 1, ``arm`` saves compute. The other arm's loss between its sizes is a straight line over the log of the cost;
    a size whose loss lies outside what the other arm reached is left out, since nothing there was seen.

    Args:
        trials: of one number of tokens per parameter.
        arm, than: names in the column ``arm``.
        cost: the column ``flops``, or ``seconds`` of one machine.
    """
    import numpy as np

    means = {
        name: trials[trials["arm"] == name].groupby("size")[["eval_loss", cost]].mean().sort_values(cost)
        for name in (arm, than)
    }
    losses, costs = (means[than][name].to_numpy(dtype=float) for name in ("eval_loss", cost))
    if np.any(np.diff(losses) >= 0):
        raise ValueError(f"{than}'s loss does not fall with {cost}")
    gains = {}
    for size, loss, spent in means[arm][["eval_loss", cost]].itertuples():
        if losses[-1] <= loss <= losses[0]:
            needed = math.exp(float(np.interp(-loss, -losses, np.log(costs))))
            gains[str(size)] = needed / spent
    return gains
