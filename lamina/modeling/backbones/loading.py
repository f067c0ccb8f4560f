"""Load saved models, and check their files first.

Weights are safetensors. Lamina unpickles nothing, and runs a checkpoint's code only with ``trust_remote_code``.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from lamina.core.architectures import ROLES
from lamina.core.hub_access import local_when_unreachable, refuse_missing_model
from lamina.core.registry import Registry
from lamina.core.values import in_order, refuse_special, whole_number
from lamina.errors import UserError, one_line, unknown
from lamina.jobs.manifest import refuse_damaged
from lamina.modeling.backbones.stored import (
    INDEX,
    WEIGHTS,
    Stored,
    kind_of,
    pickled_tensors,
    read_json,
    refuse_foreign,
    refuse_foreign_dtypes,
    refuse_tensors,
    stored_tensors,
)
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.modeling_lamina import adapter_of
from lamina.placements import Plan
from lamina.placements.registry import PLACEMENTS

# The fields of a configuration that must be positive whole numbers.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_layers", "num_attention_heads", "num_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)

# Installed packages that register model types with transformers. Lamina imports these packages if transformers does
# not know a configuration's model type.
_PACKAGES: Registry[None] = Registry("backbone", plugins="lamina.backbones")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "source.spm", "tokenizer_config.json"),
)
_CHOOSING = re.compile(r"implementation|kernel")  # in the names of fields that choose code
_FLASH = re.compile(r"flash_attention_\d+")
_OF_THE_HUB = ("sonicmoe", "deepgemm")  # experts whose kernels transformers fetches from the hub
ModelClass = type[PreTrainedModel] | type[_BaseAutoModelClass]
NOT_STORED = "is not in the checkpoint"


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' messages and progress bars inside the context."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


def read_config(
    path: str | Path, field: str, *, trust_remote_code: bool = False, weights: bool = True, **more: object
) -> PreTrainedConfig:
    """Read the configuration of a saved model from a folder or the hub, and check the folder.

    This function compares the files with the manifest, and the tensors' formats with the configuration. Raises
    UserError for a configuration that makes transformers fetch code.

    Args:
        path: a folder with config.json, or a name on the hub.
        field: the name at the beginning of error messages, such as "model".
        trust_remote_code: whether to run the code that the configuration asks for.
        weights: whether the caller also loads the weights. A Lamina model then needs a norm placement.
        more: further arguments of ``AutoConfig.from_pretrained``.

    Raises:
        UserError: for a damaged folder, a missing configuration, an unknown model type, an invalid field, a field that
            asks for code on the hub, or a quantized tensor without a quantization_config.
    """
    name, folder = str(path), Path(path)
    source = f"{field} {name!r}: config.json"
    refuse_special(field, name)
    if not name.strip():
        raise UserError(f"{field}: '' is not a path. Give a folder with config.json.")
    if folder.is_file():
        raise UserError(f"{field}: {name!r} is a file. Give a folder with config.json and model.safetensors.")
    if weights and folder.is_dir():
        refuse_damaged(folder)
    if not more:
        data = _read_fields(path, field, source)
        if not trust_remote_code:
            refuse_fetched(data, source)
            if (adapter := folder / ADAPTER_CONFIG_NAME).is_file():  # transformers loads the adapter with the model
                beside = f"{field} {name!r}: {adapter.name}"
                refuse_fetched(read_json(adapter, beside), beside)
        _check_type(data, source, trust_remote_code)
        _check_sizes(data, source)
    with quiet():
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **more)
        except ImportError as error:
            allowed = ". Run: pip install gguf" if "gguf" in str(error) else ""
            raise UserError(f"{field} {name!r}: {one_line(error)}{allowed}") from error
        except Exception as error:
            raise UserError(f"{source}: {one_line(error)}") from error
    heads, shared = (getattr(backbone_of(config), f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise UserError(
            f"{source}: num_key_value_heads: {shared} does not divide num_attention_heads, {heads}. "
            f"Set num_key_value_heads to a divisor of {heads}."
        )
    check_adapter(backbone_of(config), f"{source}: ")
    _check_quantization(getattr(config, "quantization_config", None), source)
    if weights and any((folder / file).is_file() for file in (WEIGHTS, INDEX)):
        refuse_foreign_dtypes(stored_tensors(folder, field) or {}, config, f"{field} {name!r}:")
    if isinstance(config, LaminaConfig) and weights:
        if config.plan is None:
            raise UserError(f"{source} has no field 'plan'. Give a complete Lamina checkpoint.")
        _check_plan(config.plan, source)
    return config


def _check_plan(plan: dict, source: str) -> None:
    try:
        Plan.from_dict(plan)
    except UserError:
        try:
            PLACEMENTS.names()  # imports the packages
            Plan.from_dict(plan)
        except UserError as error:
            norm = " For your own norm, import the norm's module first, or install its package." * (
                "kind:" in str(error)
            )
            raise UserError(f"{source}: {one_line(str(error))}{norm}") from None


def refuse_scores(config: PreTrainedConfig, source: str) -> None:
    """Raise UserError for a classifier, which can't continue a text. The error message begins with ``source``."""
    for name in config.architectures or ():
        if name.endswith("Classification"):
            raise UserError(f"{source} is a {name}, which returns scores. Give a model that generates text.")


