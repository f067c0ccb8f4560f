"""From transformers' checkpoints to Lamina's and back, tensor by tensor, for the architectures whose placement we know.

Conversion renames; nothing is trained, guessed or dropped: every tensor is used exactly once, or UserError names it.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init

import lamina.modeling  # noqa: F401 (registers LaminaConfig and the models)
from lamina.core.architectures import Conversion, conversions
from lamina.errors import UserError, unknown
from lamina.modeling.backbones import loading
from lamina.modeling.configuration_lamina import LaminaConfig
from lamina.modeling.modeling_lamina import LaminaForCausalLM
from lamina.placements import Norm, Plan, Sublayer, resolve

logger = logging.getLogger(__name__)


CONVERSIONS = conversions()
_LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)\.(.+)")
_MODULES = {"self_attn": "attention.module", "mlp": "feed_forward.module"}


def from_transformers(model_or_path: PreTrainedModel | str | Path, *, dtype: str | torch.dtype = "auto") -> Any:
    """The Lamina model that computes what a causal language model of transformers does.

    Args:
        model_or_path: the model, or a folder (or a name on the hub) with safetensors; remote code is never run.
        dtype: of the weights that are read from a path; "auto" keeps the checkpoint's.

    Returns:
        A LaminaForCausalLM in evaluation mode with weights of its own; its logits equal the source's. In half precision
        those of Gemma and OLMo 2 differ by rounding (``Conversion.gain_in_float32``).

    Raises:
        UserError: for a model type whose placement is not known, weights that aren't safetensors, a tensor that is
            missing, left over or of another shape.
    """
    model = load(model_or_path, dtype=dtype) if isinstance(model_or_path, str | Path) else model_or_path
    if isinstance(model.config, LaminaConfig):
        raise UserError(f"source: {_name(model_or_path)} is a Lamina model already (allowed: to transformers)")
    config: Any = model.config
    conversion = _conversion(config.model_type)
    _check_class(model)
    dtype = _dtype_of(model)
    if conversion.gain_in_float32 and dtype.itemsize < 4:
        logger.warning(_rounding_note(config.model_type, dtype))
    plan = resolve(conversion.placement, config.num_hidden_layers)
    outer = LaminaConfig(backbone_config=config, plan=plan.to_dict())
    outer._attn_implementation = config._attn_implementation  # the outer one decides for both
    with init.no_init_weights():
        ours: Any = LaminaForCausalLM._from_config(outer, dtype=dtype)
    _fill(ours, model, {key: (_to_lamina(key, conversion), offset) for key, offset in _gains(model)})
    _copy_buffers({_to_lamina(name, conversion): name for name, _ in model.named_buffers()}, model, ours)
    return ours.to(model.device).eval()


def to_transformers(model_or_path: PreTrainedModel | str | Path, *, dtype: str | torch.dtype = "auto") -> Any:
    """The model of transformers that computes what a Lamina model does, where there is one; from_transformers undone.

    Raises UserError for a plan that is not that of its backbone's architecture, and as ``from_transformers`` does.
    """
    model = load(model_or_path, dtype=dtype) if isinstance(model_or_path, str | Path) else model_or_path
    if not isinstance(model, LaminaForCausalLM):
        raise UserError(
            f"source: {_name(model_or_path)} is a {type(model).__name__} (allowed: a LaminaForCausalLM, or its folder)"
        )
    outer: Any = model.config
    conversion = check_plan(outer)
    config = _backbone_config(outer)
    # The backbone's own: Gemma 2 runs on the eager kernel only, whatever the outer model was asked for.
    config._attn_implementation = model.model.backbone.config._attn_implementation
    with init.no_init_weights():
        theirs: Any = AutoModelForCausalLM.from_config(config, dtype=_dtype_of(model))
    _fill(theirs, model, {_to_lamina(key, conversion): (key, -offset) for key, offset in _gains(theirs)})
    _copy_buffers({name: _to_lamina(name, conversion) for name, _ in theirs.named_buffers()}, model, theirs)
    return theirs.to(model.device).eval()


def check_plan(config: LaminaConfig) -> Conversion:
    """How a Lamina model goes back to transformers. Raises UserError where transformers has no such placement."""
    model_type = config.get_text_config().model_type
    conversion = _conversion(model_type)
    assert config.plan is not None
    plan = Plan.from_dict(config.plan)
    if computed(plan) != computed(resolve(conversion.placement, plan.num_layers)):
        raise UserError(
            f"plan: no transformers architecture has this placement ({plan.placement!r}) on the backbone "
            f"{model_type!r} (allowed: {conversion.placement})"
        )
    return conversion


def _rounding_note(model_type: str, dtype: torch.dtype) -> str:
    """What a user of a half-precision checkpoint has to know, for an architecture with ``gain_in_float32``."""
    return (
        f"dtype: {model_type!r} multiplies by its norms' gains in float32 and rounds afterwards, Lamina rounds first: "
        f"in {_short(dtype)} the logits differ by rounding (dtype float32 converts without a difference)"
    )


def load(path: str | Path, *, dtype: str | torch.dtype = "auto", field: str = "source") -> PreTrainedModel:
    """A causal language model from a folder or a hub's name, ours or transformers', every tensor of it accounted for.

    Reads safetensors only and runs no remote code. Raises UserError naming the field, file or tensor that is wrong.
    """
    config = read_config(path, field=field)
    model, info = loading.load_weights(path, config, AutoModelForCausalLM, field, dtype=dtype)
    _refuse_tensors("missing", info["missing_keys"], "is not in the checkpoint")
    _refuse_tensors("extra", info["unexpected_keys"], f"is not one of the architecture {config.model_type!r}")
    if config.tie_word_embeddings:
        _check_tied(model)
    return model


def read_config(path: str | Path, *, field: str = "source") -> PreTrainedConfig:
    """The configuration of a checkpoint that can be converted. Raises UserError naming what is wrong with it."""
    config = loading.read_config(path, field)
    if config.model_type == "gemma3":
        raise UserError("model_type: 'gemma3' sees images, too (allowed: the text model on its own, 'gemma3_text')")
    if config.model_type != LaminaConfig.model_type:
        _conversion(config.model_type)
    if getattr(config, "quantization_config", None):
        raise UserError("quantization_config: quantised weights cannot be converted (allowed: the original checkpoint)")
    if Path(path).is_dir():
        loading.stored_shapes(Path(path), field)  # before anything is begun
    return config


@torch.no_grad()
def largest_difference(
    one: PreTrainedModel, other: PreTrainedModel, *, blocks: int = 4, length: int = 64, seed: int = 0
) -> tuple[float, float]:
    """The largest absolute difference of two models' logits on random tokens, and the largest absolute logit of one.

    ``blocks`` blocks of ``length`` tokens (fewer where the model holds fewer), drawn from a generator of their own.
    """
    config: Any = one.config.get_text_config()
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    generator = torch.Generator().manual_seed(seed)
    difference = largest = 0.0
    for _ in range(blocks):
        ids = torch.randint(config.vocab_size, (1, length), generator=generator)
        ours, theirs = (
            m.eval()(input_ids=ids.to(m.device), use_cache=False).logits.float().cpu() for m in (one, other)
        )
        if not (torch.isfinite(ours).all() and torch.isfinite(theirs).all()):
            return float("nan"), float("nan")
        difference = max(difference, (ours - theirs).abs().max().item())
        largest = max(largest, ours.abs().max().item())
    return difference, largest


def _conversion(model_type: str) -> Conversion:
    if model_type not in CONVERSIONS:
        raise unknown("model_type", model_type, CONVERSIONS)
    return CONVERSIONS[model_type]


def _to_lamina(key: str, conversion: Conversion) -> str:
    """Where a tensor of transformers' model is in Lamina's."""
    if match := _LAYER.fullmatch(key):
        index, part, rest = match.groups()
        part = conversion.norms.get(part) or _MODULES.get(part, part)
        return f"model.backbone.layers.{index}.{part}.{rest}"
    return re.sub(r"^model\.", "model.backbone.", key)


def _gains(model: PreTrainedModel) -> Iterable[tuple[str, float]]:
    """Each tensor's name in transformers' model and what its stored gain lacks (0 for all that is no norm of a layer).

    The norms inside an attention module are the module's own and stay as they are stored.
    """
    conversion = _conversion(model.config.model_type)
    for key in model.state_dict():
        match = _LAYER.fullmatch(key)
        is_norm = key == "model.norm.weight" or (match is not None and match[2] in conversion.norms)
        yield key, conversion.gain_offset if is_norm else 0.0


def _fill(target: Any, source: PreTrainedModel, renamed: Mapping[str, tuple[str, float]]) -> None:
    """Copy every tensor of ``source`` into ``target``; ``renamed``: source's name -> target's name, offset."""
    given, wanted = source.state_dict(), target.state_dict()
    _refuse_tensors("extra", given.keys() - renamed.keys(), f"has no place in {type(target).__name__}")
    _refuse_tensors("missing", renamed.keys() - given.keys(), f"is not in the {type(source).__name__}")
    places = {new: (key, offset) for key, (new, offset) in renamed.items()}
    _refuse_tensors("missing", wanted.keys() - places.keys(), f"is not in the {type(source).__name__}")
    _refuse_tensors("extra", places.keys() - wanted.keys(), f"has no place in {type(target).__name__}")
    with torch.no_grad():
        for new, tensor in wanted.items():
            key, offset = places[new]
            value = given[key]
            if value.shape != tensor.shape:
                raise UserError(
                    f"tensor {key!r}: its shape is {list(value.shape)}, the configuration asks for {list(tensor.shape)}"
                )
            # The sum in double precision, rounded once: in float32 it is then the very number that Gemma computes.
            tensor.copy_((value.double() + offset).to(value.dtype) if offset else value)
    target.tie_weights()
    target.generation_config = copy.deepcopy(source.generation_config)


def _copy_buffers(names: Mapping[str, str], source: PreTrainedModel, target: PreTrainedModel) -> None:
    """What no checkpoint holds (the rotary frequencies): a model cast as a whole has them rounded, one loaded has not.

    ``names``: target's name -> source's name.
    """
    theirs = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if (value := theirs.get(names.get(name, ""))) is not None and value.shape == buffer.shape:
            buffer.data = value.detach().clone()


def _backbone_config(config: LaminaConfig) -> PreTrainedConfig:
    fields = config.get_text_config().to_dict()
    for name in ("transformers_version", "tie_last_hidden_states"):  # the second is Lamina's own switch
        fields.pop(name, None)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def computed(plan: Plan) -> tuple[Any, ...]:
    """What a plan computes, whatever it is called and however it starts: every backbone here has RMSNorms."""

    def norm(spec: Norm | None) -> Norm | None:
        if spec is None:
            return None
        start = 1.0 if spec.learnable_gain else spec.initial_gain
        return replace(spec, kind="backbone" if spec.kind == "rms" else spec.kind, initial_gain=start)

    def sublayer(record: Sublayer) -> Sublayer:
        norms = {name: norm(spec) for name, spec in record.norms.items()}
        return replace(record, **norms, weight_gain=1.0, gate_gain=1.0)  # type: ignore[arg-type]

    layers = tuple((sublayer(layer.attention), sublayer(layer.feed_forward)) for layer in plan.layers)
    ends = (norm(plan.final_norm), norm(plan.embedding_norm), plan.embedding_scale)
    inner = (plan.qk_norm, plan.v_norm)
    return layers, *ends, *inner, None if inner == ("off", "off") else norm(plan.qkv_norm)


def _check_class(model: PreTrainedModel) -> None:
    wanted: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    if not isinstance(model, wanted):
        raise UserError(f"source: the model is a {type(model).__name__} (allowed: {wanted.__name__})")
    if getattr(model, "hf_quantizer", None) is not None:
        raise UserError("quantization_config: quantised weights cannot be converted (allowed: the original checkpoint)")
    if model.config.tie_word_embeddings:
        _check_tied(model)


def _check_tied(model: Any) -> None:
    """Raise UserError where the configuration ties two tensors that differ: one of them would be lost."""
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    if head is not embedding and not torch.equal(head, embedding):
        raise UserError(
            "tie_word_embeddings: true, but the tensor 'lm_head.weight' differs from the embedding (allowed: false)"
        )


def _dtype_of(model: PreTrainedModel) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise UserError(f"dtype: the model mixes {', '.join(sorted(map(_short, dtypes)))} (allowed: one for all of it)")
    return dtypes.pop()


def _refuse_tensors(what: str, keys: Iterable[str], why: str) -> None:
    found = sorted(keys)
    if found:
        more = f" (and {len(found) - 1} more: {', '.join(found[1:3])}{', …' if len(found) > 3 else ''})"
        raise UserError(f"{what} tensor {found[0]!r}: it {why}{more if len(found) > 1 else ''}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(model_or_path: Any) -> str:
    return repr(str(model_or_path)) if isinstance(model_or_path, str | Path) else f"the {type(model_or_path).__name__}"
