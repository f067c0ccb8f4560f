"""Log each layer's numbers to TensorBoard, W&B and trackio, in one section per metric and group of layers."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback

from lamina.core.extras import install
from lamina.core.values import entries
from lamina.errors import UserError
from lamina.training.monitor.stream_measures import TOP
from lamina.training.monitor.writers import Row

Library: TypeAlias = Any
"""An optional package, or an object from an optional package."""

SECTION = 8  # layers of one section
STEP = "train/global_step"  # the x axis of Trainer's own callbacks


def tag_of(row: Row) -> str:
    """Return the name under which trackers log a metric of a layer: SECTION/LAYER.SUBLAYER.ROLE."""
    _, layer, sublayer, role, index, metric, _ = row
    first = layer // SECTION * SECTION
    # trackers show each section, one metric for eight layers, under one heading
    section = f"layers_{first:03d}-{first + SECTION - 1:03d}" if layer >= 0 else "outside"
    location = f"{layer:03d}.{sublayer}.{role}" if layer >= 0 else f"{sublayer}.{role}"
    return f"{metric}.{section}/{location}" + (f"{index:03d}" if role == "expert" or index else "")


def installed(report_to: str) -> list[str]:
    """Return the trackers in ``report_to``. Raises UserError if a tracker is not installed."""
    names = [name for name in entries(report_to) if name != "none"]
    if names and len(names) < len(entries(report_to)):
        raise UserError(f"report_to: {report_to!r} combines 'none' with a tracker. Give 'none', or only trackers.")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name!r} is not installed. Run: {install(name)}")
    return names


class Trackers:
    """Log measurements to TensorBoard, W&B and trackio.

    W&B and trackio write to the run that is already open. Without an open run, Lamina opens a run with the folder's
    name in the project WANDB_PROJECT (default: lamina).

    Raises:
        UserError: a tracker is not installed.
    """

    def __init__(self, report_to: str, folder: Path):
        self.names, self._folder = installed(report_to), folder
        self._writer: Library = None
        self._runs: list[Library] | None = None
        self._own: list[Library] = []

    def writer(self) -> Library:
        """Return the TensorBoard writer for the run's subfolder "tensorboard", or None without TensorBoard."""
        if self._writer is None and "tensorboard" in self.names:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / "tensorboard"))
        return self._writer

    def log(self, step: int, rows: Iterable[Row]) -> None:
        """Log one step's measurements. Of the 100 values of ``hidden_top_abs``, log only the largest and smallest."""
        if not self.names:
            return
        now = (row for row in rows if row.step == step)
        shown = (row for row in now if row.metric != "hidden_top_abs" or row.number in (0, TOP - 1))
        values = {tag_of(row): row.value for row in shown}
        if (writer := self.writer()) is not None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        for library in self._libraries():
            library.log({**values, STEP: step})

    def alarm(self, step: int, text: str) -> None:
        """Send an alarm: an alert in W&B and trackio, a text in TensorBoard."""
        if (writer := self.writer()) is not None:
            writer.add_text("alarms", text, step)
        for library in self._libraries():
            levels = getattr(library, "AlertLevel", None)
            more = {} if levels is None else {"level": levels.WARN}
            library.alert(title=f"lamina: step {step}", text=text, **more)  # W&B drops a title within a minute

    def _libraries(self) -> list[Library]:
        if self._runs is None:
            self._runs = [self._open(name) for name in self.names if name != "tensorboard"]
        return self._runs

    def _open(self, name: str) -> Library:
        library: Library = importlib.import_module(name)
        trackios = getattr(getattr(library, "context_vars", None), "current_run", None)  # whose ``run`` is a module
        if (getattr(library, "run", None) if trackios is None else trackios.get()) is None:
            library.init(project=os.environ.get("WANDB_PROJECT", "lamina"), name=self._folder.resolve().name)
            self._own.append(library)
            if hasattr(library, "define_metric"):
                library.define_metric("*", step_metric=STEP)
        return library

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for library in self._own:
            library.finish()
        self._own = []


def tensorboard(trackers: Trackers | None) -> list[TrainerCallback]:
    """Return Trainer's callback for TensorBoard. The callback uses the same writer as the trackers."""
    writer = None if trackers is None else trackers.writer()
    return [] if writer is None else [TensorBoardCallback(writer)]
