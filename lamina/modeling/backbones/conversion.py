"""Convert checkpoints between transformers and Lamina, with the same logits.

A conversion uses each tensor exactly once. Otherwise, a UserError names the tensor.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, cast

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
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from lamina.core.architectures import ROLES, UNCONVERTED, Conversion, Target, conversions
from lamina.errors import UserError
from lamina.jobs import folder as job_folder
from lamina.jobs.environment import environment
from lamina.jobs.files import disk_full, full_disk, write_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import ENVIRONMENT
from lamina.modeling.backbones import loading
from lamina.modeling.backbones.loading import TOKENIZER_FILES, load_weights
from lamina.modeling.backbones.presets import head_dim_of
from lamina.modeling.backbones.stored import refuse_tensors, stored_tensors
from lamina.modeling.configuration_lamina import LaminaConfig, LogitsStyle, backbone_of
from lamina.modeling.modeling_lamina import HEADS, LaminaForCausalLM, adapter_of
from lamina.modeling.wiring_lamina import LaminaNorm, Residual
from lamina.placements import Norm, Plan, Sublayer, resolve
from lamina.placements.resolution import map_norms

# The roles of the projections that read the stream.
_READING = ("query", "key", "value", "query_key_value_by_head", "gate", "feed_forward_in")
_BRANCH_END = re.compile(r"(.+\.(?:attention|feed_forward))\.(?:module\.)?(out_norm|o_proj|down_proj)")
# Backbones with Llama's feed-forward, and with Llama's attention except for biases and norms on queries and keys.
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "olmo2")
_BESIDE_TOKENIZER = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
# The allowed difference of the logits, relative to the largest logit. A correct conversion usually gives 0.0.
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
RECORD = "conversion.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """A transformers model type that has the same norm placement as a Lamina model."""

    placement: str  # with options
    norms: Mapping[str, str]  # from a norm's name in transformers to the norm's position in Lamina's block
    qk_norm: str = "off"  # the norms on queries and keys: "off", "head" or "full" (the full width)
    bias: bool = False  # whether queries, keys and values have biases
    # Whether the rotary embedding rotates neighboring channels (GLM), not channels half a head apart (Llama).
    pairs: bool = False
    gate_and_up: bool = False  # whether one projection computes the feed-forward's gate and input
    one_norm: bool = False  # whether attention and feed-forward share the attention's norm
    gain_offset: float = 0.0  # the difference between a gain and the stored weight (see ``Conversion``)
    # Whether the configuration has a field for the branches' factor. If not, Lamina multiplies weights by the factor.
    scales_branches: bool = False
    # Fields of the configuration other than the sizes.
    fields: Mapping[str, object] = field(default_factory=dict)


_PRE = conversions()["llama"].norms
_OUT = conversions()["olmo2"].norms
_AROUND = conversions()["glm4"].norms
# Model types with the attention and feed-forward of a Llama.
EQUIVALENTS: dict[str, Equivalent] = {
    "llama": Equivalent(placement="pre_ln", norms=_PRE),
    "qwen2": Equivalent(placement="pre_ln", norms=_PRE, bias=True),
    "qwen3": Equivalent(placement="pre_ln", norms=_PRE, qk_norm="head"),
    "olmo2": Equivalent(placement="out_ln", norms=_OUT, qk_norm="full"),
    "exaone4": Equivalent(placement="out_ln", norms=_OUT, qk_norm="head", fields={"sliding_window": None}),
    "glm4": Equivalent(placement="sandwich_ln", norms=_AROUND, pairs=True, gate_and_up=True),
}
_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def conversion_of(model_type: str) -> Conversion:
    rows = conversions()
    if model_type in UNCONVERTED:
        raise UserError(
            f"model_type: Lamina cannot convert {model_type!r}: {UNCONVERTED[model_type]}. Choose another model."
        )
    if model_type not in rows:
        raise UserError(f"model_type: Lamina cannot convert {model_type!r} (allowed: {', '.join(sorted(rows))})")
    return rows[model_type]


def lamina_name(key: str, theirs: PreTrainedModel, norms: Mapping[str, str]) -> str:
    adapter, prefix = adapter_of(theirs.config), f"{theirs.base_model_prefix}."
    if not key.startswith(prefix):
        return key
    inner = key.removeprefix(prefix)
    if match := re.fullmatch(rf"({re.escape(adapter.layers)}\.\d+)\.(\w+)(.*)", inner):
        layer, part, rest = match.groups()
        inner = f"{layer}.{norms.get(part) or adapter.parts.get(part, part)}{rest}"
    return f"model.backbone.{inner}"


def fill(target: PreTrainedModel, tensors: Mapping[str, torch.Tensor], source: PreTrainedModel) -> None:
    """Copy each tensor to ``target`` by name. Raises UserError for a missing, extra or wrongly shaped tensor."""
    expected = target.state_dict()
    refuse_tensors("missing", expected.keys() - tensors.keys(), f"is not in the {type(source).__name__}")
    refuse_tensors("extra", tensors.keys() - expected.keys(), f"does not exist in {type(target).__name__}")
    with torch.no_grad():
        for name, tensor in expected.items():
            if tensors[name].shape != tensor.shape:
                raise UserError(
                    f"tensor {name!r}: its shape is {list(tensors[name].shape)}, but the configuration asks for "
                    f"{list(tensor.shape)}. Give the configuration of these weights."
                )
            tensor.copy_(tensors[name])
    target.tie_weights()
    target.generation_config = copy.deepcopy(source.generation_config)


def _shifted(gain: torch.Tensor, offset: float) -> torch.Tensor:
    """Add an offset to a gain in double precision and round once. The sum equals the gain in Gemma's code exactly."""
    return (gain.double() + offset).to(gain.dtype) if offset else gain


