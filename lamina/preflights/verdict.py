"""Judge from a planned run's first steps whether the run will train.

tools/calibration/preflight_calibration.py fits the coefficients in calibration.json on real runs. The rules use only
measured numbers, not the names of placements, initializers and backbones.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from lamina.core.initializers import SUITS
from lamina.core.json_types import Json
from lamina.preflights.burn_in import BurnIn
from lamina.training.monitor.rules import FP16_MAX

TINY = 1e-45


@dataclass(frozen=True, kw_only=True)
class Features:
    """The numbers that the verdict uses, from the last measurement. Layers count from 0, and -1 is the embedding."""

    step: int
    finite: float  # 0.0 if the loss or the gradient was not finite, else 1.0
    excess: float  # nats per token by which the loss exceeds the loss of token frequencies
    excess_error: float  # the standard error of ``excess`` over the held-out sequences
    context: float  # nats by which the loss is lower than for the mean prediction
    similarity: float  # mean cosine between the tokens' hidden states after the last layer, x^N
    jacobian: float  # log10 of the smallest gain of the Jacobian from a layer's output to x^N
    jacobian_layer: int  # the layer with this smallest gain
    weight_gradient: float  # log10 of the smallest gradient norm of a block's weights, divided by the largest
    weight_gradient_layer: int  # the layer with this smallest norm
    spike: float  # largest rise of the training loss above its lowest earlier value, in nats
    magnitude: float  # the largest absolute value in any hidden state
    magnitude_layer: int  # the layer of this hidden state
    growth: float  # log10 of Var(x^N) / Var(x^0)
    spent: float  # the sum of the learning rates so far, divided by the sum over all planned steps
    pace: float  # fall of the held-out loss in the second half of the burn-in, in nats per unit of ``spent``

    @property
    def headroom(self) -> float:
        """FP16's largest number, 65504, divided by the largest magnitude of a hidden state."""
        return FP16_MAX / max(self.magnitude, TINY)


def features(burn_in: BurnIn, end: int = -1) -> Features:
    """Compute the numbers for the verdict from the measurement with index ``end`` (default: the last)."""
    shots = burn_in.snapshots
    last = shots[end]
    half = min(shots, key=lambda shot: abs(shot.step - last.step / 2))
    gains, largest = last.series("jacobian_gain"), last.series("hidden_abs_max")
    norms = {layer: norm for layer, norm in last.series("gradient_norm").items() if layer >= 0}
    cut_off, still = min(gains, key=gains.__getitem__), min(norms, key=norms.__getitem__)
    top = max(largest, key=largest.__getitem__)
    variance = last.series("hidden_variance")
    spent = burn_in.spent(last.step)
    best, spike = math.inf, 0.0
    for loss in burn_in.losses[: last.step]:
        spike = max(spike, loss - best) if math.isfinite(loss) else math.inf
        best = min(best, loss)
    return Features(
        step=last.step,
        finite=0.0 if burn_in.stopped and last is shots[-1] else 1.0,
        excess=last.loss - last.unigram,
        excess_error=last.error,
        context=last.context,
        similarity=last.series("token_similarity")[max(largest)],
        jacobian=_log(gains[cut_off]),
        jacobian_layer=cut_off,
        weight_gradient=_log(norms[still]) - _log(max(norms.values())),
        weight_gradient_layer=still,
        spike=spike,
        magnitude=largest[top],
        magnitude_layer=top,
        growth=_log(variance[max(variance)]) - _log(variance[-1]),
        spent=spent,
        pace=(half.loss - last.loss) / max(spent - burn_in.spent(half.step), TINY),
    )


def _log(value: float) -> float:
    return math.log10(max(value, TINY)) if value == value else math.nan


VerdictWord = Literal["fine", "risky", "undecided", "will not train"]
VERDICTS: tuple[VerdictWord, ...] = ("fine", "risky", "undecided", "will not train")
LEAST_CONTEXT = 1e-4  # nats: the smallest context that the held-out sequences can distinguish from 0
MOST_LEFT = 10.0  # the maximum of 1 / spent; few of the fitted runs had more
CLEAR = 2.0  # standard errors
WEAK = -1.0  # log10 of a gain to the last layer
FALLING = 0.3  # nats above the loss of token frequencies, from which the model still learns frequencies


@cache
def calibration() -> Json:
    return json.loads((files("lamina.preflights") / "calibration.json").read_text(encoding="utf-8"))


def verdict_of(numbers: Features, fitted: Json) -> VerdictWord:
    """Return "fine" or "risky" if the model learned, otherwise "will not train" or "undecided"."""
    low, high = fitted["bands"]
    sure = chance(numbers, fitted)
    if learns(numbers, fitted):
        return "fine" if sure >= high else "risky"
    return "will not train" if sure < low else "undecided"


