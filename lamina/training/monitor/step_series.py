"""Every step's loss and gradient norm, kept on the device between two records, and the spikes among them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from lamina.core.json_types import Json
from lamina.jobs.columns import SPIKES
from lamina.probes.engine.spikes import FEWEST, spikes, surges
from lamina.training.execution.processes import Processes
from lamina.training.monitor.rows import LOSS, NORM, Row

logger = logging.getLogger(__name__)

_CHUNK = 1000  # steps whose values are concatenated, so that rare records keep few tensors


class StepSeries:
    """The loss (mean over micro-batches and processes) and the gradient norm before clipping of each step.

    Nothing waits for the device before ``rows``, which all processes call at the same step.
    """

    def __init__(self, processes: Processes | None = None):
        self.processes = Processes() if processes is None else processes
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._steps: dict[str, list[int]] = {LOSS: [], NORM: []}
        self._values: dict[str, list[torch.Tensor]] = {LOSS: [], NORM: []}

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's share of its step's loss."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def add_norm(self, norm: Any) -> None:
        """Set the step's gradient norm, a tensor or a number."""
        self._norm = torch.as_tensor(norm).detach()

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """End the step; one that the loss scaler ``skipped`` has no norm."""
        for name, value in ((LOSS, self._loss), (NORM, None if skipped else self._norm)):
            if value is not None:
                self._steps[name].append(step)
                self._values[name].append(value.reshape(1).float())
                if len(self._values[name]) >= _CHUNK:
                    self._values[name] = [torch.cat(self._values[name])]
        self._loss = self._norm = None

    def rows(self) -> list[Row]:
        """The tidy rows of the steps since the last call."""
        rows: list[Row] = []
        for name in (LOSS, NORM):
            values = torch.cat(self._values[name]).cpu() if self._values[name] else torch.zeros(0)
            if name == LOSS:
                values = torch.stack(self.processes.everyones(values)).double().mean(0)
            rows += [
                (step, -1, "model", "all", 0, name, value)
                for step, value in zip(self._steps[name], values.tolist(), strict=True)
            ]
            self._steps[name], self._values[name] = [], []
        return rows


def spike_columns(folder: Path) -> Json:
    """Spike counts and scores, and surges, of a run's steps, by the names of ``SPIKES``, from its layers/.

    Spikes are None for a series of at most ``FEWEST`` steps, which is too short to judge; surges for an empty one.
    """
    values_by_column: Json = dict.fromkeys(SPIKES)
    series = _read(folder)
    for name, column in ((LOSS, "loss"), (NORM, "gradient")):
        values = [series[name][step] for step in sorted(series[name])]
        if values:
            values_by_column[f"{column}_surges"] = int(surges(values).sum())
        if len(values) > FEWEST:
            marked = spikes(values)
            values_by_column[f"{column}_spikes"] = int(marked.sum())
            values_by_column[f"{column}_spike_score"] = float(marked.mean())
    return values_by_column


def _read(folder: Path) -> dict[str, dict[int, float]]:
    import pyarrow.parquet as pq

    series: dict[str, dict[int, float]] = {LOSS: {}, NORM: {}}
    for path in sorted((folder / "layers").glob("part-*.parquet")):
        try:
            wanted = [("metric", "in", [LOSS, NORM])]
            table = pq.read_table(path.absolute(), columns=["step", "metric", "value"], filters=wanted)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            logger.warning("%s: left out of the spike score (%s)", path, error)
            continue
        for row in table.to_pylist():
            series[row["metric"]][row["step"]] = row["value"]
    return series