def copy_buffers(names: Mapping[str, str], source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy buffers that checkpoints do not store, such as rotary frequencies. ``names`` maps target to source names."""
    # The buffers of two models differ if only one model was rounded to a smaller dtype.
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if (value := buffers.get(names.get(name, ""))) is not None and value.shape == buffer.shape:
            buffer.data = value.detach().clone()


def from_transformers(
    model_or_path: PreTrainedModel | str | Path, *, dtype: str | torch.dtype = "auto"
) -> LaminaForCausalLM:
    """Convert a causal language model of transformers to a Lamina model with the same logits.

    Args:
        model_or_path: the model, a folder with safetensors, or a name on the hub. Lamina never runs remote code.
        dtype: the dtype of the loaded weights, for a folder or name. "auto" keeps the checkpoint's dtype.

    Returns:
        A LaminaForCausalLM in evaluation mode that shares no weights with the source. The logits are equal, or differ
        by rounding for model types with ``Conversion.rounds``.

    Raises:
        UserError: for a model type that Lamina can't convert, for weights in another format than safetensors, or for a
            missing, extra or wrongly shaped tensor.
    """
    model = load(model_or_path, dtype=dtype) if isinstance(model_or_path, str | Path) else model_or_path
    if isinstance(model.config, LaminaConfig):
        raise UserError(f"source: {_name(model_or_path)} is already a Lamina model. Add --to transformers.")
    config = model.config
    conversion = conversion_of(config.model_type)
    _check_class(model)
    dtype = _dtype_of(model)
    if conversion.rounds and dtype.itemsize < 4:
        logger.warning(
            f"dtype: for {config.model_type!r}, {conversion.rounds}. In {_short(dtype)}, the logits differ by "
            "rounding. Convert in float32: the logits then differ only in the last bits."
        )
    plan = own_plan(config)
    outer = LaminaConfig(backbone_config=config, plan=plan.to_dict())
    outer._attn_implementation = config._attn_implementation  # the outer configuration decides for both
    with init.no_init_weights():
        converted = LaminaForCausalLM._from_config(outer, dtype=dtype)
    gains = {f"{name}.weight" for name, module in converted.named_modules() if isinstance(module, LaminaNorm)}
    tensors = {}
    for key, value in model.state_dict().items():  # norms inside an attention stay unchanged
        name = lamina_name(key, model, conversion.norms)
        tensors[name] = _shifted(value, conversion.gain_offset if name in gains else 0.0)
    for name in converted.state_dict() if _has_one_norm(conversion, plan) else ():
        if _SECOND in name:
            tensors[name] = tensors[name.replace(_SECOND, _FIRST)]
    fill(converted, tensors, model)
    buffers = [name for name, _ in model.named_buffers()]
    copy_buffers({lamina_name(name, model, conversion.norms): name for name in buffers}, model, converted)
    nn.Module.to(converted, model.device)
    return converted.eval()


@torch.no_grad()
def to_transformers(model_or_path: PreTrainedModel | str | Path) -> PreTrainedModel:
    """Convert a Lamina model to a transformers model with the same logits, in evaluation mode.

    The result has the backbone's model type, or another model type of transformers with the same norm placement. If
    Lamina has to multiply a gain by a factor, float32 logits differ by rounding.

    Raises UserError if transformers has no model type with this placement, and for an unusable source.
    """
    model = load(model_or_path) if isinstance(model_or_path, str | Path) else model_or_path
    if not isinstance(model, LaminaForCausalLM):
        raise UserError(
            f"source: {_name(model_or_path)} is a {type(model).__name__}. Give a LaminaForCausalLM, or its folder."
        )
    config, row = _theirs(model)
    with init.no_init_weights():
        converted: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=_dtype_of(model))
    fill(converted, _as_stored(model, row, converted), model)
    buffers = [name for name, _ in converted.named_buffers()]
    copy_buffers({name: lamina_name(name, converted, row.norms) for name in buffers}, model, converted)
    nn.Module.to(converted, model.device)
    return converted.eval()


def own_plan(config: PreTrainedConfig) -> Plan:
    """Return the norm placement of a transformers configuration. Raises UserError if Lamina can't convert the type."""
    conversion = conversion_of(config.model_type)
    options = {option: getattr(config, name) for option, name in conversion.options.items()}
    if "wiring" in options:
        options["wiring"] = "parallel" if options["wiring"] else None
    return resolve(conversion.placement, config.num_hidden_layers, **options)


_FIRST, _SECOND = ".attention.pre_norm.", ".feed_forward.pre_norm."


def _has_one_norm(conversion: Conversion, plan: Plan) -> bool:
    return conversion.one_norm and plan.layers[0].feed_forward.read == "block_input"


def _with_one_norm(ours: dict[str, torch.Tensor], model: LaminaForCausalLM) -> None:
    """If a layer's two pre-norms differ, move gains and biases into the next projections.

    Let W n + c be a projection, and g and b the norm's gain and bias: W (g n + b) + c = (W g) n + (W b + c).
    """
    for index, block in enumerate(model.model.layers):
        layer_path = f"model.backbone.{adapter_of(backbone_of(model.config)).layers}.{index}"
        first, second = (
            {
                name: ours[f"{layer_path}{half}{name}"]
                for name in ("weight", "bias")
                if f"{layer_path}{half}{name}" in ours
            }
            for half in (_FIRST, _SECOND)
        )
        if all(torch.equal(first[name], second[name]) for name in first):
            continue
        for half, norm in (("attention", first), ("feed_forward", second)):
            for name, module in getattr(block, half).module.named_modules():
                role = ROLES.get(f"{half}.{name}") or ROLES.get(name)
                if role in _READING and isinstance(module, nn.Linear):
                    weight, bias = (f"{layer_path}.{half}.module.{name}.{kind}" for kind in ("weight", "bias"))
                    if "bias" in norm and bias not in ours:
                        raise UserError(
                            f"plan: layer {index} has two norms with different biases, but the architecture has one "
                            f"bias ({name!r}). Use the same norm on both branches."
                        )
                    if "bias" in norm:
                        ours[bias] = ours[bias] + ours[weight] @ norm["bias"]
                    ours[weight] = ours[weight] * norm["weight"]
        for half in (_FIRST, _SECOND):
            ours[f"{layer_path}{half}weight"] = torch.ones_like(first["weight"])
            if "bias" in first:
                ours[f"{layer_path}{half}bias"] = torch.zeros_like(first["bias"])


def _theirs(model: LaminaForCausalLM) -> tuple[PreTrainedConfig, Equivalent]:
    backbone, plan = backbone_of(model.config), Plan.from_dict(model.config.plan or {})
    conversion = conversions().get(backbone.model_type)
    if conversion is not None and computed(plan) == computed(own_plan(backbone)):
        fields = backbone.to_dict()
        for name in ("transformers_version", "tie_last_hidden_states"):  # Lamina sets the second field
            fields.pop(name, None)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        # The backbone's kernel may differ from the outer model's: Gemma 2 runs only on the eager kernel.
        config._attn_implementation = model.model.backbone.config._attn_implementation
        row = Equivalent(
            placement=conversion.placement,
            norms=conversion.norms,
            gain_offset=conversion.gain_offset,
            scales_branches=True,
        )
        return config, replace(row, one_norm=_has_one_norm(conversion, plan))
    model_type = _find(model, plan, backbone)
    row = EQUIVALENTS[model_type]
    changed = plan.embedding_norm is not None or plan.embedding_scale != 1.0  # not the output head
    fields = {name: getattr(backbone, name) for name in _FIELDS}
    fields |= {"head_dim": head_dim_of(backbone), "attention_bias": False, **row.fields}
    fields["tie_word_embeddings"] = bool(model.config.tie_word_embeddings) and not changed
    fields["layer_types"] = ["full_attention"] * backbone.num_hidden_layers
    fields["rope_parameters"] = {**(backbone.rope_parameters or {}), "partial_rotary_factor": 1.0}
    return AutoConfig.for_model(model_type, **fields), row


def _as_stored(model: LaminaForCausalLM, row: Equivalent, theirs: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors under transformers' names. Gains and embeddings include the placement's constant factors."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, LaminaNorm)}
    ours = model.state_dict()
    for name, norm in norms.items():
        if norm.weight is None:
            ours[f"{name}.weight"] = torch.full((norm.hidden_size,), norm.initial_gain, device=model.device)
        elif norm.zero_centered:
            ours[f"{name}.weight"] = _shifted(norm.weight, 1.0)
    embedding = next(f"{name}.weight" for name, one in model.named_modules() if one is model.get_input_embeddings())
    ours[embedding] = model.model._scaled_and_normed(ours[embedding])
    used, tensors = {"model.embedding_norm.weight"}, {}
    if row.one_norm:
        _with_one_norm(ours, model)
        used |= {name for name in ours if _SECOND in name}
    for key in theirs.state_dict():
        owner, _, last = lamina_name(key, theirs, row.norms).rpartition(".")
        stacked = row.gate_and_up and owner.endswith(".gate_up_proj")
        owners = [owner.replace("gate_up", part) for part in ("gate", "up")] if stacked else [owner]
        names = [f"{name}.{last}" for name in owners]
        refuse_tensors("source: missing", set(names) - ours.keys(), f"is not in the {type(model).__name__}")
        values = [ours[name] for name in names]
        value = torch.cat(values) if len(values) > 1 else values[0]  # avoid a copy of all weights
        if owner.endswith(".pre_norm"):
            residual = owner.removesuffix(".pre_norm")
            value = value * cast(Residual, model.get_submodule(residual)).pre_scale
            names.append(f"{residual}.pre_scale")
        if not row.scales_branches and (branch := _BRANCH_END.fullmatch(owner)):
            residual = cast(Residual, model.get_submodule(branch[1]))
            if (residual.out_norm is None) == (branch[2] != "out_norm"):
                factor = torch.as_tensor(residual.branch_factor(), dtype=value.dtype, device=value.device)
                value = value * (factor[:, None] if factor.ndim and value.ndim > 1 else factor)
                names.append(f"{branch[1]}.out_scale")
        if owner in norms:
            value = _shifted(value, -row.gain_offset)
        elif row.pairs and owner.endswith((".q_proj", ".k_proj")):
            value = in_pairs(value, head_dim_of(backbone_of(model.config)))
        used.update(names)
        tensors[key] = value
    refuse_tensors("source: extra", ours.keys() - used, "does not exist in transformers' model")
    return tensors


def in_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows [heads * head_dim, ...] of a rotary projection, so that rotated pairs are neighbors."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _find(model: LaminaForCausalLM, plan: Plan, config: PreTrainedConfig) -> str:
    """Return the transformers model type that has the same norm placement. Raises UserError if there is none."""
    if config.model_type not in LLAMAS:
        raise UserError(
            f"plan: Lamina cannot write {plan.placement!r} on the backbone {config.model_type!r} for transformers. "
            + (
                "Choose the backbone's own placement."
                if config.model_type in conversions()
                else f"Choose a model with one of these backbones: {', '.join(sorted(conversions()))}."
            )
        )
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    biased = {name.rpartition(".")[2] for name, module in linear.items() if module.bias is not None}
    bias = "q_proj" in biased
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = "sliding_attention" in types if types else bool(window)
    if slides and window and window < config.max_position_embeddings:
        raise UserError(
            f"plan: transformers has no model of {plan.placement!r} with a sliding window ({window} tokens) shorter "
            f"than the context ({config.max_position_embeddings}). Choose a backbone without a sliding window."
        )
    if biased - {"q_proj", "k_proj", "v_proj"} or config.hidden_act != "silu" or any(LogitsStyle.of(config)):
        raise UserError(
            f"plan: transformers has no model of {plan.placement!r} with this backbone's biases, activation or scaled "
            "logits. Choose a backbone such as llama, with silu, unscaled logits, and no biases outside queries, keys "
            "and values."
        )
    inner = _inner_norms(model, plan)
    for model_type, row in EQUIVALENTS.items():
        same = _folded(plan) == _folded(resolve(row.placement, plan.num_layers))
        if same and (row.qk_norm, row.bias) == (inner, bias):
            return model_type
    allowed = [
        row.placement + (f"(qk_norm={row.qk_norm})" if row.qk_norm != "off" else "")
        for row in EQUIVALENTS.values()
        if row.bias == bias
    ]
    with_bias = " with biases on queries, keys and values" if bias else ""
    raise UserError(
        "plan: transformers has no model class with the norms and scales of this placement, "
        f"{plan.placement!r}{with_bias} (allowed: {', '.join(allowed)})"
    )


def _inner_norms(model: LaminaForCausalLM, plan: Plan) -> str:
    if plan.v_norm != "off" or plan.qkv_norm.kind not in ("backbone", "rms"):
        return "other"
    norm = getattr(model.get_submodule("model.backbone.layers.0.attention.module"), "q_norm", None)
    if plan.qk_norm != "off" or norm is None:
        return plan.qk_norm
    return "head" if len(norm.weight) == head_dim_of(backbone_of(model.config)) else "full"


def _folded(plan: Plan) -> Plan:
    """Return the placement without norms on queries, keys and values, and without factors that weights can absorb."""

    def unscaled(sub: Sublayer) -> Sublayer:
        if sub.coupling == "none":
            sub = replace(sub, out_scale=1.0, out_scale_learned="no")
        return sub if sub.pre_norm is None else replace(sub, pre_scale=1.0, pre_scale_learned="no")

    plan = map_norms(plan, lambda norm: Norm(kind=norm.kind, groups=norm.groups))
    layers = tuple(layer.map(unscaled) for layer in plan.layers)
    return computed(replace(plan, layers=layers, embedding_norm=None, embedding_scale=1.0, qk_norm="off", v_norm="off"))


def load(path: str | Path, *, dtype: str | torch.dtype = "auto", head: str = "causal_lm") -> PreTrainedModel:
    """Load a Lamina or transformers model with a head. Lamina reads only safetensors, and runs no remote code."""
    config = read_config(path)
    auto = getattr(transformers, HEADS[head].auto_class)
    model, _ = load_weights(path, config, auto, "source", dtype=dtype, extra=False)
    if config.tie_word_embeddings:
        _check_tied(model)
    return model


def read_config(path: str | Path, *, field: str = "source") -> PreTrainedConfig:
    """Read a checkpoint's configuration. Raises UserError if Lamina can't convert the checkpoint."""
    config = loading.read_config(path, field)
    if config.model_type == "gemma3":
        raise UserError(
            "model_type: 'gemma3' also reads images. Give the text model alone, of the model type 'gemma3_text'."
        )
    if config.model_type != LaminaConfig.model_type:
        conversion_of(config.model_type)
    if getattr(config, "quantization_config", None):
        raise UserError("quantization_config: quantized weights cannot be converted. Give the original checkpoint")
    if Path(path).is_dir():
        stored_tensors(Path(path), field)  # before any other work
    return config


def computed(plan: Plan) -> Plan:
    """Return the placement with default values in all fields that do not affect the model's output.

    A norm of kind "rms" counts as "backbone", because all backbones in ``EQUIVALENTS`` have RMSNorms.
    """

    def norm(spec: Norm) -> Norm:
        start = 1.0 if spec.learnable_gain else spec.initial_gain
        return replace(spec, kind="backbone" if spec.kind == "rms" else spec.kind, initial_gain=start)

    plan = map_norms(plan, norm)
    layers = tuple(layer.map(lambda sub: replace(sub, weight_gain=1.0, gate_gain=1.0)) for layer in plan.layers)
    inner = Norm() if (plan.qk_norm, plan.v_norm) == ("off", "off") else norm(plan.qkv_norm)
    return replace(plan, placement="", layers=layers, qkv_norm=inner, initialization="", options={})


def _check_class(model: PreTrainedModel) -> None:
    expected = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)])
    if not isinstance(model, expected):
        raise UserError(f"source: the model is a {type(model).__name__}. Give a {expected.__name__}.")
    if getattr(model, "hf_quantizer", None) is not None:
        raise UserError("quantization_config: quantized weights cannot be converted. Give the original checkpoint")
    if model.config.tie_word_embeddings:
        _check_tied(model)


