"""Find and load the tasks of lm-evaluation-harness and of users' task files.

A user's task file can contain code. If ``run_code`` is false, Lamina only reads the file as data.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from jinja2 import TemplateError

from lamina.core.extras import install
from lamina.core.hub_access import local_when_unreachable
from lamina.core.json_types import Json
from lamina.core.values import home, real_path
from lamina.errors import UserError, nearest, one_line
from lamina.evaluation.harness import quiet_harness
from lamina.evaluation.task_names import TASKS, unknown_task
from lamina.jobs.files import disk_full

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.manager import Entry, TaskDict

READERS = {".jsonl": "json", ".json": "json", ".arrow": "arrow", ".parquet": "parquet"}
DEFAULT = "default"
_CODE_ERRORS = (ImportError, AttributeError, NameError, SyntaxError, SystemExit, yaml.YAMLError)  # not caused by data
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


@functools.cache
def _shipped() -> TaskManager:
    """Return a TaskManager of the harness's tasks. The first call takes seconds, because it builds an index."""
    from lm_eval.tasks import TaskManager

    with quiet_harness():
        return TaskManager()


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks that Lamina can run: the harness's tasks, the generated tasks, and users' tasks."""

    added: TaskManager  # the TaskManager of the generated tasks and users' tasks, which override the harness's tasks
    folders: Sequence[Path] = ()  # the user's folders of task files
    # the folder with the tasks' data, or None for data from the hub. The files are ``NAME/CONFIG/SPLIT.jsonl`` (or
    # .arrow, .parquet). NAME is the dataset's name on the hub. CONFIG is the dataset's configuration or ``default``
    data: Path | None = None
    run_code: bool = False  # whether Lamina may run users' task files, and code that a model writes

    @staticmethod
    def find(data_dir: str | None, *folders: Path, generated: Path | None = None, run_code: bool = False) -> Tasks:
        """Find the tasks. A later file overrides an earlier file. Raises UserError for a missing harness or folder."""
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError(f"tasks: lm-evaluation-harness is not installed. Run: {install('eval')}")
        from lm_eval.tasks import TaskManager

        data = real_path(home("data_dir", data_dir)) if data_dir is not None else None
        if data is not None and not data.is_dir():
            raise UserError(f"data_dir: {data_dir!r} is not a folder. Give a folder with NAME/CONFIG/SPLIT.jsonl.")
        users = [real_path(folder) for folder in folders] + ([data / TASKS] if data is not None else [])
        with quiet_harness():
            added = TaskManager(
                include_path=[*([generated] if generated is not None else []), *users], include_defaults=False
            )
        return Tasks(added=added, folders=users, data=data, run_code=run_code)

    def entry(self, name: str) -> Entry | None:
        """Return the harness's entry for a task, group or tag, or None. Only a tag's entry has no ``yaml_path``."""
        return self.added.task_index.get(name) or _shipped().task_index.get(name)

    def require(self, names: Iterable[str], *, source: str, others: Sequence[str] = ()) -> None:
        """Raise UserError for an unknown task, group or tag. The message lists ``source`` and ``others`` as allowed."""
        for name in names:
            if self.entry(name) is not None:
                continue
            self._refuse_unreadable()
            every = sorted({*self.added.task_index, *_shipped().task_index})
            raise unknown_task(name, [*others, *every], [source, *others])

    def _refuse_unreadable(self) -> None:
        """Raise UserError for a user's file that is not a YAML mapping. The harness would silently skip this file."""
        for path in sorted(path for folder in self.folders for path in folder.rglob("*.yaml")):
            try:
                if not isinstance(yaml.compose(path.read_bytes()), yaml.MappingNode):
                    raise ValueError("the content is not a mapping")
            except (OSError, ValueError, yaml.YAMLError) as error:
                raise UserError(f"tasks: {str(path)!r} is not a task file: {one_line(error)}") from None

    def tagged(self, name: str) -> list[str] | None:
        """Return the tasks with a tag, or None if the name is not a tag."""
        entry = self.entry(name)
        return sorted(entry.tags) if entry is not None and entry.yaml_path is None else None

    def build(self, name: str) -> TaskDict:
        """Load a task, or all tasks of a group or tag, with their data. Raises UserError for unreadable data or
        untrusted code.
        """
        entries = dict(self._reached(name))
        if not self.run_code:
            self._refuse_code(entries)
        with (
            tempfile.TemporaryDirectory(prefix="lamina-tasks-") as folder,
            quiet_harness(),
            local_when_unreachable() as reachable,
        ):
            try:
                return self._manager(entries, Path(folder)).load(name)
            except (Exception, SystemExit) as error:  # users' code, YAML and the hub's clients raise unrelated types
                if isinstance(error, UserError) or disk_full(error):
                    raise
                raise UserError(self._reason(name, error, reachable)) from error

    def _manager(self, entries: dict[str, Entry], folder: Path) -> TaskManager:
        """Return a TaskManager of the given tasks. Tasks with local data get new task files that point to the data."""
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_defaults=False)
        manager.task_index.update(entries)
        for number, (task, entry) in enumerate(entries.items()):
            config = entry.cfg or {}
            if self.data is None or entry.yaml_path is None or "group" in config:
                continue
            file = folder / f"{number}.yaml"
            fields = local_fields(config, task, self.data)
            file.write_text(yaml.safe_dump({"include": str(entry.yaml_path), **fields}), encoding="utf-8")
            manager.task_index[task] = replace(entry, yaml_path=file)
        return manager

    def _reached(self, name: str) -> Iterator[tuple[str, Entry]]:
        """Yield the entry of a task, group or tag. For a group or tag, also yield the entries of all members."""
        waiting, seen = [name], set[str]()
        while waiting:
            entry = self.entry(task := waiting.pop())
            if entry is None or task in seen:
                continue
            seen.add(task)
            yield task, entry
            waiting += sorted(entry.tags) if entry.yaml_path is None else _members((entry.cfg or {}).get("task"))

    def _refuse_code(self, entries: dict[str, Entry]) -> None:
        for task, entry in entries.items():
            path = entry.yaml_path
            if path is not None and any(path.is_relative_to(folder) for folder in self.folders):
                raise UserError(
                    f"tasks: {task!r} is in {str(path)!r}. A task file can run any code on this machine. "
                    "Add --run-code if you trust the file."
                )
            if (entry.cfg or {}).get("unsafe_code"):
                raise UserError(
                    f"tasks: {task!r} runs the code that a model writes. Add --run-code to allow this code."
                )

    def _reason(self, name: str, error: BaseException, reachable: bool) -> str:
        if isinstance(error, TemplateError):
            return f"tasks: {name!r}: the task's template can't be filled in: {one_line(error)}"
        entry = self.entry(name)
        where = (entry.cfg or {}).get("dataset_path") if entry is not None else None
        if isinstance(error, _CODE_ERRORS) or (self.data is None and where not in READERS.values() and reachable):
            return f"tasks: {name!r} can't be read: {one_line(error)}"
        if self.data is not None or where in READERS.values():  # the hub has none of the data
            cause = error.__cause__ or error  # datasets' own message has no reason
            folder = "" if self.data is None else f" in {str(self.data)!r}"
            return f"tasks: {name!r}: the task's data{folder} can't be read: {one_line(cause)}"
        data = f"the task's data{f' ({where})' if where else ''}"
        return (
            f"tasks: {name!r}: {data} is not on this machine, and Lamina cannot reach the hub. Connect to a "
            "network, or give the folder of the data with --data-dir (`make eval-data` builds such a folder)."
        )


