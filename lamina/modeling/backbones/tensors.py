"""The tensors of a converted model: their names on both sides, and the copying of each."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from lamina.core.architectures import Conversion, conversions
from lamina.errors import UserError, unknown
from lamina.modeling.backbones.loading import refuse_tensors

_LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)\.(.+)")
_MODULES = {"self_attn": "attention.module", "mlp": "feed_forward.module"}


def conversion_of(model_type: str) -> Conversion:
    """The conversion of a model type. Raises UserError for a type that has none."""
    rows = conversions()
    if model_type not in rows:
        raise unknown("model_type", model_type, rows)
    return rows[model_type]


def lamina_name(key: str, conversion: Conversion) -> str:
    """The name in Lamina's model of a tensor of transformers' model."""
    if match := _LAYER.fullmatch(key):
        index, part, rest = match.groups()
        part = conversion.norms.get(part) or _MODULES.get(part, part)
        return f"model.backbone.layers.{index}.{part}.{rest}"
    return re.sub(r"^model\.", "model.backbone.", key)


def gains(model: PreTrainedModel) -> Iterable[tuple[str, float]]:
    """Each tensor's name in transformers' model and the offset to add to it: 0 unless it is a layer's norm.

    Norms inside an attention module belong to the module and stay as they are stored.
    """
    conversion = conversion_of(model.config.model_type)
    for key in model.state_dict():
        match = _LAYER.fullmatch(key)
        is_norm = key == "model.norm.weight" or (match is not None and match[2] in conversion.norms)
        yield key, conversion.gain_offset if is_norm else 0.0


def fill(target: PreTrainedModel, source: PreTrainedModel, renamed: Mapping[str, tuple[str, float]]) -> None:
    """Copy every tensor of ``source`` into ``target``; ``renamed``: source's name -> target's name, offset."""
    stored, expected = source.state_dict(), target.state_dict()
    refuse_tensors("extra", stored.keys() - renamed.keys(), f"has no place in {type(target).__name__}")
    refuse_tensors("missing", renamed.keys() - stored.keys(), f"is not in the {type(source).__name__}")
    places = {new: (key, offset) for key, (new, offset) in renamed.items()}
    refuse_tensors("missing", expected.keys() - places.keys(), f"is not in the {type(source).__name__}")
    refuse_tensors("extra", places.keys() - expected.keys(), f"has no place in {type(target).__name__}")
    with torch.no_grad():
        for new, tensor in expected.items():
            key, offset = places[new]
            value = stored[key]
            if value.shape != tensor.shape:
                raise UserError(
                    f"tensor {key!r}: its shape is {list(value.shape)}, the configuration asks for {list(tensor.shape)}"
                )
            # The sum in double precision, rounded once: in float32 it is then the very number that Gemma computes.
            tensor.copy_((value.double() + offset).to(value.dtype) if offset else value)
    target.tie_weights()
    target.generation_config = copy.deepcopy(source.generation_config)


def copy_buffers(names: Mapping[str, str], source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy the buffers that no checkpoint stores (rotary frequencies); casting a model rounds them, loading does not.

    ``names``: target's name -> source's name.
    """
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if (value := buffers.get(names.get(name, ""))) is not None and value.shape == buffer.shape:
            buffer.data = value.detach().clone()
