"""The engine: one pass over the text for all streaming probes, stopped when their standard errors are small."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, MutableMapping, Sequence

import pandas as pd
import torch

from lamina.errors import UserError
from lamina.probes.engine.causality import is_causal
from lamina.probes.engine.context import Context
from lamina.probes.engine.registry import Probe, sample_of
from lamina.probes.structure.forward import forward
from lamina.probes.structure.hooks import watch
from lamina.probes.structure.sites import Point

PASSES = "forward passes"
SAMPLE = ["sequences", "tokens"]  # the columns that say how much a row was measured on
MIN_SEQUENCES = 16  # with fewer a standard error means little


def run(
    context: Context,
    probes: Sequence[Probe],
    *,
    tolerance: float = 0.0,
    strict: bool = True,
    done: Callable[[Probe, pd.DataFrame, float], None] = lambda probe, frame, seconds: None,
    broken: Callable[[Probe, Exception], None] | None = None,
    estimated: Callable[[dict[str, float]], None] | None = None,
    starting: Callable[[str], None] = lambda name: None,
    sampled: bool = True,
) -> dict[str, pd.DataFrame]:
    """Run the probes; returns their frames by name. ``done`` is called as soon as a probe has its frame.

    The forward passes stop once each probe's relative standard error is at most ``tolerance`` (0: never). Without
    ``strict`` a probe that does not apply to the model is left out with a note. ``broken`` gets a probe that failed,
    or whose frame ``done`` could not take, with the exception, and the others continue; without ``broken`` the
    exception is raised. ``done`` gets the seconds of a probe's own work, in the shared forward passes and after them.
    ``estimated`` gets the expected seconds by probe and of the passes ("forward passes") before anything runs, and
    ``starting`` the name of whatever begins. Cheap probes come first. With ``sampled`` the frames have the columns
    ``sequences`` and ``tokens``: how much a row was measured on.

    Raises:
        UserError: a probe does not apply to the model (with ``strict``), or lacks what it needs.
    """
    context.strict = strict
    if context.reads_tokens:  # before there are hooks: it takes forward passes of its own
        is_causal(context.model, context.batches[0]["input_ids"].to(context.device))
    seconds = _begin(context, probes, broken)
    ready = sorted(seconds, key=lambda probe: probe.cost(context))
    if estimated is not None:
        estimated(estimates(context, ready))
    starting(PASSES)
    _forward_passes(context, ready, tolerance, seconds)
    frames: dict[str, pd.DataFrame] = {}
    for number, probe in enumerate(ready):
        starting(probe.name)
        context.progress(number, len(ready), probe.name)
        began = time.monotonic()
        try:
            frame = _with_sample(context, probe, probe.finish(context))
            frame = frame if sampled else frame.drop(columns=SAMPLE, errors="ignore")
            done(probe, frame, seconds[probe] + time.monotonic() - began)
        except UserError as error:
            _refuse(context, probe, error)
            continue
        except Exception as error:
            if broken is None:
                raise
            broken(probe, error)
            continue
        frames[probe.name] = frame
    context.progress(len(ready), len(ready), "done")
    return frames


def _begin(
    context: Context, probes: Sequence[Probe], broken: Callable[[Probe, Exception], None] | None
) -> dict[Probe, float]:
    """The seconds that each probe took to begin, for the probes that apply to the model."""
    seconds: dict[Probe, float] = {}
    for probe in probes:
        if "tokens" in probe.needs and not context.reads_tokens:
            _refuse(context, probe, UserError(f"{probe.name}: needs a text model (allowed: other probes)"))
            continue
        began = time.monotonic()
        try:
            probe.begin(context)
        except UserError as error:
            _refuse(context, probe, error)
            continue
        except Exception as error:
            if broken is None:
                raise
            broken(probe, error)
            continue
        seconds[probe] = time.monotonic() - began
    return seconds


def _refuse(context: Context, probe: Probe, error: UserError) -> None:
    if context.strict:
        raise error
    context.notes.append(f"{probe.name} left out: {error}")


def estimates(context: Context, probes: Sequence[Probe]) -> dict[str, float]:
    """The expected seconds of the forward passes and of each probe's own work, from a small timed pass."""
    inputs = {name: tensor[:1].to(context.device) for name, tensor in context.batches[0].items()}
    with torch.no_grad():
        forward(context.model, inputs)  # the first pass of a process is slow
        began = time.monotonic()
        forward(context.model, inputs)
        first = next(iter(inputs.values()))
        each = (time.monotonic() - began) / (first.numel() if first.ndim == 2 else 256.0)
    passes = {PASSES: each * context.tokens() if any(probe.streams for probe in probes) else 0.0}
    return passes | {probe.name: each * probe.cost(context) for probe in probes}


def _with_sample(context: Context, probe: Probe, frame: pd.DataFrame) -> pd.DataFrame:
    sample = probe.measured(context)
    if sample is not None:
        frame = frame.assign(sequences=sample.sequences, tokens=sample.tokens)
    if "sequences" in frame and len(frame):
        sequences, available = max(frame["sequences"].tolist()), sample_of(context.batches).sequences
        if 0 < sequences < available:
            context.notes.append(f"{probe.name}: measured on {sequences} of {available} sequences.")
    return frame


def _forward_passes(
    context: Context, probes: Sequence[Probe], tolerance: float, seconds: MutableMapping[Probe, float]
) -> None:
    points: dict[tuple[int, Hashable], Point] = {}
    streaming = []
    for number, probe in enumerate(probes):
        watched = probe.points()
        points |= {(number, key): point for key, point in watched.items()}
        if probe.streams:
            streaming.append(probe)
    if not streaming:
        return
    head = any("logits" in probe.needs for probe in streaming)
    root = context.model if head else context.base

    def see(key: tuple[int, Hashable], value: torch.Tensor) -> None:
        began = time.monotonic()
        probes[key[0]].see(key[1], value)
        seconds[probes[key[0]]] += time.monotonic() - began

    sequences = 0
    with torch.no_grad(), watch(points, see, root=root):
        for number, inputs in enumerate(context.batches):
            context.progress(number, len(context.batches), PASSES)
            inputs = {name: tensor.to(context.device) for name, tensor in inputs.items()}
            output = forward(root, inputs)
            for probe in streaming:
                began = time.monotonic()
                probe.end_batch(inputs, output)
                seconds[probe] += time.monotonic() - began
            del output
            sequences += len(next(iter(inputs.values())))
            context.forwards = number + 1
            if tolerance > 0 and sequences >= MIN_SEQUENCES:
                errors = [e for e in (probe.standard_error() for probe in streaming) if e is not None]
                if errors and max(errors) <= tolerance:
                    break
    context.progress(len(context.batches), len(context.batches), PASSES)
