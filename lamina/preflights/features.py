"""The few numbers of a burn-in that decide the verdict; no placement's, initializer's or backbone's name is used."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from lamina.preflights.burn_in import BurnIn
from lamina.preflights.measuring import FP16_MAX, Snapshot

TINY = 1e-45


@dataclass(frozen=True, kw_only=True)
class Features:
    """The numbers of a burn-in; "end" is its last snapshot, "middle" the one halfway.

    Layers are 1-based blocks, 0 for the embedding's output.

    Attributes:
        excess: the loss in nats per token above that of a constant prediction with the tokens' frequencies.
        excess_error: its standard error over the held-out sequences.
        context: nats by which the predictions beat their own mean.
        variation: the predictions' mean divergence from their mean, in nats.
        similarity: mean cosine between tokens in x^N.
        jacobian: log10 of the smallest gain of the Jacobian from any x^l to x^N.
        jacobian_layer: the l of that gain.
        jacobian_largest: log10 of the largest gain.
        weight_gradient: log10 of the smallest over the largest gradient norm of a block's weights.
        weight_gradient_layer: the block with the smallest.
        spike: largest rise of the training loss above its best so far, in nats.
        magnitude: the largest |x| of any state.
        magnitude_layer: the layer of that state.
        growth: log10 of Var(x^N) / Var(x^0).
        spent: the sum of the learning rates of the steps taken, divided by that of all planned steps.
        pace: nats by which the held-out loss fell from the middle to the end, divided by ``spent`` in between.
        finite: 0.0 if the loss or the gradient was not finite, else 1.0.
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
        """FP16's largest number, 65504, divided by the largest magnitude of a state."""
        return FP16_MAX / max(self.magnitude, TINY)

    def to_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return asdict(self)


def features(burn_in: BurnIn, end: int = -1, middle: int | None = None) -> Features:
    """The features of a burn-in at its last snapshot (or at the one with index ``end``)."""
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
