"""The initializers, which return the standard deviation of a weight's initial values. This module loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lamina.core import specs
from lamina.core.values import is_finite
from lamina.errors import UserError, unknown

SAME = "same:"  # a prefix: all trials of a study use the initializer that follows
BRANCH_OUT = ("attention_out", "feed_forward_out")
_WITH_STD = ("normal", "scaled", "deepnorm", "xavier", "admin")
SUITS = "small_scaled"  # the initializer that suits any width and depth: the default of jobs that compare placements
_LOWEST, _HIGHEST = math.sqrt(2 / 5) / 2, 2.0  # standard deviation times sqrt(width): half SmallInit's, twice LeCun's
WITH_GAIN = ("value", "attention_out", "feed_forward_in", "feed_forward_out")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The properties of a weight that an initializer may need. The defaults describe the query projection of a block.

    Attributes:
        layer: the block's index, counted from 0, or -1 outside the blocks.
        wiring: the settings that the norm placement gives the weight's sub-layer.
    """

    hidden_size: int
    role: str = "query"
    layer: int = 0
    num_layers: int = 1
    wiring: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def fan_in(self) -> int:
        return self.hidden_size

    @property
    def fan_out(self) -> int:
        return self.hidden_size


Initializer = Callable[[Facts, float], float]
"""A function that returns the standard deviation of a weight's initial values, from the weight and the setting std."""


def normal(weight: Facts, std: float) -> float:
    """N(0, std^2) for all weights."""
    return std


def scaled(weight: Facts, std: float) -> float:
    """Megatron: N(0, std^2), but a standard deviation of std / sqrt(2 num_layers) for attention-out and FFN-out."""
    return std / math.sqrt(2 * weight.num_layers) if weight.role in BRANCH_OUT else std


def deepnorm(weight: Facts, std: float) -> float:
    """Xavier normal: gain beta for value, attention-out and FFN weights, gain 1 for other weights (DeepNet Fig 2)."""
    if weight.layer < 0:
        return std
    gain = 1.0
    if weight.role in WITH_GAIN:
        gain = weight.wiring["weight_gain"]
    elif weight.role == "gate":
        gain = weight.wiring["gate_gain"]
    return gain * math.sqrt(2 / (weight.fan_in + weight.fan_out))


def xavier(weight: Facts, std: float) -> float:
    """Xavier normal in the blocks (variance 2 / (fan_in + fan_out)), and N(0, std^2) elsewhere."""
    return std if weight.layer < 0 else math.sqrt(2 / (weight.fan_in + weight.fan_out))


def small(weight: Facts, std: float) -> float:
    """SmallInit (Nguyen & Salazar): variance 2 / (5 * hidden_size)."""
    return math.sqrt(2 / (5 * weight.hidden_size))


def small_scaled(weight: Facts, std: float) -> float:
    """HybridNorm: SmallInit, divided by sqrt(2 num_layers) for attention-out and FFN-out."""
    return scaled(weight, small(weight, std))


def over_width(weight: Facts, std: float, *, variance: float) -> float:
    """A variance of ``variance`` / hidden_size for all weights (Peri-LN Table 9)."""
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
NO_SCALES = (
    "init: 'admin' sets learned skip scales, which this placement does not have. Set the placement to 'admin', "
    "or choose another init, such as 'normal'."
)
CUT_AT = {"small_scaled": 3.0}
"""The largest magnitude that a truncated initializer draws, in standard deviations."""


def check(init: str) -> tuple[str, float]:
    """Split "name" or "name(std=0.01)" into the initializer's name and its std. Raises UserError for any other text."""
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
    """Return two standard deviations at this width: of the unsuitable initializer, and of SmallInit.

    Return None if the initializer is unknown or suits the width d. A suitable standard deviation is between half of
    SmallInit's sqrt(2 / (5 d)) (Nguyen & Salazar 2019, arXiv 1910.05895, Sec 2.2) and twice LeCun's sqrt(1 / d) (LeCun
    et al. 1998, Eq 16). GPT-2's standard deviation of 0.02 suits widths from 250 to 10,000.
    """
    try:
        name, base = check(init)
    except UserError:
        return None
    std = INITIALIZERS[name](Facts(hidden_size=hidden_size), base)
    suits = _LOWEST * (1 - 1e-9) <= std * math.sqrt(hidden_size) <= _HIGHEST
    return None if suits else (std, math.sqrt(2 / (5 * hidden_size)))


def misfit(init: str, hidden_size: int) -> str:
    """Return a warning that an initializer does not suit the width, or ""."""
    if (stds := unsuited(init, hidden_size)) is None:
        return ""
    return (
        f"The initializer {init} has a standard deviation of {stds[0]:.3g} in the blocks, but width {hidden_size} "
        f"needs about {stds[1]:.3g}. Such weights affect training more than the placement does."
    )
