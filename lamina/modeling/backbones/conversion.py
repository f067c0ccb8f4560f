"""Conversion of transformers' checkpoints to Lamina's and back, for the architectures whose placement is known.

Conversion renames tensors. Nothing is trained, guessed or dropped: every tensor is used exactly once, or a UserError
names it.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init

from lamina.core.architectures import Conversion, conversions
from lamina.errors import UserError, unknown
from lamina.modeling.backbones import loading
from lamina.modeling.backbones.loading import load_weights, refuse_tensors, stored_shapes
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.modeling_lamina import HEADS, LaminaForCausalLM
from lamina.placements import Norm, Plan, Sublayer, resolve

_LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)\.(.+)")
_MODULES = {"self_attn": "attention.module", "mlp": "feed_forward.module"}
logger = logging.getLogger(__name__)


def conversion_of(model_type: str) -> Conversion:
    """Return the conversion of a model type. Raises UserError for a type that has none."""
    rows = conversions()
    if model_type not in rows:
        raise unknown("model_type", model_type, rows)
    return rows[model_type]


def lamina_name(key: str, conversion: Conversion) -> str:
    """Return the name in Lamina's model of a tensor of transformers' model."""
    if match := _LAYER.fullmatch(key):
        index, part, rest = match.groups()
        part = conversion.norms.get(part) or _MODULES.get(part, part)
        return f"model.backbone.layers.{index}.{part}.{rest}"
    return re.sub(r"^model\.", "model.backbone.", key)


def gains(model: PreTrainedModel) -> Iterable[tuple[str, float]]:
    """Return each tensor's name in transformers' model and the offset to add to it: 0 unless it is a layer's norm.

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


def from_transformers(
    model_or_path: PreTrainedModel | str | Path, *, dtype: str | torch.dtype = "auto"
) -> LaminaForCausalLM:
    """Convert a causal language model of transformers to the Lamina model with the same logits.

    Args:
        model_or_path: the model, or a folder (or a name on the hub) with safetensors; remote code is never run.
        dtype: of the weights that are read from a path; "auto" keeps the checkpoint's.

    Returns:
        A LaminaForCausalLM in evaluation mode that shares no weights with the source. Its logits are equal; in half
        precision those of Gemma and OLMo 2 differ by rounding (``Conversion.gain_in_float32``).

    Raises:
        UserError: for a model type whose placement is unknown, weights that are not safetensors, or a tensor that is
            missing, extra or of another shape.
    """
    model = load(model_or_path, dtype=dtype) if isinstance(model_or_path, str | Path) else model_or_path
    if isinstance(model.config, LaminaConfig):
        raise UserError(f"source: {_name(model_or_path)} is a Lamina model already (allowed: to transformers)")
    config = model.config
    conversion = conversion_of(config.model_type)
    _check_class(model)
    dtype = _dtype_of(model)
    if conversion.gain_in_float32 and dtype.itemsize < 4:
        logger.warning(
            f"dtype: {config.model_type!r} multiplies by its norms' gains in float32 and rounds afterwards, Lamina "
            f"rounds first: in {_short(dtype)} the logits differ by rounding (dtype float32 converts without a "
            "difference)"
        )
    plan = resolve(conversion.placement, config.num_hidden_layers)
    outer = LaminaConfig(backbone_config=config, plan=plan.to_dict())
    outer._attn_implementation = config._attn_implementation  # the outer one decides for both
    with init.no_init_weights():
        converted = LaminaForCausalLM._from_config(outer, dtype=dtype)
    fill(converted, model, {key: (lamina_name(key, conversion), offset) for key, offset in gains(model)})
    copy_buffers({lamina_name(name, conversion): name for name, _ in model.named_buffers()}, model, converted)
    nn.Module.to(converted, model.device)
    return converted.eval()


def to_transformers(
    model_or_path: PreTrainedModel | str | Path, *, dtype: str | torch.dtype = "auto"
) -> PreTrainedModel:
    """Convert a Lamina model to transformers' model with the same logits: the inverse of ``from_transformers``.

    Raises UserError if the plan is not the one of its backbone's architecture, and for whatever ``from_transformers``
    raises it.
    """
    model = load(model_or_path, dtype=dtype) if isinstance(model_or_path, str | Path) else model_or_path
    if not isinstance(model, LaminaForCausalLM):
        raise UserError(
            f"source: {_name(model_or_path)} is a {type(model).__name__} (allowed: a LaminaForCausalLM, or its folder)"
        )
    outer = model.config
    assert isinstance(outer, LaminaConfig)
    conversion = check_plan(outer)
    config = _backbone_config(outer)
    # The backbone's own: Gemma 2 runs on the eager kernel only, whatever the outer model was asked for.
    config._attn_implementation = model.model.backbone.config._attn_implementation
    with init.no_init_weights():
        converted: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=_dtype_of(model))
    fill(converted, model, {lamina_name(key, conversion): (key, -offset) for key, offset in gains(converted)})
    copy_buffers({name: lamina_name(name, conversion) for name, _ in converted.named_buffers()}, model, converted)
    nn.Module.to(converted, model.device)
    return converted.eval()


