"""The probes of one checkpoint, each written as soon as it is there."""

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
from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs.files import disk_full, write_json, write_text
from lamina.probes.engine.measure import make_context
from lamina.probes.engine.registry import Probe
from lamina.probes.engine.running import run
from lamina.probes.engine.settings import ProbeSettings
from lamina.probes.job.compact import compact
from lamina.probes.job.describing import describe

logger = logging.getLogger(__name__)


class Measuring:
    """Loads a checkpoint and its inputs when made; ``run`` measures and writes.

    ``specs`` are the probes as they were asked for, by name; ``done`` is what the folder already holds of them.
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
        self.wanted = [one for one in probes if one.name not in done]
        self.told: Json = dict(done)
        self._noted = len(self.context.notes)
        self._loading_notes = list(self.context.notes)

    def run(self, folder: Path) -> Json:
        """Measure, write, return what result.json holds; see ``probe_folder`` for what it raises."""
        self.folder = folder
        (folder / "figures").mkdir(exist_ok=True)
        self._write("running", "it has not ended yet, or was killed (--resume goes on)")
        try:
            run(
                self.context,
                self.wanted,
                tolerance=self.settings.tolerance,
                strict=False,
                done=self._done,
                broken=self._broken,
                estimated=self.bars.plan,
                starting=self.bars.start,
            )
        except KeyboardInterrupt:
            self._write("interrupted", "stopped by Ctrl-C; what was finished is kept (--resume goes on)")
            raise
        except Exception as error:
            if disk_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
            said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._write("failed", " ".join(said.split()))
            raise
        finally:
            self.bars.close()
        for probe in self.wanted:
            if probe.name not in self.told:
                self.told[probe.name] = {**self._words(probe), "status": "skipped", "reason": self._why(probe.name)}
        failed = [f"{name}: {told['reason']}" for name, told in self.told.items() if told["status"] == "failed"]
        return self._write("failed" if failed else "finished", "; ".join(failed))

    def _broken(self, probe: Probe, error: Exception) -> None:
        """Note a probe that failed by a fault of its own; the others are measured all the same."""
        if disk_full(error):
            raise error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logger.debug("%s failed", probe.name, exc_info=error)
        self.told[probe.name] = {**self._words(probe), "status": "failed", "reason": reason}

    def _done(self, probe: Probe, frame: pd.DataFrame, seconds: float) -> None:
        """Write a probe's frame and figures, then say in result.json that they are there."""
        path = self.folder / f"{probe.name}.parquet"
        frame.to_parquet(path.with_name(f".{path.name}").absolute(), index=False)
        digests.replace(path.with_name(f".{path.name}"), path)
        error = probe.standard_error()
        self.told[probe.name] = {
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
        self._write("running", "it has not ended yet, or was killed (--resume goes on)")

    def _figures(self, probe: Probe, frame: pd.DataFrame) -> list[dict[str, str]]:
        drawn = []
        for number, (figure, caption) in enumerate(probe.figures(frame), start=1):
            small, left_out = compact(figure)
            name = f"figures/{probe.name}-{number}.json"
            write_text(self.folder / name, str(small.to_json()))
            title = figure.layout.title.text or ""
            drawn.append({"file": name, "title": title, "caption": f"{caption} {left_out}".strip()})
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
        kept = {note for told in self.told.values() for note in told.get("notes") or ()}
        out = {f"{name} left out: {told.get('reason')}" for name, told in self.told.items()}
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
            "notes": [n for n in self.context.notes if n not in kept | out | set(self.context.structure.notes)],
            "probes": {name: self.told[name] for name in self.specs if name in self.told}
            | {name: told for name, told in self.told.items() if name not in self.specs},
            "seconds": round(time.monotonic() - self.began, 2),
        }
        write_json(self.folder / "result.json", result)
        return result

    def _inputs(self) -> Json:
        """What the model was run on: how many sequences (of those there are) and how long they are."""
        batches = list(self.context.batches)
        seen = batches[: self.context.forwards] or batches
        first = next(iter(seen[0].values()))
        count = sum(len(next(iter(batch.values()))) for batch in seen)
        what = "tokens" if self.context.reads_tokens else "pixels"
        shape = " × ".join(str(size) for size in first.shape[1:])
        return {"sequences": count, "shape": list(first.shape[1:]), "text": f"{count} × {shape} {what}"}


class Bars:
    """``Context.progress`` as a bar at a time: what is being done, how much of it, and how long all of it will take.

    ``plan`` takes what each probe and the forward passes are thought to take and says so; ``start`` what begins. What
    is left is the plan's, times how long the finished parts took for each second of theirs.
    """

    def __init__(self, *, show: bool):
        self.show, self.what, self.bar = show, "", None
        self._plan: dict[str, float] = {}
        self._finished: list[str] = []
        self._running, self._began = "", time.monotonic()

    def plan(self, seconds: dict[str, float]) -> None:
        """Say how long it will take."""
        self._plan, self._began = dict(seconds), time.monotonic()
        if self.show and self._plan:
            longest = sorted(self._plan, key=lambda name: -self._plan[name])[:3]
            parts = ", ".join(f"{name} {_duration(self._plan[name])}" for name in longest)
            tqdm.write(f"about {_duration(sum(self._plan.values()))} ({parts})", file=sys.stderr)

    def start(self, name: str) -> None:
        """A probe, or the forward passes, begins; the one before is finished."""
        if self._running:
            self._finished.append(self._running)
        self._running = name

    def left(self) -> str:
        """How long is left, in words."""
        planned = sum(self._plan.get(name, 0.0) for name in self._finished)
        passed = time.monotonic() - self._began
        pace = passed / planned if planned > 1.0 else 1.0
        rest = sum(each for name, each in self._plan.items() if name not in self._finished)
        return f", about {_duration(rest * pace)} left" if self._plan else ""

    def __call__(self, done: int, every: int, what: str) -> None:
        if what != self.what:
            self.close()
            self.what = what
            self.bar = tqdm(total=every, desc=f"{what}{self.left()}", disable=not self.show, leave=False)
        if self.bar is not None:
            self.bar.total = every
            self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
