"""Which task, group or tag of lm-evaluation-harness is defined in which file, found without parsing 14,000 files.

The harness's own index parses every YAML file that it ships, which takes a minute and more. Names and tags stand at the
beginning of a line, so that a scan for them takes a second; only the files that a request needs are then parsed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.errors import UserError, nearest, one_line, shortened

if TYPE_CHECKING:
    from lm_eval.tasks._index import Entry

_NAMED = re.compile(
    r"""^["']?(task|group|class|include)["']?:[ \t]*["']?([^"'\s#\[{][^"'\n#]*?)["']?[ \t]*(?:\#.*)?$""", re.MULTILINE
)
_TAGS = re.compile(
    r"""^["']?tag["']?:[ \t]*(?:["']?([^"'\s#\[][^"'\n#]*?)["']?[ \t]*(?:\#.*)?$"""
    r"""|\n((?:[ \t]*-[ \t]*.*\n?)+)|\[(.*)\])""",
    re.MULTILINE,
)
_SKIPPED = {"__pycache__", ".ipynb_checkpoints"}


@dataclass(frozen=True, kw_only=True)
class TaskFiles:
    """The tasks in some folders, a later folder's before an earlier one's.

    Attributes:
        files: the file of each task and group.
        tags: the tasks of each tag.
    """

    files: Mapping[str, Path]
    tags: Mapping[str, list[str]]
    _entries: dict[str, Entry] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def scan(shipped: Path, own: Iterable[Path] = ()) -> TaskFiles:
        """Scan the harness's folder of tasks, then the user's own."""
        files, tags = _shipped(shipped)
        files, tags = dict(files), {tag: list(names) for tag, names in tags.items()}
        for folder in own:
            more, labels = _scanned(folder)
            files |= more
            for tag, names in labels.items():
                tags.setdefault(tag, []).extend(names)
        return TaskFiles(files=files, tags=tags)

    def require(self, names: Iterable[str], *, place: str, others: Sequence[str] = ()) -> None:
        """Raise UserError for a name that is no task, group or tag; it has the nearest names, ``others`` among them.

        ``place``: where files of the user's own may be, for the message.
        """
        known = {*self.files, *self.tags}
        for name in names:
            if name not in known:
                near = nearest(name, [*others, *sorted(known)])
                allowed = ", ".join([f"{len(known)} tasks, groups and tags of lm-evaluation-harness", place, *others])
                raise UserError(f"tasks: unknown task {shortened(repr(name), 200)}{near} (allowed: {allowed})")

    def entries(self, name: str) -> dict[str, Entry]:
        """The harness's index of all that a name needs: itself, and the members of a group or a tag."""
        todo, done = [name], set()
        while todo:
            one = todo.pop()
            if one in done:
                continue
            done.add(one)
            if one in self.files:
                todo += self._read(one)
            elif one in self.tags:
                self._add_tag(one)
                todo += self.tags[one]
        return self._entries

    def _read(self, name: str) -> list[str]:
        """Parse the file of a task or a group; returns the names of a group's members."""
        from lm_eval.tasks._index import TaskIndex

        config = self.config(name)
        if name not in self._entries:
            TaskIndex.process_cfg({**config, "tag": None}, self.files[name], self._entries)
        members = config.get("task") if "group" in config else []
        return [member for member in _members(members) if member in self.files or member in self.tags]

    def _add_tag(self, name: str) -> None:
        from lm_eval.tasks._index import Entry, Kind

        self._entries.setdefault(name, Entry(name=name, kind=Kind.TAG, yaml_path=None, tags=set(self.tags[name])))

    def config(self, name: str) -> Json:
        """A file's content, its functions as names. Raises UserError if it does not define that task or group."""
        from lm_eval.tasks._yaml_loader import load_yaml

        try:
            config = load_yaml(self.files[name], resolve_func=False)
        except Exception as error:  # the file may be the user's: whatever it holds
            raise UserError(f"tasks: {str(self.files[name])!r} is no task file: {one_line(error)}") from None
        if config.get("group", config.get("task")) != name:
            raise UserError(f"tasks: {str(self.files[name])!r} is no task file: YAML reads no name {name!r} in it")
        return config


def _members(listed: object) -> list[str]:
    """The names of a group's members, those of the groups inside it included."""
    found = []
    for member in listed if isinstance(listed, list) else [listed]:
        if isinstance(member, dict):
            found += [str(member["task"])] if isinstance(member.get("task"), str) else _members(member.get("task"))
            found += [str(member["group"])] if "group" in member else []
        elif isinstance(member, str):
            found.append(member)
    return found


def _scanned(folder: Path) -> tuple[dict[str, Path], dict[str, list[str]]]:
    files: dict[str, Path] = {}
    tags: dict[str, list[str]] = {}
    for place, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if name not in _SKIPPED)
        for file in sorted(names):
            if not file.endswith(".yaml"):
                continue
            path = Path(place, file)
            text = path.read_text(encoding="utf-8", errors="replace")
            named = dict(_NAMED.findall(text))
            name = named.get("group") or named.get("task")
            if name is None or name in files:
                continue
            files[name] = path
            for tag in _tags(text):
                tags.setdefault(tag, []).append(name)
    return files, tags


_shipped = functools.cache(_scanned)  # what is installed does not change


def _tags(text: str) -> list[str]:
    found = _TAGS.search(text)
    if found is None:
        return []
    if found[1]:
        return [found[1]]
    if found[2]:
        return re.findall(r"-[ \t]*[\"']?([^\s\"'#]+)", found[2])
    return [part for part in re.split(r"[\s,\"']+", found[3] or "") if part]
