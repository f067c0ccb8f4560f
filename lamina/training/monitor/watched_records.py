"""The folder of a watched run: the records of Lamina's own runs, written by the first process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.environment import ENVIRONMENT, environment
from lamina.jobs.files import finite, write_json, write_text, write_yaml
from lamina.jobs.folder import Resume, claim, in_use, lock
from lamina.jobs.kinds import Kind
from lamina.training.monitor.alarms import Alarm
from lamina.training.monitor.rows import Row
from lamina.training.monitor.step_series import spike_columns
from lamina.training.monitor.trackers import Trackers
from lamina.training.monitor.watch_settings import WatchSettings
from lamina.training.monitor.watched_folder import ALARMS, VERSION, WATCHED, check_version, read_alarms
from lamina.training.monitor.writers import LayersWriter, MetricsWriter

logger = logging.getLogger(__name__)


class Records:
    """metrics.jsonl, layers/, alarms.jsonl, watched.json and result.json of one run.

    Args:
        settings: of the run.
        resume: whether to continue the folder's records after ``step``; "auto": if there are any.
        overwrite: whether to replace them.
        step: the last step that was done before.

    Raises:
        UserError: for a folder in use, or one whose records are of another version.
    """

    def __init__(self, settings: WatchSettings, *, resume: Resume = False, overwrite: bool = False, step: int = 0):
        self.folder, self.settings = Path(settings.output), settings
        if resume and in_use(self.folder):
            check_version(self.folder)
        self._held = ExitStack()
        self._held.enter_context(lock(self.folder))
        with ExitStack() as undo:
            undo.callback(self._held.close)
            claim(self.folder, resume=resume, overwrite=overwrite)
            write_json(self.folder / ENVIRONMENT, environment(0, Kind.WATCHED))
            write_yaml(self.folder / "config.yaml", settings.to_dict())
            self.metrics, self.layers = MetricsWriter(self.folder), LayersWriter(self.folder)
            self.metrics.load_state_dict({"step": step})
            self.layers.load_state_dict({"step": step})
            self._alarms = [line for line in read_alarms(self.folder) if line["step"] <= step]
            self._write_alarms()
            self.trackers = Trackers(settings.report_to, self.folder)
            undo.pop_all()
        self.last_loss: float | None = None

    def describe(self, about: Json) -> None:
        """Write watched.json: what was watched, and what could not be."""
        write_json(self.folder / WATCHED, {"record": VERSION, **about})

    def write(self, record: Json) -> None:
        """Write a line of metrics.jsonl."""
        self.metrics.write(record)
        self.last_loss = record.get("loss", self.last_loss)

    def add(self, step: int, rows: Iterable[Row]) -> None:
        """Add rows of layers/, and log them to the trackers."""
        rows = list(rows)
        self.layers.add(rows)
        self.trackers.log(step, rows)

    def alarm(self, alarms: Iterable[Alarm]) -> None:
        """Add alarms to alarms.jsonl."""
        if new := [alarm.to_dict() for alarm in alarms]:
            self._alarms += new
            self._write_alarms()

    def _write_alarms(self) -> None:
        if self._alarms or (self.folder / ALARMS).exists():
            text = "".join(json.dumps(finite(alarm)) + "\n" for alarm in self._alarms)
            write_text(self.folder / ALARMS, text)

    def close(self, result: Json) -> None:
        """Write what was collected and result.json, and leave the folder."""
        try:
            self.layers.flush()
            self.metrics.sync()
            result = {**result, "loss": self.last_loss, "alarms": len(self._alarms), **spike_columns(self.folder)}
            write_json(self.folder / "result.json", result)
            self.trackers.close()
        finally:
            self._held.close()
