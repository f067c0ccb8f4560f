"""The initializers. An initializer maps a weight's role to the standard deviation of the weight's initial values.

This module loads no torch; lamina/modeling/initialization.py draws the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lamina.core import specs
from lamina.core.values import is_finite
from lamina.errors import UserError, unknown

SAME = "same:"  # before the one initializer of all of a study's trials
BRANCH_OUT = ("attention_out", "feed_forward_out")
_WITH_STD = ("normal", "scaled", "deepnorm", "xavier", "admin")
SUITS = "small_scaled"  # the one that suits any width and depth: what the jobs that compare placements start from
_LOWEST, _HIGHEST = math.sqrt(2 / 5) / 2, 2.0  # standard deviation times sqrt(width): half SmallInit's, twice LeCun's
WITH_GAIN = ("value", "attention_out", "feed_forward_in", "feed_forward_out")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a weight that an initializer may need. The defaults describe a block's query projection.

    ``layer`` is the block's index, from 0; -1 outside the blocks. ``wiring`` is the sub-layer's record in the plan.
    ``num_layers`` is the number of blocks.
    """

    hidden_size: int
    role: str = "query"
    layer: int = 0
    num_layers: int = 1
    wiring: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def fan_in(self) -> int:
        """The weight's number of input channels."""
        return self.hidden_size

    @property
    def fan_out(self) -> int:
        """The weight's number of output channels."""
        return self.hidden_size


Initializer = Callable[[Facts, float], float]
"""Returns the standard deviation of a weight's normal distribution, from the weight and the base std."""


def normal(weight: Facts, std: float) -> float:
    """N(0, std^2) everywhere, std 0.02."""
    return std


def scaled(weight: Facts, std: float) -> float:
    """Megatron: N(0, std^2); the std of attention-out and FFN-out is divided by sqrt(2 * num_layers)."""
    return std / math.sqrt(2 * weight.num_layers) if weight.role in BRANCH_OUT else std


def deepnorm(weight: Facts, std: float) -> float:
    """Xavier normal. Value, attention-out and FFN weights have gain beta. Other weights have gain 1 (DeepNet Fig 2)."""
    if weight.layer < 0:
        return std
    gain = 1.0
    if weight.role in WITH_GAIN:
        gain = weight.wiring["weight_gain"]
    elif weight.role == "gate":
        gain = weight.wiring["gate_gain"]
    return gain * math.sqrt(2 / (weight.fan_in + weight.fan_out))


def xavier(weight: Facts, std: float) -> float:
    """Xavier normal (variance 2 / (fan_in + fan_out)) in the blocks, N(0, std^2) elsewhere."""
    return std if weight.layer < 0 else math.sqrt(2 / (weight.fan_in + weight.fan_out))


def small(weight: Facts, std: float) -> float:
    """SmallInit (Nguyen & Salazar): variance 2 / (5 * hidden_size)."""
    return math.sqrt(2 / (5 * weight.hidden_size))


def small_scaled(weight: Facts, std: float) -> float:
    """HybridNorm: SmallInit; attention-out and FFN-out are divided by sqrt(2 * num_layers)."""
    return scaled(weight, small(weight, std))


def over_width(weight: Facts, std: float, *, variance: float) -> float:
    """Variance ``variance`` / hidden_size everywhere (Peri-LN Table 9)."""
    return math.sqrt(variance / weight.hidden_size)


INITIALIZERS: dict[str, Initializer] = {
    "normal": normal,
    "scaled": scaled,
    "deepnorm": deepnorm,
    "xavier": xavier,
    "small": small,
    "small_scaled": small_scaled,
    # Mix-LN Table 8's Scaled Initialization, without truncation (the paper states only the std of attention-out and
    # FFN-out; for all other weights, we take SmallInit's std).
    "small_scaled_uncut": small_scaled,
    "admin": normal,  # then Admin's profiling pass sets every omega (Liu et al. 2020)
    **{
        name: partial(over_width, variance=variance)
        for name, variance in (("he", 2.0), ("lecun", 1.0), ("10/d", 10.0), ("1/(10d)", 0.1))
    },
}
CUT_AT = {"small_scaled": 3.0}
"""The number of standard deviations at which an initializer's distribution ends."""


def check(init: str) -> tuple[str, float]:
    """Split "name" or "name(std=0.01)" into name and base std. Raises UserError for any other text."""
    if init in INITIALIZERS:  # some names contain parentheses
        return init, 0.02
    name, options = specs.parse(init, "init")
    if name not in INITIALIZERS:
        raise unknown("init", name, (*INITIALIZERS, "recommended"))
    if name not in _WITH_STD:
        raise UserError(f"init: {init!r}, but {name!r} takes no std. Write {name}.")
    std = options.get("std")
    if list(options) != ["std"] or not (isinstance(std, float | int) and is_finite(std) and std > 0):
        raise UserError(f"init: {init!r}. Write {name}, or {name}(std=NUMBER) with a number above 0.")
    return name, float(std)


def unsuited(init: str, hidden_size: int) -> tuple[float, float] | None:
    """If an initializer does not suit the width, return its standard deviation and SmallInit's standard deviation.

    An initializer suits a width d if a weight changes the RMS of a norm's output by at most a factor of about two. The
    lowest suitable standard deviation is half of SmallInit's sqrt(2 / (5 d)) (Nguyen & Salazar 2019, arXiv 1910.05895,
    Sec 2.2). The highest is twice LeCun's sqrt(1 / d) (LeCun et al. 1998, Eq 16). GPT-2's standard deviation of 0.02
    equals SmallInit's at width 1,000. GPT-2's value does not suit widths below 250 or above 10,000. Returns None if
    the initializer suits the width, or if the name is unknown.
    """
    try:
        name, base = check(init)
    except UserError:
        return None
    std = INITIALIZERS[name](Facts(hidden_size=hidden_size), base)
    suits = _LOWEST * (1 - 1e-9) <= std * math.sqrt(hidden_size) <= _HIGHEST
    return None if suits else (std, math.sqrt(2 / (5 * hidden_size)))
