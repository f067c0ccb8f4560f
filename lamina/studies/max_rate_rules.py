"""Find the learning rate at which training fails, in a run whose learning rate rises at each step.

In Keel's protocol (arXiv 2601.19895), the learning rate rises linearly from 0. The paper names three signs of
failure, but no thresholds. The signs are an early plateau, a spike from which the loss does not return, and an
anomalously slow descent. Lamina stops the run at the first step at which one of these rules holds:

- non-finite: the loss or the gradient norm is not finite.
- spike: the loss has stayed more than ``spike_margin`` above its minimum for ``spike_patience`` steps.
- plateau: the loss has fallen by less than ``plateau_margin`` while the learning rate grew by ``plateau_factor``. A
  plateau lasts at least 2 * ``window`` steps.

The minimum and the plateau use the loss averaged over the last ``window`` steps. A plateau counts only after the loss
has fallen by 2 * ``plateau_margin`` from its first value. Until then, the learning rate may be too low for progress. A
plateau close to the corpus's unigram entropy is called "stuck". A run whose loss never falls is also stuck, and its
largest learning rate is 0.

Lamina reports the last learning rate at which the loss was within ``plateau_margin`` of its minimum. For a plateau,
Lamina reports the learning rate at the start of the plateau.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lamina.core.json_types import Json, RunState
from lamina.jobs.status import Status
from lamina.studies.settings import RisingSettings
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.writers import LOSS, Row
from lamina.training.setting_groups import in_steps

# why a run stopped; NONE means that the run reached the end of the warm-up
NON_FINITE, SPIKE, PLATEAU, STUCK, NONE = "non-finite", "spike", "plateau", "stuck", "none"


@dataclass(frozen=True)
class MaxRateRules:
    """The thresholds of the rules, and the corpus's unigram entropy in nats per token."""

    given: RisingSettings
    unigram_entropy: float

    def rate(self, step: int) -> float:
        """Return the learning rate of a step. Steps count from 1, and step 1 has learning rate 0."""
        return self.given.max_learning_rate * (step - 1) / self.given.steps


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The step at which training failed under a rising learning rate."""

    rule: str  # the rule that found the failure, or ``NONE``
    step: int  # the last step before the failure
    rate: float  # the learning rate at ``step``
    loss: float  # the averaged loss at ``step``
    seen: int  # the step at which the rule found the failure
    reason: str  # the reason in words, for result.json


def smoothed(losses: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """Return each step's mean over the last ``window`` losses (fewer at the start): [steps] -> [steps]."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(losses, dtype=np.float64))])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def find_stop(losses: Sequence[float], rules: MaxRateRules, *, broken: bool = False) -> Stop | None:
    """Find the first failure in the losses so far, or None. ``broken``: another value than the loss was not finite."""
    values = np.asarray(losses, dtype=np.float64)
    finite = np.isfinite(values)
    count = len(values) if finite.all() else int(finite.argmin())
    smooth = smoothed(values[:count], rules.given.window)
    low = np.minimum.accumulate(smooth)
    risen, patience = 0, in_steps(rules.given.spike_patience, rules.given.steps)
    for step in range(1, count + 1):
        risen = risen + 1 if values[step - 1] > low[step - 1] + rules.given.spike_margin else 0
        if risen >= patience:
            return _spike(rules, smooth, low, step, risen)
        if not _begun(rules, smooth, low[step - 1]):
            continue
        fallen_at = 1 + int(np.searchsorted(-low[:step], -low[step - 1] - rules.given.plateau_margin, side="right"))
        grown = rules.rate(step) >= rules.given.plateau_factor * rules.rate(max(2, fallen_at))
        if grown and step - fallen_at >= 2 * rules.given.window:
            return _plateau(rules, smooth, low, step, fallen_at)
    if count == len(values) and not broken:
        return None
    step = min(count + 1, len(values))
    what = f"the loss is {values[count]}" if count < len(values) else "the gradient norm is not finite"
    before = _last_low(rules, smooth, low, step - 1)
    reason = f"{what} at step {step}; the loss was last at its minimum at step {before}, at a learning rate of "
    return _stop(NON_FINITE, rules, smooth, before, step, f"{reason}{rules.rate(max(1, before)):.3g}")


