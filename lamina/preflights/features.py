"""The few numbers of a burn-in that the verdict reads; no names of placements, initializers or backbones among them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from lamina.preflights.burn_in import BurnIn
from lamina.preflights.measuring import FP16_MAX, Snapshot

TINY = 1e-45


@dataclass(frozen=True, kw_only=True)
class Features:
    """The numbers of a burn-in; "end" is its last snapshot, "middle" the one half-way.

    ``excess``: nats per token above (below: negative) a constant prediction with the tokens' frequencies;
    ``excess_error``: its standard error from one held-out sequence to another; ``context``:
    nats by which the predictions beat their own mean; ``variation``: the predictions' mean divergence from it, in nats;
    ``similarity``: mean cosine between tokens in x^N; ``jacobian``: log10 of the smallest gain of the Jacobian from any
    x^l to x^N, ``jacobian_layer`` that l, ``jacobian_largest``: log10 of the largest;
    ``weight_gradient``: log10 of the smallest over the largest gradient norm of a block's weights,
    ``weight_gradient_layer`` the smallest's block; ``spike``: largest rise of the training loss above its best so far
    in nats; ``magnitude``: the largest |x| of any state, ``magnitude_layer`` where; ``growth``: log10 of Var(x^N) /
    Var(x^0); ``spent``: the learning rates of the steps taken, summed, over those of all planned steps; ``pace``: nats
    by which the held-out loss fell from the middle to the end over the rates spent in between, in the same unit;
    ``finite``: 0.0 where the loss or the gradient was not.
    Layers are 1-based blocks, 0 for the embedding's output.
    """

    step: int
    finite: float
    excess: float
    excess_error: float
    excess_middle: float
    context: float
    context_middle: float
    variation: float
    similarity: float
    similarity_middle: float
    jacobian: float
    jacobian_layer: int
    jacobian_middle: float
    jacobian_start: float
    jacobian_largest: float
    weight_gradient: float
    weight_gradient_layer: int
    weight_gradient_start: float
    spike: float
    magnitude: float
    magnitude_layer: int
    growth: float
    spent: float
    pace: float

    @property
    def headroom(self) -> float:
        """How many times the largest state's magnitude fits under FP16's 65504."""
        return FP16_MAX / max(self.magnitude, TINY)

    def to_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return asdict(self)


def features(burn_in: BurnIn, end: int = -1, middle: int | None = None) -> Features:
    """The features of a burn-in, as seen at its last snapshot (or at the one of index ``end``)."""
    shots = burn_in.snapshots
    last = shots[end]
    half = shots[middle] if middle is not None else min(shots, key=lambda shot: abs(shot.step - last.step / 2))
    first = shots[0]
    jacobian, where = _smallest_gain(last)
    weights, block = _imbalance(last)
    largest = last.series("hidden_abs_max")
    top = max(largest, key=lambda layer: largest[layer])
    variance = last.series("hidden_variance")
    spent = burn_in.spent(last.step)
    return Features(
        step=last.step,
        finite=0.0 if burn_in.stopped and last is shots[-1] else 1.0,
        excess=last.loss - last.unigram,
        excess_error=last.error,
        excess_middle=half.loss - half.unigram,
        context=last.context,
        context_middle=half.context,
        variation=last.variation,
        similarity=last.series("token_similarity")[max(largest)],
        similarity_middle=half.series("token_similarity")[max(largest)],
        jacobian=jacobian,
        jacobian_layer=where,
        jacobian_middle=_smallest_gain(half)[0],
        jacobian_start=_smallest_gain(first)[0],
        jacobian_largest=_log(max(last.series("jacobian_gain").values())),
        weight_gradient=weights,
        weight_gradient_layer=block,
        weight_gradient_start=_imbalance(first)[0],
        spike=_spike(burn_in.losses[: last.step]),
        magnitude=largest[top],
        magnitude_layer=top + 1,
        growth=_log(variance[max(variance)]) - _log(variance[-1]),
        spent=spent,
        pace=(half.loss - last.loss) / max(spent - burn_in.spent(half.step), TINY),
    )


def _log(value: float) -> float:
    return math.log10(max(value, TINY)) if value == value else math.nan


def _smallest_gain(shot: Snapshot) -> tuple[float, int]:
    gains = shot.series("jacobian_gain")
    layer = min(gains, key=lambda layer: gains[layer])
    return _log(gains[layer]), layer + 1


def _imbalance(shot: Snapshot) -> tuple[float, int]:
    norms = {layer: norm for layer, norm in shot.series("gradient_norm").items() if layer >= 0}
    layer = min(norms, key=lambda layer: norms[layer])
    return _log(norms[layer]) - _log(max(norms.values())), layer + 1


def _spike(losses: list[float]) -> float:
    best, rise = math.inf, 0.0
    for loss in losses:
        if not math.isfinite(loss):
            return math.inf
        rise, best = max(rise, loss - best), min(best, loss)
    return rise
