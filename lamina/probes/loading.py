"""A checkpoint from a path: ours, transformers', a run's folder, a GGUF file. Only plain tensors are ever unpickled."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from lamina.data.network import local_when_unreachable, one_line
from lamina.digests import MANIFEST, refuse_damaged
from lamina.errors import UserError
from lamina.modeling import modeling_lamina

DTYPES = ("auto", "float32", "bfloat16", "float16")
_HEADS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel")


@dataclass(kw_only=True)
class Loaded:
    """A model in evaluation mode, its tokenizer where it has one, the run's folder it is from, and what to know."""

    model: nn.Module
    tokenizer: Any = None
    run: Path | None = None
    notes: list[str] = field(default_factory=list)


def load(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> Loaded:
    """Load a checkpoint: a folder with config.json, a run's folder, a .gguf file or a folder with one, a hub's name.

    The weights are safetensors, GGUF, or .bin files of tensors only (read with ``weights_only``).

    Raises:
        UserError: where it is no checkpoint, asks for code of its own, or holds NaN or infinite weights (says where).
    """
    name, run = str(path), None
    place = Path(path).expanduser()
    if (place / "result.json").is_file() or (place / "config.yaml").is_file():
        place, run = _of_run(place), place
    more: dict[str, Any] = {}
    if place.suffix == ".gguf" and place.is_file():
        place, more["gguf_file"] = place.parent, place.name
    elif place.is_dir() and not any(place.glob("*.safetensors*")) and not any(place.glob("*.bin*")):
        found = sorted(place.glob("*.gguf"))
        if len(found) > 1:
            raise UserError(f"checkpoint: {name!r} holds {len(found)} .gguf files (allowed: the path of one of them)")
        if found:
            more["gguf_file"] = found[0].name
    source = str(place) if place.exists() else name
    if place.is_dir():
        refuse_damaged(place)
    with local_when_unreachable():
        config = _config(source, name, more)
        model, notes = _model(source, name, config, dtype, more)
        tokenizer = _tokenizer(source, more)
    _check_weights(model)
    return Loaded(model=model.to(device).eval(), tokenizer=tokenizer, run=run, notes=notes)


def _of_run(folder: Path) -> Path:
    if (folder / "model" / "config.json").is_file() or (folder / "model" / MANIFEST).is_file():
        return folder / "model"
    saved = [p for p in (folder / "checkpoints").glob("checkpoint-*") if p.name[11:].isdecimal()]
    saved = [p for p in saved if (p / "config.json").is_file()]
    if not saved:
        raise UserError(f"checkpoint: the run {str(folder)!r} has saved no model yet (neither model/ nor checkpoints/)")
    return max(saved, key=lambda p: int(p.name[11:]))


def _config(source: str, name: str, more: dict[str, Any]) -> PreTrainedConfig:
    place = Path(source)
    if place.is_file():
        raise UserError(f"checkpoint: {name!r} is a file (allowed: a folder with config.json, or a .gguf file)")
    if place.is_dir() and not more and not (place / "config.json").is_file():
        raise UserError(f"checkpoint: {name!r} holds no saved model (config.json is missing)")
    try:
        if not more:
            data, _ = PreTrainedConfig.get_config_dict(source)
            known = str(data.get("model_type")) in transformers.CONFIG_MAPPING
            if not known and data.get("auto_map"):
                raise UserError(
                    f"checkpoint: {name!r} asks for code of its own ({data['auto_map'].get('AutoConfig')}), which is "
                    "never run (from Python, load the model yourself and pass it to lamina.probe)"
                )
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **more)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"checkpoint {name!r}: {one_line(error)} (allowed: pip install gguf)") from error
    except Exception as error:
        if not place.exists():
            raise UserError(f"checkpoint: {name!r} is no folder and no readable model on the hub") from error
        raise UserError(f"checkpoint {name!r}: config.json: {one_line(error)}") from error


def _model(
    source: str, name: str, config: PreTrainedConfig, dtype: str, more: dict[str, Any]
) -> tuple[nn.Module, list[str]]:
    if dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} (allowed: {', '.join(DTYPES)})")
    wanted: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        cls = _class(config)
        options = {"dtype": wanted, "trust_remote_code": False, "output_loading_info": True, **more}
        if not more:
            options["config"] = config
        model, info = cls.from_pretrained(source, **options)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, json.JSONDecodeError, ImportError) as error:
        raise UserError(f"checkpoint {name!r}: {one_line(error)}") from error
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":
            raise UserError(
                f"checkpoint {name!r}: its .bin file holds more than tensors (allowed: safetensors)"
            ) from None
        raise
    finally:
        transformers_logging.set_verbosity(level)
    missing = sorted(info["missing_keys"])
    notes = []
    if missing:
        layers = [key for key in missing if any(part.isdigit() for part in key.split("."))]
        if layers:
            raise UserError(f"checkpoint {name!r}: {len(missing)} tensors are missing, {layers[0]!r} the first")
        notes.append(f"not in the checkpoint, so random: {', '.join(missing[:4])}{' ...' * (len(missing) > 4)}")
    return model, notes


def _class(config: PreTrainedConfig) -> Any:
    """The class that saved the checkpoint, or the one with a head that its configuration has."""
    for architecture in config.architectures or ():
        for module in (modeling_lamina, transformers):
            if hasattr(module, architecture):
                return getattr(module, architecture)
    for name in _HEADS:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"no model is known for model_type {config.model_type!r}")


def _tokenizer(source: str, more: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **more)
    except Exception:  # a vision model has none; a text model without one is refused where text is to be read
        return None


def _check_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter.detach()).all()):
            bad = ~torch.isfinite(parameter.detach())
            first = tuple(int(i) for i in bad.nonzero()[0])
            raise UserError(
                f"checkpoint: the weight {name!r} holds {int(bad.sum())} values that are not finite, the first at "
                f"{list(first)} (allowed: finite weights)"
            )
