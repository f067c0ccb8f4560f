"""Gradient norms by parameter that other tools recorded, as the records of a watched run.

TensorBoard's event files, W&B's offline runs, and histories as CSV or JSON.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from lamina.core.extras import install
from lamina.core.json_types import Json
from lamina.errors import UserError, one_line
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json, write_lines, write_yaml
from lamina.jobs.folder import hold
from lamina.jobs.kinds import Kind
from lamina.jobs.names import ALARMS, CONFIG, ENVIRONMENT, RESULT
from lamina.training.monitor.alarms import Alarms, events
from lamina.training.monitor.writers import LOSS, NORM, VERSION, WATCHED, LayersWriter, MetricsWriter, Row

Point: TypeAlias = tuple[str, int, float]
"""a series' name, step, value"""
Proto: TypeAlias = Any
"""A message, or a histogram, of another tool's."""
Owner: TypeAlias = tuple[int, str, str]
"""layer, sub-layer, role"""

_STEPS = ("trainer/global_step", "train/global_step", "global_step", "step", "Step", "_step", "iter", "iteration")
_MOST = 2**53  # the largest step: beyond it a float is no whole number
_MODEL: Owner = (-1, "model", "all")
_JUDGED = ("gradient_norm", NORM, LOSS)  # metrics whose steps are judged
# Names of series, without case; of several the first that a history has.
_WHOLE = {
    LOSS: r"(train(ing)?[/_.])?loss(_step)?|loss/train(ing)?|train(ing)?/.*_loss|loss_metrics/global_avg_loss",
    NORM: r"((train|optim)\w*[/_.])?(total_|global_)?grad(ient)?[-_]?norm(/total)?|grad_2\.0_norm_total|"
    r"optim/total_grad_norm",
    "learning_rate": r"((train|optim)\w*[/_.])?(lr|learning_rate)(-\w+)?(/\w+)?",
}
_BY_PARAMETER = {
    "gradient_norm": r"(?P<before>.+)[/._]grad(?:ient)?(?:[-_.]?norm)?|"
    r"(?:.*/)?grad(?:ient)?s?(?:[-_ ]?(?:[\d.]+|l2)?[-_ ]?norms?)?[/._](?P<name>.+)",
    "weight_norm": r"(?:.*/)?(?:param(?:eter)?|weight)s?(?:[-_ ]?(?:[\d.]+|l2)?[-_ ]?norms?)?[/._](?P<name>.+)",
}
_SUBLAYERS = {
    "feed_forward": r"post_attention_layernorm|ln_?2|norm_?2|ffn|mlp|feed_?forward|ff|moe|experts?|router|gate_proj|"
    r"up_proj|down_proj|fc_?\d?|c_fc|w[123]|linear[12]|intermediate|dense_\w+_\w+",
    "attention": r"\w*att\w*|input_layernorm|ln_?1|norm_?1|mixer|mamba|ssm|[qkvo]_proj|qkv|c_attn|w[qkvo]",
}
_OUTSIDE = {
    "embedding": r"\w*embed\w*|wte|wpe",
    "readout": r"\w*head|output|unembed\w*|embed_out",
}


def is_history(path: Path) -> bool:
    """Return whether a path is another tool's: a file, or a folder of TensorBoard's or W&B's that is not Lamina's."""
    return path.is_file() or (path.is_dir() and not (path / CONFIG).exists() and bool(_recorded(path)))


def _recorded(folder: Path) -> list[Path]:
    return sorted([*folder.rglob("*.wandb"), *folder.rglob("events.out.tfevents.*")])


def read_points(path: Path) -> Iterator[Point]:
    """Read the points of a history, in no order. Raises UserError if it is not readable."""
    if path.is_dir():
        files = _recorded(path)
        places = sorted({file.parent for file in files})
        if not all(place.is_relative_to(places[0]) for place in places) or sum(f.suffix == ".wandb" for f in files) > 1:
            listed = ", ".join(str(place) for place in places[:5])
            raise UserError(f"run: {str(path)!r} holds several runs (allowed: one of {listed})")
        for file in files:
            yield from read_points(file)
        return
    readers: dict[str, Callable[[Path], Iterable[Point]]] = {".csv": _csv, ".json": _json, ".jsonl": _json}
    reader = (
        _wandb if path.suffix == ".wandb" else _tensorboard if "tfevents" in path.name else readers.get(path.suffix)
    )
    if reader is None:
        raise UserError(
            f"run: {str(path)!r} is not a history (allowed: a run of Lamina's, TensorBoard's event files, W&B's "
            "offline run, or a history as .csv, .json or .jsonl)"
        )
    try:
        yield from reader(path)
    except ModuleNotFoundError:
        name = "wandb" if reader is _wandb else "tensorboard"
        raise UserError(f"run: {str(path)!r} needs {name} (to install it: {install(name)})") from None
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError, csv.Error) as error:
        raise UserError(f"run: {str(path)!r} is not readable ({one_line(error)})") from None


