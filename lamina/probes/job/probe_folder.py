"""`lamina probe`: measure a checkpoint, and write a folder with a table and figures for each probe."""

from __future__ import annotations

import datetime
import inspect
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from tqdm.auto import tqdm

from lamina.core.json_types import Json
from lamina.core.progress import ProgressLines, duration, has_bars
from lamina.core.specs import split
from lamina.core.terminal import show_line
from lamina.errors import UserError, one_line
from lamina.jobs.files import (
    disk_full,
    full_disk,
    read_config,
    read_result,
    write_parquet,
    write_text,
)
from lamina.jobs.folder import Resume
from lamina.jobs.job import ResumePolicy, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.seals import altered, write_result
from lamina.probes.engine import registry
from lamina.probes.engine.layer_calls import ShortProbe
from lamina.probes.engine.measure import PASSES, SKIPPED, make_context, run, tolerance_of
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.registry import Probe
from lamina.probes.job.compact import compact
from lamina.probes.structure.sites import Structure

logger = logging.getLogger(__name__)
# The name of the norms around a sub-layer, by their roles.
_FAMILIES = {
    frozenset({"pre_norm"}): "Pre-LN",
    frozenset({"post_norm"}): "Post-LN",
    frozenset({"pre_norm", "out_norm"}): "norms before and after each module (Peri-LN, Sandwich-LN)",
    frozenset({"out_norm"}): "norms on each module's output (OLMo 2)",
    frozenset({"pre_norm", "post_norm"}): "norms on each module's input and on the residual stream (Keel, Pre-Post-LN)",
    frozenset(): "no norms on inputs, outputs or the residual stream",
}
LONG = 600.0  # seconds, above which the estimate names the probes to leave out
_VERY_LONG = 1800.0  # seconds, above which the estimate names the flag that measures less text
_RUNNING = ("running", "the probe is still running, or was killed (continue with --resume)")
POLICY = ResumePolicy(what="folder", free=ProbeSettings.free())


