"""What the reliability suites share: seeded cases, the outcome of a command, and the record that docs are made of.

Each suite is one file here, run whole as a script and in a fast sample by its own test:

    python -m tools.reliability.command_lines --count 600 --seed 0 --output docs/reliability/command_lines.json
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What a case can come out as. Every kind but "right" is a fault of ours.
RIGHT, TRACEBACK, SILENT, WRONG, HUNG, LOST = "right", "traceback", "silent difference", "wrong number", "hung", "lost"
KINDS = (RIGHT, TRACEBACK, SILENT, WRONG, HUNG, LOST)


@dataclass(frozen=True)
class Case:
    """One case and how it came out: ``group`` is the row of the table that it counts in."""

    group: str
    name: str
    outcome: str = RIGHT
    detail: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in KINDS:
            raise ValueError(f"outcome: {self.outcome!r} (allowed: {', '.join(KINDS)})")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (None where it had to be killed) and what it printed."""

    code: int | None
    out: str
    err: str


def command(
    arguments: Iterable[str], *, folder: Path, seconds: float = 120.0, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run ``lamina ARGUMENTS`` in ``folder`` as a process of its own, killed after ``seconds``."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lamina", *arguments],
            cwd=folder,
            env=given,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        return Ended(None, _text(error.stdout), _text(error.stderr))
    return Ended(done.returncode, _text(done.stdout), _text(done.stderr))


def called(act: Callable[[], int | None]) -> tuple[int | None, str]:
    """Call the command line in this process: its exit code, None for a traceback, and all that it says and logs."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("lamina")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            return act(), stream.getvalue()
    except SystemExit as stop:
        return int(stop.code or 0), stream.getvalue()
    except BaseException:
        return None, stream.getvalue() + traceback.format_exc()
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def environment_as_before(**changes: str) -> Iterator[None]:
    """Change variables of the environment for a while; all others that change come back, too."""
    saved = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")


def write_record(path: Path, name: str, seed: int, cases: list[Case], seconds: float) -> dict[str, Any]:
    """Write the record of a suite as JSON: counts by group and outcome, every fault, and where it was made."""
    from lamina.jobs.environment import environment

    where = environment(seed)
    groups: dict[str, Counter[str]] = {}
    for case in cases:
        groups.setdefault(case.group, Counter())[case.outcome] += 1
    record = {
        "suite": name,
        "seed": seed,
        "cases": len(cases),
        "faults": [asdict(case) for case in cases if case.outcome != RIGHT],
        "groups": {group: dict(counts) for group, counts in groups.items()},
        "seconds": round(seconds),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "revision": where["git_revision"],
        "machine": where["machine"],
        "versions": where["versions"],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return record


def main(name: str, suite: Callable[[int, int], Iterable[Case]], count: int) -> int:
    """The command line of a suite; ``suite(count, seed)`` yields its cases. Exit code 1 for a fault or no case."""
    parser = argparse.ArgumentParser(description=f"The reliability suite {name!r}.")
    parser.add_argument("--count", type=int, default=count, help=f"cases to run (default {count})")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--output", type=Path, help="where the record goes (default: printed only)")
    options = parser.parse_args()
    start, cases = time.monotonic(), []
    for case in suite(options.count, options.seed):
        cases.append(case)
        if case.outcome != RIGHT:
            print(f"{case.outcome}: {case.group}: {case.name}: {case.detail}", file=sys.stderr, flush=True)
        elif len(cases) % 20 == 0:
            print(f"{len(cases)} cases, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    if options.output:
        write_record(options.output, name, options.seed, cases, seconds)
    faults = sum(case.outcome != RIGHT for case in cases)
    print(f"{len(cases)} cases, {faults} faults, {seconds:.0f} s")
    return int(faults > 0 or not cases)
