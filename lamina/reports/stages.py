"""Join the folders of a run's pipeline stages, so that Lamina can read all stages as one run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.text import ranges
from lamina.core.values import folder_beside
from lamina.errors import UserError
from lamina.jobs.environment import environment
from lamina.jobs.files import read_config, read_result, write_json, write_lines, write_sealed
from lamina.jobs.folder import hold
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.names import BATCHES, CONFIG, ENVIRONMENT, METRICS
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.seals import refuse_page, write_result
from lamina.jobs.status import Status
from lamina.training.monitor.alarms import events, read_alarms, write_alarms
from lamina.training.monitor.batches import read_batches
from lamina.training.monitor.writers import (
    NORM,
    VERSION,
    WATCHED,
    LayersWriter,
    Row,
    by_step,
    read_about,
    read_rows,
    spike_columns,
)


def stages_in(folder: Path) -> list[Path]:
    """Return the folders of pipeline stages inside ``folder``, or [] if ``folder`` belongs to one job."""
    if kind_of(folder) is not None:
        return []
    stages = [about.parent for about in sorted(folder.glob(f"*/{WATCHED}")) if kind_of(about.parent) == Kind.WATCHED]
    later = any(isinstance(first := read_about(at).get("first_layer"), int) and first > 0 for at in stages)
    return stages if later and len(stages) > 1 else []  # whole models begin at layer 0


def joined(folder: Path) -> Path:
    """Join the pipeline stages in a folder to one run in NAME-lamina. Without stages, return ``folder``."""
    if not (stages := stages_in(folder)):
        return folder
    for stage in stages:
        refuse_page(stage)
    abouts = {stage: read_about(stage) for stage in stages}
    stages = sorted(stages, key=lambda stage: _layers(abouts[stage])[:1])
    _refuse_others(stages, abouts)
    target = folder_beside(folder)
    with hold(target, resume=False, overwrite=True):
        write_json(target / ENVIRONMENT, environment(0, Kind.WATCHED))
        write_sealed(target / CONFIG, {**read_config(stages[0]), "output": str(target)})
        steps = _write_rows(target, stages)
        norms = by_step(read_rows(target, [NORM]), NORM)
        lines: dict[int, Json] = {}
        for line in (line for stage in stages for line in RunFolder(stage).metrics):
            known = lines.setdefault(line["step"], {})
            # a value outside the layers comes from the first stage with such a value
            known |= {name: value for name, value in line.items() if value is not None and name not in known}
        write_lines(target / METRICS, [{**lines[step], "grad_norm": norms.get(step)} for step in sorted(lines)])
        told = {(a.step, a.rule, a.layer, a.sublayer, a.role, a.metric): a for s in stages for a in read_alarms(s)}
        write_alarms(target, sorted(told.values(), key=lambda alarm: alarm.order))
        if batches := read_batches(stages[0]):  # the other stages receive hidden states, not tokens
            write_lines(target / BATCHES, batches)
        write_json(target / WATCHED, {"record": VERSION, **_about(stages, abouts, steps)})
        results = [read_result(stage) or {"status": "unfinished"} for stage in stages]
        worst = next((result for result in results if result["status"] != Status.FINISHED), results[0])
        loss = next((result["loss"] for result in results if result.get("loss") is not None), None)
        parts = {"parameters": sum(result.get("parameters") or 0 for result in results), "loss": loss}
        write_result(target, {**worst, **parts, "alarms": len(events(told.values())), **spike_columns(target)})
    return target


def notes_of_stages(folder: Path) -> list[str]:
    """Return the notes about joined pipeline stages, or [] if the folder has no joined stages."""
    told = read_about(folder).get("stages") if folder.is_dir() else None
    return [f"{note}." for note in told or ()]


def _write_rows(target: Path, stages: Sequence[Path]) -> dict[Path, set[int]]:
    """Write the rows of all stages to ``target``, and return the recorded steps of each stage."""
    writer, steps = LayersWriter(target), dict[Path, set[int]]()
    outside: dict[tuple[int, int, str, str, int, str], list[float]] = {}
    for stage in stages:
        rows = read_rows(stage)
        steps[stage] = {row.step for row in rows}
        writer.add(row for row in rows if row.layer >= 0)
        for row in (row for row in rows if row.layer < 0):
            outside.setdefault(row[:6], []).append(row.value)
    all_of = max((len(values) for (*_, metric), values in outside.items() if metric == NORM), default=0)
    for key, values in sorted(outside.items()):
        if key[-1] != NORM:
            writer.add([Row(*key, values[0])])
        elif len(values) == all_of:  # the norm of only some stages would look like a fall
            writer.add([Row(*key, math.hypot(*values))])
    writer.flush()
    return steps


def _layers(about: Json) -> list[int]:
    first = about.get("first_layer")
    return [*range(first, first + len(about.get("layers", [])))] if isinstance(first, int) else []


def _refuse_others(stages: Sequence[Path], abouts: Mapping[Path, Json]) -> None:
    """Raise UserError if two stages cannot belong to one run: they have a common layer or different widths."""
    for stage, other in combinations(stages, 2):
        both = sorted({*_layers(abouts[stage])} & {*_layers(abouts[other])})
        widths = [about.get("hidden_size") for about in (abouts[stage], abouts[other])]
        why = f"both have layer {ranges(both)}" if both else f"have widths {widths[0]} and {widths[1]}"
        if both or (None not in widths and widths[0] != widths[1]):
            raise UserError(
                f"folder: {stage.name!r} and {other.name!r} in {str(stage.parent)!r} are not stages of one run: "
                f"they {why}. Give the folder of one run, or give lamina.watch the first_layer of each stage."
            )


def _about(stages: Sequence[Path], abouts: Mapping[Path, Json], steps: Mapping[Path, set[int]]) -> Json:
    layers = {
        number: layer for at in stages for number, layer in zip(_layers(abouts[at]), abouts[at]["layers"], strict=True)
    }
    told = [
        f"{at.name} (layers {ranges(_layers(abouts[at])) or 'none'}, steps {min(steps[at])} to {max(steps[at])})"
        for at in stages
        if steps[at]
    ]
    first, last = min(layers, default=0), max(layers, default=-1)
    missing = [number for number in range(last + 1) if number not in layers]
    notes = [f"Lamina read {len(told)} pipeline stages as one run: {', '.join(told)}"]
    notes += ["The last recorded steps of the stages differ"] * (len({max(steps[at], default=0) for at in stages}) > 1)
    notes += [f"No stage's folder has the layers {ranges(missing)}"] * bool(missing)
    return {
        **abouts[stages[0]],
        "parameters": sum(about.get("parameters") or 0 for about in abouts.values()),
        "num_layers": len(layers),
        "first_layer": first,
        "layers": [layers.get(number, {"path": ""}) for number in range(first, last + 1)],
        "half": any(about.get("half") for about in abouts.values()),
        "stages": notes,
        "notes": [*notes, *(f"{at.name}: {note}" for at in stages for note in abouts[at].get("notes", ()))],
    }
