"""The harness's builder of tasks, reading their data from a folder. It needs lm-evaluation-harness to be imported."""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path

from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.harness.containment import ALLOWED, check_names, check_plain, check_reader, is_shipped
from lamina.harness.local_data import DataFolder


class LocalTaskFactory(TaskFactory):
    """Builds tasks as the harness does, but with their data from a folder where one is given.

    Args:
        data: the folder; None for the hub.
        run_code: whether a task may bring code of its own.
    """

    def __init__(self, data: DataFolder | None, *, run_code: bool) -> None:
        super().__init__()
        self._data, self._run_code = data, run_code

    def _load_full_config(self, entry: Entry, overrides: Json | None = None) -> Json:
        """The configuration that a task is built from: every task's passes through here (pinned by a test)."""
        if (entry.cfg or {}).get("unsafe_code") and not self._run_code:
            raise UserError(f"tasks: {entry.name!r} runs the code that a model writes {ALLOWED}")
        config = super()._load_full_config(entry, overrides)
        yours = entry.yaml_path is None or not is_shipped(Path(entry.yaml_path))
        if not self._run_code:
            own = super()._load_full_config(entry) if overrides else config
            (check_plain if yours else check_names)(own, entry.name)
        if self._data is not None and "group" not in config and "task" in config:
            config = self._data.localized(config, str(config["task"]))
        if yours and not self._run_code:
            check_reader(config, entry.name)
        return config
