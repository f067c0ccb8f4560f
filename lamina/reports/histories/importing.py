"""Assign the series of another tool's log to the model's layers, and check the series with the monitor's rules."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import repeat
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lamina.errors import UserError
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json, write_lines, write_sealed
from lamina.jobs.folder import hold
from lamina.jobs.kinds import Kind
from lamina.jobs.names import CONFIG, ENVIRONMENT, METRICS
from lamina.jobs.seals import write_result
from lamina.reports.histories.names import (
    OTHER,
    RATE,
    are_opposed,
    best,
    is_loss,
    is_whole_loss,
    parameter_of,
    parts_of,
    plain,
    step_rank,
    whole,
)
from lamina.reports.histories.owners import Owner, Places, places_of
from lamina.reports.histories.recordings import Bools, Floats, Ints, Recording, Series
from lamina.reports.histories.sources import read_runs, recorded_in, runs_in, tracked
from lamina.reports.loss_course import BEFORE, restarts, wander_of
from lamina.training.monitor.alarms import Alarm, Alarms, events, write_alarms
from lamina.training.monitor.loss_chart import LAG, LEAST_NOISE
from lamina.training.monitor.pasts import DEVIATIONS, WINDOW
from lamina.training.monitor.policy_signs import METRICS as POLICY
from lamina.training.monitor.policy_signs import metrics_of
from lamina.training.monitor.rules import STANDS_OUT, limits
from lamina.training.monitor.writers import LOSS, NORM, VERSION, WATCHED, LayersWriter, Row

Key: TypeAlias = tuple[Owner, str]
"""The location and the metric of a series."""

_MODEL: Owner = (-1, "model", "all")
_WORDS = {LOSS: "loss", NORM: "gradient norm", RATE: "learning rate"}
_SHOWN = 5
_CALMER, _MOST = 4.0, 0.8  # times the later moves, and share of the epochs, that tell an average over the epoch so far
_SHORT, _LOSSES, _CALMING = 4, 48, -0.6  # in short epochs: losses of one, of all, and the power of the number of a move
_FEW = 5  # rows of a run without steps, below which a table only sums runs up
_LONG, _MANY = 300_000, 20_000  # gradient norms of layers, and records, up to which all are judged
_OFF = 1.5  # noises by which a loss moves: a smaller step leaves no chart before the past has followed it
EPOCH = "epoch"


@dataclass(kw_only=True)
class History:
    """Another tool's record of a run. Each series belongs to a layer, a sub-layer and a kind of parameter."""

    form: str  # the kind of file, in words
    clock: str  # the column with the steps ("" if Lamina counts records)
    # the series, by owner (layer, sub-layer and role) and metric
    series: dict[Key, Series] = field(default_factory=dict)
    # for each metric of the whole model, the name of the series that Lamina uses
    read: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)  # the number of parameters with a series, by metric
    # the path of each layer in the model, by the layer's number
    layers: Mapping[int, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)  # the names of the series that Lamina does not use
    opposed: bool = False  # whether the loss is a GAN's
    notes: list[str] = field(default_factory=list)  # lines for the user

    @property
    def lags(self) -> bool:
        """Whether a progress bar shows the steps. The bar may lag behind the losses."""
        return "progress bar" in f"{self.form}, {self.clock.replace('_', ' ')}"

    @property
    def steps(self) -> list[int]:
        """Return the steps that the rules check."""
        judged = {
            id(steps): steps
            for (_, metric), (steps, _) in self.series.items()
            if metric in (LOSS, NORM, "gradient_norm")
        }
        return np.unique(np.concatenate([*judged.values()])).tolist()

    @property
    def rows(self) -> Iterator[Row]:
        for key in self.series:
            yield from self.rows_of(key)

    def rows_of(self, key: Key) -> Iterator[Row]:
        (owner, metric), (steps, values) = key, self.series[key]
        yield from map(Row, steps.tolist(), *map(repeat, (*owner, 0, metric)), values.tolist())

    def values(self, metric: str) -> dict[int, float]:
        """Return a metric of the whole model by step, or {} if the record does not have the metric."""
        steps, values = self.series.get((_MODEL, metric), (np.array([], np.int64), np.array([])))
        return dict(zip(steps.tolist(), values.tolist(), strict=True))

    def __str__(self) -> str:
        steps = self.steps
        word = "record" if not self.clock else "step"
        counted = f"{self.form}, {len(steps):,} record{'s' * (len(steps) > 1)} from {word} {steps[0]} to {steps[-1]}"
        counted += f" (steps are the column {self.clock!r})" if self.clock not in ("step", "") else ""
        counted += "" if self.clock else " (no column has the steps, so Lamina counts records)"
        said = [f"{_WORDS.get(metric, metric.replace('_', ' '))} {name!r}" for metric, name in self.read.items()]
        if count := self.parameters.get("gradient_norm"):
            inside = f" in {len(self.layers)} layers" if self.layers else ""
            said.append(f"gradient norms of {count} parameter{'s' * (count > 1)}{inside}")
        return "; ".join([f"{counted}: {', '.join(said)}", *self.notes])


