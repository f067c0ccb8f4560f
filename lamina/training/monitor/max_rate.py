"""The guard of a run whose learning rate rises until it fails: it ends the run where a rule holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lamina.core.json_types import Json
from lamina.jobs.status import Status
from lamina.training.checkpointing.stateful import RunState
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.max_rate_rules import MaxRateRules, Stop, find_stop, no_stop
from lamina.training.monitor.rows import LOSS, Row


@dataclass(kw_only=True)
class MaxRateGuard(DivergenceGuard):
    """Reads every step's loss and, at each record, ends the run if one of the rules holds.

    The rules look at the losses by step alone, so that the result does not depend on when they are read, on the
    device, or on a kill in between.
    """

    rules: MaxRateRules
    losses: list[float] = field(default_factory=list)

    def see_steps(self, rows: Iterable[Row]) -> None:
        self.losses += [value for _, _, _, _, _, metric, value in rows if metric == LOSS]

    def see_loss(self, step: int, loss: float) -> None:
        """End the run at a record where a rule holds. Raises Diverged; a loss that is not finite ends it at once."""
        if loss != loss or abs(loss) == float("inf"):
            super().see_loss(step, loss)
        if (stop := find_stop(self.losses, self.rules)) is not None:
            raise Diverged(step, stop.reason)

    def state_dict(self) -> Json:
        return {**super().state_dict(), "losses_by_step": self.losses}

    def load_state_dict(self, state: RunState) -> None:
        super().load_state_dict(state)
        self.losses = list(state.get("losses_by_step", []))

    def outcome(self, status: Status) -> Json:
        """The run's largest rate, by columns of result.json; a run that found it has finished. Nothing if stopped."""
        if not status.ended:
            return {}
        stop = self.stop(broken=status == Status.DIVERGED)
        return {
            "status": str(Status.FINISHED),
            "max_learning_rate": stop.rate,
            "stop_rule": stop.rule,
            "loss_at_stop": stop.loss,
            "reason": stop.reason,
        }

    def stop(self, *, broken: bool) -> Stop:
        """Where the rate failed; ``broken``: the run diverged."""
        found = find_stop(self.losses, self.rules, broken=broken)
        return no_stop(self.losses, self.rules) if found is None else found
