"""A saved model from a path: one way to load its weights and its tokenizer, with one set of errors.

Whatever a folder holds, the result is the model or a UserError of one line. Weights are safetensors, nothing is
unpickled and no code beside a checkpoint runs unless the caller says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from lamina.errors import UserError, one_line
from lamina.modeling.backbones.loading import quiet, stored_shapes
from lamina.modeling.configuration_lamina import backbone_of

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "source.spm", "tokenizer_config.json"),
)
ModelClass = type[PreTrainedModel] | type[_BaseAutoModelClass]
NOT_STORED = "is not in the checkpoint"


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
    """Load a model in evaluation mode. Returns it with the names of its tensors that the checkpoint lacks.

    Args:
        path: a folder with weights, or a name on the hub.
        config: the model's configuration, as ``read_config`` returns it.
        cls: the model's class, or one of transformers' Auto classes.
        field: the user's name for the path; every message begins with it.
        dtype: of the weights; "auto" keeps the checkpoint's.
        pickles: read a .bin file, tensors only, if there is nothing else.
        trust_remote_code: run the code beside the checkpoint.
        optional: whether the checkpoint may lack a tensor of the model; without it, it may lack none.
        extra: whether the checkpoint may have tensors that the model does not use.
        more: for ``from_pretrained``.

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
    """Raise UserError, beginning with ``says``, if there are such tensors; it names the first ones."""
    names = sorted(keys)
    if names:
        more = f" (and {len(names) - 1} more: {', '.join(names[1:3])}{', …' if len(names) > 3 else ''})"
        raise UserError(f"{source} tensor {names[0]!r}: it {why}{more if len(names) > 1 else ''}")


def _check_room(config: PreTrainedConfig, cls: ModelClass, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise UserError, before anything is allocated, if the configuration's model is far larger than the files."""
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
    """Raise UserError for tensors of layers beyond the last: the configuration would cut the model short."""

    def kind(key: str) -> str:
        return ".".join("#" if part.isdigit() else part for part in key.split("."))

    known = {kind(key) for key, _ in model.named_parameters()}
    more = sorted(key for key in unexpected if any(p.isdigit() for p in key.split(".")) and kind(key) in known)
    if more:
        raise UserError(f"{source}: the weights have {one_line(repr(more[0]))}, a layer that config.json does not have")


def check_finite(model: nn.Module, field: str) -> None:
    """Raise UserError naming the first weight with NaN or infinite values and their position."""
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
