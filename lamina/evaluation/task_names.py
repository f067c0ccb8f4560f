"""Reject an unknown task within a second. The harness needs many seconds to list its 14,000 tasks."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lamina.core.extras import install
from lamina.core.values import home
from lamina.errors import UserError, nearest, shortened

TASKS = "tasks"  # the folder of task files in the harness, and in a user's folder of data
OWN_FILES = "DIR/tasks/*.yaml in --data-dir"
_NAMED = re.compile(rb"^[\"']?(?:task|group|tag)[\"']?\s*:\s*[\"']?([\w./-]+)[\"']?\s*$", re.MULTILINE)


def refuse_absent(wanted: Iterable[str], data_dir: str | None, sets: Sequence[str], generated: Iterable[str]) -> None:
    """Raise UserError for a name that is no generated task, and that no task file of the harness or the user contains.

    A name that occurs in a file may still be unknown, and a user's file may include other files. ``Tasks.require``
    decides these cases.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"tasks: lm-evaluation-harness is not installed. Run: {install('eval')}")
    roots = [Path(spec.submodule_search_locations[0]) / TASKS]
    if data_dir is not None:
        roots.append(home("data_dir", data_dir) / TASKS)
        if not roots[1].parent.is_dir() or any(b"include" in text for text in _task_files(roots[1:], ())):
            return
    known = set(generated)
    absent = [name for name in dict.fromkeys(wanted) if name not in known]
    if not absent:
        return
    for text in _task_files(roots, absent):
        for name in [name for name in absent if name.encode() in text]:
            if re.search(rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])", text):
                absent.remove(name)
        if not absent:
            return
        known.update(name.decode() for name in _NAMED.findall(text))
    raise unknown_task(absent[0], [*sets, *known], [OWN_FILES, *sets])


def unknown_task(name: str, known: Iterable[str], sources: Sequence[str]) -> UserError:
    """Return the error for an unknown task, with the most similar of the names in ``known``."""
    allowed = ", ".join(["the tasks, groups and tags of lm-evaluation-harness", *sources])
    return UserError(f"tasks: unknown task {shortened(repr(name), 200)}{nearest(name, known)} (allowed: {allowed})")


def _task_files(roots: Sequence[Path], names: Sequence[str]) -> Iterator[bytes]:
    """Yield the content of every task file. Begin with folders whose name is the beginning of a task's name."""
    for root in roots:
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        likely = [path for path in folders if any(name.startswith(path.name) for name in names)]
        for folder in dict.fromkeys([*likely, *folders, root]):
            for path in folder.rglob("*") if folder != root else folder.glob("*"):
                if path.suffix in ("", ".yaml") and path.is_file():  # the harness's files include files without suffix
                    yield path.read_bytes()