def _csv(path: Path) -> Iterator[Point]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        yield from _of_lines(csv.DictReader(file))


def _json(path: Path) -> Iterator[Point]:
    text = path.read_text(encoding="utf-8-sig")
    each = path.suffix == ".jsonl"
    lines = [json.loads(line) for line in text.split("\n") if line.strip()] if each else json.loads(text)
    lines = lines.get("log_history", []) if isinstance(lines, Mapping) else lines  # Trainer's trainer_state.json
    yield from _of_lines(line for line in lines if isinstance(line, Mapping))


def _of_lines(lines: Iterable[Mapping[str, object]]) -> Iterator[Point]:
    """Yield the points of lines with their steps. W&B's exports put the run's name before a column's: it is cut off."""
    for number, line in enumerate(lines):
        step = next((int(float(str(line[name]))) for name in _STEPS if line.get(name) not in (None, "")), number)
        if abs(step) > _MOST:
            raise ValueError(f"step {step:.0e}")
        for column, value in line.items():
            name = str(column).rpartition(" - ")[2]
            if name not in _STEPS and not name.endswith(("__MIN", "__MAX")) and (number := _number(value)) is not None:
                yield name, step, number


def _number(value: object) -> float | None:
    """Return a value as a number; for a histogram, the norm of the values in its bins; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return _norm_of_bins(value) if isinstance(value, Mapping) else float(str(value))
    except (ValueError, TypeError, LookupError, OverflowError):  # bins that are none
        return None


def _norm_of_bins(histogram: Mapping[str, Proto]) -> float | None:
    """Return the norm of values in bins, as if they were uniform in each: E[x^2] = middle^2 + width^2 / 12."""
    counts, edges, packed = histogram.get("values"), histogram.get("bins"), histogram.get("packedBins")
    if not isinstance(counts, list):
        return None
    if isinstance(packed, Mapping):
        low, size, count = (float(packed[name]) for name in ("min", "size", "count"))
        edges = [low + size * index for index in range(len(counts) + 1)] if count == len(counts) else None
    if not isinstance(edges, list) or len(edges) != len(counts) + 1:
        return None
    bins = zip(counts, edges, edges[1:], strict=False)
    return math.sqrt(sum(n * (((low + high) / 2) ** 2 + (high - low) ** 2 / 12) for n, low, high in bins))


def _wandb(path: Path) -> Iterator[Point]:
    messages: Proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    damaged = importlib.import_module("google.protobuf.message").DecodeError
    lines: list[Json] = []
    for data in _records_of(path.read_bytes()):
        record: Proto = messages.Record()
        try:
            record.ParseFromString(data)
        except damaged as error:
            raise ValueError(str(error)) from error
        if record.WhichOneof("record_type") == "history":
            line: Json = {"_step": record.history.step.num}
            for item in record.history.item:
                name, *inside = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                line[name] = {**line.get(name, {}), inside[0]: value} if inside else value  # a histogram's fields
            lines.append(line)
    yield from _of_lines(lines)


_BLOCK, _HEAD = 32_768, 7
_WHOLE_RECORD, _LAST_PART = 1, 4


def _records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file, LevelDB's log format: parts of a checksum, a length, a kind, and the bytes.

    A part never crosses a block. An incomplete last record, of a run that has not ended, is left out.
    """
    if not data.startswith(b":W&B"):
        raise ValueError("no file of W&B's")
    at, record = _HEAD, b""
    while at + _HEAD <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEAD:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += _HEAD + length
        if at > len(data):
            return
        record += data[at - length : at]
        if kind in (_WHOLE_RECORD, _LAST_PART):
            yield record
            record = b""


