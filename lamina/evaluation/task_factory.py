"""The harness's builder of tasks, reading their data from a folder. It needs lm-evaluation-harness to be imported."""

# pyright: reportMissingImports=false
from __future__ import annotations

from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry

from lamina.core.json_types import Json
from lamina.evaluation.local_data import DataFolder


class LocalTaskFactory(TaskFactory):
    """Builds tasks as the harness does, but with their data from a folder where one is given."""

    def __init__(self, data: DataFolder | None) -> None:
        super().__init__()
        self._data = data

    def _load_full_config(self, entry: Entry, overrides: Json | None = None) -> Json:
        """The configuration that a task is built from: every task's passes through here (pinned by a test)."""
        config = super()._load_full_config(entry, overrides)
        if self._data is None or "group" in config or "task" not in config:
            return config
        return self._data.localized(config, str(config["task"]))
