"""Bad command lines, made from the commands' own parsers: each must end with exit code 2 and one clear line.

    python -m tools.reliability.command_lines --count 800 --seed 0

A case is right if the exit code is 2, standard error holds exactly one line of ours, that line names the field or the
value, nothing that a terminal obeys is printed, no file was made or changed, and it took less than ``SECONDS``.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.reliability import bad_calls, bad_files, bad_values
from tools.reliability.record import HUNG, LOST, SILENT, TRACEBACK, WRONG, Case, command, environment_as_before, main

SECONDS = 60.0  # of a case within this process: nothing is trained; a busy machine takes 20 to import the harness
NOTES = re.compile(r"(placement|probe) '.*' runs as code")  # said before a Python file is run


@dataclass(frozen=True)
class Bad:
    """A command line that has to be refused; ``mentions``: one of them stands in the line that says why."""

    group: str
    argv: list[str]
    mentions: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    process: bool = False  # only true of a process of its own


class TimedOut(BaseException):
    """A case took too long; no Exception, so that nothing swallows it."""


def suite(count: int, seed: int) -> Iterator[Case]:
    """``count`` seeded cases of all groups: flags, configuration files, paths, contradictions, calls from Python."""
    import torch  # noqa: F401  (not on the first case's time)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        bad_files.prepare(folder)
        with _inside(folder):
            drawn = random.Random(seed)
            bads = list(cases(folder, drawn))
            drawn.shuffle(bads)
            bads = _evenly(bads, count)
            before = snapshot(folder)
            for number, bad in enumerate(bads):
                # each tenth as a user starts it: with the start's cost, and with what only a process has
                alone = bad.process or (number % 25 == 0 and not any("\0" in word for word in bad.argv))
                yield (as_process if alone else within)(bad, folder, before)
                if snapshot(folder) != before:
                    bad_files.prepare(folder)
                    before = snapshot(folder)
            yield from bad_calls.suite(folder, drawn, max(10, count // 10))


def cases(folder: Path, drawn: random.Random) -> Iterator[Bad]:
    """Every bad command line of this draw."""
    for group, argv, mentions, environment, process in bad_values.cases(folder, drawn):
        yield Bad(group, argv, mentions, environment, process)
    for group, argv, mentions, environment, process in bad_files.cases(folder, drawn):
        yield Bad(group, argv, mentions, environment, process)


def _evenly(bads: list[Bad], count: int) -> list[Bad]:
    """``count`` of them, of each group its share, at least ten."""
    groups: dict[str, list[Bad]] = {}
    for bad in bads:
        groups.setdefault(bad.group, []).append(bad)
    share = count / len(bads)
    return [bad for of in groups.values() for bad in of[: max(10, round(share * len(of)))]]


def within(bad: Bad, folder: Path, before: dict[str, Any]) -> Case:
    """The command in this process, as ``lamina.cli.main`` runs it."""
    from lamina.cli import main as lamina

    out, err = io.StringIO(), io.StringIO()
    start = time.monotonic()
    with environment_as_before(**bad.environment), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _limit(SECONDS):
                code = lamina(bad.argv)
        except TimedOut:
            return _case(bad, HUNG, f"{SECONDS:.0f} s")
        except SystemExit as error:
            code = error.code
        except BaseException:
            return _case(bad, TRACEBACK, traceback.format_exc()[-800:])
    return judge(bad, code, out.getvalue(), err.getvalue(), folder, before, time.monotonic() - start)


def as_process(bad: Bad, folder: Path, before: dict[str, Any]) -> Case:
    """The command as a user starts it."""
    ended = command(bad.argv, folder=folder, seconds=300.0, environment=bad.environment)
    return judge(bad, ended.code, ended.out, ended.err, folder, before, 0.0)


def judge(bad: Bad, code: Any, out: str, err: str, folder: Path, before: dict[str, Any], seconds: float) -> Case:
    """The case of a command that has ended."""
    lines = [line for line in re.split(r"[\r\n]+", err) if line.strip() and "%|" not in line]
    said = [line for line in lines if not NOTES.match(line)]
    if code is None:
        return _case(bad, HUNG, "killed")
    if "Traceback (most recent call last)" in out + err:
        return _case(bad, TRACEBACK, err[-800:])
    if code == 0:
        return _case(bad, SILENT, f"accepted: {out[-200:]!r}")
    if snapshot(folder) != before:
        return _case(bad, LOST, f"files changed: {_changes(before, snapshot(folder))}; {err[-200:]!r}")
    if code != 2 or len(said) != 1 or not said[0].startswith("lamina: "):
        return _case(bad, WRONG, f"exit code {code}, {len(said)} lines: {err[-600:]!r}")
    if re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", out + said[0]
    ):
        return _case(bad, WRONG, f"a control character reaches the terminal: {err[-300:]!r}")
    if len(said[0]) > 2500:
        return _case(bad, WRONG, f"a line of {len(said[0])} characters")
    if not any(word.lower() in said[0].lower() for word in bad.mentions):
        return _case(bad, WRONG, f"names none of {bad.mentions}: {said[0]!r}")
    return _case(bad)


def _case(bad: Bad, outcome: str = "right", detail: str = "") -> Case:
    shown = " ".join(repr(word)[:120] for word in bad.argv)
    return Case(bad.group, f"{shown}{' with ' + str(bad.environment) if bad.environment else ''}", outcome, detail)


def snapshot(folder: Path) -> dict[str, Any]:
    """Every file, folder and link below, with its content's size and time of change."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            state = os.lstat(path)
            found[os.path.relpath(path, folder)] = (state.st_mode, state.st_size, state.st_mtime_ns)
    kept = {name: state for name, state in found.items() if not name.startswith("cache" + os.sep)}
    return {name: state if stat.S_ISREG(state[0]) else state[0] for name, state in kept.items()}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))[:5]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """The folder as the working one, with a cache in it."""
    with contextlib.chdir(folder), environment_as_before(LAMINA_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1"):
        yield


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main("command_lines", suite, 800))
