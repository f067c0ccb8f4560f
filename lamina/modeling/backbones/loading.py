"""A saved model from a path: one way to read its configuration, its weights and its tokenizer, one set of errors.

Whatever a folder holds, the answer is what was asked for or a UserError of one line. Weights are safetensors, nothing
is unpickled and no code beside a checkpoint runs unless the caller says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from lamina.core.values import whole_number
from lamina.errors import UserError, unknown
from lamina.modeling.configuration_lamina import LaminaConfig
from lamina.placements import Plan

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "source.spm", "tokenizer_config.json"),
)
# What of a configuration must be a size before anything is built of it.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_layers", "num_attention_heads", "num_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
_LARGEST_JSON = 2**26  # bytes


def one_line(error: object) -> str:
    """An error as one line that is safe to print: control characters escaped, cut at 300 characters."""
    text = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    name = type(error).__name__ if isinstance(error, BaseException) else ""
    text = text if len(text) <= 300 else text[:299] + "…"
    return (f"{name}: {text}" if text else name) if name else text


def folder_of_run(path: str | Path) -> Path:
    """Where the model is: a run's folder holds it as model/, any other holds it itself."""
    inner = Path(path) / "model"
    whole = any((inner / name).is_file() for name in ("config.json", "manifest.json"))
    return inner if whole else Path(path)


