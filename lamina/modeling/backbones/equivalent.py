"""The model of transformers that computes what a Lamina model computes, also where its backbone is another one.

Llama's attention and feed-forward with OLMo 2's placement is an OLMo 2. Whether there is such a model is decided by the
plans, after what is constant has been moved into the weights:

    pre_scale * A(x)                        a factor on A's gain
    x^0 = LN(embedding_scale * E[token])    another table E, whose rows are scaled and normed
    a norm without a learned gain           a gain that is constant
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from lamina.core.architectures import conversions
from lamina.errors import UserError
from lamina.modeling.backbones.conversion import computed, to_transformers
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import Block, LaminaForCausalLM, LaminaNorm, LogitsStyle, Residual
from lamina.placements import Norm, Plan, Sublayer, resolve

# Backbones with the attention of Llama, but for biases and norms on queries and keys, and its feed-forward.
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "olmo2")


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
    """The model of transformers with the same logits, in evaluation mode; it shares no weights with ``model``.

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
    tied = bool(model.config.tie_word_embeddings) and not _folds_embedding(plan)
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
    """The sliding window of a layer, where a sequence can be longer than it; None where no layer slides."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = "sliding_attention" in types if types else bool(window)
    return window if slides and window and window < config.max_position_embeddings else None


def _find(model: LaminaForCausalLM, plan: Plan, config: PreTrainedConfig) -> str:
    """The model type with the same equation. Raises UserError if there is none."""
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
    """The linear layers of a sub-layer's module, or that of the name."""
    named = residual.module.named_modules()
    return [module for key, module in named if isinstance(module, nn.Linear) and name in ("", key)]


def _inner_norms(attention: nn.Module, plan: Plan, head_dim: int) -> str:
    """The norms on queries and keys, the plan's or the attention's own: "off", "head", "full", or "other"."""
    rms = plan.qkv_norm is None or plan.qkv_norm.kind in ("backbone", "rms")
    if plan.v_norm != "off" or not rms:
        return "other"
    norm = getattr(attention, "q_norm", None)
    if norm is None:
        return "off"
    return "head" if len(_gain(norm)) == head_dim else "full"


def _folded(plan: Plan) -> tuple[object, ...]:
    """What a plan computes once its constants are in the weights; without the norms on queries, keys and values."""

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


def _folds_embedding(plan: Plan) -> bool:
    return plan.embedding_norm is not None or plan.embedding_scale != 1.0


def _renamed(model: LaminaForCausalLM, row: Equivalent) -> dict[str, torch.Tensor]:
    """The tensors of the row's model, by their names in it."""
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
    """The attention's tensors, its queries and keys in the order that the rotary embedding expects."""
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
    """The gain of a norm [width]; the constant one where it is not learned."""
    if isinstance(norm, LaminaNorm) and norm.weight is None:
        return torch.full((norm.hidden_size,), norm.initial_gain)
    return norm.get_parameter("weight")


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