def _read_fields(path: str | Path, field: str, source: str) -> dict[str, object]:
    name, folder = str(path), Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            models = in_order(str(config.parent) for config in folder.glob("*/config.json"))
            such = f", such as {models[-1]!r}" if models else ""
            raise UserError(
                f"{field}: {name!r} holds no saved model: config.json is missing. Give a folder with config.json{such}."
            )
        return read_json(folder / "config.json", source)
    refuse_missing_model(field, name)
    with local_when_unreachable():
        return PreTrainedConfig.get_config_dict(name)[0]


def check_adapter(config: PreTrainedConfig, says: str) -> None:
    try:
        roles = adapter_of(config).roles
    except ValueError as error:
        raise UserError(f"{says}{one_line(error)}") from None
    for name, role in roles.items():
        if role not in ROLES.values():
            raise UserError(f"{says}adapter: roles: {name}: {unknown('role', role, set(ROLES.values()))}")


def _check_quantization(requested: object, source: str) -> None:
    """Raise UserError for an unknown quantization method, which transformers would ignore."""
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
    registered = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if not registered and code:
        if trust_remote_code:
            return
        requested = code.get("AutoConfig") if isinstance(code, Mapping) else code
        raise UserError(
            f"{source} needs code from the checkpoint ({one_line(requested)}), which Lamina does not run here. Use "
            "`lamina generate --trust-remote-code`, or load the model yourself in Python."
        )
    if not isinstance(model_type, str):
        raise UserError(f"{source}: model_type is {model_type!r}. Give the name of a model type of transformers.")
    if not registered:
        raise UserError(f"{source}: {unknown('model_type', model_type, transformers.CONFIG_MAPPING)}")
    if model_type == LaminaConfig.model_type:
        inner = data.get("backbone_config")
        if not isinstance(inner, Mapping):
            raise UserError(f"{source}: backbone_config is {kind_of(inner)}. Give the backbone's configuration.")
        _check_type({"model_type": inner.get("model_type")}, f"{source}: backbone_config", trust_remote_code)


def refuse_fetched(data: Mapping[str, object], source: str) -> None:
    """Raise UserError for a field, at any level, that makes transformers fetch code from the hub."""
    for path, value in _texts(data):
        if _CHOOSING.search(path) is None:
            continue
        name = value.rpartition("|")[2]
        fetched = "/" in name or (name in _OF_THE_HUB and "experts" in path) or _falls_back(name)
        if fetched:
            allowed = "eager, batched_mm, grouped_mm" if "experts" in path else "eager, sdpa, flex_attention"
            raise UserError(
                f"{source}: {one_line(path)}: {one_line(repr(value))} is code on the hub, which Lamina does not run "
                f"here. Set this field to one of {allowed}, or use `lamina generate --trust-remote-code`."
            )
    core = data.get("megatron_core")
    if (
        data.get("megatron_config") is not None and core != "megatron.core"
    ):  # peft would import the module of an adapter
        raise UserError(f"{source}: megatron_core: {one_line(repr(core))}. Set megatron_core to 'megatron.core'.")


