"""The conversion of a saved model into a new folder: converted, verified, then put in its place as a whole."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging
from transformers.utils.hub import cached_file

from lamina.core.architectures import Target, conversions
from lamina.errors import UserError
from lamina.jobs import folder as job_folder
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json
from lamina.jobs.kinds import Kind
from lamina.jobs.model_folder import model_folder
from lamina.jobs.names import ENVIRONMENT
from lamina.modeling.backbones import conversion
from lamina.modeling.backbones.conversion import computed, to_transformers
from lamina.modeling.backbones.loading import load_weights, read_config
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.modeling_lamina import Block, LaminaForCausalLM, LaminaNorm, LogitsStyle, Residual
from lamina.placements import Norm, Plan, Sublayer, resolve

# Backbones with the attention of Llama, but for biases and norms on queries and keys, and its feed-forward.
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "olmo2")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
# Logits that differ by more than this part of the largest are another model's; a correct conversion gives 0.0.
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1


class ConversionRecord(TypedDict):
    """The content of conversion.json. ``model_type`` is that of transformers' model, ``backbone`` that of Lamina's."""

    source: str
    to: Target
    model_type: str
    backbone: str
    placement: str
    placement_options: dict[str, object]
    num_layers: int
    dtype: str
    largest_difference: float | None


def convert(
    source: str, output: Path, *, to: Target | None, dtype: str, overwrite: bool, verify: bool
) -> ConversionRecord:
    """Convert a saved model into a new folder. If it cannot, raises UserError and leaves ``output`` as it was.

    Args:
        source: a folder with config.json and safetensors, a run's folder, or a name on the hub.
        output: a new or empty folder.
        to: the form to convert to; by default the one that the source does not have.
        dtype: of the weights; "auto" keeps the checkpoint's.
        overwrite: delete the files that Lamina wrote into ``output`` earlier.
        verify: load what was written and compare its logits with the source's.
    """
    job_folder.refuse(output, resume=False, overwrite=overwrite)
    source = str(model_folder(source))
    if Path(source).exists() and output.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise UserError(f"output: {str(output)!r} holds the source {source!r} (allowed: another folder)")
    logging.disable_progress_bar()
    to = _target(source, to)
    model = conversion.load(source, dtype=dtype)
    if isinstance(model, LaminaForCausalLM):
        converted = equivalent(model)
    else:
        converted = conversion.from_transformers(model)
    record = _record(source, to, *((converted, model) if to == "lamina" else (model, converted)))
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        _copy_tokenizer(source, draft)
        converted.save_pretrained(draft)
        del converted  # never more than two copies of the weights
        if verify:
            again, _ = load_weights(draft, read_config(draft, "output"), AutoModelForCausalLM, "output", extra=False)
            record["largest_difference"] = _verified_difference(model, again, record["backbone"])
        write_json(draft / "conversion.json", record)
        write_json(draft / ENVIRONMENT, environment(seed=0, kind=Kind.MODEL))
        with job_folder.hold(output, overwrite=overwrite):
            for path in sorted(draft.iterdir()):
                path.rename(output / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return record


def _target(source: str, to: Target | None) -> Target:
    """Return the form to convert to. Raises UserError, before the weights are read, for the source's own."""
    config = conversion.read_config(source)
    form: Target = "lamina" if isinstance(config, LaminaConfig) else "transformers"
    other: Target = "transformers" if form == "lamina" else "lamina"
    if to == form:
        raise UserError(f"--to: {source!r} is a {to} checkpoint already (allowed: {other})")
    return other


def _record(source: str, to: Target, ours: PreTrainedModel, theirs: PreTrainedModel) -> ConversionRecord:
    config = ours.config
    assert isinstance(config, LaminaConfig)
    assert config.plan is not None
    return {
        "source": source,
        "to": to,
        "model_type": theirs.config.model_type,
        "backbone": backbone_of(config).model_type,
        "placement": config.plan["placement"],
        "placement_options": config.plan["options"],
        "num_layers": len(config.plan["layers"]),
        "dtype": str(ours.dtype).removeprefix("torch."),
        "largest_difference": None,
    }