def _check_tied(model: PreTrainedModel) -> None:
    embedding = model.get_input_embeddings().get_parameter("weight")
    head = model.get_parameter("lm_head.weight")
    if head is not embedding and not torch.equal(head, embedding):
        raise UserError(
            "tie_word_embeddings: true, but the tensor 'lm_head.weight' differs from the embedding. Set "
            "tie_word_embeddings to false."
        )


def _dtype_of(model: PreTrainedModel) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise UserError(
            f"dtype: the model mixes {', '.join(sorted(map(_short, dtypes)))}. Convert all weights to one dtype."
        )
    return dtypes.pop()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(model_or_path: object) -> str:
    return repr(str(model_or_path)) if isinstance(model_or_path, str | Path) else f"the {type(model_or_path).__name__}"


class ConversionRecord(TypedDict):
    """The content of conversion.json."""

    source: str
    to: str
    model_type: str  # of the transformers model
    backbone: str  # the model type of the Lamina model's backbone
    placement: str
    placement_options: dict[str, object]
    num_layers: int
    dtype: str
    largest_difference: float | None


def convert(
    source: str, output: Path, *, to: Target | None, dtype: str, overwrite: bool, verify: bool
) -> ConversionRecord:
    """Convert a saved model into a new folder (see ``lamina.api.models.convert``). After an error, leave ``output`` as
    is.
    """
    is_ours = isinstance(read_config(source), LaminaConfig)
    form, other = ("lamina", "transformers") if is_ours else ("transformers", "lamina")
    if to == form:
        raise UserError(f"--to: {source!r} is already a {to} checkpoint. Set --to {other}.")
    model = load(source, dtype=dtype)
    converted = to_transformers(model) if is_ours else from_transformers(model)
    ours, theirs = (model, converted) if is_ours else (converted, model)
    record: ConversionRecord = {
        "source": source,
        "to": other,
        "model_type": theirs.config.model_type,
        "backbone": backbone_of(ours.config).model_type,
        "placement": ours.config.plan["placement"],
        "placement_options": ours.config.plan["options"],
        "num_layers": len(ours.config.plan["layers"]),
        "dtype": str(ours.dtype).removeprefix("torch."),
        "largest_difference": None,
    }
    with written_model(source, output, overwrite=overwrite) as draft:
        converted.save_pretrained(draft)
        del converted, ours, theirs  # at most two copies of the weights in memory
        if verify:
            again, _ = load_weights(
                draft, loading.read_config(draft, "output"), AutoModelForCausalLM, "output", extra=False
            )
            record["largest_difference"] = _verified_difference(model, again, record["backbone"])
        write_json(draft / RECORD, record)
    return record


