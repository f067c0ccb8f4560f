"""Read the names, shapes and dtypes of a checkpoint's tensors from files, and compare them with the loaded model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from lamina.errors import UserError, one_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LARGEST_JSON = 2**26  # bytes
_FLOATS = ("F64", "F32", "F16", "BF16")
_WHOLE = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
_MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias)$")  # in old checkpoints: [1, 1, tokens, tokens] or []
_VALUES = (".weight", ".bias", ".gamma", ".beta")
_VALUE_HEAD = "v_head."  # TRL's value head, in the checkpoint of a language model


class Stored(NamedTuple):
    """A tensor's shape and dtype in a file. ``dtype`` is a safetensors name, such as F32."""

    shape: tuple[int, ...]
    dtype: str


Tensors = dict[str, Stored]


def read_json(path: Path, source: str) -> dict[str, object]:
    """Read a JSON object from a file. Raises UserError for other content. The message begins with ``source``."""
    if path.stat().st_size > _LARGEST_JSON:
        raise UserError(
            f"{source} has {path.stat().st_size} bytes, more than the {_LARGEST_JSON} that Lamina reads. Give the "
            "original file."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{source}: {error.strerror or one_line(error)}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON ({one_line(error)}). Give the original file.") from None
    if not isinstance(data, dict):
        raise UserError(f"{source} holds {kind_of(data)} instead of an object. Give the original file.")
    return data


def kind_of(value: object) -> str:
    names = {"NoneType": "nothing", "list": "a list", "dict": "an object", "str": "a text", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")


def stored_tensors(path: Path, field: str, *, pickles: bool = False) -> Tensors | None:
    """Return each tensor's shape and dtype by name, from the headers of a folder's safetensors files.

    Returns None if the folder has only pickled weights and ``pickles`` is true. Raises UserError for a missing,
    incomplete or altered file, and for a file outside the folder.
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
    raise UserError(
        f"{field}: {str(path)!r} {content}, and Lamina reads only safetensors. Give a folder with {WEIGHTS}."
    )


def _indexed(path: Path, source: str) -> Tensors:
    places = read_json(path / INDEX, f"{source} {INDEX}").get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise UserError(f"{source} {INDEX}: weight_map does not map tensors to files. Give the original file.")
    shapes: Tensors = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise UserError(
                f"{source} {INDEX} names {one_line(repr(file))}, which is not a .safetensors file in the same folder. "
                "Give the original files."
            )
        if not (path / file).is_file():
            raise UserError(f"{source} {file} is missing, but {INDEX} lists this file. Give the complete folder.")
        header = _header(path / file, source)
        lacking = sorted(k for k, v in places.items() if v == file and k not in header)
        if lacking:
            raise UserError(
                f"{source} {file} has no tensor {one_line(repr(lacking[0]))}, but {INDEX} lists the tensor there. "
                "Give the original files."
            )
        shapes |= header
    return shapes


def _header(file: Path, source: str) -> Tensors:
    try:
        file.open("rb").close()  # to raise an error for a file that the user may not read
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in list(opened.keys())}
            return {key: Stored(tuple(part.get_shape()), str(part.get_dtype())) for key, part in slices.items()}
    except OSError as error:
        raise UserError(f"{source} {file.name}: {error.strerror or one_line(error)}") from None
    except (SafetensorError, ValueError) as error:
        raise UserError(
            f"{source} {file.name} is cut short or altered ({one_line(error)}). Give the original file."
        ) from None


def refuse_tensors(source: str, keys: Iterable[str], why: str) -> None:
    names = sorted(keys)
    if names:
        more = f" (and {len(names) - 1} more: {', '.join(names[1:3])}{', …' if len(names) > 3 else ''})"
        raise UserError(f"{source} tensor {names[0]!r}{more if len(names) > 1 else ''}: it {why}.")


def refuse_foreign_dtypes(stored: Mapping[str, Stored], config: PreTrainedConfig, source: str) -> None:
    """Raise UserError for a tensor in a quantized format if the configuration has no quantization_config."""
    if is_quantized(config):
        return
    for name, tensor in stored.items():
        if tensor.dtype not in (*_FLOATS, *_WHOLE):
            raise UserError(
                f"{source} tensor {one_line(repr(name))} is {tensor.dtype}, but config.json has no "
                "quantization_config. Add the quantization_config, or give the checkpoint in bf16."
            )


def is_quantized(config: PreTrainedConfig) -> bool:
    return any(getattr(each, "quantization_config", None) for each in (config, config.get_text_config()))


def refuse_foreign(
    model: PreTrainedModel, stored: Mapping[str, Stored], unexpected: Iterable[str], source: str
) -> None:
    """Raise UserError for a stored tensor that the model does not use, or for integers where the model has floats.

    Three kinds of unused tensors are allowed: heads of the same model type, buffers that older versions stored, and
    tensors that transformers ignores.
    """
    unexpected = sorted(unexpected)
    _refuse_more_layers(model, unexpected, source)
    if is_quantized(model.config):  # transformers has unpacked the tensors under other names
        modules = {name for name, _ in model.named_modules() if name}
        unexpected = [key for key in unexpected if not _is_packed(key, modules)]
        stored = {}
    buffers = {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    buffers |= {name.removeprefix(f"{model.base_model_prefix}."): shape for name, shape in buffers.items()}
    unsaved = {key for key in unexpected if key in buffers and (key not in stored or stored[key].shape == buffers[key])}
    left = [key for key in unexpected if key not in unsaved and not _is_mask(key, stored.get(key))]
    left = [key for key in left if not key.startswith(_VALUE_HEAD)]
    if left:
        others = _tensors_of_heads(model)
        why = (
            f"does not belong to the model type {model.config.model_type!r}. Remove the tensor, or give the right "
            "configuration"
        )
        refuse_tensors(f"{source}: extra", [key for key in left if key not in others], why)
    tensors: Mapping[str, torch.Tensor] = model.state_dict()
    for key, tensor in stored.items():
        expected = tensors.get(key, tensors.get(f"{model.base_model_prefix}.{key}"))
        # transformers may have renamed the tensor
        is_float = key.endswith(_VALUES) if expected is None else expected.is_floating_point()
        if tensor.dtype in _WHOLE and is_float and not _is_mask(key, tensor):
            raise UserError(
                f"{source}: tensor {one_line(repr(key))} is stored as {tensor.dtype}, but the model needs floats "
                f"(allowed: {', '.join(_FLOATS)})"
            )


def _is_packed(key: str, modules: set[str]) -> bool:
    """Return whether a tensor may belong to a quantized weight, such as a scale or a zero point."""
    *path, last = key.split(".")
    inside = any(".".join(path[:count]) in modules for count in range(1, len(path) + 1))
    return inside and last not in ("weight", "bias")


def _is_mask(key: str, stored: Stored | None) -> bool:
    return _MASK.search(key) is not None and (stored is None or len(stored.shape) in (0, 4))


def _tensors_of_heads(model: PreTrainedModel) -> set[str]:
    """Return the tensor names of all models that transformers can build from the configuration, with any head."""
    names: set[str] = set()
    for mapping in (value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING")):
        try:
            made: Any = mapping[type(model.config)]
        except (KeyError, TypeError, AttributeError):  # some mappings contain only names
            continue
        for cls in made if isinstance(made, tuple) else (made,):
            try:
                with torch.device("meta"):
                    names |= set(cls(model.config).state_dict())
            except Exception:  # the head may need other fields of the configuration
                continue
    prefix = f"{model.base_model_prefix}."
    return names | {name.removeprefix(prefix) for name in names}


def pickled_tensors(path: Path) -> Tensors:
    """Return the shapes and dtypes of the tensors in a folder's .bin files, without reading the values."""
    tensors: Tensors = {}
    names = {dtype: name for name, dtype in _TORCH.items()}
    for file in sorted(path.glob("pytorch_model*.bin")):
        try:
            loaded = torch.load(file, map_location="meta", weights_only=True)
        except Exception:  # transformers raises the error when it reads the file
            continue
        for key, value in loaded.items() if isinstance(loaded, Mapping) else ():
            if isinstance(value, torch.Tensor):
                tensors[str(key)] = Stored(tuple(value.shape), names.get(value.dtype, str(value.dtype)))
    return tensors


_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def _refuse_more_layers(model: nn.Module, unexpected: Iterable[str], source: str) -> None:
    def kind(key: str) -> str:
        return ".".join("#" if part.isdigit() else part for part in key.split("."))

    kinds = {kind(key) for key, _ in model.named_parameters()}
    more = sorted(key for key in unexpected if any(p.isdigit() for p in key.split(".")) and kind(key) in kinds)
    if more:
        raise UserError(
            f"{source}: the weights have {one_line(repr(more[0]))}, but config.json has no such layer. Give the "
            "configuration of these weights."
        )
