"""The fitted rules: what a burn-in's few numbers say about the rest of the run.

Their coefficients are data (calibration.json), fitted by benchmarks/preflight_calibration.py on real runs. No rule
depends on a placement's name.
"""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Literal

from lamina.core.json_types import Json
from lamina.preflights.features import Features

Kind = Literal["fine", "risky", "undecided", "will not train"]
VERDICTS: tuple[Kind, ...] = ("fine", "risky", "undecided", "will not train")
LEAST_CONTEXT = 1e-4  # nats: the least that the held-out sequences can distinguish from 0
MOST_LEFT = 10.0  # the whole schedule over the part taken: few of the fitted runs had more
CLEAR = 2.0  # standard errors
FALLING = 0.3  # nats above a constant prediction's loss: the tokens' frequencies are still being learned


@cache
def calibration() -> Json:
    """The rules' coefficients and their origin."""
    return json.loads((files("lamina.preflights") / "calibration.json").read_text(encoding="utf-8"))


def kind_of(numbers: Features, fitted: Json) -> Kind:
    """The verdict: "fine" and "risky" need a burn-in that learned, "will not train" needs a small chance."""
    low, high = fitted["bands"]
    sure = chance(numbers, fitted)
    if learns(numbers, fitted):
        return "fine" if sure >= high else "risky"
    return "will not train" if sure < low else "undecided"


def learns(numbers: Features, fitted: Json) -> bool:
    """Whether the model uses its input and its held-out loss is clearly below a constant prediction's.

    Clearly: by a fitted margin plus two standard errors.
    """
    clear = numbers.excess + CLEAR * numbers.excess_error < -fitted["evidence"]["margin"]
    return bool(numbers.finite) and clear and numbers.context > fitted["collapse"]["context"]


def chance(numbers: Features, fitted: Json) -> float:
    """The probability that the run trains, by the logistic rule on progress; 0 if the model has collapsed."""
    if not numbers.finite or collapsed(numbers, fitted):
        return 0.0
    rule = fitted["progress"]
    score = rule["intercept"] + sum(rule["weights"][name] * value for name, value in progress(numbers).items())
    if not math.isfinite(score):
        return 0.0
    return 1.0 / (1.0 + math.exp(-min(max(score, -50.0), 50.0)))


def collapsed(numbers: Features, fitted: Json) -> bool:
    """Whether a layer is cut off: its Jacobian to the last state has almost vanished and the input is not used."""
    rule = fitted["collapse"]
    return numbers.jacobian < rule["jacobian"] and numbers.context < rule["context"]


def progress(numbers: Features) -> dict[str, float]:
    """The inputs of the rule on progress."""
    return {
        "context": math.log10(max(numbers.context, LEAST_CONTEXT)),
        "excess": min(max(numbers.excess, -1.0), 1.0),
        "projected": min(max(projected(numbers), 0.0), 2.0),
        "left": math.log10(min(1.0 / max(numbers.spent, 1.0 / MOST_LEFT), MOST_LEFT)),
        "jacobian": min(max(numbers.jacobian, -4.0), 0.0),
    }


def projected(numbers: Features) -> float:
    """The excess at the planned run's end if the loss keeps falling at half its pace per unit of rate spent."""
    return numbers.excess - 0.5 * max(numbers.pace, 0.0) * max(1.0 - numbers.spent, 0.0)


def deciding_share(numbers: Features, fitted: Json) -> float:
    """The share of the planned run's summed learning rates by which a run that learns should show it.

    While the loss still falls toward a constant prediction's: the share needed to get clearly below it at the pace of
    the burn-in's second half, times a fitted factor, since the fall slows down. Once it has come close: a fitted
    multiple of the share spent. At most 1, the whole run.
    """
    rule = fitted["deciding"]
    if not still_falling(numbers):
        return min(1.0, rule["times"] * numbers.spent)
    distance = numbers.excess + CLEAR * numbers.excess_error + fitted["evidence"]["margin"]
    return min(1.0, numbers.spent + rule["slowing"] * distance / numbers.pace) if numbers.pace > 0 else 1.0


def still_falling(numbers: Features) -> bool:
    """Whether the loss is so far above a constant prediction's that the model still learns the tokens' frequencies."""
    return numbers.excess > FALLING