def _members(listed: object) -> list[str]:
    names: list[str] = []
    for member in listed if isinstance(listed, list) else [listed]:
        if isinstance(member, str):
            names.append(member)
        elif isinstance(member, dict):
            names += _members([member.get("group")]) + _members(member.get("task"))
    return names


def local_fields(config: Json, task: str, data: Path) -> Json:
    """Return the fields that make a task read its data from a folder, or {} if the task already reads files."""
    name = config.get("dataset_path")
    if not isinstance(name, str) or name in READERS.values():
        return {}
    wanted = f"{name}/{config.get('dataset_name') or DEFAULT}"
    folder = data / wanted
    files: dict[str, Path] = {}
    if folder.is_dir() and data in real_path(folder).parents:
        files = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix in READERS}
    if not files:
        held = [file for kind in READERS for file in data.rglob(f"*{kind}") if data / TASKS not in file.parents]
        near = nearest(wanted, {file.parent.relative_to(data).as_posix() for file in held})
        raise UserError(
            f"data_dir: no data for the task {task!r}: {str(data)!r} has no {wanted}/SPLIT.jsonl{near}. Put the "
            "file there (`make eval-data` does so for many tasks), or leave out --data-dir to read from the hub."
        )
    kinds = {file.suffix for file in files.values()}
    readers = {READERS[kind] for kind in kinds}
    if len(readers) > 1:
        raise UserError(f"data_dir: {wanted} mixes {', '.join(sorted(kinds))} files. Keep one kind of file.")
    # The harness uses another split in place of a missing split, whose value is None.
    splits = {key: config[key] for key in _SPLITS if config.get(key) is not None}
    scored = {splits[key] for key in ("validation_split", "test_split") if key in splits}
    if not scored & set(files):
        raise UserError(
            f"data_dir: {wanted} holds {', '.join(sorted(files))}, but the task {task!r} is scored on "
            f"{' or '.join(sorted(scored))}. Add the file {wanted}/{min(scored)}.jsonl."
        )
    return {
        "dataset_path": readers.pop(),
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
        **{key: split if split in files else None for key, split in splits.items()},
    }