def is_history(path: Path) -> bool:
    """Return whether a path is another tool's record: a file, "-" for a pipe, or another tool's folder."""
    return str(path) == "-" or path.is_file() or (path.is_dir() and recorded_in(path) is not None)


def read_history(path: Path, run: str = "") -> History:
    """Read another tool's record (a file, a folder, or "-" for a pipe), and assign its series to the model's layers."""
    source = (recorded_in(path) or path) if path.is_dir() else path
    runs = read_runs(source)
    useful = {
        name: kept for name, kept in runs.items() if any(whole(each) or parameter_of(each) for each in kept.series)
    }
    if run and run not in runs:
        raise UserError(f"run: {str(source)!r} holds no run {run!r} (allowed: {', '.join(map(repr, runs))})")
    long = {name: kept for name, kept in useful.items() if kept.clock or kept.rows >= _FEW}
    if len(useful) > 1 and not long:
        most = max(recording.rows for recording in useful.values())
        raise UserError(
            f"run: {str(source)!r} has at most {most} row{'s' * (most > 1)} for each of {len(useful)} runs, which is a "
            "summary and no history. Give a record with a row for each step (in W&B, export a chart as CSV)."
        )
    short = [name for name in useful if long and name not in long and not run]
    useful = long or useful
    if len(useful) > 1 and not run:
        told = ", ".join(f"{name!r} ({_span(kept)})" for name, kept in list(useful.items())[:20])
        raise UserError(
            f"run: {str(source)!r} holds {len(useful)} runs: {told}. Choose one. Run: lamina diagnose {path} --run "
            f"{next(reversed(useful))!r}"
        )
    chosen = runs[run] if run else next(iter((useful or runs).values()), None)
    if chosen is None:
        raise UserError(f"run: {str(source)!r} holds no records. Give a file with records.")
    history = _placed(chosen, source)
    if short:
        shown = f"{', '.join(map(repr, short[:_SHOWN]))}{', ...' * (len(short) > _SHOWN)}"
        history.notes.append(f"not read, because they have fewer than {_FEW} rows: {shown} (choose with --run)")
    if source != path:
        history.form = f"{history.form} {source.relative_to(path)}"
        beside = tracked(path) if source.suffix == ".db" else runs_in(path)[1:]
        if others := [str(other.relative_to(path)) for other in beside]:
            shown = f"{', '.join(others[:_SHOWN])}{', ...' * (len(others) > _SHOWN)}"
            one = len(others) == 1
            history.notes.append(f"the folder holds {'another run' if one else f'{len(others)} other runs'} ({shown})")
    return history


def _span(recording: Recording) -> str:
    steps = [steps for steps, _ in recording.series.values() if len(steps)]
    return (
        f"{recording.clock or 'record'} {min(s[0] for s in steps)} to {max(s[-1] for s in steps)}" if steps else "empty"
    )