def probe_folder(
    settings: ProbeSettings | Json, *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Measure a checkpoint, write the folder ``settings.output``, and return the content of result.json.

    Lamina writes each probe's table, figures and sentences as soon as the probe has ended. With ``resume``, Lamina
    skips finished probes. Lamina also skips a probe that cannot measure the model, and records the reason.

    Raises:
        UserError: if the settings are invalid, Lamina cannot read the checkpoint or the corpus, or the output folder
            has files
        OSError: if the disk is full. Lamina keeps finished probes.
        KeyboardInterrupt: if you stop the job. result.json has the status `interrupted`, and Lamina keeps finished
            probes.
    """
    job = open_job(
        Kind.PROBING,
        ProbeSettings,
        settings,
        resume=resume,
        overwrite=overwrite,
        policy=POLICY,
        stored=lambda folder: read_config(folder),
    )
    complete = job.settings
    if not complete.checkpoint:
        raise UserError(
            "checkpoint: no checkpoint is given. Give a model's folder, a run's folder, a .gguf file, or a name on "
            "the hub."
        )
    probes = registry.make_all(complete.probes)
    specs = spec_by_name(complete.probes)
    done = finished(job.folder, specs) if job.resumes else {}
    if done and all(name in done for name in specs):
        return read_result(job.folder) or {}
    measuring = Measuring(complete, probes, specs, done, bar=bar)  # the folder is not touched: it may be unreadable
    with job:
        job.write_config(complete.to_dict())
        return measuring.run(job.folder)


def spec_by_name(probes: str) -> dict[str, str]:
    """Return each requested probe's spec by name: ``{"angular_distance": "angular_distance(tokens=all)"}``."""
    specs: dict[str, str] = {}
    for spec in split(probes, "probe"):
        names = registry.names() if spec == "all" else [registry.make(spec).name]
        specs |= {name: name if spec == "all" else spec for name in names}
    return specs


def finished(folder: Path, specs: dict[str, str]) -> dict[str, Json]:
    """Return the results of the finished probes in a folder to resume, by probe name."""
    results = (read_result(folder) or {}).get("probes") or {}
    whole: dict[str, Json] = {}
    faults = altered(folder)
    for name, result in results.items():
        files = [f"{name}.parquet", *(str(figure["file"]) for figure in result.get("figures") or ())]
        if (
            result.get("status") == "finished"
            and all((folder / file).is_file() and file not in faults for file in files)
            and result.get("spec") == specs.get(name, result.get("spec"))
        ):
            whole[name] = result
        elif named := [f"{file}: {faults[file]}" for file in files if file in faults]:
            logger.warning("%s; Lamina measures this probe again", "; ".join(named))
    return whole


class Measuring:
    """A checkpoint with its inputs, and the results of its probes."""

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

    def run(self, folder: Path) -> Json:
        """Measure the checkpoint, and return the content of result.json. ``probe_folder`` documents the errors."""
        self.folder = folder
        (folder / "figures").mkdir(exist_ok=True)
        self._write(*_RUNNING)
        try:
            run(
                self.context,
                self.remaining,
                tolerance=tolerance_of(self.context, self.settings),
                strict=False,
                done=self._done,
                broken=self._broken,
                estimated=self._plan,
                starting=self.bars.start,
            )
            self.bars.end()
        except KeyboardInterrupt:
            kept = f"Lamina keeps {len(self.results)} of {len(self.specs)} probes"
            logger.warning(kept)
            self._write("interrupted", f"stopped by Ctrl-C. {kept}. Continue with --resume")
            raise
        except Exception as error:
            if disk_full(error):
                raise full_disk(folder) from error
            self._write("failed", one_line(str(error) if isinstance(error, UserError) else error))
            raise
        finally:
            self.bars.close()
        for probe in self.remaining:
            if probe.name not in self.results:
                start = f"{probe.name}{SKIPPED}"
                reasons = (note.removeprefix(start) for note in self.context.notes if note.startswith(start))
                self._note(probe, "skipped", reason=next(reasons, "no result"))
        failed = [f"{name}: {r['reason']}" for name, r in self.results.items() if r["status"] == "failed"]
        return self._write("failed" if failed else "finished", "; ".join(failed))

    def _plan(self, seconds: dict[str, float]) -> None:
        """Print the expected time. If the time is long, also print a flag that shortens the measurement."""
        total, sequences = sum(seconds.values()), registry.sample_of(self.context.batches).sequences
        every = self.context.whole or self.context.requested  # otherwise, probes measure only a few sequences
        few = max(1, int(sequences * LONG / total)) if every and total else 1
        less = ""
        if total > _VERY_LONG and sequences > 1:
            less = f". To measure less text, add --sequences {few}"
            less += f" (about {duration(total * few / sequences)})" * every
            costly = [f"{probe.name}(tokens=32)" for probe in self.remaining if isinstance(probe, ShortProbe)]
            if every and few == 1 and costly:
                less += f', and limit the tokens, as in --probes "{",".join(costly)}"'
        self.bars.plan(seconds, less)

    def _broken(self, probe: Probe, error: Exception) -> None:
        if disk_full(error):
            raise error
        logger.debug("%s failed", probe.name, exc_info=error)
        module = type(probe).__module__
        own = [  # the frames in the user's file
            (frame.f_code, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__") == module and not module.startswith("lamina.")
        ]
        where = f"{own[0][0].co_name} ({Path(own[-1][0].co_filename).name}, line {own[-1][1]}): " if own else ""
        self._note(probe, "failed", reason=f"{where}{one_line(error)}")

    def _done(self, probe: Probe, frame: pd.DataFrame, seconds: float) -> None:
        write_parquet(self.folder / f"{probe.name}.parquet", frame)
        error = probe.standard_error()
        told = self._told()
        figures = []
        for number, (figure, caption) in enumerate(probe.figures(frame), start=1):
            small, reduction = compact(figure)
            name = f"figures/{probe.name}-{number}.json"
            write_text(self.folder / name, str(small.to_json()))
            title = figure.layout.title.text or ""
            figures.append({"file": name, "title": title, "caption": f"{caption} {reduction}".strip()})
        self._note(
            probe,
            "finished",
            rows=len(frame),
            seconds=round(seconds, 3),
            forwards=self.context.forwards if probe.points() else None,
            standard_error=error if error is not None and math.isfinite(error) else None,
            sentences=list(probe.sentences(frame)),
            urgent=probe.urgent(frame),
            figures=figures,
            notes=[
                note
                for note, author in self.context.authors.items()
                if author == probe.name and SKIPPED not in note and note not in told
            ],
        )
        self._write(*_RUNNING)

    def _note(self, probe: Probe, status: str, **more: object) -> None:
        self.results[probe.name] = {
            "spec": self.specs[probe.name],
            "title": probe.title,
            "summary": probe.summary,
            "source": probe.source,
            "definition": inspect.getdoc(type(probe)) or "",
            "status": status,
            **more,
        }

    def _write(self, status: str, reason: str) -> Json:
        context, names = self.context, dict.fromkeys([*self.specs, *self.results])
        told = self._told() | {f"{name}{SKIPPED}{entry.get('reason')}" for name, entry in self.results.items()}
        told |= set(context.structure.notes)
        result = {
            "status": status,
            "reason": reason,
            "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "model": {"name": str(Path(self.settings.checkpoint)), **describe(context.model, context.structure)},
            "inputs": self._inputs(),
            "settings": self.settings.to_dict(),
            "forwards": context.forwards,
            "warnings": list(context.warnings),
            "notes": [note for note in context.notes if note not in told],
            "probes": {name: self.results[name] for name in names if name in self.results},
            "seconds": round(time.monotonic() - self.began, 2),
        }
        write_result(self.folder, result)
        return result

    def _told(self) -> set[str]:
        return {note for entry in self.results.values() for note in entry.get("notes") or ()}

    def _inputs(self) -> Json:
        batches = list(self.context.batches)
        count = registry.sample_of(batches[: self.context.forwards] or batches).sequences
        first = next(iter(batches[0].values()))
        unit = "tokens" if self.context.reads_tokens else "pixels"
        shape = " × ".join(str(size) for size in first.shape[1:])
        return {"sequences": count, "shape": list(first.shape[1:]), "text": f"{count} × {shape} {unit}"}


class Bars:
    """Show one progress bar at a time, with the time left for all probes. Outside a terminal, write progress lines.

    A part is a probe or the shared forward passes. The time left is the expected time of the unfinished parts, times
    the ratio of real to expected time of the finished parts.
    """

    def __init__(self, *, show: bool):
        self.show, self.label, self.bar, self._done = show, "", None, 0
        self._plan: dict[str, float] = {}
        self._finished: list[str] = []
        self._running, self._began = "", time.monotonic()

    def plan(self, seconds: dict[str, float], less: str = "") -> None:
        """Print the expected time. If the time is long, also print how to measure less."""
        self._plan, self._began = dict(seconds), time.monotonic()
        if self.show and self._plan:
            longest = sorted(self._plan, key=lambda name: -self._plan[name])[:3]
            parts = ", ".join(f"{name} {duration(self._plan[name])}" for name in longest)
            total = sum(self._plan.values())
            others = ",".join(name for name in self._plan if name not in (*longest, PASSES))
            fewer = f". To skip these probes, add --probes {others}" * (total > LONG and bool(others))
            show_line(f"about {duration(total)} ({parts}){fewer}{less}")

    def start(self, name: str) -> None:
        if self._running:
            self.end()
        self._running = name

    def end(self) -> None:
        """End the current part. Outside a terminal, print a line instead of a progress bar."""
        self._finished.append(self._running)
        if self.show and not has_bars():
            show_line(f"{self._running} has ended{self.time_left()}")
        self._running = ""

    def time_left(self) -> str:
        planned = sum(self._plan.get(name, 0.0) for name in self._finished)
        passed = time.monotonic() - self._began
        pace = passed / planned if planned > 1.0 else 1.0
        remaining = sum(planned_seconds for name, planned_seconds in self._plan.items() if name not in self._finished)
        return f", about {duration(remaining * pace)} left" if self._plan else ""

    def __call__(self, done: int, total: int, label: str) -> None:
        if self.bar is None or total != self.bar.total or done < self._done:  # not at each label, to keep the pace
            self.close()
            self.lines = ProgressLines(total, show=self.show and not has_bars(), every=30.0, at_once=False)
            self.bar = tqdm(total=total, disable=not (self.show and has_bars()), leave=False)
        if label != self.label:
            self.bar.set_description(f"{label}{self.time_left()}")
        self.bar.update(done - self.bar.n)
        if done < total:
            self.lines.see(done, {label: ""})
        self.label, self._done = label, done

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def describe(model: nn.Module, structure: Structure) -> dict[str, object]:
    """Return the model's sizes, layers and norms for result.json."""
    parameters = list(model.parameters())
    shared = len({id(site.module) for site in structure.layers}) < structure.num_layers
    families: list[str] = []
    norms: list[str] = []
    for site in structure.layers:
        roles = [[norm.role for norm in sublayer.norms] for sublayer in site.sublayers]
        kinds = [frozenset(each) - {"inner_norm"} for each in roles]
        names = [_FAMILIES.get(kind) or " and ".join(sorted(kind)) for kind in kinds]
        named = [f"{s.kind.replace('_', '-')}: {name}" for s, name in zip(site.sublayers, names, strict=True)]
        families.append(", ".join(named) if len(set(names)) > 1 else names[0] if names else "no sub-layers found")
        counts = [[f"{role} × {n}" if n > 1 else role for role, n in Counter(each).items()] for each in roles]
        pairs = zip(site.sublayers, counts, strict=True)
        norms.append(", ".join(f"{s.kind}: {' + '.join(each) or 'none'}" for s, each in pairs))
    return {
        "model_type": getattr(getattr(model, "config", None), "model_type", None),
        "class": type(model).__name__,
        "num_layers": structure.num_layers,
        "hidden_size": structure.hidden_size,
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "placement": _runs(families),
        "layers": " … ".join(dict.fromkeys((structure.layers[0].path, structure.layers[-1].path))),
        "layers_share_weights": shared or None,
        "sublayers": _runs([", ".join(s.kind for s in site.sublayers) for site in structure.layers]),
        "norms": _runs(norms),
        "embedding_norm": structure.embedding_norm.path if structure.embedding_norm else None,
        "final_norm": structure.final_norm.path if structure.final_norm else "none",
        "notes": list(structure.notes),
    }


def _runs(texts: Sequence[str]) -> str:
    """Return one text if all layers have the same text. If the texts differ, return each text with its layers."""
    runs = [(text, [i for i, _ in run]) for text, run in groupby(enumerate(texts), key=lambda each: each[1])]
    if len(runs) == 1:
        return texts[0]
    if len(runs) > 8:  # alternating kinds: each once, with its count
        return "; ".join(f"{count} layers: {text}" for text, count in Counter(texts).items())
    return "; ".join(
        f"layer{'s' * (len(run) > 1)} {run[0]}{f'–{run[-1]}' if len(run) > 1 else ''}: {text}" for text, run in runs
    )