def _tensorboard(path: Path) -> Iterator[Point]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            kind = value.WhichOneof("value")
            if kind == "simple_value":
                yield value.tag, event.step, value.simple_value
            elif kind == "histo":
                yield value.tag, event.step, math.sqrt(value.histo.sum_squares)
            elif kind == "tensor" and (array := make_ndarray(value.tensor)).size == 1 and array.dtype.kind in "fiu":
                yield value.tag, event.step, float(array.item())  # else a text


def owner_of(name: str) -> tuple[str, Owner] | None:
    """Return the stack and the owner of a parameter by its name; None if the name is no parameter's.

    The layer is the first number in the name, and the parts before it are the stack.
    """
    parts = [part for part in re.split(r"[./]", name) if part not in ("module", "_orig_mod", "_fsdp_wrapped_module")]
    if not parts or not all(re.fullmatch(r"\w+", part) for part in parts):
        return None
    if (at := next((index for index, part in enumerate(parts) if re.fullmatch(r"\d{1,5}", part)), None)) is not None:
        inside = [part.lower() for part in parts[at + 1 :]]
        kinds = (kind for part in inside for kind, words in _SUBLAYERS.items() if re.fullmatch(words, part))
        kind = next(kinds, None)
        return ".".join(parts[:at]), (int(parts[at]), *((kind, "all") if kind else ("block", "other")))
    if len(parts) == 1 and not re.search(r"weight|bias|gain|scale", parts[0]) and not _outside(parts):
        return None  # a statistic of the whole model
    return "", (-1, "block", _outside(parts) or "readout")  # the last norm


def _outside(parts: Iterable[str]) -> str | None:
    roles = (role for part in parts for role, words in _OUTSIDE.items() if re.fullmatch(words, part.lower()))
    return next(roles, None)


@dataclass(kw_only=True)
class History:
    """A history as rows by layer.

    Attributes:
        rows: by step.
        parameters: how many parameters have a series, by metric.
        unused: the names of the series that say nothing here.
        notes: for the user, a line each.
    """

    rows: list[Row] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        layers = len({row[1] for row in self.rows if row[1] >= 0})
        steps = sorted({row[0] for row in self.rows if row[5] in _JUDGED[:2]})
        counted = f"gradient norms of {self.parameters['gradient_norm']} parameters in {layers} layers"
        return "; ".join([f"{counted}, {len(steps)} records from step {steps[0]} to {steps[-1]}", *self.notes])


def read_history(path: Path) -> History:
    """Read a history and place its series. Raises UserError if it is not readable, or has no gradient by layer."""
    series: dict[str, dict[int, float]] = {}
    for name, step, value in read_points(path):
        series.setdefault(name, {})[step] = value
    history, whole, placed = History(), {}, {metric: {} for metric in _BY_PARAMETER}
    for name, values in series.items():
        metric = next((metric for metric, words in _WHOLE.items() if re.fullmatch(words, name.lower())), None)
        if metric is not None:
            whole.setdefault(metric, []).append(name)
        elif (parameter := _parameter(name)) is not None:
            placed[parameter[0]][name] = (parameter[1], values)
        elif not re.search(r"(^|/)(_\w+|epoch|eval\w*|val\w*|test\w*|system|perf)(/|_|$)", name.lower()):
            history.unused.append(name)
    for metric, names in whole.items():
        longest = min(names, key=lambda name: (-len(series[name]), len(name)))
        history.unused += [name for name in names if name != longest]
        history.rows += [(step, *_MODEL, 0, metric, value) for step, value in series[longest].items()]
    stacks = [stack for (stack, (layer, _, _)), _ in placed["gradient_norm"].values() if layer >= 0]
    main = max(sorted(set(stacks)), key=stacks.count, default=None)  # the one with the most parameters
    for metric, parameters in placed.items():
        history.parameters[metric] = len(parameters)
        history.rows += _summed(metric, parameters.values(), main, NORM in whole)
    if (main is None and NORM not in whole) or not any(row[5] in _JUDGED[:2] for row in history.rows):
        raise UserError(
            f"run: {str(path)!r} has no gradient norms of one step among its {len(series)} series (allowed: names such "
            "as gradients/layers.0.mlp.up_proj.weight, as wandb.watch, Lightning's grad_norm or add_histogram write)"
        )
    history.rows.sort(key=lambda row: row[0])
    history.notes = _notes(history, whole, {*stacks} - {main})
    return history


