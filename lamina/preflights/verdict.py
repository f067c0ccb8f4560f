"""The verdict in words: what the fitted rules say about a burn-in, why, what to change, and what would decide it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lamina.placements import Plan
from lamina.preflights.features import Features
from lamina.preflights.rules import CLEAR, Kind, calibration, chance, collapsed, deciding_share, kind_of, still_falling

HIGH = 0.5  # nats: a loss that rose by more above its best calls for a lower learning rate
FP16_LITTLE = 2.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the verdict needs to know about the planned run: wiring, initializer, rate, warm-up, steps (planned, taken).

    ``step_at`` returns the planned step by which a share of the run's summed learning rates is spent.
    """

    plan: Plan
    init: str
    learning_rate: float
    warmup: int
    steps: int
    burn_in: int
    step_at: Callable[[float], int]

    @property
    def norms_on_skip(self) -> int:
        """Sub-layers with a norm on their sum: each divides the gradient by the sum's standard deviation."""
        return sum(
            sub.post_norm is not None for layer in self.plan.layers for sub in (layer.attention, layer.feed_forward)
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A verdict, its reason, what to change.

    ``chance``: the fitted probability that the run gets clearly below the loss of a constant prediction;
    ``deciding_steps``: for an undecided run, the burn-in steps that should decide; else 0.
    """

    verdict: Kind
    chance: float
    deciding_steps: int
    reason: str
    change: str


def judge(numbers: Features, case: Case, stopped: str = "") -> Verdict:
    """The verdict on a burn-in's features; ``stopped``: why it ended early, or empty."""
    fitted = calibration()
    sure, kind = chance(numbers, fitted), kind_of(numbers, fitted)
    deciding = max(case.step_at(deciding_share(numbers, fitted)), case.burn_in + 1) if kind == "undecided" else 0
    if not numbers.finite:
        reason, change = f"{stopped or 'the loss was not finite'} of the burn-in", _calmer(case)
    elif collapsed(numbers, fitted):
        reason, change = _collapse(numbers, case), _reconnect(case)
    elif kind == "fine":
        reason, change = _well(numbers, case), ""
    elif kind == "risky":
        reason, change = _doubtful(numbers, case, sure), _faster(numbers, case)
    elif kind == "undecided":
        reason, change = _open(numbers, case), _longer(numbers, case, deciding)
    else:
        reason, change = _slow(numbers, case, sure), _faster(numbers, case)
    if numbers.headroom < FP16_LITTLE:
        change = f"{change}; " if change else ""
        change += (
            f"train in bf16 or fp32: |x| reaches {numbers.magnitude:.3g} behind {_place(numbers.magnitude_layer)}, "
            + (f"{numbers.headroom:.2g} × under" if numbers.headroom > 1 else f"{1 / numbers.headroom:.2g} × over")
            + " FP16's largest number"
        )
    return Verdict(verdict=kind, chance=sure, deciding_steps=deciding, reason=reason, change=change)


def _place(layer: int) -> str:
    return f"block {layer}" if layer else "the embedding"


def _collapse(numbers: Features, case: Case) -> str:
    return (
        f"after {case.burn_in} steps a change at {_place(numbers.jacobian_layer)} reaches the last layer with a gain "
        f"of {10**numbers.jacobian:.0e} (the gradient comes back as weak), and all tokens look alike there (mean "
        f"cosine {numbers.similarity:.3f}): the model no longer reads its input and stays at the tokens' frequencies"
    )


def _against_constant(numbers: Features) -> str:
    side = "below" if numbers.excess < 0 else "above"
    return (
        f"the held-out loss is {abs(numbers.excess):.2f} ± {CLEAR * numbers.excess_error:.2f} nats {side} that of a "
        "constant prediction"
    )


def _well(numbers: Features, case: Case) -> str:
    return (
        f"after {case.burn_in} steps {_against_constant(numbers)}, the predictions use the input (worth "
        f"{numbers.context:.2f} nats) and every layer is connected: the smallest gain to the last layer is "
        f"{10**numbers.jacobian:.2g}, from {_place(numbers.jacobian_layer)}"
    )


def _doubtful(numbers: Features, case: Case, sure: float) -> str:
    return (
        f"after {case.burn_in} of {case.steps} steps {_against_constant(numbers)}, but the rule on progress gives it a "
        f"chance of only {100 * sure:.0f} % to get clearly below{_weak(numbers)}"
    )


def _open(numbers: Features, case: Case) -> str:
    return (
        f"not decided by these steps: after {case.burn_in} of {case.steps} {_against_constant(numbers)} and the input "
        f"is worth {max(numbers.context, 0.0):.3f} nats to the predictions: nothing shows yet that the run gets below"
        f"{_weak(numbers)}"
    )


def _slow(numbers: Features, case: Case, sure: float) -> str:
    return (
        f"after {case.burn_in} of {case.steps} steps the input is worth only {max(numbers.context, 0.0):.3f} nats to "
        f"the predictions and {_against_constant(numbers)}{_weak(numbers)}: the rule on progress gives it a chance of "
        f"{100 * sure:.0f} % to get clearly below"
    )


def _weak(numbers: Features) -> str:
    if numbers.jacobian >= -1:
        return ""
    return f"; the gain from {_place(numbers.jacobian_layer)} to the last layer is down to {10**numbers.jacobian:.1e}"


def _longer(numbers: Features, case: Case, deciding: int) -> str:
    if still_falling(numbers):
        estimate = (
            "at the pace of these steps, as it slows down, the loss is clearly below a constant prediction's "
            f"{_by(deciding, case)}"
        )
    else:
        times = calibration()["deciding"]["times"]
        estimate = (
            "the loss has come close to a constant prediction's; of the runs that left it four in five had done so "
            f"at {times:g} times the learning rates spent, {_by(deciding, case)}"
        )
    if deciding >= case.steps:
        return f"only the whole run decides it: {estimate}; or {_faster(numbers, case)}"
    return f"look longer, with --burn-in {deciding}: {estimate}"


def _by(deciding: int, case: Case) -> str:
    return f"by step {deciding}" if deciding < case.steps else "only toward the end or not at all"


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
    if numbers.spike > HIGH:
        return f"a lower learning rate ({case.learning_rate / 3:.1g}): the loss rose by {numbers.spike:.1f} nats"
    higher = f"a higher learning rate ({case.learning_rate * 2:.1g})"
    return f"more steps than {case.steps}, or {higher} if a preflight with it is fine"
