"""A run's precision, and whether its blocks are compiled: as requested, or as a short trial finds faster."""

from __future__ import annotations

import ctypes
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from lamina.core.json_types import Json
from lamina.jobs.files import write_json, write_yaml
from lamina.modeling.linear_cross_entropy import LinearLoss
from lamina.modeling.profiling import random_batch
from lamina.training.execution.compiling import compile_blocks, discard, missing_compiler
from lamina.training.execution.processes import Processes
from lamina.training.settings import PretrainSettings, RunSettings

logger = logging.getLogger(__name__)

SHORT_RUN = 300  # steps below which there is no trial
SHORT_TIME = 120.0  # seconds that a run must take for a trial to pay off: compiling takes tens of seconds
TRIAL_STEPS = 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
GIVE_UP = 1.5  # times the best step: the timing of a slower candidate ends early


@dataclass(frozen=True)
class Timed:
    """A candidate's seconds for its first step, which compiles, and for each later step."""

    precision: str
    compile: str
    first: float
    step: float

    def __str__(self) -> str:
        return f"{_named(self.precision, self.compile)} {self.step:.3g} s per step (the first {self.first:.3g} s)"


@dataclass(frozen=True)
class Choice:
    """A run's precision and compilation, and the reason."""

    precision: str
    compile: str
    why: str
    trial: list[Timed] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{_named(self.precision, self.compile)}: {self.why}"

    def to_dict(self) -> Json:
        """The choice for speed.json."""
        return asdict(self)


def is_open(settings: RunSettings) -> bool:
    """Whether precision or compilation is still to be chosen."""
    return "auto" in (settings.precision, settings.compile)


def choose(settings: RunSettings, make_model: Callable[[], PreTrainedModel], device: torch.device) -> Choice:
    """Choose the precision and compilation for these settings, by a trial on ``device`` if one is worth its time.

    The trial runs forward and backward on random tokens of a batch's shape. It changes neither the weights nor the
    random state; the run uses the blocks that it compiled. ``make_model`` is called only if there is a trial.
    """
    plain = (_or(settings.precision, "fp32"), _or(settings.compile, "off"))
    if not is_open(settings):
        return Choice(*plain, why="as requested")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A model that only fits sharded cannot be tried here, and all processes must decide alike.
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        plain = (_or(settings.precision, "bf16" if fast else "fp32"), plain[1])
        return Choice(*plain, why="there is no trial with several processes (--precision, --compile)")
    if settings.steps < SHORT_RUN:
        why = f"{settings.steps} steps are too few to try what is faster (--precision, --compile)"
        return Choice(*plain, why=why)
    return _try(settings, cast(PreTrainedModel, cast(nn.Module, make_model()).to(device)), plain, device)


def decide(
    settings: PretrainSettings, model: PreTrainedModel, device: torch.device, processes: Processes, *, bar: bool
) -> PretrainSettings:
    """The settings with precision and compilation decided, as stored in the run's folder from now on.

    A resumed run does not try again. ``bar``: print the choice on the terminal.
    """
    if not is_open(settings):
        return settings
    folder = Path(settings.output)

    def try_out() -> PretrainSettings:
        choice = choose(settings, lambda: model, device)
        decided = replace(settings, precision=choice.precision, compile=choice.compile)
        write_json(folder / "speed.json", choice.to_dict())
        write_yaml(folder / "config.yaml", decided.to_dict())
        logger.info("%s", choice)
        if bar:
            tqdm.write(str(choice), file=sys.stderr)
        return decided

    return processes.by_first(try_out)


def prepare(model: nn.Module, settings: RunSettings) -> None:
    """Set up ``model`` to train as ``settings`` say, except for the precision, which the Trainer applies."""
    on = settings.compile == "on"
    keep_freed_memory()
    if hasattr(model, "linear_loss"):
        model.linear_loss = LinearLoss(compiled=on)  # type: ignore[assignment]
    discard(model)
    if on:
        compile_blocks(model)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, in allocations of up to 32 MiB (its maximum).

    By default it returns the memory of freed activations to the system, which must zero it page by page when the next
    step allocates it again: 3 to 8 % of a step on a CPU. Does nothing without glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def half_precision_pays(device: torch.device) -> bool:
    """Whether a matrix product is faster in bfloat16 than in float32; it is not on a CPU without its instructions."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        factor = torch.ones(256, 256, dtype=dtype)
        torch.mm(factor, factor)
        start = time.perf_counter()
        torch.mm(factor, factor)
        seconds[dtype] = time.perf_counter() - start
    return seconds[torch.bfloat16] < seconds[torch.float32]


def _try(settings: RunSettings, model: PreTrainedModel, plain: tuple[str, str], device: torch.device) -> Choice:
    seconds: list[Timed] = [_time(model, settings, *plain, device, limit=None)]
    rest = settings.steps * seconds[0].step
    if rest < SHORT_TIME:
        return Choice(*plain, f"a run of about {rest:.0f} s is too short to try what is faster", seconds)
    remarks = []
    precisions, compiles = [plain[0]], [plain[1]]
    if settings.precision == "auto":
        if half_precision_pays(device):
            precisions.append("bf16")
        else:
            remarks.append("bf16 left out, its matrix products are no faster here")
    if settings.compile == "auto":
        if missing := missing_compiler(device):
            remarks.append(f"not compiled, {missing}")
        else:
            compiles.append("on")
    for candidate in [(p, c) for c in compiles for p in precisions if (p, c) != plain]:
        best = min(timed.step for timed in seconds)
        try:
            seconds.append(_time(model, settings, *candidate, device, limit=best * GIVE_UP))
        except Exception as error:  # a compiler can fail in many ways; the plain path remains
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            remarks.append(f"{_named(*candidate)} failed ({reason[:200]})")
            logger.warning("%s left out: %s", _named(*candidate), reason)
    discard(model)
    quickest = min(seconds, key=lambda timed: timed.first + settings.steps * timed.step)
    trials = "; ".join([*map(str, seconds), *remarks])
    return Choice(quickest.precision, quickest.compile, f"the fastest for {settings.steps} steps of: {trials}", seconds)


def _time(
    model: PreTrainedModel,
    settings: RunSettings,
    precision: str,
    compile: str,
    device: torch.device,
    limit: float | None,
) -> Timed:
    prepare(model, replace(settings, precision=precision, compile=compile))
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: tensor.to(device)
        for name, tensor in random_batch(model, settings.batch_size, settings.sequence_length, generator).items()
    }
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    times: list[float] = []
    with _undisturbed(model, settings, device):
        for _ in range(TRIAL_STEPS):
            start = time.perf_counter()
            with torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32"):
                loss = model(**inputs, use_cache=False).loss
            loss.backward()
            float(loss.detach())  # waits for the device
            model.zero_grad(set_to_none=True)
            times.append(time.perf_counter() - start)
            if limit is not None and len(times) == 4 and statistics.median(times[1:]) > limit:
                break
    return Timed(precision, compile, times[0], statistics.median(times[2:]))


@contextmanager
def _undisturbed(model: Any, settings: RunSettings, device: torch.device):
    """Training mode; mode, gradients and random state are restored afterwards."""
    was_training = model.training
    model.train()
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_disable()
        model.train(was_training)
        model.zero_grad(set_to_none=True)


def _or(value: str, default: str) -> str:
    return default if value == "auto" else value


def _named(precision: str, compile: str) -> str:
    return f"{precision}, {'compiled' if compile == 'on' else 'eager'}"