def _falls_back(name: str) -> bool:
    """Return whether transformers would use a kernel from the hub because a package is not installed."""
    packages = ("kernels", "flash_attn", "flash_attn_interface")
    kernels, *installed = (importlib.util.find_spec(package) is not None for package in packages)
    return _FLASH.fullmatch(name) is not None and kernels and not any(installed)


def _texts(data: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each string in JSON data with its path, such as "a.b". A path has no list indices."""
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, Mapping):
        for name, value in data.items():
            yield from _texts(value, f"{path}.{name}" if path and name else path or str(name))
    elif isinstance(data, list):
        for value in data:
            yield from _texts(value, path)


def _check_sizes(data: Mapping[str, object], source: str) -> None:
    for name, value in data.items():
        if name in ("backbone_config", "text_config") and isinstance(value, Mapping):
            _check_sizes(value, f"{source}: {name}")
        elif name in _SIZES and isinstance(value, bool | int | float | str | dict):
            whole_number(name, value, says=f"{source}: ")


def load_weights(
    path: str | Path,
    config: PreTrainedConfig,
    cls: ModelClass,
    field: str,
    *,
    dtype: str | torch.dtype = "auto",
    pickles: bool = False,
    trust_remote_code: bool = False,
    optional: Callable[[PreTrainedModel, str], bool] | None = None,
    extra: bool = True,
    **more: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model in evaluation mode. Return the model, and the names of the tensors that the checkpoint lacks.

    Args:
        path: a folder with weights, or a name on the hub.
        config: the configuration from ``read_config``.
        cls: the model class or Auto class.
        field: the name at the beginning of error messages, such as "model".
        dtype: the dtype of the weights. "auto" keeps the checkpoint's dtype.
        pickles: whether to read the tensors of a .bin file if there is no safetensors file.
        trust_remote_code: whether to run the checkpoint's code.
        optional: a function (model, tensor name) that returns whether the checkpoint may lack the tensor.
        extra: whether to ignore a head in the checkpoint that the model does not have.
        more: further arguments of ``from_pretrained``.

    Raises:
        UserError: for a tensor that is missing, extra, not finite or wrongly shaped, and for an unreadable file.
    """
    name, folder = str(path), Path(path)
    source = f"{field} {name!r}"
    stored = stored_tensors(folder, field, pickles=pickles) if folder.is_dir() and not more else None
    if stored is not None:
        _check_room(config, cls, stored, f"{source}: config.json")
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True, **more}
    options |= {"ignore_mismatched_sizes": True}  # the lines below raise an error for these tensors
    if "gguf_file" not in more:
        options["config"] = config
    if stored is not None:
        options["use_safetensors"] = True
    model, info = _from_pretrained(name, cls, options, source)
    for key, stored, expected in sorted(info["mismatched_keys"]):
        raise UserError(
            f"{source}: tensor {one_line(repr(key))}: its shape is {list(stored)}, but the configuration asks for "
            f"{list(expected)}"
        )
    if errors := [*info.get("error_msgs", ()), *info.get("conversion_errors", ())]:
        raise UserError(f"{source}: {one_line(errors[0])}")
    missing = sorted(info["missing_keys"])
    refuse_tensors(f"{source}: missing", [k for k in missing if not (optional and optional(model, k))], NOT_STORED)
    if stored is None:  # for a name on the hub, the files are now in the cache
        stored = {} if more else pickled_tensors(folder) if folder.is_dir() else _cached_tensors(name, field)
    refuse_foreign(model, stored, info["unexpected_keys"], source)
    if not extra:
        refuse_tensors(
            f"{source}: extra", info["unexpected_keys"], f"does not belong to the model type {config.model_type!r}"
        )
    check_finite(model, field)
    return model.eval(), missing