@torch.no_grad()
def largest_difference(first: PreTrainedModel, second: PreTrainedModel) -> tuple[float, float]:
    """Return the largest absolute difference of two models' logits, and the first one's largest logit.

    On 4 blocks of 64 random tokens (fewer if the model's context is shorter), drawn from a separate generator.
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
    """Compare the written model's logits with the source's. Raises UserError if they differ much."""
    difference, largest = largest_difference(model, again)
    if math.isnan(difference):
        raise UserError(
            "verify: the logits are not finite, so they cannot be compared (--no-verify converts unchecked)"
        )
    half = model.dtype.itemsize < 4 and (again.dtype != model.dtype or conversions()[backbone].gain_in_float32)
    if difference > largest * (HALF_TOLERANCE if half else TOLERANCE):
        raise UserError(
            f"verify: the logits differ by up to {difference:.3g} (the largest is {largest:.3g}); nothing was written "
            "(--no-verify converts unchecked)"
        )
    return difference


def _copy_tokenizer(source: str, target: Path) -> None:
    """Copy the tokenizer's files unchanged from a folder or the hub's cache."""
    for name in TOKENIZER_FILES:
        try:
            stored = cached_file(
                source,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError:
            stored = None
        if stored is not None:
            shutil.copyfile(stored, target / name)


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """A model type of transformers with the attention and feed-forward of a Llama.

    Args:
        placement: its placement, as ``lamina.placements.resolve`` reads it.
        norms: the position in Lamina's block of each of a layer's norms, by transformers' name.
        qk_norm: its norms on queries and keys: "off", "head" or "full" (the full width).
        bias: whether queries, keys and values have biases.
        pairs: whether its rotary embedding turns neighboring channels, not those half a head apart.
        gate_and_up: whether one projection computes the gate and the feed-forward's input.
        fields: of its configuration, beyond the sizes.
    """

    placement: str
    norms: Mapping[str, str]
    qk_norm: str = "off"
    bias: bool = False
    pairs: bool = False
    gate_and_up: bool = False
    fields: Mapping[str, object] = field(default_factory=dict)


_PRE = conversions()["llama"].norms
_OUT = conversions()["olmo2"].norms
_AROUND = {
    "input_layernorm": "attention.pre_norm",
    "post_self_attn_layernorm": "attention.out_norm",
    "post_attention_layernorm": "feed_forward.pre_norm",
    "post_mlp_layernorm": "feed_forward.out_norm",
}
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


@torch.no_grad()
def equivalent(model: LaminaForCausalLM) -> PreTrainedModel:
    """Return the model of transformers with the same logits, in evaluation mode; it shares no weights with ``model``.

    The logits are equal in float32 but for rounding, where a factor went into a gain. Raises UserError where there is
    no such model, saying what it lacks.
    """
    config = backbone_of(model.config)
    plan = Plan.from_dict(model.config.plan or {})
    own = conversions().get(config.model_type)
    if own is not None and computed(plan) == computed(resolve(own.placement, plan.num_layers)):
        return to_transformers(model)
    model_type = _find(model, plan, config)
    row = EQUIVALENTS[model_type]
    tensors = _renamed(model, row)
    changed = plan.embedding_norm is not None or plan.embedding_scale != 1.0  # the table's rows, not the readout's
    tied = bool(model.config.tie_word_embeddings) and not changed
    if tied:
        tensors.pop("lm_head.weight", None)
    fields = {name: getattr(config, name) for name in _FIELDS}
    fields |= {"head_dim": _head_dim(config), "tie_word_embeddings": tied, "attention_bias": False, **row.fields}
    fields["layer_types"] = ["full_attention"] * config.num_hidden_layers
    fields["rope_parameters"] = {**(config.rope_parameters or {}), "partial_rotary_factor": 1.0}
    with init.no_init_weights():
        found: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **fields), dtype=model.dtype
        )
    missing, extra = found.load_state_dict(tensors, strict=False)
    if extra or set(missing) - ({"lm_head.weight"} if tied else set()):
        raise UserError(f"source: its tensors are not those of {model_type!r} ({[*missing, *extra][0]!r})")
    found.tie_weights()
    nn.Module.to(found, model.device)
    return found.eval()


def window_of(config: PreTrainedConfig) -> int | None:
    """Return the sliding window of a layer, where a sequence can be longer than it; None where no layer slides."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = "sliding_attention" in types if types else bool(window)
    return window if slides and window and window < config.max_position_embeddings else None


def _find(model: LaminaForCausalLM, plan: Plan, config: PreTrainedConfig) -> str:
    """Return the model type with the same equation. Raises UserError if there is none."""
    if config.model_type not in LLAMAS:
        raise UserError(
            f"plan: no model of transformers has this placement ({plan.placement!r}) on the backbone "
            f"{config.model_type!r} (allowed: its own placement, or of the backbones {', '.join(LLAMAS)})"
        )
    attention = _blocks(model)[0].attention.module
    inner = _inner_norms(attention, plan, _head_dim(config))
    bias = "q_proj.bias" in attention.state_dict()
    others = [m for b in _blocks(model) for m in (*_linear(b.attention, "o_proj"), *_linear(b.feed_forward))]
    if (window := window_of(config)) is not None:
        raise UserError(
            f"plan: {plan.placement!r} on this backbone is no model of transformers: its sliding window of {window} is "
            f"less than max_position_embeddings, {config.max_position_embeddings}"
        )
    if any(linear.bias is not None for linear in others) or config.hidden_act != "silu" or any(LogitsStyle.of(config)):
        raise UserError(
            f"plan: {plan.placement!r} on this backbone is no model of transformers: it has biases outside queries, "
            "keys and values, another activation than silu, or scaled logits"
        )
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
        f"plan: no architecture computes the placement {plan.placement!r} as it is here{with_bias} (allowed: what "
        f"equals {', '.join(allowed)})"
    )