def _placed(recording: Recording, source: Path) -> History:
    history = History(form=recording.form, clock=recording.clock, notes=list(recording.notes))
    wholes = {name: owner for name in recording.series if (owner := whole(name)) is not None}
    named = {
        name: owner for name in recording.series if name not in wholes and (owner := parameter_of(name)) is not None
    }
    places = places_of([inner for _, inner in named.values()])
    named = {name: owner for name, owner in named.items() if owner[1] in places.owners}
    for metric in _WORDS:
        names = {
            name: (owner, len(recording.series[name][0])) for name, owner in wholes.items() if owner.metric == metric
        }
        if names:
            history.read[metric] = best(names, history.read.get(LOSS, ""))
            history.series[_MODEL, metric] = recording.series[history.read[metric]]
    history.opposed = are_opposed(history.read.get(LOSS, ""), recording.series)
    parts = _add_parts(history, recording.series)
    for metric in ("gradient_norm", "weight_norm"):
        own = {inner: recording.series[name] for name, (kind, inner) in named.items() if kind == metric}
        history.parameters[metric] = len(own)
        history.series |= _summed(metric, own, places, has_total=NORM in history.read)
    history.layers = places.layers
    policy = {metric: name for name, metric in metrics_of(recording.series).items()}
    history.series |= {(_MODEL, metric): recording.series[name] for metric, name in policy.items()}
    history.read |= policy
    for name, series in recording.series.items():
        if plain(name) in (EPOCH, "train_epoch"):
            history.series[_MODEL, EPOCH] = series
        elif name not in {*named, *parts, *history.read.values()} and not name.startswith("_"):
            history.unused += [] if OTHER & set(plain(name).split("_")) else [name]  # else nobody expects it to be used
    _read_filtered_losses(history)
    _read_broken_parts(history, {name: recording.series[name] for name in history.unused if is_loss(name)})
    _read_running_means(history)
    if not any(metric in (LOSS, NORM, "gradient_norm") for _, metric in history.series):
        if odd := [name for name in recording.odd if whole(name)]:
            raise UserError(
                f"{odd[0]}: {recording.odd[odd[0]]!r} in {str(source)!r} is not a number. The column holds no numbers, "
                "and the record has no other loss or gradient norm. Give a record with a loss or a gradient norm."
            )
        names = sorted(recording.series)
        shown = f": {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}" if names else ""
        raise UserError(
            f"run: {str(source)!r} holds no loss and no gradient norm. Lamina read the record as {recording.form} with "
            f"{len(names)} series{shown}. Use names such as loss, lm loss, train/loss, grad_norm, or "
            "gradients/layers.0.mlp.up_proj.weight (with all parameters at the same steps)."
        )
    history.notes += _notes(history, recording.odd)
    return history


def _summed(metric: str, own: Mapping[str, Series], places: Places, *, has_total: bool) -> dict[Key, Series]:
    """Compute the norms of sub-layers, blocks and the model at each step that has the norms of all parameters."""
    parts: dict[Owner, list[Series]] = {}
    for inner, series in own.items():
        owner = places.owners[inner]
        owners = [owner, *([(owner[0], "block", "all")] if owner[0] >= 0 else [])]
        owners += [_MODEL] if metric == "gradient_norm" and not has_total else []
        for each in owners:
            parts.setdefault(each, []).append(series)
    summed: dict[Key, Series] = {}
    for owner, several in parts.items():
        steps = several[0][0]
        if any(len(one) != len(steps) or not np.array_equal(one, steps) for one, _ in several[1:]):
            steps = reduce(np.intersect1d, (one for one, _ in several))
            several = [(steps, values[np.searchsorted(one, steps)]) for one, values in several]
        squares = np.zeros(len(steps))
        with np.errstate(over="ignore"):  # a norm beyond the largest number is infinite
            for _, values in several:
                squares += np.square(values)
        if len(steps):
            summed[owner, NORM if owner == _MODEL else metric] = (steps, np.sqrt(squares))
    return summed


def _read_filtered_losses(history: History) -> None:
    """Change losses of exactly 0 to NaN where the gradient is not finite, because Trainer prints 0 for such a loss."""
    loss, norm = (history.series.get((_MODEL, metric)) for metric in (LOSS, NORM))
    if loss is None or norm is None:
        return
    steps, values = norm
    filtered = np.isin(loss[0], steps[~np.isfinite(values)]) & (loss[1] == 0.0)
    if filtered.any():
        history.series[_MODEL, LOSS] = (loss[0], np.where(filtered, np.nan, loss[1]))
        history.notes.append(
            f"Lamina reads {int(filtered.sum())} losses of exactly 0 as not finite, because these steps' gradients are "
            "not finite (Trainer's logging_nan_inf_filter prints 0 for such losses)"
        )