def no_stop(losses: Sequence[float], rules: MaxRateRules) -> Stop:
    """Return the result of a run in which no rule held. If the loss fell, the learning rate is a lower bound."""
    smooth = smoothed(losses, rules.given.window)
    if len(smooth) and not _begun(rules, smooth, smooth.min()):
        reason = (
            f"the loss has not fallen by {2 * rules.given.plateau_margin:g} nats from its first value, {smooth[0]:.3f}"
        )
        return _stop(STUCK, rules, smooth, 1, len(losses), reason)
    loss = float(smooth[-1]) if len(smooth) else math.nan
    top = rules.given.max_learning_rate
    reason = f"the loss still fell at the end of the warm-up, at a learning rate of {top:g}"
    return Stop(rule=NONE, step=len(losses), rate=top, loss=loss, seen=len(losses), reason=reason)


def _spike(rules: MaxRateRules, smooth: np.ndarray, low: np.ndarray, step: int, risen: int) -> Stop:
    began = step - risen + 1
    before = _last_low(rules, smooth, low, began - 1)
    reason = (
        f"the loss stayed more than {rules.given.spike_margin:g} nats above its minimum of {low[step - 1]:.3f} "
        f"from step {began} to {step}; the loss began to rise after step {before}, at a learning rate of "
        f"{rules.rate(before):.3g}"
    )
    return _stop(SPIKE, rules, smooth, before, step, reason)


def _plateau(rules: MaxRateRules, smooth: np.ndarray, low: np.ndarray, step: int, fallen_at: int) -> Stop:
    reason = (
        f"the loss has not fallen by {rules.given.plateau_margin:g} nats since step {fallen_at}, while the learning "
        f"rate rose from {rules.rate(fallen_at):.3g} to {rules.rate(step):.3g}"
    )
    if low[step - 1] <= rules.unigram_entropy - rules.given.stuck_margin:
        return _stop(PLATEAU, rules, smooth, fallen_at, step, reason)
    reason += (
        f"; the minimum of {low[step - 1]:.3f} is not {rules.given.stuck_margin:g} nats below the corpus's "
        f"unigram entropy of {rules.unigram_entropy:.3f}"
    )
    return _stop(STUCK, rules, smooth, fallen_at, step, reason)


def _begun(rules: MaxRateRules, smooth: np.ndarray, low: float) -> bool:
    return bool(low <= smooth[0] - 2 * rules.given.plateau_margin)


def _last_low(rules: MaxRateRules, smooth: np.ndarray, low: np.ndarray, until: int) -> int:
    """Return the last step up to ``until`` at which the averaged loss was near its minimum, or 0."""
    close = np.flatnonzero(smooth[:until] < low[:until] + rules.given.plateau_margin)
    return int(close[-1]) + 1 if len(close) else 0


def _stop(rule: str, rules: MaxRateRules, smooth: np.ndarray, step: int, seen: int, reason: str) -> Stop:
    loss = float(smooth[step - 1]) if step else math.nan
    return Stop(rule=rule, step=step, rate=rules.rate(max(1, step)), loss=loss, seen=seen, reason=reason)


@dataclass(kw_only=True)
class MaxRateGuard(DivergenceGuard):
    """Check the loss of every step. If a rule holds, end the run at the next recorded step."""

    rules: MaxRateRules
    losses: list[float] = field(default_factory=list)

    def see_steps(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        super().see_steps(rows)
        self.losses += [row.value for row in rows if row.metric == LOSS]

    def see_loss(self, step: int, loss: float, rows: Sequence[Row] = ()) -> None:
        """Raise Diverged if a rule holds at a recorded step, or if the loss is not finite."""
        if not math.isfinite(loss):
            super().see_loss(step, loss, rows)
        if (stop := find_stop(self.losses, self.rules)) is not None:
            raise Diverged(step, stop.reason)

    def state_dict(self) -> Json:
        return {**super().state_dict(), "losses_by_step": self.losses}

    def load_state_dict(self, state: RunState) -> None:
        super().load_state_dict(state)
        self.losses = list(state.get("losses_by_step", []))

    def outcome(self, status: Status) -> Json:
        """Return the fields of result.json about the largest learning rate, or {} for an interrupted run."""
        if not status.ended:
            return {}
        stop = find_stop(self.losses, self.rules, broken=status == Status.DIVERGED)
        stop = no_stop(self.losses, self.rules) if stop is None else stop
        return {
            "status": str(Status.FINISHED),
            "max_learning_rate": stop.rate,
            "stop_rule": stop.rule,
            "loss_at_stop": stop.loss,
            "reason": stop.reason,
        }
