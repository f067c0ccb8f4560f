"""Read a run's folder, even while the run trains or if some records are damaged."""

from __future__ import annotations

import glob
import json
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import is_table, read_config
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.names import ALARMS, BATCHES, CONFIG, METRICS, NOTABLE_BATCHES, NOTES


class RunFolder:
    """The content of a run's folder. Lamina treats missing or unreadable files as empty."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def metrics(self) -> list[Json]:
        """Return the records of metrics.jsonl in order, without damaged lines."""
        return parse_lines(self.path / METRICS)[0]

    def last_step(self) -> int:
        path = self.path / METRICS
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 400))
                return int(json.loads(file.read().splitlines()[-1])["step"])
        except (OSError, ValueError, IndexError, KeyError, TypeError):
            return 0

    def faults(self) -> list[str]:
        lines = (METRICS, ALARMS, NOTABLE_BATCHES, BATCHES, f"probes/*/{NOTES}")
        faults = [parse_lines(path)[1] for pattern in lines for path in sorted(self.path.glob(pattern))]
        tables = ("layers/part-*.parquet", "layers/part-*.npz", "probes/*/part-*.parquet")
        for part in sorted(part for pattern in tables for part in self.path.glob(pattern)):
            if not is_table(part):
                faults.append(f"{part.relative_to(self.path).as_posix()} is not readable")
        return [fault for fault in faults if fault is not None]

    def require_records(self) -> None:
        """Raise UserError for the first damaged record file, because a resumed run would append to this file."""
        for fault in self.faults():
            raise UserError(
                f"resume: {fault} in {str(self.path)!r}. Restore or delete the file, or begin again with --overwrite."
            )


def parse_lines(path: Path) -> tuple[list[Json], str | None]:
    """Parse a file of JSON records that may still grow. Return the records, and a description of the first fault.

    A line without a step is a fault, and Lamina omits the line. Decreasing steps are also a fault, except in records
    of rollbacks. An incomplete last line is no fault, because a killed run can leave an incomplete line.
    """
    records: list[Json] = []
    fault, last = None, -1
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = record["step"]
            if not isinstance(step, int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                fault = fault or f"line {number} of {path.name} is not a record"
            continue
        records.append(record)
        if "rollback" not in record:
            if step < last:
                fault = fault or f"line {number} of {path.name} goes back from step {last} to step {step}"
            last = max(last, step)
    return records, fault


def trainings(output: Path) -> list[Path]:
    """Return the folders of all watched trainings with this ``output`` (NAME, NAME-2, ...), the latest training last.

    ``output`` may also be one of the later folders. The list is empty if ``output`` holds no watched training.
    """

    def name(folder: Path) -> str:
        with suppress(UserError):
            return Path(str(read_config(folder).get("output"))).name if kind_of(folder) == Kind.WATCHED else ""
        return ""

    def has_number(folder: Path) -> bool:
        return re.fullmatch(rf"{re.escape(base)}(-[1-9]\d*)?", folder.name) is not None

    if not (base := name(output)) or not has_number(output):
        return [output] if base else []
    beside = [path for path in output.parent.glob(f"{glob.escape(base)}*") if has_number(path) and name(path) == base]
    return sorted(beside, key=lambda folder: (folder / CONFIG).stat().st_mtime_ns)  # written when a training begins