def learns(numbers: Features, fitted: Json) -> bool:
    """Return whether the model uses its input, and predicts held-out text clearly better than token frequencies do.

    The loss must be below the loss of token frequencies by more than a fitted margin plus two standard errors.
    """
    clear = numbers.excess + CLEAR * numbers.excess_error < -fitted["evidence"]["margin"]
    return bool(numbers.finite) and clear and numbers.context > fitted["collapse"]["context"]


def chance(numbers: Features, fitted: Json) -> float:
    """Estimate the probability that the run trains, by logistic regression. The result is 0 for a collapsed model."""
    if not numbers.finite or collapsed(numbers, fitted):
        return 0.0
    rule = fitted["progress"]
    score = rule["intercept"] + sum(rule["weights"][name] * value for name, value in progress(numbers).items())
    if not math.isfinite(score):
        return 0.0
    return 1.0 / (1.0 + math.exp(-min(max(score, -50.0), 50.0)))


def collapsed(numbers: Features, fitted: Json) -> bool:
    """Return whether a layer hardly affects the last layer, and the model does not use its input."""
    rule = fitted["collapse"]
    return numbers.jacobian < rule["jacobian"] and numbers.context < rule["context"]


def progress(numbers: Features) -> dict[str, float]:
    """Return the inputs of the logistic regression that estimates whether the run trains."""
    return {
        "context": math.log10(max(numbers.context, LEAST_CONTEXT)),
        "excess": min(max(numbers.excess, -1.0), 1.0),
        "projected": min(max(projected(numbers), 0.0), 2.0),
        "left": math.log10(min(1.0 / max(numbers.spent, 1.0 / MOST_LEFT), MOST_LEFT)),
        "jacobian": min(max(numbers.jacobian, -4.0), 0.0),
    }


def projected(numbers: Features) -> float:
    """Estimate how far the final loss will be above the loss of token frequencies, at half the present pace."""
    return numbers.excess - 0.5 * max(numbers.pace, 0.0) * max(1.0 - numbers.spent, 0.0)


def deciding_share(numbers: Features, fitted: Json) -> float:
    """Return the fraction of the run after which the verdict should be clear, measured in summed learning rates.

    If the loss is far above the loss of token frequencies, Lamina extrapolates the loss at its present pace, times a
    fitted factor for a slower pace later. If the loss is lower, the result is the finished fraction times a fitted
    factor.
    """
    rule = fitted["deciding"]
    if not learns_frequencies(numbers):
        return min(1.0, rule["times"] * numbers.spent)
    distance = numbers.excess + CLEAR * numbers.excess_error + fitted["evidence"]["margin"]
    return min(1.0, numbers.spent + rule["slowing"] * distance / numbers.pace) if numbers.pace > 0 else 1.0


def learns_frequencies(numbers: Features) -> bool:
    """Return whether the model still learns token frequencies, because its loss is far above their loss."""
    return numbers.excess > FALLING


HIGH = 0.5  # nats: a larger rise of the loss calls for a lower learning rate
FP16_LITTLE = 2.0


@dataclass(frozen=True, kw_only=True)
class PreflightVerdict:
    """A verdict, its reason, and what to change."""

    verdict: VerdictWord
    chance: float
    """The estimated probability that the model will learn clearly more than token frequencies."""
    deciding_steps: int
    """The number of steps that should be enough for a clear verdict, or 0 if the verdict is not "undecided"."""
    reason: str
    change: str


def judge(numbers: Features, burn_in: BurnIn, better: str = "") -> PreflightVerdict:
    """Return the verdict in words. ``better`` is text about flags with a better verdict."""
    fitted = calibration()
    sure, kind, deciding = chance(numbers, fitted), verdict_of(numbers, fitted), 0
    if kind == "undecided":
        deciding = max(burn_in.step_at(deciding_share(numbers, fitted)), len(burn_in.losses) + 1)
    if not numbers.finite:
        reason = f"{burn_in.stopped or 'the loss was not finite at the last step'} of the burn-in"
        change = better or "a much lower learning rate, gradient clipping, or a longer warm-up"
    elif collapsed(numbers, fitted):
        reason, change = _collapse(numbers, burn_in), _reconnect(burn_in, better)
    else:
        reason = _reason(numbers, burn_in, kind, sure)
        change = "" if kind == "fine" else _faster(numbers, burn_in, better)
        change = _longer(numbers, burn_in, deciding, better) if deciding else change
    if numbers.headroom < FP16_LITTLE:
        change = f"{change}; " if change else ""
        change += (
            f"train in bf16 or fp32: |x| reaches {numbers.magnitude:.3g} after {_place(numbers.magnitude_layer)}, "
            + (f"{numbers.headroom:.2g} × under" if numbers.headroom > 1 else f"{1 / numbers.headroom:.2g} × over")
            + " FP16's largest number"
        )
    return PreflightVerdict(verdict=kind, chance=sure, deciding_steps=deciding, reason=reason, change=change)


