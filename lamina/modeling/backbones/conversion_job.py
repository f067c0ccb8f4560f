"""The conversion of a saved model into a new folder: converted, verified, then put in its place as a whole."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import TypedDict

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging
from transformers.utils.hub import cached_file

from lamina.core.architectures import Target, conversions
from lamina.errors import UserError
from lamina.jobs import folder as job_folder
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json
from lamina.jobs.kinds import Kind
from lamina.jobs.model_folder import model_folder
from lamina.modeling.backbones import conversion
from lamina.modeling.backbones.conversion_job import equivalent
from lamina.modeling.backbones.loading import load_weights, read_config
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.modeling_lamina import LaminaForCausalLM

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
# Logits that differ by more than this part of the largest are another model's; a correct conversion gives 0.0.
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1


class ConversionRecord(TypedDict):
    """The content of conversion.json. ``model_type`` is that of transformers' model, ``backbone`` that of Lamina's."""

    source: str
    to: Target
    model_type: str
    backbone: str
    placement: str
    placement_options: dict[str, object]
    num_layers: int
    dtype: str
    largest_difference: float | None


def convert(
    source: str, output: Path, *, to: Target | None, dtype: str, overwrite: bool, verify: bool
) -> ConversionRecord:
    """Convert a saved model into a new folder. If it cannot, raises UserError and leaves ``output`` as it was.

    Args:
        source: a folder with config.json and safetensors, a run's folder, or a name on the hub.
        output: a new or empty folder.
        to: the form to convert to; by default the one that the source does not have.
        dtype: of the weights; "auto" keeps the checkpoint's.
        overwrite: delete the files that Lamina wrote into ``output`` earlier.
        verify: load what was written and compare its logits with the source's.
    """
    job_folder.refuse(output, resume=False, overwrite=overwrite)
    source = str(model_folder(source))
    if Path(source).exists() and output.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise UserError(f"output: {str(output)!r} holds the source {source!r} (allowed: another folder)")
    logging.disable_progress_bar()
    to = _target(source, to)
    model = conversion.load(source, dtype=dtype)
    converted = _converted(model, to)
    record = _record(source, to, *((converted, model) if to == "lamina" else (model, converted)))
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        _copy_tokenizer(source, draft)
        converted.save_pretrained(draft)
        del converted  # never more than two copies of the weights
        if verify:
            again, _ = load_weights(draft, read_config(draft, "output"), AutoModelForCausalLM, "output", extra=False)
            record["largest_difference"] = _verified_difference(model, again, record["backbone"])
        write_json(draft / "conversion.json", record)
        write_json(draft / "environment.json", environment(seed=0, kind=Kind.MODEL))
        with job_folder.lock(output):
            job_folder.claim(output, resume=False, overwrite=overwrite)
            for path in sorted(draft.iterdir()):
                path.rename(output / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return record


def _target(source: str, to: Target | None) -> Target:
    """The form to convert to. Raises UserError, before the weights are read, if the source cannot be converted."""
    config = conversion.read_config(source)
    form: Target = "lamina" if isinstance(config, LaminaConfig) else "transformers"
    other: Target = "transformers" if form == "lamina" else "lamina"
    if to == form:
        raise UserError(f"--to: {source!r} is a {to} checkpoint already (allowed: {other})")
    return other


def _converted(model: PreTrainedModel, to: Target) -> PreTrainedModel:
    if to == "lamina":
        return conversion.from_transformers(model)
    assert isinstance(model, LaminaForCausalLM)
    return equivalent(model)


def _record(source: str, to: Target, ours: PreTrainedModel, theirs: PreTrainedModel) -> ConversionRecord:
    config = ours.config
    assert isinstance(config, LaminaConfig)
    assert config.plan is not None
    return {
        "source": source,
        "to": to,
        "model_type": theirs.config.model_type,
        "backbone": backbone_of(config).model_type,
        "placement": config.plan["placement"],
        "placement_options": config.plan["options"],
        "num_layers": len(config.plan["layers"]),
        "dtype": str(ours.dtype).removeprefix("torch."),
        "largest_difference": None,
    }


@torch.no_grad()
def largest_difference(
    first: PreTrainedModel, second: PreTrainedModel, *, blocks: int = 4, length: int = 64, seed: int = 0
) -> tuple[float, float]:
    """The largest absolute difference of two models' logits on random tokens, and the first one's largest logit.

    ``blocks`` blocks of ``length`` tokens (fewer if the model's context is shorter), drawn from a separate generator.
    """
    config = backbone_of(first.config)
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    generator = torch.Generator().manual_seed(seed)
    difference = largest = 0.0
    for _ in range(blocks):
        ids = torch.randint(config.vocab_size, (1, length), generator=generator)
        logits, others = (
            m.eval()(input_ids=ids.to(m.device), use_cache=False).logits.float().cpu() for m in (first, second)
        )
        if not (torch.isfinite(logits).all() and torch.isfinite(others).all()):
            return float("nan"), float("nan")
        difference = max(difference, (logits - others).abs().max().item())
        largest = max(largest, logits.abs().max().item())
    return difference, largest


def _verified_difference(model: PreTrainedModel, again: PreTrainedModel, backbone: str) -> float:
    """The largest difference between the source's logits and the written model's. Raises UserError if it is large."""
    difference, largest = largest_difference(model, again)
    if math.isnan(difference):
        raise UserError(
            "verify: the logits are not finite, so they cannot be compared (--no-verify converts unchecked)"
        )
    half = model.dtype.itemsize < 4 and (again.dtype != model.dtype or conversions()[backbone].gain_in_float32)
    if difference > largest * (HALF_TOLERANCE if half else TOLERANCE):
        raise UserError(
            f"verify: the logits differ by up to {difference:.3g} (the largest is {largest:.3g}); nothing was written "
            "(--no-verify converts unchecked)"
        )
    return difference


def _copy_tokenizer(source: str, target: Path) -> None:
    """Copy the tokenizer's files unchanged from a folder or the hub's cache."""
    for name in TOKENIZER_FILES:
        try:
            stored = cached_file(
                source,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError:
            stored = None
        if stored is not None:
            shutil.copyfile(stored, target / name)
