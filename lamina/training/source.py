"""Start a run from a checkpoint: load the model, and complete the run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lamina.core.hub_access import local_when_unreachable
from lamina.core.json_types import Json
from lamina.data.tokenizers import not_bytes
from lamina.errors import UserError
from lamina.jobs.manifest import model_folder, refuse_as_output
from lamina.modeling.backbones import conversion, resolve_backbone
from lamina.modeling.building import make_plan
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.scaling import Scaling
from lamina.placements import Plan
from lamina.training.optimization.optimizer import scaling_of
from lamina.training.settings import PretrainSettings

DECIDED = ("placement", "backbone", "num_layers", "hidden_size", "num_heads", "untie_embeddings", "init", "tokenizer")
_Read: TypeAlias = tuple[Plan, Any]  # a checkpoint's plan and backbone; the backbone's fields differ by model
_SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _folder(source: str) -> str:
    inner = model_folder(source)
    return source if inner == Path(source) else str(inner)


def with_checkpoint(settings: PretrainSettings, given: Mapping[str, Any] | None = None) -> PretrainSettings:
    """Complete the settings from the checkpoint of ``from_model``. Raises UserError for a contradictory setting."""
    if settings.from_model is None:
        return settings
    folder = _folder(settings.from_model)
    refuse_as_output(settings.output, settings.from_model)
    plan, config = _read(folder)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    # on the hub, loading reports a missing tokenizer
    lacks_tokenizer = Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in files)
    options = ", ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in plan.options.items())
    stored: Json = {
        "placement": plan.placement + (f"({options})" if options else ""),
        "backbone": folder,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "untie_embeddings": False,
        "init": "recommended",
        "tokenizer": settings.tokenizer if lacks_tokenizer else folder,
    }
    if given is None:
        values = {name: getattr(settings, name) for name in DECIDED}
        given = {name: value for name, value in values.items() if value != settings.default(name)}
    rows = getattr(config, "vocab_size", None)
    if lacks_tokenizer and "tokenizer" not in given and (warning := not_bytes(settings.tokenizer, rows)):
        raise UserError(f"from: {settings.from_model!r} holds no tokenizer. {warning}")
    for name in DECIDED:
        if name in given and given[name] != stored[name] and not _same(name, given[name], stored, plan, config):
            raise UserError(
                f"{name}: {given[name]!r}, but the checkpoint {settings.from_model!r} has {stored[name]!r}. With "
                f"--from, leave {name} out."
            )
    return replace(settings, **stored)


def _same(name: str, value: Any, stored: Json, plan: Plan, config: Any) -> bool:
    """Return whether a setting has the same effect as the checkpoint's value, even if the two values differ."""
    if value is None:
        return True
    if name == "placement":
        return conversion.computed(make_plan(value, plan.num_layers)) == conversion.computed(plan)
    if name == "backbone":
        sizes = {"num_layers": stored["num_layers"], "hidden_size": stored["hidden_size"]}
        other = resolve_backbone(value, **sizes, num_heads=stored["num_heads"])
        return all(getattr(other, field, None) == getattr(config, field, None) for field in _SHAPE)
    if name == "untie_embeddings":
        return not value or not config.tie_word_embeddings
    if name == "tokenizer" and value != stored["tokenizer"]:
        from lamina.data.encoding import TextEncoder
        from lamina.data.tokenizers import load_tokenizer

        if value.startswith("bpe:"):
            return False  # a tokenizer trained on the new text is another tokenizer
        return (
            TextEncoder(load_tokenizer(value)).content_hash()
            == TextEncoder(load_tokenizer(stored["tokenizer"])).content_hash()
        )
    return False


def plan_of(settings: PretrainSettings, num_layers: int) -> Plan:
    """Return the norm placement of the checkpoint, or of the settings if there is no checkpoint."""
    scaling = scaling_of(settings) or Scaling()
    if settings.from_model is None:
        return make_plan(settings.placement, num_layers, **scaling.placement_options)
    plan = stored_plan(settings.from_model)
    scaling.check_options(plan.options)
    return plan


def stored_plan(source: str) -> Plan:
    return _read(_folder(source))[0]


def config_of(source: str, vocab_size: int | None = None) -> PreTrainedConfig:
    """Return the checkpoint's configuration. Raises UserError if the checkpoint's vocabulary is too small."""
    config: Any = resolve_backbone(_read(_folder(source))[1])
    if vocab_size is not None:
        check_vocabulary(config, vocab_size, source)
    return config


def check_vocabulary(config: PreTrainedConfig, vocab_size: int, source: str) -> None:
    """Raise UserError if the tokenizer has more tokens than the checkpoint's vocabulary."""
    if vocab_size > config.vocab_size:
        raise UserError(
            f"tokenizer: the tokenizer has {vocab_size} tokens, but the checkpoint {source!r} has a vocabulary "
            f"of {config.vocab_size}. Use the checkpoint's tokenizer."
        )


def load(source: str, config: PreTrainedConfig, head: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a checkpoint as a Lamina model in training mode, with the number of positions in ``config``."""
    folder = _folder(source)
    loaded: Any = conversion.load(folder, dtype=dtype, head=head)
    model = loaded if isinstance(loaded.config, LaminaConfig) else conversion.from_transformers(loaded)
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        backbone_of(model.config).max_position_embeddings = positions
    return model.train()


def _read(folder: str) -> _Read:
    file = Path(folder) / "config.json"
    return _read_once(folder, file.stat().st_mtime_ns if file.is_file() else None)


@lru_cache(maxsize=4)
def _read_once(folder: str, changed: int | None) -> _Read:
    """Read a checkpoint's norm placement and configuration, and cache them until the checkpoint changes."""
    with local_when_unreachable():
        config: Any = conversion.read_config(folder, field="from")
    if isinstance(config, LaminaConfig):
        if config.plan is None:
            raise UserError(
                f"from: {folder!r} has no plan (norm placement) in config.json. Choose a complete Lamina checkpoint."
            )
        return Plan.from_dict(config.plan), backbone_of(config)
    return conversion.own_plan(config), config
