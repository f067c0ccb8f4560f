"""The probes of one checkpoint, each written as soon as it is finished."""

from __future__ import annotations

import datetime
import errno
import inspect
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm

from lamina.core.json_types import Json
from lamina.core.progress import has_bars
from lamina.errors import UserError
from lamina.jobs.files import disk_full, write_json, write_text, writing
from lamina.probes.engine.measure import make_context, tolerance_of
from lamina.probes.engine.registry import Probe
from lamina.probes.engine.running import run
from lamina.probes.engine.settings import ProbeSettings
from lamina.probes.job.compact import compact
from lamina.probes.job.describing import describe

logger = logging.getLogger(__name__)


class Measuring:
    """Loads a checkpoint and its inputs on creation; ``run`` measures and writes.

    ``specs`` are the requested probes as the user wrote them, by name; ``done`` are the results already in the folder.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        probes: Sequence[Probe],
        specs: Mapping[str, str],
        done: Mapping[str, Json],
        bar: bool,
    ):
        if settings.threads:
            torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.settings, self.specs, self.began = settings, specs, time.monotonic()
        self.context = make_context(settings.checkpoint, settings)
        self.bars = self.context.progress = Bars(show=bar)
        self.remaining = [probe for probe in probes if probe.name not in done]
        self.results: Json = dict(done)
        self._noted = len(self.context.notes)
        self._loading_notes = list(self.context.notes)

    def run(self, folder: Path) -> Json:
        """Measure, write, and return the content of result.json; errors as in ``probe_folder``."""
        self.folder = folder
        (folder / "figures").mkdir(exist_ok=True)
        self._write("running", "it is still running, or was killed (--resume continues)")
        try:
            run(
                self.context,
                self.remaining,
                tolerance=tolerance_of(self.context, self.settings),
                strict=False,
                done=self._done,
                broken=self._broken,
                estimated=self.bars.plan,
                starting=self.bars.start,
            )
        except KeyboardInterrupt:
            self._write("interrupted", "stopped by Ctrl-C; finished probes are kept (--resume continues)")
            raise
        except Exception as error:
            if disk_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._write("failed", " ".join(message.split()))
            raise
        finally:
            self.bars.close()
        for probe in self.remaining:
            if probe.name not in self.results:
                self.results[probe.name] = {**self._words(probe), "status": "skipped", "reason": self._why(probe.name)}
        failed = [
            f"{name}: {result['reason']}" for name, result in self.results.items() if result["status"] == "failed"
        ]
        return self._write("failed" if failed else "finished", "; ".join(failed))

    def _broken(self, probe: Probe, error: Exception) -> None:
        """Record a probe that failed; the others are still measured."""
        if disk_full(error):
            raise error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logger.debug("%s failed", probe.name, exc_info=error)
        self.results[probe.name] = {**self._words(probe), "status": "failed", "reason": reason}

    def _done(self, probe: Probe, frame: pd.DataFrame, seconds: float) -> None:
        """Write a probe's frame and figures, then list them in result.json."""
        with writing(self.folder / f"{probe.name}.parquet") as temporary:
            frame.to_parquet(temporary.absolute(), index=False)
        error = probe.standard_error()
        self.results[probe.name] = {
            **self._words(probe),
            "status": "finished",
            "rows": len(frame),
            "seconds": round(seconds, 3),
            "forwards": self.context.forwards if probe.points() else None,
            "standard_error": error if error is not None and math.isfinite(error) else None,
            "sentences": list(probe.sentences(frame)),
            "figures": self._figures(probe, frame),
            "notes": self.context.notes[self._noted :],
        }
        self._noted = len(self.context.notes)
        self._write("running", "it is still running, or was killed (--resume continues)")

    def _figures(self, probe: Probe, frame: pd.DataFrame) -> list[dict[str, str]]:
        drawn = []
        for number, (figure, caption) in enumerate(probe.figures(frame), start=1):
            small, reduction = compact(figure)
            name = f"figures/{probe.name}-{number}.json"
            write_text(self.folder / name, str(small.to_json()))
            title = figure.layout.title.text or ""
            drawn.append({"file": name, "title": title, "caption": f"{caption} {reduction}".strip()})
        return drawn

    def _words(self, probe: Probe) -> dict[str, str]:
        definition = inspect.getdoc(type(probe)) or ""
        return {
            "spec": self.specs[probe.name],
            "title": probe.title,
            "summary": probe.summary,
            "source": probe.source,
        } | {"definition": definition}

    def _why(self, name: str) -> str:
        start = f"{name} left out: "
        return next((note.removeprefix(start) for note in self.context.notes if note.startswith(start)), "no result")

    def _write(self, status: str, reason: str) -> Json:
        probe_notes = {note for entry in self.results.values() for note in entry.get("notes") or ()}
        skip_notes = {f"{name} left out: {entry.get('reason')}" for name, entry in self.results.items()}
        result = {
            "status": status,
            "reason": reason,
            "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "model": {
                "name": str(Path(self.settings.checkpoint)),
                **describe(self.context.model, self.context.structure),
            },
            "inputs": self._inputs(),
            "settings": self.settings.to_dict(),
            "forwards": self.context.forwards,
            "warnings": list(self.context.warnings),
            "notes": [
                n for n in self.context.notes if n not in probe_notes | skip_notes | set(self.context.structure.notes)
            ],
            "probes": {name: self.results[name] for name in self.specs if name in self.results}
            | {name: entry for name, entry in self.results.items() if name not in self.specs},
            "seconds": round(time.monotonic() - self.began, 2),
        }
        write_json(self.folder / "result.json", result)
        return result

    def _inputs(self) -> Json:
        """The inputs that the model ran on: the number of sequences used, and their length."""
        batches = list(self.context.batches)
        used = batches[: self.context.forwards] or batches
        first = next(iter(used[0].values()))
        count = sum(len(next(iter(batch.values()))) for batch in used)
        unit = "tokens" if self.context.reads_tokens else "pixels"
        shape = " × ".join(str(size) for size in first.shape[1:])
        return {"sequences": count, "shape": list(first.shape[1:]), "text": f"{count} × {shape} {unit}"}


