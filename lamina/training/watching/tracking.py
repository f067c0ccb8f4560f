"""The monitor's numbers in TensorBoard, W&B and trackio."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from lamina.errors import UserError
from lamina.training.monitoring.layers import Row, row_name

Library: TypeAlias = Any
"""An extra that may be missing, or an object of it."""


class Trackers:
    """Logs rows as ``layers/METRIC/LAYER.SUBLAYER.ROLE``, as Lamina's own runs do.

    W&B and trackio: into the run that is open, else into one of its own, named like the folder.

    Raises:
        UserError: for a tracker that is not installed.
    """

    def __init__(self, report_to: str, folder: Path):
        names = [name for name in map(str.strip, report_to.split(",")) if name not in ("", "none")]
        self._writer: Library = None
        self._runs: list[Library] = []
        self._own: list[Library] = []
        for name in names:
            if importlib.util.find_spec(name) is None:
                raise UserError(f"report_to: {name!r} is not installed (allowed: pip install 'lamina[{name}]')")
            if name == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(folder / "tensorboard"))
            else:
                self._open(name, folder)

    def _open(self, name: str, folder: Path) -> None:
        library: Library = importlib.import_module(name)
        if getattr(library, "run", None) is None:  # a callback of Trainer's may have opened one
            library.init(project="lamina", name=folder.name)
            self._own.append(library)
        self._runs.append(library)

    def log(self, step: int, rows: Iterable[Row]) -> None:
        """Log one step's rows."""
        if self._writer is None and not self._runs:
            return
        values = {row_name(row): row[6] for row in rows if row[0] == step}
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        for library in self._runs:
            library.log({**values, "trainer/global_step": step})

    def close(self) -> None:
        """Close what was opened here."""
        if self._writer is not None:
            self._writer.close()
        for library in self._own:
            library.finish()
