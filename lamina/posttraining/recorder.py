"""The records of a run after pretraining: what its trainer measures beside the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from transformers import TrainerControl, TrainerState, TrainingArguments

from lamina.core.json_types import Json
from lamina.posttraining.trainer import Passed, TunedTrainer
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.monitor.recorder import RunRecorder

# Of Trainer's own logs; tokens and the learning rate have their own places in a record.
_NOT_MEASURED = frozenset(
    ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step", "total_flos", "step_time")
)  # fmt: skip
_TIMES = ("_runtime", "_per_second", "_time")


class TuningRecorder(RunRecorder):
    """RunRecorder with the trainer's own metrics: ``NAME`` in records of training, ``eval_NAME`` in evaluations."""

    _evaluation: Mapping[str, object] = MappingProxyType({})
    last_measured: Mapping[str, object] = MappingProxyType({})
    _began: int | None = None

    @property
    def tokens_here(self) -> int:
        """The tokens that this process and its siblings have trained on since the run began or resumed."""
        return self.tokens_at(0) - (self._began or 0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._began = self.tokens_at(0)
        super().on_train_begin(args, state, control, **kwargs)

    def tokens_at(self, step: int) -> int:
        """The tokens trained on by now, padding not counted."""
        assert isinstance(self.trainer, TunedTrainer)
        return self.trainer.tokens_seen

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Json | None = None,
        **kwargs: Passed,
    ) -> None:
        if logs and any(name.startswith("eval_") for name in logs):
            self._evaluation = dict(logs)  # Trainer tells the callbacks of an evaluation only what it measured itself
        super().on_log(args, state, control, logs, **kwargs)

    def measured(self, logs: Json) -> Json:
        """The trainer's metrics, with _ for / in their names."""
        return _numbers(logs)

    def evaluated(self, metrics: Json, loss: float) -> Json:
        """The trainer's metrics of the evaluation."""
        self.last_measured = _numbers({**self._evaluation, **metrics})
        return dict(self.last_measured)

    def state_dict(self) -> Json:
        """The same as for pretraining, and what the last evaluation measured: it is not recorded a second time."""
        return {**super().state_dict(), "last_measured": dict(self.last_measured)}

    def load_state_dict(self, state: RunState) -> None:
        super().load_state_dict(state)
        self.last_measured = dict(state.get("last_measured", {}))


def _numbers(logs: Mapping[str, object]) -> Json:
    return {
        name.replace("/", "_"): float(value)
        for name, value in logs.items()
        if (name.startswith("eval_") or name not in _NOT_MEASURED)
        and name != "eval_num_tokens"
        and not name.endswith(_TIMES)
        and not name.startswith("layers/")
        and isinstance(value, int | float)
        and math.isfinite(value)
    }
