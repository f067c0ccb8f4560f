"""The engine: one pass over the text for all streaming probes, stopped when their standard errors are small."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.registry import Probe
from lamina.probes.engine.watching import watch
from lamina.probes.structure.discovery import Point, Structure

PASSES = "forward passes"
MIN_SEQUENCES = 16  # a standard error of fewer says little
MASKED_SHARE = 0.15


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
) -> dict[str, pd.DataFrame]:
    """Run the probes; returns each one's frame by its name. ``done`` is called as soon as a probe's is there.

    The forward passes stop once each probe's relative standard error is at most ``tolerance`` (0: never). Without
    ``strict`` a probe that has no meaning for the model is left out with a note. ``broken`` is told of one whose frame
    could not be made or handed to ``done``, and the others go on; without it the exception is raised. ``done`` is given
    the seconds of a probe's own work, in the shared forward passes and behind them. ``estimated`` is told before any of
    it what each is thought to take, and what the passes are (by their name, "forward passes"), and ``starting`` what
    begins. The cheap ones come first.

    Raises:
        UserError: a probe has no meaning for the model (with ``strict``), or can't be given what it needs.
    """
    context.strict = strict
    if context.reads_tokens:  # before any hook is there: it takes passes of its own
        from lamina.probes.engine.causality import is_causal

        is_causal(context.model, context.batches[0]["input_ids"].to(context.device))
    ready: list[Probe] = []
    seconds: dict[Probe, float] = {}
    for probe in probes:
        if "tokens" in probe.needs and not context.reads_tokens:
            _refuse(context, probe, UserError(f"{probe.name}: needs a model of text (allowed: other probes)"), strict)
            continue
        began = time.monotonic()
        try:
            probe.begin(context)
        except UserError as error:
            _refuse(context, probe, error, strict)
            continue
        seconds[probe] = time.monotonic() - began
        ready.append(probe)
    ready.sort(key=lambda probe: probe.cost(context))
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
            frame = probe.finish(context)
            done(probe, frame, seconds[probe] + time.monotonic() - began)
        except UserError as error:
            _refuse(context, probe, error, strict)
            continue
        except Exception as error:
            if broken is None:
                raise
            broken(probe, error)
            continue
        frames[probe.name] = frame
    context.progress(len(ready), len(ready), "done")
    return frames


def _refuse(context: Context, probe: Probe, error: UserError, strict: bool) -> None:
    if strict:
        raise error
    context.notes.append(f"{probe.name} left out: {error}")


def estimates(context: Context, probes: Sequence[Probe]) -> dict[str, float]:
    """Seconds that the forward passes and each probe's own work are thought to take, from a small pass timed here."""
    inputs = {name: tensor[:1].to(context.device) for name, tensor in context.batches[0].items()}
    with torch.no_grad():
        forward(context.model, inputs)  # the first pass of a process is slow
        began = time.monotonic()
        forward(context.model, inputs)
        first = next(iter(inputs.values()))
        each = (time.monotonic() - began) / (first.numel() if first.ndim == 2 else 256.0)
    found = {PASSES: each * context.tokens() if any(_streams(probe) for probe in probes) else 0.0}
    return found | {probe.name: each * probe.cost(context) for probe in probes}


def _streams(probe: Probe) -> bool:
    return bool(probe.points()) or type(probe).end_batch is not Probe.end_batch


def _forward_passes(
    context: Context, probes: Sequence[Probe], tolerance: float, seconds: MutableMapping[Probe, float]
) -> None:
    points: dict[tuple[int, Any], Point] = {}
    streaming = []
    for number, probe in enumerate(probes):
        watched = probe.points()
        points |= {(number, key): point for key, point in watched.items()}
        if watched or type(probe).end_batch is not Probe.end_batch:
            streaming.append(probe)
    if not streaming:
        return
    head = any("logits" in probe.needs for probe in streaming)
    root = context.model if head else context.base

    def see(key: tuple[int, Any], value: torch.Tensor) -> None:
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


def forward(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Run a model on a batch without a cache."""
    more = {"use_cache": False} if takes_cache(type(model)) else {}
    return model(**inputs, **more)


def base_of(model: nn.Module, structure: Structure, inputs: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model without its head, where that takes the same inputs and holds all layers; else the model itself."""
    base = getattr(model, "base_model", model)
    if not isinstance(base, nn.Module) or base is model:
        return model
    parts = {id(module) for module in base.modules()}
    takes = inspect.signature(type(base).forward).parameters
    whole = all(id(site.module) in parts for site in structure.layers)
    return base if whole and all(name in takes for name in inputs) else model


def takes_cache(cls: type[nn.Module]) -> bool:
    """Whether a model's forward can be told to keep no cache."""
    parameters = inspect.signature(cls.forward).parameters
    # Some take it as one of their **kwargs and hand it on to a model that would keep a cache otherwise.
    return "use_cache" in parameters or ("past_key_values" in parameters)


def loss(model: nn.Module, inputs: Mapping[str, torch.Tensor], tokenizer: Any = None) -> torch.Tensor:
    """Mean cross-entropy in nats per predicted token, float32; see ``Context.loss``."""
    return token_losses(model, inputs, tokenizer).mean()


def token_losses(model: nn.Module, inputs: Mapping[str, torch.Tensor], tokenizer: Any = None) -> torch.Tensor:
    """The cross-entropy of each predicted token, [batch, predicted]: next tokens, or masked ones (as many in each row).

    Raises UserError where the model predicts no tokens, or its mask token is not known.
    """
    ids = inputs.get("input_ids")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if ids is None or head is None:
        raise UserError(
            f"loss: {type(model).__name__} has no head that predicts tokens (allowed: a causal or masked model)"
        )
    from lamina.probes.engine.causality import is_causal

    if is_causal(model, ids):
        logits = logits_of(forward(model, inputs))[:, :-1].float()
        return _cross_entropy(logits, ids[:, 1:])
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise UserError("loss: a masked language model needs its tokenizer's mask token (allowed: --tokenizer)")
    chosen = masked_positions(ids.shape[1]).to(ids.device)
    hidden = ids.clone()
    hidden[:, chosen] = mask
    logits = logits_of(forward(model, {**inputs, "input_ids": hidden}))[:, chosen].float()
    return _cross_entropy(logits, ids[:, chosen])


def logits_of(output: Any) -> torch.Tensor:
    """The logits [batch, tokens, vocabulary] of a model's output. Raises UserError where it has none."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise UserError(f"loss: {type(output).__name__} holds no logits (allowed: a causal or masked model)")
    return logits


def masked_positions(tokens: int) -> torch.Tensor:
    """The positions that are masked in a sequence: 15 % of them, the same ones each time, never the first or last."""
    count = max(1, round(tokens * MASKED_SHARE))
    order = torch.randperm(max(tokens - 2, 1), generator=torch.Generator().manual_seed(0)) + (1 if tokens > 2 else 0)
    return order[:count].sort().values


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """See ``Context.eager_attention``."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    switches = before not in (None, "eager") and hasattr(model, "set_attn_implementation")
    if switches:
        model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if switches:
            model.set_attn_implementation(before)  # type: ignore[operator]