def read_config(
    path: str | Path, field: str, *, trust_remote_code: bool = False, weights: bool = True, **more: Any
) -> PreTrainedConfig:
    """The configuration of a saved model: a folder's, or that of a name on the hub.

    Args:
        path: a folder with config.json, or a name on the hub.
        field: what the user calls it ("model", "checkpoint"); every message begins with it.
        trust_remote_code: run the code that it asks for, where it does.
        weights: whether it is to be loaded; a Lamina model then needs its plan.
        more: for ``AutoConfig.from_pretrained``.

    Raises:
        UserError: where it is no configuration, of a model that is not known, or with fields that have no meaning.
    """
    name, place = str(path), Path(path)
    says = f"{field} {name!r}: config.json"
    if not name.strip():
        raise UserError(f"{field}: '' is no path (allowed: a folder with config.json)")
    if place.is_file():
        raise UserError(f"{field}: {name!r} is a file (allowed: a folder with config.json and model.safetensors)")
    if not more:
        if place.is_dir():
            if not (place / "config.json").is_file():
                raise UserError(f"{field}: {name!r} holds no saved model (config.json is missing)")
            data = read_json(place / "config.json", says)
        else:
            try:
                data, _ = PreTrainedConfig.get_config_dict(name)
            except Exception as error:
                raise UserError(f"{field}: {name!r} is no folder and no readable model on the hub") from error
        _check_type(data, says, trust_remote_code)
        _check_sizes(data, says)
    with quiet():
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **more)
        except ImportError as error:
            allowed = " (allowed: pip install gguf)" if "gguf" in str(error) else ""
            raise UserError(f"{field} {name!r}: {one_line(error)}{allowed}") from error
        except Exception as error:
            raise UserError(f"{says}: {one_line(error)}") from error
    inner: Any = config.get_text_config()
    heads, shared = (getattr(inner, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise UserError(f"{says}: num_key_value_heads: {shared} does not divide num_attention_heads, {heads}")
    _check_quantization(getattr(config, "quantization_config", None), says)
    if isinstance(config, LaminaConfig) and weights:
        if config.plan is None:
            raise UserError(f"{says} has no plan, so this is no whole Lamina checkpoint (allowed: one saved by Lamina)")
        try:
            Plan.from_dict(config.plan)
        except UserError as error:
            raise UserError(f"{says}: {one_line(str(error))}") from None
    return config


def _check_quantization(asked: Any, says: str) -> None:
    """Transformers leaves a method that it does not know out, and then reads the weights as if they were plain."""
    if asked is None:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    method = asked.get("quant_method") if isinstance(asked, Mapping) else getattr(asked, "quant_method", None)
    name = getattr(method, "value", method)
    loads_in_bits = isinstance(asked, Mapping) and (asked.get("load_in_4bit") or asked.get("load_in_8bit"))
    if name not in KNOWN and not loads_in_bits and name != "bitsandbytes":
        raise UserError(f"{says}: quantization_config: {unknown('quant_method', str(name), KNOWN)}")


def _check_type(data: Mapping[str, Any], says: str, trust_remote_code: bool) -> None:
    model_type, code = data.get("model_type"), data.get("auto_map")
    known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if not known and code:
        if trust_remote_code:
            return
        asked = code.get("AutoConfig") if isinstance(code, Mapping) else code
        raise UserError(
            f"{says} asks for code of its own ({one_line(asked)}), which is never run unasked (`lamina generate` takes "
            "--trust-remote-code; from Python load the model yourself)"
        )
    if not isinstance(model_type, str):
        raise UserError(f"{says}: model_type is {model_type!r} (allowed: the name of a model of transformers)")
    if not known:
        raise UserError(f"{says}: {unknown('model_type', model_type, transformers.CONFIG_MAPPING)}")
    if model_type == LaminaConfig.model_type:
        inner = data.get("backbone_config")
        if not isinstance(inner, Mapping):
            raise UserError(f"{says}: backbone_config is {_kind(inner)} (allowed: the backbone's configuration)")
        _check_type({"model_type": inner.get("model_type")}, f"{says}: backbone_config", trust_remote_code)


def _check_sizes(data: Mapping[str, Any], says: str) -> None:
    for name, value in data.items():
        if name in ("backbone_config", "text_config") and isinstance(value, Mapping):
            _check_sizes(value, f"{says}: {name}")
        elif name in _SIZES and isinstance(value, bool | int | float | str | dict):
            whole_number(name, value, says=f"{says}: ")


def read_json(path: Path, says: str) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError, beginning with ``says``, where there is none."""
    if path.stat().st_size > _LARGEST_JSON:
        raise UserError(f"{says} has {path.stat().st_size} bytes (allowed: up to {_LARGEST_JSON})")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{says} is not JSON ({one_line(error)})") from None
    if not isinstance(data, dict):
        raise UserError(f"{says} holds {_kind(data)} (allowed: an object)")
    return data


def _kind(value: Any) -> str:
    names = {"NoneType": "nothing", "list": "a list", "dict": "an object", "str": "a text", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")


def stored_shapes(path: Path, field: str, *, pickles: bool = False) -> dict[str, tuple[int, ...]] | None:
    """Name and shape of every tensor in a folder's safetensors files, whose headers are checked on the way.

    None where there are none but pickled weights and ``pickles`` allows those. Raises UserError naming the file that
    is missing, cut short or altered, or that lies outside of the folder.
    """
    says = f"{field} {str(path)!r}:"
    if (path / WEIGHTS).is_file():
        return _header(path / WEIGHTS, says)
    if (path / INDEX).is_file():
        return _indexed(path, says)
    others = sorted(p.name for kind in (*PICKLES, "*.gguf", "*.h5") for p in path.glob(kind))
    if others and pickles:
        return None
    found = f"has its weights in {others[0]}" if others else "has no weights"
    raise UserError(f"{field}: {str(path)!r} {found} (allowed: {WEIGHTS}; nothing is ever unpickled)")


def _indexed(path: Path, says: str) -> dict[str, tuple[int, ...]]:
    places = read_json(path / INDEX, f"{says} {INDEX}").get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise UserError(f"{says} {INDEX}: weight_map is no table of tensors and files")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise UserError(f"{says} {INDEX} names {one_line(repr(file))} (allowed: .safetensors files in its folder)")
        if not (path / file).is_file():
            raise UserError(f"{says} {file} is missing ({INDEX} names it)")
        header = _header(path / file, says)
        lacking = sorted(k for k, v in places.items() if v == file and k not in header)
        if lacking:
            raise UserError(f"{says} {file} has no tensor {one_line(repr(lacking[0]))} ({INDEX} says so)")
        shapes |= header
    return shapes


def _header(file: Path, says: str) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{says} {file.name} is cut short or altered ({one_line(error)})") from None


def load_weights(
    path: str | Path,
    config: PreTrainedConfig,
    cls: Any,
    field: str,
    *,
    dtype: str | torch.dtype = "auto",
    pickles: bool = False,
    trust_remote_code: bool = False,
    **more: Any,
) -> tuple[Any, dict[str, Any]]:
    """The model of a class (or an Auto class) in evaluation mode, and transformers' report of its tensors.

    Tensors of another shape, and those of layers that the configuration has not, are refused here; it is for the
    caller to say what a missing tensor means. ``pickles``: read a .bin file, tensors only, where there is nothing else.

    Raises:
        UserError: naming the file or tensor that is wrong, or what transformers says of it.
    """
    name, place = str(path), Path(path)
    shapes = stored_shapes(place, field, pickles=pickles) if place.is_dir() and not more else None
    if shapes is not None:
        _check_room(config, cls, shapes, f"{field} {name!r}: config.json")
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True, **more}
    options |= {"ignore_mismatched_sizes": True}  # they are refused below, by name
    if "gguf_file" not in more:
        options["config"] = config
    if shapes is not None:
        options["use_safetensors"] = True
    with quiet():
        try:
            model, info = cls.from_pretrained(name, **options)
        except Exception as error:
            if type(error).__name__ == "UnpicklingError":
                raise UserError(
                    f"{field} {name!r}: its .bin file holds more than tensors (allowed: safetensors)"
                ) from None
            raise UserError(f"{field} {name!r}: {one_line(error)}") from error
    for key, found, wanted in sorted(info["mismatched_keys"]):
        raise UserError(
            f"{field} {name!r}: tensor {one_line(repr(key))}: its shape is {list(found)}, the configuration asks for "
            f"{list(wanted)}"
        )
    if errors := [*info.get("error_msgs", ()), *info.get("conversion_errors", ())]:
        raise UserError(f"{field} {name!r}: {one_line(errors[0])}")
    _refuse_more_layers(model, info["unexpected_keys"], f"{field} {name!r}")
    check_finite(model, field)
    return model.eval(), info


def _check_room(config: PreTrainedConfig, cls: Any, shapes: Mapping[str, tuple[int, ...]], says: str) -> None:
    """Raise UserError where the configuration is of a far larger model than the files hold, before it is allocated."""
    stored = sum(_product(shape) for shape in shapes.values())
    text: Any = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > max(1024, len(shapes)):
        raise UserError(f"{says}: num_hidden_layers is {layers}, but the weights are {len(shapes)} tensors")
    width, vocabulary = getattr(text, "hidden_size", 1), getattr(text, "vocab_size", 1)
    if isinstance(width, int) and isinstance(vocabulary, int) and width * vocabulary > max(2 * stored, 2**27):
        raise UserError(
            f"{says}: an embedding of {vocabulary} tokens and width {width} alone is more than the {stored} values of "
            "the weights"
        )
    wanted = 0
    try:
        with torch.device("meta"), quiet():
            made = cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
            wanted = sum(parameter.numel() for parameter in made.parameters())
    except Exception as error:
        raise UserError(f"{says}: {one_line(error)}") from error
    if wanted > max(2 * stored, 2**27):
        raise UserError(f"{says} is of a model with {wanted} parameters, the weights have {stored} values")


def _product(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _refuse_more_layers(model: nn.Module, unexpected: Iterable[str], says: str) -> None:
    """Raise UserError for tensors of layers behind the last one: the configuration would cut the model short."""

    def kind(key: str) -> str:
        return ".".join("#" if part.isdigit() else part for part in key.split("."))

    known = {kind(key) for key, _ in model.named_parameters()}
    more = sorted(key for key in unexpected if any(p.isdigit() for p in key.split(".")) and kind(key) in known)
    if more:
        raise UserError(f"{says}: the weights have {one_line(repr(more[0]))}, a layer that config.json has not")


def check_finite(model: nn.Module, field: str) -> None:
    """Raise UserError naming the first weight that holds NaN or infinite values, and where."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter.detach()).all()):
            bad = ~torch.isfinite(parameter.detach())
            first = tuple(int(i) for i in bad.nonzero()[0])
            raise UserError(
                f"{field}: the weight {name!r} holds {int(bad.sum())} values that are not finite, the first at "
                f"{list(first)} (allowed: finite weights)"
            )


def load_tokenizer(path: str | Path, config: PreTrainedConfig, field: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a model. Raises UserError where there is none, or where it has tokens the model has not."""
    name, place = str(path), Path(path)
    if place.is_dir():
        there = [file for file in TOKENIZER_FILES if (place / file).is_file()]
        if not there or there == ["tokenizer_config.json"]:
            raise UserError(f"{field}: {name!r} holds no tokenizer (allowed: a folder with tokenizer.json)")
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            ids = tokenizer.get_vocab().values()
        except Exception as error:
            raise UserError(f"{field} {name!r}: its tokenizer cannot be read: {one_line(error)}") from error
    size = getattr(config.get_text_config(), "vocab_size", None)
    largest = max(ids, default=-1)
    if largest < 0:
        raise UserError(f"{field} {name!r}: its tokenizer has no tokens")
    if isinstance(size, int) and largest >= size:
        raise UserError(f"{field} {name!r}: its tokenizer has {largest + 1} tokens, the model has {size}")
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own words and bars: what matters is said in one line here."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()