def _blocks(model: LaminaForCausalLM) -> list[Block]:
    return [block for block in model.model.layers if isinstance(block, Block)]


def _linear(residual: Residual, name: str = "") -> list[nn.Linear]:
    """Return the linear layers of a sub-layer's module, or that of the name."""
    named = residual.module.named_modules()
    return [module for key, module in named if isinstance(module, nn.Linear) and name in ("", key)]


def _inner_norms(attention: nn.Module, plan: Plan, head_dim: int) -> str:
    """Return the norms on queries and keys, the plan's or the attention's own: "off", "head", "full", or "other"."""
    rms = plan.qkv_norm is None or plan.qkv_norm.kind in ("backbone", "rms")
    if plan.v_norm != "off" or not rms:
        return "other"
    norm = getattr(attention, "q_norm", None)
    if norm is None:
        return "off"
    return "head" if len(_gain(norm)) == head_dim else "full"


def _folded(plan: Plan) -> tuple[object, ...]:
    """Return what a plan computes once its constants are in the weights, without norms on queries, keys, values."""

    def norm(spec: Norm | None) -> Norm | None:
        return None if spec is None else Norm(kind=spec.kind, groups=spec.groups)

    def sublayer(record: Sublayer) -> Sublayer:
        scale: dict = {"pre_scale": 1.0, "pre_scale_learned": "no"} if record.pre_norm is not None else {}
        norms = {name: norm(getattr(record, name)) for name in ("pre_norm", "out_norm", "post_norm")}
        return replace(record, **norms, **scale)

    layers = tuple(
        replace(layer, attention=sublayer(layer.attention), feed_forward=sublayer(layer.feed_forward))
        for layer in plan.layers
    )
    ends = {"final_norm": norm(plan.final_norm), "embedding_norm": None, "embedding_scale": 1.0}
    return computed(replace(plan, layers=layers, **ends, qk_norm="off", v_norm="off"))


def _renamed(model: LaminaForCausalLM, row: Equivalent) -> dict[str, torch.Tensor]:
    """Return the tensors of the row's model, by their names in it."""
    config = backbone_of(model.config)
    tensors = {
        "lm_head.weight": model.lm_head.weight,
        "model.embed_tokens.weight": model.model._scaled_and_normed(
            model.get_input_embeddings().get_parameter("weight")
        ),
        "model.norm.weight": _gain(model.model.norm),
    }
    for index, block in enumerate(_blocks(model)):
        prefix = f"model.layers.{index}."
        for name, position in row.norms.items():
            part, _, norm = position.partition(".")
            residual = getattr(block, part)
            scale = residual.pre_scale if norm == "pre_norm" else 1.0
            tensors[f"{prefix}{name}.weight"] = _gain(getattr(residual, norm)) * scale
        for name, value in _attention(block.attention, row, _head_dim(config)).items():
            tensors[f"{prefix}self_attn.{name}"] = value
        weights = {name: m.weight for name, m in block.feed_forward.module.named_modules() if isinstance(m, nn.Linear)}
        if row.gate_and_up:
            weights["gate_up_proj"] = torch.cat([weights.pop("gate_proj"), weights.pop("up_proj")])
        tensors |= {f"{prefix}mlp.{name}.weight": value for name, value in weights.items()}
    return {name: value.detach().clone() for name, value in tensors.items()}


def _attention(residual: Residual, row: Equivalent, head_dim: int) -> dict[str, torch.Tensor]:
    """Return the attention's tensors, its queries and keys in the order that the rotary embedding expects."""
    tensors = {}
    for name, value in residual.module.named_parameters():
        turned = row.pairs and name.partition(".")[0] in ("q_proj", "k_proj")
        tensors[name] = in_pairs(value, head_dim) if turned else value
    for name in ("q_norm", "k_norm"):
        norm = getattr(residual.module, name, None)
        if isinstance(norm, LaminaNorm):
            tensors[f"{name}.weight"] = _gain(norm)
    return tensors


def in_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [heads * head_dim, ...] in another order: those that are half a head apart become neighbors."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _gain(norm: nn.Module) -> torch.Tensor:
    """Return the gain of a norm [width]; the constant one where it is not learned."""
    if isinstance(norm, LaminaNorm) and norm.weight is None:
        return torch.full((norm.hidden_size,), norm.initial_gain)
    return norm.get_parameter("weight")


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
