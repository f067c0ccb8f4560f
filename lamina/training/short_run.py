"""Train a run's first steps, without a folder, records, evaluations or checkpoints.

Lamina uses a short run to check a planned run. A short run has the same Trainer as the whole run, and therefore
the same batches, losses and updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from lamina.data.blocks import ItemSource, TokenBlock
from lamina.errors import UserError
from lamina.modeling.parts import patched
from lamina.modeling.scaling import StepFactors
from lamina.training.arguments import training_arguments
from lamina.training.monitor.experts import ExpertBalance
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.monitor import StepSeries
from lamina.training.optimization.order import order_of
from lamina.training.settings import PretrainSettings
from lamina.training.trainer import LaminaTrainer

AfterStep = Callable[[int], bool]
"""A function that takes the number of finished steps, and returns whether to train another step."""


class ShortRun(TrainerCallback):
    """A run that ends when ``after_step`` returns False, or when a loss or a gradient is not finite.

    Args:
        settings: the run's settings. A precision of "auto" means fp32.
        model: a new model, which Lamina moves to the device.
        train: the text blocks to train on.
        device: cpu or cuda.
        step_factors: each parameter's learning rate factors.
        schedule: a function from the number of finished steps to a fraction of the peak learning rate (default: the
            schedule in the settings).

    Attributes:
        losses: the training loss of every step.
        gradient_norms: the gradient norm of every step, before clipping.
        learning_rates: the learning rate of every step, without width and depth scaling.
        stopped: the reason why the run ended early, or "".
    """

    def __init__(
        self,
        settings: PretrainSettings,
        model: PreTrainedModel,
        train: ItemSource[TokenBlock],
        *,
        device: str,
        step_factors: dict[str, StepFactors] | None = None,
        schedule: Callable[[int], float] | None = None,
    ):
        if settings.precision == "float8":
            raise UserError("precision: 'float8' does not work here. Choose auto, fp32, bf16 or fp16.")
        precision = "fp32" if settings.precision == "auto" else settings.precision
        self.settings = replace(
            settings, precision=precision, compile="off", device=device, probe_every=0, report_to="none"
        )
        nn.Module.to(model, device)  # transformers wraps ``to`` without its type
        self.model, self.step_factors, self.schedule, self.dataset = model, step_factors, schedule, train
        self.order = order_of(settings, train)
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.learning_rates: list[float] = []
        self.stopped = ""
        self._after: AfterStep = lambda step: True
        self._series = _StepNumbers()

    def train(self, after_step: AfterStep) -> None:
        """Take steps until ``after_step`` returns False, or until the run's last step."""
        settings, self._after = self.settings, after_step
        with TemporaryDirectory() as folder:  # Trainer creates its output folder even if it is unused
            arguments = training_arguments(replace(settings, output=folder))
            arguments.logging_strategy = arguments.eval_strategy = IntervalStrategy.NO
            arguments.save_strategy, arguments.logging_first_step = SaveStrategy.NO, False
            trainer = LaminaTrainer(
                model=self.model,
                args=arguments,
                train_dataset=self.dataset,
                callbacks=[self],
                guard=DivergenceGuard(margin=math.inf, patience=settings.steps),
                order=self.order,
                experts=ExpertBalance(self.model, settings.expert_balance, settings.expert_balance_rate),
                step_factors=self.step_factors,
                schedule=self.schedule,
            )
            trainer.series = self._series
            trainer.remove_callback(PrinterCallback)
            try:
                trainer.train()
            except Diverged:
                self._end_step()

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Run the model without mixed precision inside the context."""
        plain = vars(self.model).get("_original_forward")
        with nullcontext() if plain is None else patched(self.model, forward=plain):
            yield

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        optimizer = kwargs["optimizer"]
        assert isinstance(optimizer, torch.optim.Optimizer)
        group = optimizer.param_groups[0]
        self.learning_rates.append(self.settings.learning_rate * group["lr"] / group["initial_lr"])

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        self._end_step()
        if self.stopped or not self._after(len(self.losses)):
            control.should_training_stop = True

    def _end_step(self) -> None:
        loss, norm = self._series.take()
        self.losses.append(loss)
        self.gradient_norms.append(norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            cause = "gradient" if math.isfinite(loss) else "loss"
            self.stopped = f"the {cause} was not finite at step {len(self.losses)}"


class _StepNumbers(StepSeries):
    """Keep the current step's loss and gradient norm as plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._total, self._gradient = 0.0, 0.0

    def add_loss(self, loss: torch.Tensor) -> None:
        self._total += float(loss.detach())

    def add_norm(self, norm: torch.Tensor | float) -> None:
        self._gradient = float(norm)

    def take(self) -> tuple[float, float]:
        numbers = self._total, self._gradient
        self._total, self._gradient = 0.0, 0.0
        return numbers