Placed: TypeAlias = tuple[tuple[str, Owner], dict[int, float]]
"""stack and owner of a parameter, and its norm by step"""


def _parameter(name: str) -> tuple[str, tuple[str, Owner]] | None:
    for metric, words in _BY_PARAMETER.items():
        if (match := re.fullmatch(words, name, re.IGNORECASE)) is not None:
            groups = match.groupdict()
            inner = re.sub(r"[./_](l2_?)?norm$", "", groups["name"] or groups.get("before") or "")
            if (owner := owner_of(inner)) is not None:
                return metric, owner
    return None


def _summed(metric: str, placed: Iterable[Placed], main: str | None, has_total: bool) -> Iterator[Row]:
    """Yield the norms of sub-layers, blocks and the model, at the steps at which all their parameters have one."""
    squares: dict[Owner, list[dict[int, float]]] = {}
    for (stack, owner), values in placed:
        owner = owner if owner[0] < 0 or stack == main else (-1, "block", "other")
        owners = [owner, *([(owner[0], "block", "all")] if owner[0] >= 0 else [])]
        owners += [_MODEL] if metric == "gradient_norm" and not has_total else []
        for each in owners:
            squares.setdefault(each, []).append(values)
    for owner, parts in squares.items():
        steps = set.intersection(*(set(part) for part in parts))
        name = NORM if owner == _MODEL else metric
        yield from ((step, *owner, 0, name, math.hypot(*(part[step] for part in parts))) for step in sorted(steps))


def _notes(history: History, whole: Mapping[str, list[str]], others: set[str]) -> list[str]:
    notes = []
    if not history.parameters["gradient_norm"]:
        notes.append("no gradient norm by parameter: only the model's is judged")
    missing = {LOSS: "the loss", "learning_rate": "the learning rate"}
    if absent := [words for metric, words in missing.items() if metric not in whole]:
        notes.append(f"not recorded: {', '.join(absent)}")
    if NORM not in whole:
        notes.append("the model's gradient norm is that of all parameters with a series")
    if others:
        notes.append(f"counted as 'other': the parameters of {', '.join(sorted(others))}")
    if history.unused:
        shown = ", ".join(sorted(history.unused)[:5])
        notes.append(f"not used: {len(history.unused)} series ({shown}{', ...' * (len(history.unused) > 5)})")
    return notes


def import_history(path: Path, folder: Path) -> History:
    """Write a history into ``folder`` as the records of a watched run, with the alarms that the rules give.

    The rules count records where a history has gaps. What an earlier import wrote is replaced. Raises UserError as
    ``read_history`` does, and for a folder that another job wrote.
    """
    history = read_history(path)
    judged = sorted({row[0] for row in history.rows if row[5] in _JUDGED})
    place = {step: number for number, step in enumerate(judged, start=1)}
    rates = {row[0]: row[6] for row in history.rows if row[5] == "learning_rate"}
    layers = 1 + max(row[1] for row in history.rows)
    with hold(folder, resume=False, overwrite=True):
        write_json(folder / ENVIRONMENT, environment(0, Kind.WATCHED))
        write_yaml(folder / CONFIG, {"output": str(folder), "imported": str(path)})
        about = {"record": VERSION, "model": f"a model of {path.name}", "num_layers": layers, "notes": history.notes}
        write_json(folder / WATCHED, about)
        writer, metrics, alarms = LayersWriter(folder), MetricsWriter(folder), Alarms()
        writer.add(history.rows)
        writer.flush()
        by_step: dict[int, list[Row]] = {}
        for row in history.rows:
            by_step.setdefault(row[0], []).append(row)
        for step in judged:
            alarms.see([(place[step], *row[1:]) for row in by_step[step]], rates.get(step))
            losses = [row[6] for row in by_step[step] if row[5] == LOSS]
            record = {"loss": losses[0], "learning_rate": rates.get(step)} if losses else {}
            metrics.write({"step": step, "tokens": None, **record})
        alarms.close()
        told = [replace(alarm, step=judged[alarm.step - 1]) for alarm in alarms.told]
        write_lines(folder / ALARMS, list(map(asdict, told)))
        write_json(folder / RESULT, {"status": "imported", "steps": judged[-1], "alarms": len(events(told))})
    return history