@contextmanager
def written_model(source: str, output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder, and move its files and the source's tokenizer to ``output`` if no error occurs."""
    transformers_logging.disable_progress_bar()
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        for name in (*TOKENIZER_FILES, *_BESIDE_TOKENIZER):
            if (stored := _stored(source, name)) is not None:
                shutil.copyfile(stored, draft / name)
        yield draft
        write_json(draft / ENVIRONMENT, environment(seed=0, kind=Kind.MODEL))
        with job_folder.hold(output, overwrite=overwrite):
            for path in sorted(draft.iterdir()):
                path.rename(output / path.name)
    except Exception as error:
        if disk_full(error):
            raise full_disk(output) from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def saved(model: PreTrainedModel, draft: Path, stored: object, *, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """Save a model in the dtype ``stored`` (None: the model's dtype), and return the model as loaded in ``dtype``."""
    if isinstance(stored, torch.dtype):
        nn.Module.to(model, stored)
    model.save_pretrained(draft)
    config = loading.read_config(draft, "output")
    return load_weights(draft, config, type(model), "output", dtype=dtype, extra=False)[0]


@torch.no_grad()
def largest_difference(first: PreTrainedModel, second: PreTrainedModel) -> tuple[float, float]:
    """Return the largest absolute difference between two models' logits, and the first model's largest logit.

    The input is 4 sequences of at most 64 random tokens.
    """
    config = backbone_of(first.config)
    length = min(64, getattr(config, "max_position_embeddings", None) or 64)
    generator = torch.Generator().manual_seed(0)
    difference = largest = 0.0
    for _ in range(4):
        ids = torch.randint(config.vocab_size, (1, length), generator=generator)
        logits, others = (
            m.eval()(input_ids=ids.to(m.device), use_cache=False).logits.float().cpu() for m in (first, second)
        )
        if not (torch.isfinite(logits).all() and torch.isfinite(others).all()):
            return float("nan"), float("nan")
        difference = max(difference, (logits - others).abs().max().item())
        largest = max(largest, logits.abs().max().item())
    return difference, largest


def _verified_difference(model: PreTrainedModel, again: PreTrainedModel, backbone: str) -> float:
    difference, largest = largest_difference(model, again)
    if math.isnan(difference):
        raise UserError(
            "verify: the logits are not finite, so Lamina cannot compare them. To convert without the check, add "
            "--no-verify."
        )
    half = model.dtype.itemsize < 4 and (again.dtype != model.dtype or conversions()[backbone].rounds != "")
    if difference > largest * (HALF_TOLERANCE if half else TOLERANCE):
        raise UserError(
            f"verify: the logits differ by up to {difference:.3g} (the largest logit is {largest:.3g}), so Lamina "
            "wrote nothing. To convert without the check, add --no-verify."
        )
    return difference


def _stored(source: str, name: str) -> str | None:
    if Path(source).is_file():  # another trainer's checkpoint. transformers would look for this name on the hub
        return None
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        return cached_file(source, name, **quiet)
    except OSError:
        return None
