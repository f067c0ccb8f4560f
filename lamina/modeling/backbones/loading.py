"""Loading of saved models from a path: one way to load weights and tokenizers, with one set of errors.

Whatever a folder holds, the result is the model or a UserError of one line. Weights are safetensors; nothing is
unpickled, and no code beside a checkpoint runs, unless the caller allows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import logging as transformers_logging

from lamina.core.architectures import ROLES
from lamina.core.registry import Registry
from lamina.core.values import whole_number
from lamina.errors import UserError, one_line, unknown
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.modeling_lamina import adapter_of
from lamina.placements import Plan
from lamina.placements.registry import PLACEMENTS

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LARGEST_JSON = 2**26  # bytes
Shapes = dict[str, tuple[int, ...]]
# The fields of a configuration that must be sizes before anything is built of it.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_layers", "num_attention_heads", "num_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)

# Installed packages that register a model type of their own with transformers. They are imported when a configuration
# has a type that transformers does not know.
_PACKAGES: Registry[None] = Registry("backbone", plugins="lamina.backbones")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "source.spm", "tokenizer_config.json"),
)
ModelClass = type[PreTrainedModel] | type[_BaseAutoModelClass]
NOT_STORED = "is not in the checkpoint"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' messages and progress bars inside the context: Lamina reports what matters in one line."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


def read_json(path: Path, source: str) -> dict[str, object]:
    """Read the object in a JSON file. Raises UserError, beginning with ``source``, if there is none."""
    if path.stat().st_size > _LARGEST_JSON:
        raise UserError(f"{source} has {path.stat().st_size} bytes (allowed: up to {_LARGEST_JSON})")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON ({one_line(error)})") from None
    if not isinstance(data, dict):
        raise UserError(f"{source} holds {kind_of(data)} (allowed: an object)")
    return data


def kind_of(value: object) -> str:
    """Describe the type of a JSON value in words."""
    names = {"NoneType": "nothing", "list": "a list", "dict": "an object", "str": "a text", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")


def stored_shapes(path: Path, field: str, *, pickles: bool = False) -> Shapes | None:
    """Return the shape of every tensor in a folder's safetensors files, by name; checks the files' headers.

    Returns None if there are only pickled weights and ``pickles`` allows them. Raises UserError naming the file that is
    missing, cut short, altered or outside the folder.
    """
    source = f"{field} {str(path)!r}:"
    if (path / WEIGHTS).is_file():
        return _header(path / WEIGHTS, source)
    if (path / INDEX).is_file():
        return _indexed(path, source)
    others = sorted(p.name for kind in (*PICKLES, "*.gguf", "*.h5") for p in path.glob(kind))
    if others and pickles:
        return None
    content = f"has its weights in {others[0]}" if others else "has no weights"
    raise UserError(f"{field}: {str(path)!r} {content} (allowed: {WEIGHTS}; nothing is ever unpickled)")


def _indexed(path: Path, source: str) -> Shapes:
    places = read_json(path / INDEX, f"{source} {INDEX}").get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise UserError(f"{source} {INDEX}: weight_map is not a table of tensors and files")
    shapes: Shapes = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise UserError(
                f"{source} {INDEX} names {one_line(repr(file))} (allowed: .safetensors files in its folder)"
            )
        if not (path / file).is_file():
            raise UserError(f"{source} {file} is missing ({INDEX} names it)")
        header = _header(path / file, source)
        lacking = sorted(k for k, v in places.items() if v == file and k not in header)
        if lacking:
            raise UserError(f"{source} {file} has no tensor {one_line(repr(lacking[0]))} ({INDEX} says so)")
        shapes |= header
    return shapes


def _header(file: Path, source: str) -> Shapes:
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: tuple(opened.get_slice(key).get_shape()) for key in list(opened.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{source} {file.name} is cut short or altered ({one_line(error)})") from None


def read_config(
    path: str | Path, field: str, *, trust_remote_code: bool = False, weights: bool = True, **more: object
) -> PreTrainedConfig:
    """Read the configuration of a saved model from a folder or the hub.

    Args:
        path: a folder with config.json, or a name on the hub.
        field: the user's name for the path ("model", "checkpoint"); every message begins with it.
        trust_remote_code: run the code that the configuration asks for.
        weights: whether the weights will also be loaded; a Lamina model then needs a plan.
        more: further arguments of ``AutoConfig.from_pretrained``.

    Raises:
        UserError: if there is no configuration, its model type is unknown, or a field is invalid.
    """
    name, place = str(path), Path(path)
    source = f"{field} {name!r}: config.json"
    if not name.strip():
        raise UserError(f"{field}: '' is not a path (allowed: a folder with config.json)")
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
    heads, shared = (getattr(backbone_of(config), f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise UserError(f"{source}: num_key_value_heads: {shared} does not divide num_attention_heads, {heads}")
    check_adapter(backbone_of(config), f"{source}: ")
    _check_quantization(getattr(config, "quantization_config", None), source)
    if isinstance(config, LaminaConfig) and weights:
        if config.plan is None:
            raise UserError(f"{source} has no plan (allowed: a whole Lamina checkpoint)")
        _check_plan(config.plan, source)
    return config


def _check_plan(plan: dict, source: str) -> None:
    """Raise UserError for an invalid plan; a norm kind that is unknown may come from an installed package."""
    try:
        Plan.from_dict(plan)
    except UserError:
        try:
            PLACEMENTS.names()  # imports the packages
            Plan.from_dict(plan)
        except UserError as error:
            norm = " (a norm of your own: import it before, or install its package)" * ("kind:" in str(error))
            raise UserError(f"{source}: {one_line(str(error))}{norm}") from None


def refuse_scores(config: PreTrainedConfig, source: str) -> None:
    """Raise UserError, beginning with ``source``, for a model that classifies and cannot continue a text."""
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
        raise UserError(f"{field}: {name!r} is neither a folder nor a readable model on the hub") from error


def check_adapter(config: PreTrainedConfig, says: str) -> None:
    """Raise UserError, beginning with ``says``, if a backbone's ``lamina_adapter`` is invalid."""
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
    """Load a model in evaluation mode; also return the names of the tensors that the checkpoint lacks.

    Args:
        path: a folder with weights, or a name on the hub.
        config: the model's configuration, as ``read_config`` returns it.
        field: the user's name for the path; every message begins with it.
        dtype: the dtype of the weights; "auto" keeps the checkpoint's.
        pickles: read a .bin file, tensors only, if there are no safetensors.
        optional: decides by name whether the checkpoint may lack a tensor of the model; without it, none may be
            missing.
        extra: whether the checkpoint may have tensors that the model does not use.
        more: further arguments of ``from_pretrained``.

    Raises:
        UserError: naming the first tensor that is missing, extra, of another shape, of a layer that the configuration
            does not have or not finite; the file that cannot be read; or the error of transformers.
    """
    name, place = str(path), Path(path)
    source = f"{field} {name!r}"
    shapes = stored_shapes(place, field, pickles=pickles) if place.is_dir() and not more else None
    if shapes is not None:
        _check_room(config, cls, shapes, f"{source}: config.json")
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True, **more}
    options |= {"ignore_mismatched_sizes": True}  # they are refused below, by name
    if "gguf_file" not in more:
        options["config"] = config
    if shapes is not None:
        options["use_safetensors"] = True
    model, info = _from_pretrained(name, cls, options, source)
    for key, stored, expected in sorted(info["mismatched_keys"]):
        raise UserError(
            f"{source}: tensor {one_line(repr(key))}: its shape is {list(stored)}, the configuration asks for "
            f"{list(expected)}"
        )
    if errors := [*info.get("error_msgs", ()), *info.get("conversion_errors", ())]:
        raise UserError(f"{source}: {one_line(errors[0])}")
    missing = sorted(info["missing_keys"])
    refuse_tensors(f"{source}: missing", [k for k in missing if not (optional and optional(model, k))], NOT_STORED)
    _refuse_more_layers(model, info["unexpected_keys"], source)
    if not extra:
        refuse_tensors(
            f"{source}: extra", info["unexpected_keys"], f"is not one of the model type {config.model_type!r}"
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


def refuse_tensors(source: str, keys: Iterable[str], why: str) -> None:
    """Raise UserError, beginning with ``source``, if ``keys`` is not empty; the message names the first ones."""
    names = sorted(keys)
    if names:
        more = f" (and {len(names) - 1} more: {', '.join(names[1:3])}{', …' if len(names) > 3 else ''})"
        raise UserError(f"{source} tensor {names[0]!r}: it {why}{more if len(names) > 1 else ''}")


def _check_room(config: PreTrainedConfig, cls: ModelClass, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise UserError, before allocating anything, if the configuration's model is far larger than the files."""
    stored = sum(math.prod(shape) for shape in shapes.values())
    text = backbone_of(config)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > max(1024, len(shapes)):
        raise UserError(f"{source}: num_hidden_layers is {layers}, but the weights are {len(shapes)} tensors")
    width, vocabulary = getattr(text, "hidden_size", 1), getattr(text, "vocab_size", 1)
    if isinstance(width, int) and isinstance(vocabulary, int) and width * vocabulary > max(2 * stored, 2**27):
        raise UserError(
            f"{source}: an embedding of {vocabulary} tokens and width {width} alone is more than the {stored} values "
            "of the weights"
        )
    needed = 0
    try:
        with torch.device("meta"), quiet():
            make = cast("Callable[[PreTrainedConfig], nn.Module]", getattr(cls, "from_config", cls))
            needed = sum(parameter.numel() for parameter in make(config).parameters())
    except Exception as error:
        raise UserError(f"{source}: {one_line(error)}") from error
    if needed > max(2 * stored, 2**27):
        raise UserError(f"{source} is of a model with {needed} parameters, the weights have {stored} values")


def _refuse_more_layers(model: nn.Module, unexpected: Iterable[str], source: str) -> None:
    """Raise UserError for tensors of layers beyond the configuration's last: it would cut the model short."""

    def kind(key: str) -> str:
        return ".".join("#" if part.isdigit() else part for part in key.split("."))

    known = {kind(key) for key, _ in model.named_parameters()}
    more = sorted(key for key in unexpected if any(p.isdigit() for p in key.split(".")) and kind(key) in known)
    if more:
        raise UserError(f"{source}: the weights have {one_line(repr(more[0]))}, a layer that config.json does not have")


def check_finite(model: nn.Module, field: str) -> None:
    """Raise UserError for NaN or infinite weights, naming the first weight and the position in it."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter.detach()).all()):
            bad = ~torch.isfinite(parameter.detach())
            first = tuple(int(i) for i in bad.nonzero()[0])
            raise UserError(
                f"{field}: the weight {name!r} holds {int(bad.sum())} values that are not finite, the first at "
                f"{list(first)} (allowed: finite weights)"
            )


def load_tokenizer(
    path: str | Path, config: PreTrainedConfig, field: str, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model. Raises UserError if there is none or it has more tokens than the model."""
    name, place = str(path), Path(path)
    if place.is_dir():
        present = [file for file in TOKENIZER_FILES if (place / file).is_file()]
        if not present or present == ["tokenizer_config.json"]:
            raise UserError(f"{field}: {name!r} holds no tokenizer (allowed: a folder with tokenizer.json)")
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            ids = tokenizer.get_vocab().values()
        except Exception as error:
            raise UserError(f"{field} {name!r}: its tokenizer cannot be read: {one_line(error)}") from error
    size = getattr(backbone_of(config), "vocab_size", None)
    largest = max(ids, default=-1)
    if largest < 0:
        raise UserError(f"{field} {name!r}: its tokenizer has no tokens")
    if isinstance(size, int) and largest >= size:
        raise UserError(f"{field} {name!r}: its tokenizer has {largest + 1} tokens, the model has {size}")
    return tokenizer
