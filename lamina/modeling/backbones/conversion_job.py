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
from lamina.jobs.manifest import model_folder
from lamina.jobs.names import ENVIRONMENT
from lamina.modeling.backbones import conversion
from lamina.modeling.backbones.loading import load_weights, read_config
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
# Logits that differ by more than this part of the largest are another model's; a correct conversion gives 0.0.
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1


class ConversionRecord(TypedDict):
    """The content of conversion.json; ``model_type`` is transformers' model type, ``backbone`` the one in Lamina."""

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
    is_ours = isinstance(conversion.read_config(source), LaminaConfig)
    form, other = ("lamina", "transformers") if is_ours else ("transformers", "lamina")
    if to == form:
        raise UserError(f"--to: {source!r} is a {to} checkpoint already (allowed: {other})")
    model = conversion.load(source, dtype=dtype)
    converted = conversion.to_transformers(model) if is_ours else conversion.from_transformers(model)
    ours, theirs = (model, converted) if is_ours else (converted, model)
    record: ConversionRecord = {
        "source": source,
        "to": other,
        "model_type": theirs.config.model_type,
        "backbone": backbone_of(ours.config).model_type,
        "placement": ours.config.plan["placement"],
        "placement_options": ours.config.plan["options"],
        "num_layers": len(ours.config.plan["layers"]),
        "dtype": str(ours.dtype).removeprefix("torch."),
        "largest_difference": None,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        for name in TOKENIZER_FILES:
            if (stored := _stored(source, name)) is not None:
                shutil.copyfile(stored, draft / name)
        converted.save_pretrained(draft)
        del converted, ours, theirs  # never more than two copies of the weights
        if verify:
            again, _ = load_weights(draft, read_config(draft, "output"), AutoModelForCausalLM, "output", extra=False)
            record["largest_difference"] = _verified_difference(model, again, record["backbone"])
        write_json(draft / "conversion.json", record)
        write_json(draft / ENVIRONMENT, environment(seed=0, kind=Kind.MODEL))
        with job_folder.hold(output, overwrite=overwrite):
            for path in sorted(draft.iterdir()):
                path.rename(output / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return record


@torch.no_grad()
def largest_difference(first: PreTrainedModel, second: PreTrainedModel) -> tuple[float, float]:
    """Return the largest absolute difference of two models' logits, and the first one's largest logit.

    On 4 blocks of 64 random tokens (fewer if the model's context is shorter), drawn from a separate generator.
    """
    config = backbone_of(first.config)
    length = min(64, getattr(config, "max_position_embeddings", None) or 64)
    generator = torch.Generator().manual_seed(0)
    difference = largest = 0.0
    for _ in range(4):
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
    """Compare the written model's logits with the source's. Raises UserError if they differ much."""
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


def _stored(source: str, name: str) -> str | None:
    """Return the path of a file in a folder or in the hub's cache; None if there is none."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        return cached_file(source, name, **quiet)
    except OSError:
        return None
