"""`lamina.probe`: from a model or a checkpoint to one frame per probe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lamina.core.values import text
from lamina.data.corpus import EMBEDDED
from lamina.errors import UserError
from lamina.modeling.checkpoint import Loaded, checked_device, load
from lamina.probes.engine.context import Context, RunState
from lamina.probes.engine.inputs import NOISE, Inputs, batches_of, reads_images
from lamina.probes.engine.new_weights import new_head
from lamina.probes.engine.registry import Probe, make_all
from lamina.probes.engine.running import run
from lamina.probes.engine.settings import ProbeSettings
from lamina.probes.structure.discovery import find_structure
from lamina.probes.structure.forward import base_of, forward
from lamina.probes.structure.proof import prove
from lamina.probes.structure.sites import Structure

logger = logging.getLogger(__name__)

_SEQUENCES = 64  # of the embedded corpus


def probe(
    model_or_path: nn.Module | str | Path,
    probes: str | Iterable[str | Probe] = "all",
    texts_or_blocks: Inputs = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> dict[str, pd.DataFrame]:
    """Measure what each layer of a model does: one tidy frame for each probe, by its name.

    Args:
        model_or_path: any transformers model, or a path as `lamina probe` takes it.
        probes: "all", or names (with options: ``angular_distance(tokens=all)``), or Probe objects.
        texts_or_blocks: texts, token blocks [sequences, tokens], or images [images, channels, height, width], all of
            which are measured (unless ``sequences`` or an option of the probe says otherwise); by default the corpus of
            the settings (the embedded one). The frames' columns ``sequences`` and ``tokens`` say how much a row is of.
        tokenizer: for texts; by default the checkpoint's.
        settings: those of `lamina probe`: sequence_length, sequences, batch_size, tolerance, layers, corpus, ...

    Raises:
        UserError: (a ValueError) for a path that is not a checkpoint, layers that cannot be found, text shorter than a
            block, or a probe that does not apply to the model. Of "all", such probes are left out.
    """
    chosen = make_all(probes)
    record = ProbeSettings.from_dict(settings)
    strict = not (isinstance(probes, str) and probes.strip() == "all")
    return measure(make_context(model_or_path, record, texts_or_blocks, tokenizer), chosen, record, strict=strict)


def measure(
    context: Context, probes: Sequence[Probe], settings: ProbeSettings, *, strict: bool = True, sampled: bool = True
) -> dict[str, pd.DataFrame]:
    """The probes' frames by name, with the model in evaluation mode. See ``run`` for ``strict`` and ``sampled``."""
    for warning in context.warnings:
        logger.warning(warning)
    model, training = context.model, context.model.training
    model.eval()
    try:
        return run(context, probes, tolerance=tolerance_of(context, settings), strict=strict, sampled=sampled)
    finally:
        model.train(training)


def tolerance_of(context: Context, settings: ProbeSettings) -> float:
    """The relative standard error at which the forward passes stop."""
    return settings.tolerance if settings.tolerance is not None else 0.0 if context.whole else 0.02


def make_context(
    model_or_path: nn.Module | str | Path,
    settings: ProbeSettings,
    texts_or_blocks: Inputs = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    sample: bool = False,
) -> Context:
    """Load the model, find its layers, read its inputs. Raises UserError.

    ``sample``: the inputs are Lamina's sample of a corpus, not the user's own, which probes measure whole.
    """
    loaded = _loaded(model_or_path, settings)
    model, notes = loaded.model, list(loaded.notes)
    state: RunState = {} if loaded.run is None else {"run": loaded.run}
    tokenizer = tokenizer if tokenizer is not None else loaded.tokenizer
    whole = not sample and (texts_or_blocks is not None or settings.corpus not in (NOISE, EMBEDDED))
    tokenizer = tokenizer if settings.tokenizer is None else _tokenizer(settings.tokenizer, settings)
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
    if whole:
        for note in notes[len(loaded.notes) :]:  # the user's own text, of which a part is not measured
            logger.warning(note)
    if reads_images(model) and texts_or_blocks is None and settings.corpus in (NOISE, EMBEDDED):
        notes.append("the images are Gaussian noise: pass real ones with --corpus to see what the model does with them")
    structure = structure_of(model, batches[0], layers=settings.layers)
    base = base_of(model, structure, batches[0])
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        structure = prove(structure, {name: tensor.to(device) for name, tensor in batches[0].items()}, base)
    finally:
        model.train(training)
    notes += structure.notes
    loaded_here = not isinstance(model_or_path, nn.Module) and not reads_images(model)
    new = new_head(model, structure) if loaded_here else []
    return Context(
        model=model,
        base=base,
        structure=structure,
        batches=batches,
        tokenizer=tokenizer,
        notes=notes,
        state=state,
        warnings=[_without_head(new)] if new else [],
        new_weights=new,
        whole=whole,
    )


def _loaded(model_or_path: nn.Module | str | Path, settings: ProbeSettings) -> Loaded:
    """The model that was passed in, or the one in a checkpoint."""
    if not isinstance(model_or_path, nn.Module):
        return load(text("checkpoint", model_or_path), dtype=settings.dtype, device=checked_device(settings.device))
    for name, parameter in model_or_path.named_parameters():
        if parameter.is_meta:
            raise UserError(f"model: the weight {name!r} is on the meta device (allowed: a model with weights)")
    return Loaded(model=model_or_path)


def _tokenizer(spec: str, settings: ProbeSettings) -> PreTrainedTokenizerBase:
    from lamina.data.corpus import Corpus
    from lamina.data.tokenizers import is_trained, load_tokenizer

    corpus = Corpus.parse(settings.corpus, settings.text_field) if is_trained(spec) else None
    return load_tokenizer(spec, corpus=corpus)


def _without_head(new: Sequence[str]) -> str:
    names = f"{', '.join(new[:3])}{' ...' if len(new) > 3 else ''}"
    return (
        f"The head is not in the checkpoint ({names}: newly initialized), so the model's predictions are random. "
        "Left out: gradients, layer_drop, logit_lens, and the losses of low_precision and bounds."
    )


def structure_of(model: nn.Module, inputs: dict[str, torch.Tensor], *, layers: str | None = None) -> Structure:
    """A model's structure from one small forward pass on a part of a batch. Raises UserError."""
    parts = getattr(model, "base_model", model)
    two = all(isinstance(getattr(parts, name, None), nn.Module) for name in ("encoder", "decoder"))
    if two and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UserError(
            f"model: {type(model).__name__} is an encoder and a decoder (allowed: one of them, which from Python is "
            "lamina.probe(model.get_encoder(), ...))"
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
            f"model: {type(model).__name__} could not be run on {', '.join(tiny)} alone: {text} (allowed: a model of "
            "one tower, a decoder, an encoder or a vision model)"
        ) from error
    return find_structure(model, tiny, layers=layers)
