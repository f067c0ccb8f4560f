"""Measure a model with ``lamina.probe``: one DataFrame per probe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lamina.core.values import text
from lamina.data.corpus import EMBEDDED, Corpus
from lamina.data.tokenizers import is_trained, load_tokenizer, not_bytes
from lamina.errors import UserError
from lamina.modeling.checkpoint import Loaded, checked_device, load
from lamina.probes.engine.context import Context, RunState
from lamina.probes.engine.inputs import NOISE, Inputs, batches_of, reads_images
from lamina.probes.engine.losses import is_causal
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.registry import Probe, Sample, make_all, sample_of
from lamina.probes.structure.discovery import find_structure
from lamina.probes.structure.hooks import base_of, evaluating, forward, observe
from lamina.probes.structure.proof import prove
from lamina.probes.structure.sites import Point, Structure
from lamina.probes.structure.token_rows import token_rows

Points: TypeAlias = dict[tuple[Probe, Hashable], Point]
PASSES = "forward passes"
MIN_SEQUENCES = 16  # with fewer a standard error means little
_READ = "_is_hf_initialized"  # transformers marks the weights that it read, so as not to initialize them
logger = logging.getLogger(__name__)
_SEQUENCES = 64  # of the embedded corpus
_WITHOUT_HEAD = (
    "The checkpoint lacks the head's weights ({}), so the model's predictions are random. Lamina skips the probes "
    "gradients, layer_drop, layer_use and logit_lens, and the losses of low_precision and bounds."
)
_GAUSSIAN = "the images are Gaussian noise. To measure real images, give a folder or a .npy file with --corpus"
SKIPPED = " skipped: "  # in a note, between a probe's name and the reason


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
    """Run the probes, cheapest first, and return their tables by name.

    Args:
        tolerance: the relative standard error at which the shared forward passes stop (0: use all inputs).
        strict: whether to raise an error if a probe does not apply to the model. If false, Lamina skips the probe.
        done: a function that gets each finished probe, the probe's table and the probe's seconds.
        broken: a function that gets a failed probe and the exception (default: raise the exception).
        estimated: a function that gets the expected seconds, by the name of a probe or "forward passes".
        starting: a function that gets the name of each probe, or "forward passes", before the start.
        sampled: whether to add the size of each row's sample as the columns ``sequences`` and ``tokens``.

    Raises:
        UserError: if ``strict`` is true and a probe does not apply to the model.
    """
    context.strict = strict
    if context.reads_tokens:  # before there are hooks: it takes forward passes of its own
        is_causal(context.model, context.batches[0]["input_ids"].to(context.device))
    seconds: dict[Probe, float] = {}
    costs: dict[Probe, float] = {}
    points: Points = {}
    attempt = partial(_attempted, context, broken, failed := set[Probe]())
    for probe in probes:
        with attempt(probe):
            refuse_unfit(probe, context)
            began = time.monotonic()
            probe.begin(context)
            costs[probe] = probe.cost(context)
            points |= {(probe, key): point for key, point in probe.points().items()}
            seconds[probe] = time.monotonic() - began
    ready = sorted(seconds, key=lambda probe: costs[probe])
    if estimated is not None:
        estimated(estimates(context, ready))
    starting(PASSES)
    _forward_passes(context, ready, points, tolerance, seconds, failed, attempt)
    ready = [probe for probe in ready if probe not in failed]
    frames: dict[str, pd.DataFrame] = {}
    for number, probe in enumerate(ready):
        starting(probe.name)
        context.progress(number, len(ready), probe.name)
        with attempt(probe):
            began = time.monotonic()
            frame = _finished(context, probe)
            frame = frame if sampled else frame.drop(columns=[*Sample._fields], errors="ignore")
            done(probe, frame, seconds[probe] + time.monotonic() - began)
            frames[probe.name] = frame
    context.progress(len(ready), len(ready), "done")
    return frames


def refuse_unfit(probe: Probe, context: Context) -> None:
    """Raise UserError if the probe needs another kind of model."""
    if "tokens" in probe.needs and not context.reads_tokens:
        raise UserError(f"{probe.name}: this probe needs a text model. Choose other probes.")
    if context.structure.carries_more and not probe.of_streams:
        more = "earlier states" if context.structure.has_memory else "several streams"
        raise UserError(
            f"{probe.name}: this probe follows a single residual stream, but the model's layers read {more}. "
            "Choose other probes."
        )


@contextmanager
def _attempted(
    context: Context, broken: Callable[[Probe, Exception], None] | None, failed: set[Probe], probe: Probe
) -> Iterator[None]:
    """Run a step of a probe. Add a note if the probe does not apply to the model. Call ``broken`` if it fails.

    In both cases, the probe joins the set ``failed``.
    """
    try:
        with context.credit(probe.name):
            yield
    except UserError as error:
        if context.strict:
            raise
        failed.add(probe)
        context.notes.append(f"{probe.name}{SKIPPED}{str(error).removeprefix(f'{probe.name}: ')}")
    except Exception as error:
        if broken is None:
            raise
        failed.add(probe)
        broken(probe, error)


def estimates(context: Context, probes: Sequence[Probe]) -> dict[str, float]:
    """Return the expected seconds of the forward passes and of each probe, from a small timed pass."""
    inputs = context.on_device(context.batches[0], 1)
    with torch.no_grad():
        forward(context.model, inputs)  # the first pass of a process is slow
        began = time.monotonic()
        forward(context.model, inputs)
        each = (time.monotonic() - began) / context.tokens(1)
    passes = {PASSES: each * context.tokens() if any(probe.streams for probe in probes) else 0.0}
    return passes | {probe.name: each * probe.cost(context) for probe in probes}


def _finished(context: Context, probe: Probe) -> pd.DataFrame:
    with context.credit(probe.name):  # before the caller reads the notes
        frame = probe.finish(context)
        if not isinstance(frame, pd.DataFrame):
            raise TypeError(f"finish returned a {type(frame).__name__}, not a DataFrame")
        sample = probe.measured(context)
        if sample is not None:
            frame = frame.assign(**sample._asdict())
        if "sequences" in frame and len(frame):
            sequences, available = max(frame["sequences"].tolist()), sample_of(context.batches).sequences
            if 0 < sequences < available:
                context.notes.append(f"{probe.name}: Lamina measured {sequences} of {available} sequences.")
    return frame


def _forward_passes(
    context: Context,
    probes: Sequence[Probe],
    points: Points,
    tolerance: float,
    seconds: MutableMapping[Probe, float],
    failed: set[Probe],
    attempt: Callable[[Probe], AbstractContextManager[None]],
) -> None:
    """Run the shared forward passes until no probe needs more. A probe that has failed takes no further part."""
    streaming = [probe for probe in probes if probe.streams]
    if not streaming:
        return
    head = any("logits" in probe.needs for probe in streaming)
    root = context.model if head else context.base

    def see(place: tuple[Probe, Hashable], value: torch.Tensor) -> None:
        probe, key = place
        if probe not in failed:
            began = time.monotonic()
            with attempt(probe):
                probe.see(key, value)
            seconds[probe] += time.monotonic() - began

    sequences = 0
    with torch.no_grad(), observe(points, see, root=root):
        for number, inputs in enumerate(context.batches):
            context.progress(number, len(context.batches), PASSES)
            inputs = context.on_device(inputs)
            output = forward(root, inputs)
            errors: list[float | None] = []
            sequences += len(next(iter(inputs.values())))
            enough = tolerance > 0 and sequences >= MIN_SEQUENCES
            for probe in streaming:
                if probe not in failed:
                    began = time.monotonic()
                    with attempt(probe):
                        probe.end_batch(inputs, output)
                        errors.append(probe.standard_error() if enough else None)
                    seconds[probe] += time.monotonic() - began
            del output
            context.forwards = number + 1
            known = [error for error in errors if error is not None]
            if failed.issuperset(streaming) or (known and max(known) <= tolerance):
                break
    context.progress(len(context.batches), len(context.batches), PASSES)


def probe(
    model_or_path: nn.Module | str | Path,
    probes: str | Iterable[str | Probe] = "all",
    texts_or_blocks: Inputs = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    **settings: Any,
) -> dict[str, pd.DataFrame]:
    """Measure each layer of a model. Returns a dict with a DataFrame per probe, by the probe's name.

    Args:
        model_or_path: any transformers model, or a checkpoint's path or hub name, as for `lamina probe`.
        probes: "all", names or Probe objects. A name may have options: ``angular_distance(tokens=all)``.
        texts_or_blocks: texts, token blocks [sequences, tokens], or images [images, channels, height, width]. Lamina
            measures all inputs, unless you set ``sequences`` or an option of the probe. By default, Lamina reads the
            setting ``corpus``. In the result, the columns ``sequences`` and ``tokens`` give the size of each row's
            sample.
        tokenizer: the tokenizer for texts, or its name, as for `lamina probe` (default: the checkpoint's).
        settings: settings of `lamina probe`: sequence_length, sequences, batch_size, tolerance, layers, corpus, ...

    Raises:
        UserError: (a ValueError) if the path is not a checkpoint, Lamina finds no layers, the text is shorter than a
            block, or a probe does not apply to the model. With "all", Lamina skips probes that do not apply.
    """
    chosen = make_all(probes)
    if isinstance(tokenizer, str):
        settings, tokenizer = {**settings, "tokenizer": tokenizer}, None
    record = ProbeSettings.from_dict(settings)
    strict = not (isinstance(probes, str) and probes.strip() == "all")
    context = make_context(model_or_path, record, texts_or_blocks, tokenizer)
    context.warn()  # there is no page
    return measure(context, chosen, record, strict=strict)


def measure(
    context: Context, probes: Sequence[Probe], settings: ProbeSettings, *, strict: bool = True, sampled: bool = True
) -> dict[str, pd.DataFrame]:
    """Run the probes with the model in evaluation mode. ``run`` documents the arguments."""
    with evaluating(context.model):
        return run(context, probes, tolerance=tolerance_of(context, settings), strict=strict, sampled=sampled)


def tolerance_of(context: Context, settings: ProbeSettings) -> float:
    """Return the relative standard error at which the forward passes stop (0: use all inputs)."""
    return settings.tolerance if settings.tolerance is not None else 0.0 if context.whole else 0.02


def make_context(
    model_or_path: nn.Module | str | Path,
    settings: ProbeSettings,
    texts_or_blocks: Inputs = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    sample: bool = False,
) -> Context:
    """Load the model, find its layers, and read the inputs. Raises UserError if one of these steps fails.

    If ``sample`` is true, probes may measure only a part of the user's own inputs.
    """
    loaded = _loaded(model_or_path, settings)
    model, notes = loaded.model, list(loaded.notes)
    state: RunState = {} if loaded.run is None else {"run": loaded.run}
    tokenizer = tokenizer if tokenizer is not None else loaded.tokenizer
    whole = not sample and (texts_or_blocks is not None or settings.corpus not in (NOISE, EMBEDDED))
    if settings.tokenizer is not None:
        corpus = Corpus.parse(settings.corpus, settings.text_field) if is_trained(settings.tokenizer) else None
        tokenizer = load_tokenizer(settings.tokenizer, corpus=corpus)
    batches = batches_of(
        texts_or_blocks,
        model,
        tokenizer,
        corpus=settings.corpus,
        text_field=settings.text_field,
        sequence_length=settings.sequence_length,
        sequences=settings.sequences or (None if whole else _SEQUENCES),
        notes=notes,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )
    unread = notes[len(loaded.notes) :] if whole else []
    if reads_images(model) and texts_or_blocks is None and settings.corpus in (NOISE, EMBEDDED):
        notes.append(_GAUSSIAN)
    structure = structure_of(model, batches[0], layers=settings.layers)
    base = base_of(model, structure, batches[0])
    device = next(model.parameters()).device
    with evaluating(model):
        structure = prove(structure, {name: tensor.to(device) for name, tensor in batches[0].items()}, base)
    notes += structure.notes
    new = [] if isinstance(model_or_path, nn.Module) or reads_images(model) else new_head(model, structure)
    warnings = [_WITHOUT_HEAD.format(f"{', '.join(new[:3])}{' ...' if len(new) > 3 else ''}")] if new else []
    warnings += filter(None, [not_bytes(settings.tokenizer, token_rows(model))])
    return Context(
        model=model,
        base=base,
        structure=structure,
        batches=batches,
        tokenizer=tokenizer,
        notes=notes,
        state=state,
        warnings=warnings,
        new_weights=new,
        whole=whole,
        requested=not sample and (settings.sequences is not None or settings.tolerance is not None),
        tolerance=None if sample else settings.tolerance,
        unread=unread,
    )


def _loaded(model_or_path: nn.Module | str | Path, settings: ProbeSettings) -> Loaded:
    if not isinstance(model_or_path, nn.Module):
        return load(text("checkpoint", model_or_path), dtype=settings.dtype, device=checked_device(settings.device))
    refuse_meta(model_or_path)
    return Loaded(model=model_or_path)


def refuse_meta(model: nn.Module) -> None:
    """Raise UserError if a weight has no values (on the meta device)."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(f"model: the weight {name!r} is on the meta device. Load the model's weights first.")


def structure_of(model: nn.Module, inputs: dict[str, torch.Tensor], *, layers: str | None = None) -> Structure:
    """Find a model's layers with a small part of a batch. Raises UserError if the forward pass fails."""
    parts = getattr(model, "base_model", model)
    two = all(isinstance(getattr(parts, name, None), nn.Module) for name in ("encoder", "decoder"))
    if two and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UserError(
            f"model: {type(model).__name__} is an encoder with a decoder. Probe one part from Python: "
            "lamina.probe(model.get_encoder(), ...)"
        )
    device = next(model.parameters()).device
    tiny = {name: (t[:1, :8] if name == "input_ids" else t[:1]).to(device) for name, t in inputs.items()}
    try:
        with torch.no_grad():
            forward(model, tiny)
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"model: {type(model).__name__} does not run on {', '.join(tiny)} alone ({text}). Choose a decoder, an "
            "encoder or a vision model."
        ) from error
    return find_structure(model, tiny, layers=layers)


def new_head(model: nn.Module, structure: Structure) -> list[str]:
    """Return the names of the head's weights that the checkpoint lacks.

    Raises UserError if the checkpoint lacks the embedding, because every hidden state would be random.
    """
    named = dict(model.named_parameters())
    read = {name for name, parameter in named.items() if getattr(parameter, _READ, False)}
    new = [name for name in named if name not in read] if read else []  # none of them: not from a checkpoint
    embedding = set() if structure.embedding is None else {id(p) for p in structure.embedding.parameters()}
    for name in new:
        if id(named[name]) in embedding:
            raise UserError(f"checkpoint: the embedding {name!r} is missing. Choose a complete checkpoint.")
    base = getattr(model, "base_model", model)
    inside = set(map(id, base.parameters() if isinstance(base, nn.Module) else named.values()))
    return [name for name in new if id(named[name]) not in inside]
