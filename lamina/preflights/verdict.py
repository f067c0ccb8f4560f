"""The verdict: two fitted rules on what the burn-in measured, and a sentence on which of them spoke and why.

The rules' numbers are data (calibration.json), fitted by benchmarks/preflight_calibration.py on real runs; nothing here
knows a placement's name.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from lamina.placements import Plan
from lamina.preflights.features import Features

Kind = Literal["fine", "risky", "will not train"]
VERDICTS: tuple[Kind, ...] = ("fine", "risky", "will not train")
LEAST_CONTEXT = 1e-4  # nats: what the held-out sequences can tell from nothing
FP16_LITTLE = 2.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the verdict has to know of the plan: its wiring, initialiser, rate, warm-up and steps (planned, taken)."""

    plan: Plan
    init: str
    learning_rate: float
    warmup: int
    steps: int
    burn_in: int

    @property
    def norms_on_skip(self) -> int:
        """Sub-layers whose sum of skip and branch is normalised: each divides the gradient by the sum's deviation."""
        return sum(
            sub.post_norm is not None for layer in self.plan.layers for sub in (layer.attention, layer.feed_forward)
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``chance``: the fitted probability that the run gets clearly below the loss of a constant prediction."""

    verdict: Kind
    chance: float
    reason: str
    change: str


@cache
def calibration() -> dict[str, Any]:
    """The rules' numbers and where they come from."""
    return json.loads((files("lamina.preflights") / "calibration.json").read_text(encoding="utf-8"))


def chance(numbers: Features, fitted: dict[str, Any]) -> float:
    """The probability that the run trains, by the logistic rule on progress; 0 where the model has collapsed."""
    if not numbers.finite or collapsed(numbers, fitted):
        return 0.0
    rule = fitted["progress"]
    score = rule["intercept"] + sum(rule["weights"][name] * value for name, value in progress(numbers).items())
    if not math.isfinite(score):
        return 0.0
    return 1.0 / (1.0 + math.exp(-min(max(score, -50.0), 50.0)))


def kind_of(sure: float, fitted: dict[str, Any]) -> Kind:
    """The verdict that a probability gives."""
    low, high = fitted["bands"]
    return "will not train" if sure < low else "fine" if sure >= high else "risky"


def collapsed(numbers: Features, fitted: dict[str, Any]) -> bool:
    """Whether some layer is cut off: its Jacobian to the last state has all but vanished and the input is not used."""
    rule = fitted["collapse"]
    return numbers.jacobian < rule["jacobian"] and numbers.context < rule["context"]


def progress(numbers: Features) -> dict[str, float]:
    """What the rule on progress reads."""
    return {
        "context": math.log10(max(numbers.context, LEAST_CONTEXT)),
        "excess": min(max(numbers.excess, -1.0), 1.0),
        "remaining": math.log10(max(numbers.remaining, 1.0)),
        "jacobian": min(max(numbers.jacobian, -4.0), 0.0),
    }


def judge(numbers: Features, case: Case, stopped: str = "") -> Verdict:
    """The verdict on a burn-in's features; ``stopped`` says why it ended early, where it did."""
    fitted = calibration()
    sure = chance(numbers, fitted)
    kind = kind_of(sure, fitted)
    if not numbers.finite:
        reason, change = f"{stopped or 'the loss was not finite'} of the burn-in", _calmer(case)
    elif collapsed(numbers, fitted):
        reason, change = _collapse(numbers, case), _reconnect(case)
    elif kind == "fine":
        reason, change = _well(numbers, case), ""
    else:
        reason, change = _slow(numbers, case, sure), _faster(numbers, case)
    if numbers.headroom < FP16_LITTLE:
        change = f"{change}; " if change else ""
        change += (
            f"train in bf16 or fp32: |x| reaches {numbers.magnitude:.3g} behind block {numbers.magnitude_layer}, "
            f"{numbers.headroom:.2g} × under FP16's largest number"
        )
    return Verdict(verdict=kind, chance=sure, reason=reason, change=change)


def _place(layer: int) -> str:
    return f"block {layer}" if layer else "the embedding"


def _collapse(numbers: Features, case: Case) -> str:
    return (
        f"after {case.burn_in} steps a change at {_place(numbers.jacobian_layer)} reaches the last layer with a gain "
        f"of {10**numbers.jacobian:.0e} (the gradient comes back as weak), and all tokens look alike there (mean "
        f"cosine {numbers.similarity:.3f}): the model no longer reads its input and stays at the tokens' frequencies"
    )


def _well(numbers: Features, case: Case) -> str:
    where = f"{-numbers.excess:.2f} nats below" if numbers.excess < 0 else f"{numbers.excess:.2f} nats above"
    return (
        f"after {case.burn_in} steps the predictions use the input (worth {numbers.context:.2f} nats; the loss is "
        f"{where} that of a constant prediction) and every layer is connected: the smallest gain to the last layer is "
        f"{10**numbers.jacobian:.2g}, from {_place(numbers.jacobian_layer)}"
    )


def _slow(numbers: Features, case: Case, sure: float) -> str:
    weak = (
        f"; the gain from {_place(numbers.jacobian_layer)} to the last layer is down to {10**numbers.jacobian:.1e}"
        if numbers.jacobian < -1
        else ""
    )
    above = f"{abs(numbers.excess):.2f} nats {'above' if numbers.excess > 0 else 'below'}"
    return (
        f"after {case.burn_in} of {case.steps} steps the input is worth only {max(numbers.context, 0.0):.3f} nats to "
        f"the predictions and the loss is {above} that of a constant one{weak}: runs like this left it in "
        f"{100 * sure:.0f} % of the cases"
    )


def _calmer(case: Case) -> str:
    return f"a lower learning rate ({case.learning_rate / 10:.1g}), gradient clipping, a longer warm-up"


def _reconnect(case: Case) -> str:
    parts = [f"a lower learning rate ({case.learning_rate / 3:.1g}) with a longer warm-up"]
    if case.init != "scaled":
        parts.append("--init scaled")
    norms, all_of_them = case.norms_on_skip, 2 * case.plan.num_layers
    if norms:
        parts.append(
            f"a placement with fewer norms on the skip path ({norms} of {all_of_them} sub-layers here) or fewer layers"
        )
    return "; or ".join(parts)


def _faster(numbers: Features, case: Case) -> str:
    if numbers.jacobian < -1:
        return _reconnect(case)
    if numbers.spike > 0.5:
        return f"a lower learning rate ({case.learning_rate / 3:.1g}): the loss rose by {numbers.spike:.1f} nats"
    higher = f"a higher learning rate ({case.learning_rate * 2:.1g})"
    return f"more steps than {case.steps}, or {higher} if a preflight with it is fine"