def _place(layer: int) -> str:
    return f"layer {layer}" if layer >= 0 else "the embedding"


def _collapse(numbers: Features, burn_in: BurnIn) -> str:
    return (
        f"after {len(burn_in.losses)} steps, the model ignores its input and predicts token frequencies. A change at "
        f"{_place(numbers.jacobian_layer)} reaches the last layer with a gain of {10**numbers.jacobian:.0e}, and the "
        "gradient shrinks by the same factor. At the last layer, all tokens have nearly the same hidden state (mean "
        f"cosine {numbers.similarity:.3f})"
    )


def _reason(numbers: Features, burn_in: BurnIn, kind: VerdictWord, sure: float) -> str:
    constant = (
        f"the held-out loss is {abs(numbers.excess):.2f} ± {CLEAR * numbers.excess_error:.2f} nats "
        f"{'below' if numbers.excess < 0 else 'above'} the loss of a model that predicts only token frequencies"
    )
    worth = f"{max(numbers.context, 0.0):.3f} nats"
    taken = len(burn_in.losses)
    after = f"after {taken} of {burn_in.planned.steps}"
    gain, layer_text = 10**numbers.jacobian, _place(numbers.jacobian_layer)
    weak = f"; the gain from {layer_text} to the last layer is only {gain:.1e}" if disconnected(numbers) else ""
    if kind == "fine":
        return (
            f"after {taken} steps {constant}, and the input improves the predictions by {numbers.context:.2f} nats. "
            f"Every layer affects the output: the smallest gain to the last layer is {gain:.2g}, from {layer_text}"
        )
    if kind == "risky":
        return (
            f"{after} steps {constant}. The run has an estimated chance of only {100 * sure:.0f} % to learn clearly "
            f"more than token frequencies{weak}"
        )
    if kind == "undecided":
        return (
            f"a verdict needs more steps: {after} steps {constant}, and the input improves the predictions by "
            f"{worth}. We cannot tell yet whether the run will learn more than token frequencies{weak}"
        )
    return (
        f"{after} steps the input improves the predictions by only {worth}, and {constant}{weak}. The run has an "
        f"estimated chance of {100 * sure:.0f} % to learn clearly more than token frequencies"
    )


def _longer(numbers: Features, burn_in: BurnIn, deciding: int, better: str) -> str:
    by = f"by step {deciding}" if deciding < burn_in.planned.steps else "only toward the end or not at all"
    if learns_frequencies(numbers):
        estimate = (
            "at the pace of these steps (the pace usually slows), the model learns clearly more than token frequencies "
            f"{by}"
        )
    else:
        times = calibration()["deciding"]["times"]
        estimate = (
            "so far the model predicts little more than token frequencies. In the calibration, 80 % of the runs that "
            f"learned had learned before the sum of their learning rates was {times:g} times as large. This run "
            f"reaches that sum {by}"
        )
    if deciding >= burn_in.planned.steps:
        return f"only the whole run can decide: {estimate}. Alternatives: {_faster(numbers, burn_in, better)}"
    return f"measure more steps, with --burn-in {deciding}: {estimate}"


def disconnected(numbers: Features) -> bool:
    """Return whether an early layer hardly affects the last layer: the smallest gain is below 0.1."""
    return numbers.jacobian < WEAK


def _reconnect(burn_in: BurnIn, better: str) -> str:
    # each norm on a sub-layer's sum divides the gradient by the sum's standard deviation
    sublayers = [sub for layer in burn_in.proxy.plan.layers for sub in (layer.attention, layer.feed_forward)]
    norms = sum(sub.post_norm is not None for sub in sublayers)
    fewer = (
        f"a placement with fewer norms on the residual stream (here, {norms} of {len(sublayers)} sub-layers have such "
        "a norm) or "
    )
    helpless = f"a lower learning rate and the initializer {SUITS} did not help"
    return better or f"{fewer if norms else ''}fewer layers ({helpless})"


def _faster(numbers: Features, burn_in: BurnIn, better: str) -> str:
    planned = burn_in.planned
    if disconnected(numbers):
        return _reconnect(burn_in, better)
    if numbers.spike > HIGH:
        return f"a lower learning rate ({planned.learning_rate / 3:.1g}): the loss rose by {numbers.spike:.1f} nats"
    higher = f"a higher learning rate ({planned.learning_rate * 2:.1g})"
    return f'plan more than {planned.steps} steps, or use {higher} if preflight calls this learning rate "fine"'