def _add_parts(history: History, series: Mapping[str, Series]) -> list[str]:
    """If the record has no total loss, add up at least three parts of the loss. Return the parts' names, or []."""
    parts = parts_of(history.read.get(LOSS, ""), series)
    if not parts or any(not np.array_equal(series[name][0], series[parts[0]][0]) for name in parts):
        return []
    history.read[LOSS] = " + ".join(parts)
    history.series[_MODEL, LOSS] = series[parts[0]][0], np.sum([series[name][1] for name in parts], axis=0)
    return parts


def _read_broken_parts(history: History, others: Mapping[str, Series]) -> None:
    """Change the loss to NaN where another loss is infinite, or where another loss stays NaN until the end."""
    if (loss := history.series.get((_MODEL, LOSS))) is None:
        return
    for name, (steps, values) in others.items():
        broken = np.isinf(values)
        finite = np.flatnonzero(np.isfinite(values))
        broken[finite[-1] + 1 if len(finite) else len(values) :] = True
        if not len(finite) and not broken.any():
            history.notes.append(f"{name!r} is not finite in any record, so Lamina does not judge it")
        where = np.isin(loss[0], steps[broken]) & np.isfinite(loss[1])
        if where.any():
            loss = history.series[_MODEL, LOSS] = loss[0], np.where(where, np.nan, loss[1])
            history.notes.append(
                f"{name!r} is not finite, first at step {loss[0][where][0]}, so Lamina reads the loss as not finite"
            )


def _read_running_means(history: History) -> None:
    """If the losses are averages over the epoch so far, keep only the last loss of each later epoch."""
    loss, epoch = (history.series.get((_MODEL, metric)) for metric in (LOSS, EPOCH))
    if loss is None or epoch is None or not len(epoch[0]):
        return
    steps, values = loss
    numbers = epoch[1][np.maximum(np.searchsorted(epoch[0], steps, side="right") - 1, 0)]
    begins = np.flatnonzero(np.diff(np.floor(numbers)) > 0) + 1
    if _is_running_mean([values[part] for part in np.split(np.arange(len(steps)), begins)[1:]]):
        kept = ~np.isfinite(values)
        kept[: begins[0]] = kept[begins - 1] = kept[-1] = True
        history.series[_MODEL, LOSS] = steps[kept], values[kept]
        del history.series[_MODEL, EPOCH]  # these losses say nothing of an epoch's beginning
        history.notes.append(
            "the loss seems to be an average over the epoch so far, so Lamina reads only each epoch's last loss, and "
            f"skips {int((~kept).sum())} losses"
        )