def _from_pretrained(
    name: str, cls: ModelClass, options: dict[str, Any], source: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    with quiet():
        try:
            return cast(tuple[PreTrainedModel, dict[str, Any]], cls.from_pretrained(name, **options))
        except Exception as error:
            if type(error).__name__ == "UnpicklingError":
                raise UserError(f"{source}: its .bin file holds more than tensors (allowed: safetensors)") from None
            raise UserError(f"{source}: {one_line(error)}") from error


def _cached_tensors(name: str, field: str) -> dict[str, Stored]:
    config = try_to_load_from_cache(name, "config.json")
    folder = Path(config).parent if isinstance(config, str) else None
    if folder is None or not any((folder / file).is_file() for file in (WEIGHTS, INDEX)):
        return {}
    return stored_tensors(folder, field) or {}


def _check_room(config: PreTrainedConfig, cls: ModelClass, tensors: Mapping[str, Stored], source: str) -> None:
    """Raise UserError if the configuration describes a far larger model than the files. Allocate no memory."""
    stored = sum(math.prod(tensor.shape) for tensor in tensors.values())
    text = backbone_of(config)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > max(1024, len(tensors)):
        raise UserError(
            f"{source}: num_hidden_layers is {layers}, but the checkpoint has only {len(tensors)} tensors. Give the "
            "configuration of these weights."
        )
    width, vocabulary = getattr(text, "hidden_size", 1), getattr(text, "vocab_size", 1)
    if isinstance(width, int) and isinstance(vocabulary, int) and width * vocabulary > max(2 * stored, 2**27):
        raise UserError(
            f"{source}: config.json asks for an embedding of {vocabulary} tokens and width {width}, but the "
            f"checkpoint has only {stored} values. Give the configuration of these weights."
        )
    needed = 0
    try:
        with torch.device("meta"), quiet():
            make = cast("Callable[[PreTrainedConfig], nn.Module]", getattr(cls, "from_config", cls))
            needed = sum(parameter.numel() for parameter in make(config).parameters())
    except Exception as error:
        raise UserError(f"{source}: {one_line(error)}") from error
    if needed > max(2 * stored, 2**27):
        raise UserError(
            f"{source} describes a model with {needed} parameters, but the weights have {stored} values. Give the "
            "configuration of these weights."
        )


def check_finite(model: nn.Module, field: str) -> None:
    """Raise UserError for NaN or infinite values. The error message names the weight and the first value's position."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter.detach()).all()):
            bad = ~torch.isfinite(parameter.detach())
            first = tuple(int(i) for i in bad.nonzero()[0])
            raise UserError(
                f"{field}: the weight {name!r} holds {int(bad.sum())} values that are not finite, the first at "
                f"{list(first)}. Give another checkpoint."
            )


def load_tokenizer(
    path: str | Path, config: PreTrainedConfig, field: str, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a model's folder. Raises UserError if it is missing or has more tokens than the model."""
    name, folder = str(path), Path(path)
    if folder.is_dir():
        present = [file for file in TOKENIZER_FILES if (folder / file).is_file()]
        if not present or present == ["tokenizer_config.json"]:
            raise UserError(
                f"{field}: {name!r} holds no tokenizer. Name a tokenizer with --tokenizer, or give a folder with "
                "tokenizer.json."
            )
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            tokenizer.get_vocab()
        except Exception as error:
            raise UserError(
                f"{field} {name!r}: Lamina cannot read its tokenizer ({one_line(error)}). Give another folder."
            ) from error
    check_vocabulary(tokenizer, config, f"{field} {name!r}: its tokenizer")
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, which: str) -> None:
    """Raise UserError if a text can become a token that the model lacks. ``which`` names the tokenizer.

    A special token outside the model's vocabulary does no harm, unless the tokenizer adds the token to each text. The
    tokenizer ``bytes`` has such a token for a model with a vocabulary of 256.
    """
    size = getattr(backbone_of(config), "vocab_size", None)
    ids = {*tokenizer.get_vocab().values()}
    if not ids:
        raise UserError(f"{which} has no tokens. Give another folder.")
    used = (ids - {*tokenizer.all_special_ids}) | {*tokenizer("")["input_ids"]}
    if isinstance(size, int) and max(used, default=-1) >= size:
        raise UserError(
            f"{which} has {max(ids) + 1} tokens, but the model has only {size}. Give the model's own tokenizer."
        )
