"""Monitor Lightning's Trainer with a callback: `LightningMonitor`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lamina.errors import UserError
from lamina.jobs.status import Status
from lamina.training.monitor.callbacks import WatchCallback
from lamina.training.monitor.guard import Diverged

Lightning = Any
"""An object from Lightning. The type is Any, because the package may be lightning or pytorch_lightning."""


def _callback() -> Lightning:
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):  # first the package that the training uses
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise UserError("lamina.LightningMonitor needs lightning. Run: pip install lightning")


class LightningMonitor(WatchCallback, _callback()):
    """Watches a training of Lightning's Trainer layer by layer.

    >>> trainer = lightning.Trainer(callbacks=[lamina.LightningMonitor("runs/mine")])
    >>> trainer.fit(module, data)

    Lamina watches the child module that holds all parameters, or otherwise the whole module. If Lightning resumes from
    a checkpoint, Lamina continues the records.

    Args:
        output: the folder of the records. If an earlier training has records there, Lamina writes to NAME-2, NAME-3,
            and so on.
        overwrite: whether to replace the records in ``output``.
        on_alarm: a function that Lamina calls with the first alarm of each event (a group of alarms within 20 steps).
        tokenizer: the tokenizer that decodes recorded batches (default: the model's tokenizer).
        settings: the other settings of ``lamina.watch``.

    Raises:
        UserError: a setting is invalid or, when training begins, the output folder has other files.
    """

    def on_train_start(self, trainer: Lightning, pl_module: nn.Module) -> None:
        self._shares: list[torch.Tensor] = []
        self._steps, count = trainer.global_step, sum(1 for _ in pl_module.parameters())
        inner = [child for child in pl_module.children() if sum(1 for _ in child.parameters()) == count]
        self._begin(inner[0] if len(inner) == 1 else pl_module, trainer.optimizers, self._steps)

    def on_train_batch_end(
        self, trainer: Lightning, pl_module: nn.Module, outputs: Lightning, batch: object, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._shares.append(loss.detach())  # divided by the number of micro-batches
        if self.monitor is None or trainer.global_step == self._steps:
            return
        self._steps, shares, self._shares = trainer.global_step, self._shares, []
        try:
            self.monitor.end_step(torch.stack(shares).sum() if shares else None)
        except Diverged:
            trainer.should_stop = True

    def on_save_checkpoint(self, trainer: Lightning, pl_module: nn.Module, checkpoint: object) -> None:
        if self.monitor is not None:
            self.monitor.flush()

    def on_train_end(self, trainer: Lightning, pl_module: nn.Module) -> None:
        self._end(Status.FINISHED)

    def on_exception(self, trainer: Lightning, pl_module: nn.Module, exception: BaseException) -> None:
        self._end(Status.INTERRUPTED if isinstance(exception, KeyboardInterrupt) else Status.FAILED)