def _is_running_mean(epochs: Sequence[Floats]) -> bool:
    """Return whether losses are averages over the epoch so far: the n-th change is about 1/n of the first change."""
    long = [part for part in epochs if len(part) >= 2 * BEFORE]
    moves = [np.abs(np.diff(part)) for part in long]
    calmer = [moved[: BEFORE // 2].mean() > _CALMER * np.median(moved[BEFORE:]) for moved in moves]
    if len(long) > 1:
        return bool(np.mean(calmer) > _MOST)
    count = int(np.median([len(part) for part in epochs])) if epochs else 0
    same = [np.abs(np.diff(part[:count])) for part in epochs if len(part) >= count]
    if count < _SHORT or len(same) * count < _LOSSES:
        return False
    middle = np.median(same, axis=0)
    if not (np.isfinite(middle).all() and (middle > 0).all()):
        return False
    slope = np.polyfit(np.log(np.arange(1, count)), np.log(middle), 1)[0]
    return bool(slope < _CALMING and middle[0] > 2 * middle[-1])


def _notes(history: History, odd: Mapping[str, str]) -> list[str]:
    notes = []
    if not history.clock and (steps := [name for name in odd if step_rank(name) is not None]):
        notes.append(
            f"{steps[0]!r} holds no numbers ({odd[steps[0]]!r}), so Lamina does not read steps from this column"
        )
    if not history.parameters["gradient_norm"]:
        notes.append("the record has no values by layer, so Lamina checks only the whole model")
    if absent := [words for metric, words in _WORDS.items() if (_MODEL, metric) not in history.series]:
        notes.append(f"not recorded: {', '.join(absent)}")
    if LOSS in history.read and not history.series[_MODEL, LOSS][1].any():
        notes.append(f"{history.read[LOSS]!r} is 0 in every record")
    if LOSS not in history.read and (
        side := [name for name in history.unused if is_loss(name) and not is_whole_loss(name)]
    ):
        notes.append(f"{side[0]!r} is not the task's loss, so Lamina does not use it as the loss")
    if NORM not in history.read and history.parameters["gradient_norm"]:
        notes.append("Lamina computed the model's gradient norm from the recorded gradient norms of its parameters")
    if history.unused:
        shown = ", ".join(sorted(history.unused)[:_SHOWN])
        notes.append(f"not used: {len(history.unused)} series ({shown}{', ...' * (len(history.unused) > _SHOWN)})")
    return notes


def judge(history: History) -> tuple[list[Alarm], list[int]]:
    """Check a record with the monitor's rules. Return the alarms, and the steps at which the loss fell suddenly."""
    alarms, judged = Alarms(), history.steps
    wanted, filling = _worth_judging(history, judged)
    rows: dict[int, list[Row]] = {}
    many = len(judged) > _MANY
    for key, (steps, values) in history.series.items():
        if key[1] in (RATE, EPOCH):
            continue
        places = np.searchsorted(judged, steps)
        judged_here = (places < len(judged)) & (np.take(judged, np.minimum(places, len(judged) - 1)) == steps)
        if key[1] == "gradient_norm" or many:
            judged_here &= wanted[np.minimum(places, len(judged) - 1)]
        chosen = np.flatnonzero(judged_here)
        for row, value in zip(places[chosen].tolist(), values[chosen].tolist(), strict=True):
            rows.setdefault(row, []).append(Row(row + 1, *key[0], 0, key[1], value))
    # the rules count records instead of steps
    for row in range(len(judged)):
        alarms.see(rows.pop(row, []))
    alarms.close()
    told = [
        replace(alarm, step=judged[alarm.step - 1])
        for alarm in alarms.told
        if not filling[alarm.step - 1] or not (many or alarm.metric == "gradient_norm")
    ]
    losses, rates = history.values(LOSS), history.values(RATE)
    calm = restarts(rates)
    kept, falls = _of_policy(history), list[int]()
    told = [alarm for alarm in told if alarm.metric not in POLICY]
    for alarm in told:
        if alarm.metric == LOSS and alarm.rule == "fall":
            falls.append(alarm.step)
        elif alarm.metric != LOSS or alarm.rule != "rise" or (not history.opposed and _rose(alarm, losses, calm)):
            kept.append(alarm)
    return kept, falls


def _of_policy(history: History) -> list[Alarm]:
    """Return the alarms for a policy's metrics. These rules count steps, because a record may average several steps."""
    rows: dict[int, list[Row]] = {}
    for key in history.series:
        for row in history.rows_of(key) if key[1] in POLICY else ():
            rows.setdefault(row.step, []).append(row)
    alarms = Alarms()
    for step in sorted(rows):
        alarms.see(rows[step])
    alarms.close()
    return alarms.told


def _worth_judging(history: History, judged: Sequence[int]) -> tuple[Bools, Bools]:
    """Choose the records of a long log that the rules check, and mark records that only serve as earlier values."""
    layered = {key: series for key, series in history.series.items() if key[1] == "gradient_norm"}
    count, many = sum(len(steps) for steps, _ in layered.values()), len(judged) > _MANY
    if count <= _LONG and not many:
        return np.ones(len(judged), bool), np.zeros(len(judged), bool)
    odd = np.zeros(len(judged), bool)
    # to save time, only records near a moving loss or an unusual gradient
    odd[: 2 * WINDOW] = True
    if many and (loss := history.series.get((_MODEL, LOSS))) is not None:
        odd[np.searchsorted(judged, loss[0])[_moves(loss[1])]] = True
    if many and (norm := history.series.get((_MODEL, NORM))) is not None:
        layered[_MODEL, NORM] = norm
    kinds: dict[tuple[str, str, int], list[Floats]] = {}
    for ((_, sublayer, role), _), (steps, values) in layered.items():
        places, logs = np.searchsorted(judged, steps), np.log(np.maximum(values, 1e-30))
        odd[places[~np.isfinite(values) | (values == 0.0)]] = True
        kinds.setdefault((sublayer, role, len(steps)), []).append(logs)
        if len(values) > WINDOW:
            past = np.lib.stride_tricks.sliding_window_view(logs[:-1], WINDOW)
            middle = np.median(past, axis=1)
            high = np.flatnonzero(logs[WINDOW:] > middle + STANDS_OUT)
            spread = 1.4826 * np.median(np.abs(past[high] - middle[high, None]), axis=1)
            odd[places[WINDOW + high[logs[WINDOW + high] - middle[high] > DEVIATIONS * spread]]] = True
    for logs in kinds.values():
        apart = np.stack(logs) - np.median(np.stack(logs), axis=0) > limits()["apart/gradient_norm"]
        if len(logs) > 2 and apart.shape[1] == len(judged):
            odd[np.flatnonzero((apart[:, 1:] & ~apart[:, :-1]).any(axis=0)) + 1] = True
    wanted, filling = np.zeros(len(judged), bool), np.zeros(len(judged), bool)
    for row in np.flatnonzero(odd).tolist():
        begin = max(0, row - 2 * WINDOW)
        filling[begin : max(begin, row - WINDOW // 2)] |= ~wanted[begin : max(begin, row - WINDOW // 2)]
        filling[max(begin, row - WINDOW // 2) : row + WINDOW] = False
        wanted[begin : row + WINDOW] = True
    filling[: 2 * WINDOW] = False
    return wanted, filling


def _moves(losses: Floats) -> Ints:
    """Return the positions at which the loss is not finite, or changes by more than its noise."""
    window, ahead = np.lib.stride_tricks.sliding_window_view, LAG
    finite = np.isfinite(losses)
    if len(losses) < WINDOW + 2 * ahead or not finite.any():
        return np.arange(len(losses))
    values = np.where(finite, losses, np.median(losses[finite]))
    usual = np.median(window(values[: -2 * ahead], WINDOW), axis=1)
    after = np.median(window(values[WINDOW + ahead :], ahead), axis=1)
    changes = window(np.abs(np.diff(values[: -2 * ahead])), WINDOW - 1)
    noise = np.maximum(LEAST_NOISE, 1.4826 * np.median(changes, axis=1) / 2**0.5)
    off = np.flatnonzero(np.abs(after - usual) > _OFF * noise) + WINDOW + ahead
    return np.union1d(off, np.flatnonzero(~finite))


def _rose(alarm: Alarm, losses: Mapping[int, float], calm: Sequence[int]) -> bool:
    """Return whether the loss rose by more than usual at an alarm, without a restart of the learning rate."""
    steps = sorted(losses)
    at = bisect_left(steps, alarm.step)
    if any(bisect_left(steps, step) <= at < bisect_left(steps, step) + 2 * BEFORE for step in calm):
        return False
    after = [losses[step] for step in steps[at : at + BEFORE // 2]]
    before, level = [losses[step] for step in steps[:at]], statistics.median(after)
    high = sorted(before[-2 * BEFORE - LAG : -LAG])[-2:-1]  # near a loss of 0, single batches are ten times the others
    return level - alarm.usual > wander_of(before) and level > max(high, default=-math.inf)


def import_history(path: Path, folder: Path, run: str = "") -> History:
    """Convert another tool's record to a watched run in ``folder``. Raises UserError for the folder of another job."""
    history = read_history(path, run)
    judged, rates, losses = history.steps, history.values(RATE), history.values(LOSS)
    told, falls = judge(history)
    # replaces an earlier import
    with hold(folder, resume=False, overwrite=True):
        write_json(folder / ENVIRONMENT, environment(0, Kind.WATCHED))
        write_sealed(folder / CONFIG, {"output": str(folder), "imported": str(path)})
        count = 1 + max(history.layers, default=-1)
        about = {
            "record": VERSION,
            "model": f"a model of {path.name}",
            "num_layers": count,
            "notes": history.notes,
            "layers": [{"path": history.layers.get(at, "")} for at in range(count)],
            "history": {
                "clock": history.clock,
                "lags": history.lags,
                "metrics": sorted({metric for _, metric in history.series}),
                "falls": falls,
                "opposed": history.opposed,
            },
        }
        write_json(folder / WATCHED, about)
        writer = LayersWriter(folder)
        for key in history.series:
            writer.add(history.rows_of(key))
        writer.flush()
        records = (
            {"step": step, "tokens": None}
            | ({"loss": losses[step], "learning_rate": rates.get(step)} if step in losses else {})
            for step in judged
        )
        write_lines(folder / METRICS, records)
        write_alarms(folder, told)
        write_result(folder, {"status": "imported", "steps": judged[-1], "alarms": len(events(told))})
    return history