class Bars:
    """``Context.progress`` as one progress bar at a time, with the time left for all probes.

    ``plan`` gets the expected seconds of each probe and of the forward passes; ``start`` gets what begins. The time
    left is that of the unfinished parts in the plan, times the actual over the planned time of the finished ones.
    """

    def __init__(self, *, show: bool):
        self.show, self.label, self.bar = show, "", None
        self._plan: dict[str, float] = {}
        self._finished: list[str] = []
        self._running, self._began = "", time.monotonic()

    def plan(self, seconds: dict[str, float]) -> None:
        """Print the expected time."""
        self._plan, self._began = dict(seconds), time.monotonic()
        if self.show and self._plan:
            longest = sorted(self._plan, key=lambda name: -self._plan[name])[:3]
            parts = ", ".join(f"{name} {_duration(self._plan[name])}" for name in longest)
            tqdm.write(f"about {_duration(sum(self._plan.values()))} ({parts})", file=sys.stderr)

    def start(self, name: str) -> None:
        """Begin a probe or the forward passes; whatever ran before is finished."""
        if self._running:
            self._finished.append(self._running)
        self._running = name

    def time_left(self) -> str:
        """The time left, in words."""
        planned = sum(self._plan.get(name, 0.0) for name in self._finished)
        passed = time.monotonic() - self._began
        pace = passed / planned if planned > 1.0 else 1.0
        remaining = sum(planned_seconds for name, planned_seconds in self._plan.items() if name not in self._finished)
        return f", about {_duration(remaining * pace)} left" if self._plan else ""

    def __call__(self, done: int, total: int, label: str) -> None:
        if label != self.label:
            self.close()
            self.label = label
            self.bar = tqdm(
                total=total, desc=f"{label}{self.time_left()}", disable=not (self.show and has_bars()), leave=False
            )
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
