"""A saved model's configuration: read from a folder or the hub, and checked before anything is built of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import transformers
from transformers import AutoConfig, PreTrainedConfig

from lamina.core.architectures import ROLES
from lamina.core.registry import Registry
from lamina.core.values import whole_number
from lamina.errors import UserError, one_line, unknown
from lamina.modeling.backbones.loading import kind_of, quiet, read_json
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.modeling_lamina import adapter_of
from lamina.placements import Plan

# The fields of a configuration that must be sizes before anything is built of it.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_layers", "num_attention_heads", "num_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)

# Installed packages that register a model type of their own with transformers. They are imported when a configuration
# has a type that transformers does not know.
_PACKAGES: Registry[None] = Registry("backbone", plugins="lamina.backbones")


def read_config(
    path: str | Path, field: str, *, trust_remote_code: bool = False, weights: bool = True, **more: object
) -> PreTrainedConfig:
    """Read the configuration of a saved model from a folder or the hub.

    Args:
        path: a folder with config.json, or a name on the hub.
        field: the user's name for the path ("model", "checkpoint"); every message begins with it.
        trust_remote_code: run the code that the configuration asks for.
        weights: whether the weights will be loaded, too; a Lamina model then needs its plan.
        more: for ``AutoConfig.from_pretrained``.

    Raises:
        UserError: if there is no configuration, its model type is unknown, or a field is invalid.
    """
    name, place = str(path), Path(path)
    source = f"{field} {name!r}: config.json"
    if not name.strip():
        raise UserError(f"{field}: '' is no path (allowed: a folder with config.json)")
    if place.is_file():
        raise UserError(f"{field}: {name!r} is a file (allowed: a folder with config.json and model.safetensors)")
    if not more:
        data = _read_fields(path, field, source)
        _check_type(data, source, trust_remote_code)
        _check_sizes(data, source)
    with quiet():
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **more)
        except ImportError as error:
            allowed = " (allowed: pip install gguf)" if "gguf" in str(error) else ""
            raise UserError(f"{field} {name!r}: {one_line(error)}{allowed}") from error
        except Exception as error:
            raise UserError(f"{source}: {one_line(error)}") from error
    _check_heads(backbone_of(config), source)
    check_adapter(backbone_of(config), f"{source}: ")
    _check_quantization(getattr(config, "quantization_config", None), source)
    if isinstance(config, LaminaConfig) and weights:
        _check_plan(config, source)
    return config


def refuse_scores(config: PreTrainedConfig, source: str) -> None:
    """Raise UserError, which begins with ``source``, for a model that writes no text."""
    for name in config.architectures or ():
        if name.endswith("Classification"):
            raise UserError(f"{source} is a {name}, which gives scores (allowed: models that continue a text)")


def _read_fields(path: str | Path, field: str, source: str) -> dict[str, object]:
    name, place = str(path), Path(path)
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise UserError(f"{field}: {name!r} holds no saved model (config.json is missing)")
        return read_json(place / "config.json", source)
    try:
        return PreTrainedConfig.get_config_dict(name)[0]
    except Exception as error:
        raise UserError(f"{field}: {name!r} is no folder and no readable model on the hub") from error


def check_adapter(config: PreTrainedConfig, says: str) -> None:
    """Raise UserError, beginning with ``says``, if a backbone's ``lamina_adapter`` is not one."""
    try:
        roles = adapter_of(config).roles
    except ValueError as error:
        raise UserError(f"{says}{one_line(error)}") from None
    for name, role in roles.items():
        if role not in ROLES.values():
            raise UserError(f"{says}adapter: roles: {name}: {unknown('role', role, set(ROLES.values()))}")


def _check_heads(config: PreTrainedConfig, source: str) -> None:
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise UserError(f"{source}: num_key_value_heads: {shared} does not divide num_attention_heads, {heads}")


def _check_plan(config: LaminaConfig, source: str) -> None:
    if config.plan is None:
        raise UserError(f"{source} has no plan, so this is no whole Lamina checkpoint (allowed: one saved by Lamina)")
    try:
        Plan.from_dict(config.plan)
    except UserError as error:
        raise UserError(f"{source}: {one_line(str(error))}") from None


def _check_quantization(requested: object, source: str) -> None:
    """Raise UserError for an unknown method: transformers would ignore it and read the weights as plain ones."""
    if requested is None:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    method = (
        requested.get("quant_method") if isinstance(requested, Mapping) else getattr(requested, "quant_method", None)
    )
    name = getattr(method, "value", method)
    loads_in_bits = isinstance(requested, Mapping) and (requested.get("load_in_4bit") or requested.get("load_in_8bit"))
    if name not in KNOWN and not loads_in_bits and name != "bitsandbytes":
        raise UserError(f"{source}: quantization_config: {unknown('quant_method', str(name), KNOWN)}")


def _check_type(data: Mapping[str, object], source: str, trust_remote_code: bool) -> None:
    model_type, code = data.get("model_type"), data.get("auto_map")
    if isinstance(model_type, str) and model_type not in transformers.CONFIG_MAPPING:
        _PACKAGES.names()
    known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if not known and code:
        if trust_remote_code:
            return
        requested = code.get("AutoConfig") if isinstance(code, Mapping) else code
        raise UserError(
            f"{source} asks for code of its own ({one_line(requested)}), which is never run unasked "
            "(`lamina generate` takes --trust-remote-code; from Python load the model yourself)"
        )
    if not isinstance(model_type, str):
        raise UserError(f"{source}: model_type is {model_type!r} (allowed: the name of a model of transformers)")
    if not known:
        raise UserError(f"{source}: {unknown('model_type', model_type, transformers.CONFIG_MAPPING)}")
    if model_type == LaminaConfig.model_type:
        inner = data.get("backbone_config")
        if not isinstance(inner, Mapping):
            raise UserError(f"{source}: backbone_config is {kind_of(inner)} (allowed: the backbone's configuration)")
        _check_type({"model_type": inner.get("model_type")}, f"{source}: backbone_config", trust_remote_code)


def _check_sizes(data: Mapping[str, object], source: str) -> None:
    for name, value in data.items():
        if name in ("backbone_config", "text_config") and isinstance(value, Mapping):
            _check_sizes(value, f"{source}: {name}")
        elif name in _SIZES and isinstance(value, bool | int | float | str | dict):
            whole_number(name, value, says=f"{source}: ")