def check_plan(config: LaminaConfig) -> Conversion:
    """Return the conversion back to transformers. Raises UserError if transformers has no such placement."""
    model_type = backbone_of(config).model_type
    conversion = conversion_of(model_type)
    assert config.plan is not None
    plan = Plan.from_dict(config.plan)
    if computed(plan) != computed(resolve(conversion.placement, plan.num_layers)):
        raise UserError(
            f"plan: no transformers architecture has this placement ({plan.placement!r}) on the backbone "
            f"{model_type!r} (allowed: {conversion.placement})"
        )
    return conversion


def load(
    path: str | Path, *, dtype: str | torch.dtype = "auto", field: str = "source", head: str = "causal_lm"
) -> PreTrainedModel:
    """Load a model with a head, Lamina's or transformers', from a folder or a name on the hub.

    Reads safetensors only and runs no remote code. Raises UserError naming the invalid field, file or tensor; a missing
    or extra tensor is an error.
    """
    config = read_config(path, field=field)
    auto = getattr(transformers, HEADS[head].auto_class)
    model, _ = load_weights(path, config, auto, field, dtype=dtype, extra=False)
    if config.tie_word_embeddings:
        _check_tied(model)
    return model


def read_config(path: str | Path, *, field: str = "source") -> PreTrainedConfig:
    """Read the configuration of a checkpoint. Raises UserError if the checkpoint cannot be converted."""
    config = loading.read_config(path, field)
    if config.model_type == "gemma3":
        raise UserError("model_type: 'gemma3' sees images, too (allowed: the text model on its own, 'gemma3_text')")
    if config.model_type != LaminaConfig.model_type:
        conversion_of(config.model_type)
    if getattr(config, "quantization_config", None):
        raise UserError("quantization_config: quantized weights cannot be converted (allowed: the original checkpoint)")
    if Path(path).is_dir():
        stored_shapes(Path(path), field)  # before anything is begun
    return config


def _backbone_config(config: LaminaConfig) -> PreTrainedConfig:
    fields = backbone_of(config).to_dict()
    for name in ("transformers_version", "tie_last_hidden_states"):  # the second is Lamina's own switch
        fields.pop(name, None)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def computed(plan: Plan) -> tuple[object, ...]:
    """Return the parts of a plan that decide the function it computes, without its name and initial values.

    A norm of kind "rms" counts as "backbone": every backbone of the table has RMSNorms.
    """

    def norm(spec: Norm | None) -> Norm | None:
        if spec is None:
            return None
        start = 1.0 if spec.learnable_gain else spec.initial_gain
        return replace(spec, kind="backbone" if spec.kind == "rms" else spec.kind, initial_gain=start)

    def sublayer(record: Sublayer) -> Sublayer:
        pre, out, post = (norm(spec) for spec in (record.pre_norm, record.out_norm, record.post_norm))
        return replace(record, pre_norm=pre, out_norm=out, post_norm=post, weight_gain=1.0, gate_gain=1.0)

    layers = tuple((sublayer(layer.attention), sublayer(layer.feed_forward)) for layer in plan.layers)
    ends = (norm(plan.final_norm), norm(plan.embedding_norm), plan.embedding_scale)
    inner = (plan.qk_norm, plan.v_norm)
    return layers, *ends, *inner, None if inner == ("off", "off") else norm(plan.qkv_norm)


def _check_class(model: PreTrainedModel) -> None:
    expected = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)])
    if not isinstance(model, expected):
        raise UserError(f"source: the model is a {type(model).__name__} (allowed: {expected.__name__})")
    if getattr(model, "hf_quantizer", None) is not None:
        raise UserError("quantization_config: quantized weights cannot be converted (allowed: the original checkpoint)")
    if model.config.tie_word_embeddings:
        _check_tied(model)


def _check_tied(model: PreTrainedModel) -> None:
    """Raise UserError if the configuration ties two tensors that differ: one of them would be lost."""
    embedding = model.get_input_embeddings().get_parameter("weight")
    head = model.get_parameter("lm_head.weight")
    if head is not embedding and not torch.equal(head, embedding):
        raise UserError(
            "tie_word_embeddings: true, but the tensor 'lm_head.weight' differs from the embedding (allowed: false)"
        )


def _dtype_of(model: PreTrainedModel) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise UserError(f"dtype: the model mixes {', '.join(sorted(map(_short, dtypes)))} (allowed: one for all of it)")
    return dtypes.pop()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(model_or_path: object) -> str:
    return repr(str(model_or_path)) if isinstance(model_or_path, str | Path) else f"the {type(model_or_path).__name__}"
