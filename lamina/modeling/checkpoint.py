"""Load models from checkpoints of Lamina or transformers. Lamina reads only tensors from a pickled file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from lamina.core.hub_access import local_when_unreachable
from lamina.core.json_types import Json
from lamina.core.values import DTYPES, one_of, refuse_special
from lamina.errors import UserError
from lamina.jobs.manifest import model_folder
from lamina.jobs.names import CONFIG, RESULT
from lamina.modeling import modeling_lamina
from lamina.modeling.backbones.loading import ModelClass, load_weights, read_config
from lamina.modeling.backbones.stored import stored_tensors

_HEADS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel")


@dataclass(kw_only=True)
class Loaded:
    """A model in evaluation mode, with notes for the user. ``run`` is the folder in which the model was trained, or
    None.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None = None
    run: Path | None = None
    notes: list[str] = field(default_factory=list)


def checked_device(name: str | None) -> str:
    """Return a device's name, or the fastest device for None. Raises UserError if PyTorch can't use the device."""
    if name is None:
        if torch.cuda.is_available():
            return "cuda"
        return "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device: PyTorch cannot use {name!r} ({str(error).splitlines()[0]}). Choose cpu, or this machine's device."
        ) from None
    return name


def load(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> Loaded:
    """Load a checkpoint.

    ``path`` is a saved model's folder, a run's folder, a .gguf file, or a name on the hub. The weights may be in
    safetensors, GGUF or .bin files. From a .bin file, torch reads only tensors (``weights_only``).

    Raises UserError if ``path`` has no checkpoint, or if the checkpoint needs custom code or has non-finite weights.
    """
    source, run, more = _located(path)
    with local_when_unreachable():
        config = read_config(source, "checkpoint", **more)
        one_of("dtype", dtype, DTYPES)
        # Old checkpoints have only .bin files. torch reads only tensors from these files.
        options: Json = {"dtype": getattr(torch, dtype, dtype), "pickles": True, "optional": _is_of_a_head, **more}
        loaded = load_weights(source, config, _class(config), "checkpoint", **options)
        tokenizer = _tokenizer(source, more)
    model: Any = loaded[0]  # transformers' decorators hide the signature of `to`
    missing = loaded[1]
    some = f"{', '.join(missing[:4])}{' ...' * (len(missing) > 4)}"
    notes = [f"Lamina drew random weights for tensors that the checkpoint lacks: {some}"] if missing else []
    return Loaded(model=model.to(device).eval(), tokenizer=tokenizer, run=run, notes=notes)


def config_of(path: str | Path) -> PreTrainedConfig:
    """Read a checkpoint's configuration without loading the weights (see ``load``)."""
    source, _, more = _located(path)
    with local_when_unreachable():
        return read_config(source, "checkpoint", **more)


def tokenizer_of(path: str | Path) -> PreTrainedTokenizerBase | None:
    """Load a checkpoint's tokenizer without the weights, or return None. Raises UserError for damaged weights."""
    source, _, more = _located(path)
    if Path(source).is_dir() and not more:
        stored_tensors(Path(source), "checkpoint", pickles=True)
    with local_when_unreachable():
        return _tokenizer(source, more)


def _located(path: str | Path) -> tuple[str, Path | None, Json]:
    """Return the path of the model, the run's folder (or None), and more arguments for ``from_pretrained``."""
    name, run = str(path), None
    folder = Path(path).expanduser()
    refuse_special("checkpoint", folder)
    if (folder / RESULT).is_file() or (folder / CONFIG).is_file():
        folder, run = model_folder(folder), folder
        if folder == run:
            saved = [p for p in (run / "checkpoints").glob("checkpoint-*") if p.name[11:].isdecimal()]
            saved = [p for p in saved if (p / "config.json").is_file()]
            if not saved:
                raise UserError(
                    f"checkpoint: the run {str(run)!r} has no saved model: the folders model/ and checkpoints/ are "
                    "missing. Choose a run that has saved a model."
                )
            folder = max(saved, key=lambda p: int(p.name[11:]))
    more: Json = {}
    if folder.suffix == ".gguf" and folder.is_file():
        folder, more["gguf_file"] = folder.parent, folder.name
    elif folder.is_dir() and not any(folder.glob("*.safetensors*")) and not any(folder.glob("*.bin*")):
        files = sorted(folder.glob("*.gguf"))
        if len(files) > 1:
            raise UserError(f"checkpoint: {name!r} holds {len(files)} .gguf files. Give the path of one file.")
        if files:
            more["gguf_file"] = files[0].name
    return (str(folder) if folder.exists() else name), run, more


def _is_of_a_head(model: PreTrainedModel, key: str) -> bool:
    """Return whether a tensor belongs to a head or a pooler, not to the body."""
    parts, prefix = key.split("."), model.base_model_prefix
    of_body = parts[0] == prefix or not (prefix and hasattr(model, prefix)) or any(part.isdigit() for part in parts)
    return "pooler" in parts or not of_body


def _class(config: PreTrainedConfig) -> ModelClass:
    for architecture in config.architectures or ():
        for module in (modeling_lamina, transformers):
            if hasattr(module, architecture):
                return getattr(module, architecture)
    return auto_class(config)


def auto_class(config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
    """Return the Auto class for a configuration, with a head if possible. Raises UserError if transformers has none."""
    for name in _HEADS:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    raise UserError(
        f"checkpoint: transformers has no model for model_type {config.model_type!r}. Choose another checkpoint."
    )


def _tokenizer(source: str, more: Json) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **more)
    except Exception:  # a vision model has none. For a text model, the code that reads text raises the error
        return None
    # without files, transformers makes a tokenizer for BERT that has only special tokens such as [UNK]
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None
