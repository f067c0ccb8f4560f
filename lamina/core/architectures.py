"""The model types of transformers that Lamina supports. This module does not load torch.

For each model type, a table lists the roles of the weights, which initializers need. The table also lists the norm
placement, which the conversion of checkpoints needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Target = Literal["lamina", "transformers"]  # the format to which Lamina converts a checkpoint
TRAINERS = ("megatron", "nanogpt", "olmo-core", "torchtitan")  # Lamina converts their checkpoints in both directions


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How Lamina converts the checkpoints of a model type."""

    placement: str  # the norm placement with its options, such as "peri_ln(embedding_norm=false)"
    # a mapping from the name of a norm or learned scale in transformers to a position in Lamina's block
    norms: Mapping[str, str]
    # a mapping from an option of the placement to the field of transformers' configuration with the option's value. The
    # option ``wiring`` becomes "parallel" if the field is true
    options: Mapping[str, str] = field(default_factory=dict)
    # whether the checkpoint stores a single norm for attention and feed-forward, under the attention's name
    one_norm: bool = False
    # the number to add to a stored gain. Gemma stores w and multiplies by 1 + w, so the offset is 1
    gain_offset: float = 0.0
    # a clause for messages that explains why Lamina's outputs differ from transformers' in the last bits
    rounds: str = ""
    note: str = ""  # a remark for the table in docs/edit-layers.md


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model type of transformers."""

    title: str  # the model type's name for messages and docs
    # a mapping from a module's attribute name to the role of the module's weight, such as "query". If attention and
    # feed-forward use the same attribute name, the key names the sub-layer ("attention.Wo")
    roles: Mapping[str, str] = field(default_factory=dict)
    conversion: Conversion | None = None


_PRE_LN = Conversion(
    placement="pre_ln",
    norms={"input_layernorm": "attention.pre_norm", "post_attention_layernorm": "feed_forward.pre_norm"},
)
_GAIN = (
    "transformers applies the norms' gains in float32 and then rounds, but Lamina rounds before it applies the gains"
)
_BITNET = replace(_PRE_LN, note="attention and feed-forward contain SubLN's inner norms")
_OLMO2 = Conversion(
    placement="olmo2(qk_norm=off)",
    norms={"post_attention_layernorm": "attention.out_norm", "post_feedforward_layernorm": "feed_forward.out_norm"},
    rounds=_GAIN,
    note="attention normalizes queries and keys",
)
# Gemma has no norm on its embedding; the factor sqrt(hidden_size) is part of its embed_tokens, which stays as it is.
_GEMMA = Conversion(
    placement="gemma2(embedding_scale=1, zero_centered=false)",
    norms={
        "input_layernorm": "attention.pre_norm",
        "post_attention_layernorm": "attention.out_norm",
        "pre_feedforward_layernorm": "feed_forward.pre_norm",
        "post_feedforward_layernorm": "feed_forward.out_norm",
    },
    gain_offset=1.0,
    rounds=_GAIN,
)
_APERTUS = replace(
    _PRE_LN, norms={"attention_layernorm": "attention.pre_norm", "feedforward_layernorm": "feed_forward.pre_norm"}
)
_GLM4 = Conversion(
    placement="sandwich_ln",
    norms={
        "input_layernorm": "attention.pre_norm",
        "post_self_attn_layernorm": "attention.out_norm",
        "post_attention_layernorm": "feed_forward.pre_norm",
        "post_mlp_layernorm": "feed_forward.out_norm",
    },
)
_SKIPS = {"input_residual": "attention.skip_scale", "post_attention_residual": "feed_forward.skip_scale"}
_GRANITE = Conversion(placement="granite", norms=_PRE_LN.norms, options={"multiplier": "residual_multiplier"})
_HYPERCLOVA = replace(
    _GRANITE,
    norms={**_PRE_LN.norms, "post_norm1": "attention.out_norm", "post_norm2": "feed_forward.out_norm"},
    options={**_GRANITE.options, "out_norm": "use_post_norm"},
)
_MINICPM = Conversion(placement="minicpm", norms=_PRE_LN.norms, options={"scale_depth": "scale_depth"})
_PARALLEL = {"wiring": "use_parallel_residual"}
_ADDS = "transformers adds the sum of both branches to the residual stream, but Lamina adds one branch after the other"
_NEOX = Conversion(
    placement="pre_ln",
    norms=_PRE_LN.norms,
    options=_PARALLEL,
    rounds=_ADDS,
    note="`wiring=parallel` if the checkpoint sets use_parallel_residual",
)
_STABLELM = replace(_NEOX, rounds="", one_norm=True)
_COHERE = Conversion(
    placement="pre_ln(wiring=parallel)",
    norms=_PRE_LN.norms,
    one_norm=True,
    rounds="transformers computes each LayerNorm in several operations, but Lamina uses one operation",
    note="attention and feed-forward share one norm, which Lamina stores twice",
)
_PHI = replace(_COHERE, rounds=_ADDS)
# The model types that Lamina neither builds nor converts, with the reason.
UNCONVERTED = dict.fromkeys(
    ("codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj"),
    "the layers of this model type return more than the residual stream, so Lamina cannot replace the layers",
)
# The usual names in decoders, including decoders that the table does not list.
_DECODER = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "qkv_proj": "query_key_value",
    "o_proj": "attention_out",
    "gate_proj": "gate",
    "up_proj": "feed_forward_in",
    "gate_up_proj": "gate_and_in",
    "down_proj": "feed_forward_out",
}
_EXPERTS = {**_DECODER, **dict.fromkeys(("gate", "router", "shared_expert_gate"), "router")}
_LATENT = {  # DeepSeek's multi-head latent attention
    **_EXPERTS,
    "q_a_proj": "query_down",
    "q_b_proj": "query",
    "kv_a_proj_with_mqa": "key_value_down",
    "kv_b_proj": "key_value",
}
_NEOX_ROLES = {
    "query_key_value": "query_key_value_by_head",
    "attention.dense": "attention_out",
    "dense_h_to_4h": "feed_forward_in",
    "dense_4h_to_h": "feed_forward_out",
}
_MODERNBERT = {
    "Wqkv": "query_key_value",
    "attention.Wo": "attention_out",
    "Wi": "gate_and_in",
    "feed_forward.Wo": "feed_forward_out",
}
_PHI_ROLES = {
    **{name: _DECODER[name] for name in ("q_proj", "k_proj", "v_proj")},
    "attention.dense": "attention_out",
    "fc1": "feed_forward_in",
    "fc2": "feed_forward_out",
}
_VIT = {name: _PHI_ROLES[name] for name in ("q_proj", "k_proj", "v_proj", "fc1", "fc2")} | {"o_proj": "attention_out"}


def _rows(conversion: Conversion, roles: Mapping[str, str] = _DECODER, /, **titles: str) -> dict[str, Architecture]:
    return {name: Architecture(title=title, roles=roles, conversion=conversion) for name, title in titles.items()}


# Norms inside the attention module, such as OLMo 2's norms on queries and keys, stay in that module.
ARCHITECTURES: dict[str, Architecture] = {
    **_rows(_PRE_LN, llama="Llama", mistral="Mistral", qwen2="Qwen 2", qwen3="Qwen 3", smollm3="SmolLM 3"),
    **_rows(_PRE_LN, ernie4_5="ERNIE 4.5", phi3="Phi-3", seed_oss="Seed-OSS", starcoder2="StarCoder2"),
    **_rows(_PRE_LN, arcee="Arcee"),
    **_rows(_BITNET, bitnet="BitNet"),
    **_rows(_PRE_LN, cwm="CWM", glm="GLM", jais2="Jais 2", ministral3="Ministral 3"),
    **_rows(_PRE_LN, _EXPERTS, exaone_moe="EXAONE MoE", glm4_moe="GLM-4.5"),
    **_rows(_PRE_LN, _EXPERTS, minimax_m2="MiniMax-M2", mixtral="Mixtral", olmoe="OLMoE", phimoe="Phi-3.5 MoE"),
    **_rows(_PRE_LN, _EXPERTS, qwen2_moe="Qwen 2 MoE", qwen3_moe="Qwen 3 MoE", solar_open="Solar Open"),
    **_rows(_PRE_LN, _LATENT, deepseek_v2="DeepSeek-V2", deepseek_v3="DeepSeek-V3"),
    **_rows(_APERTUS, apertus="Apertus"),
    **_rows(replace(_OLMO2, rounds="", note=""), exaone4="EXAONE 4"),
    **_rows(_OLMO2, olmo2="OLMo 2", olmo3="OLMo 3"),
    **_rows(
        replace(_GEMMA, placement="pre_ln", norms=_PRE_LN.norms, note="the norm multiplies by 1 + the stored gain"),
        gemma="Gemma",
    ),
    **_rows(_GEMMA, gemma2="Gemma 2"),
    **_rows(
        replace(_GEMMA, placement=_GEMMA.placement.replace("gemma2(", "gemma3(qk_norm=off, ")),
        gemma3_text="Gemma 3 text",
    ),
    **_rows(_GLM4, glm4="GLM-4"),
    **_rows(Conversion(placement="doge", norms={**_PRE_LN.norms, **_SKIPS}), doge="Doge"),
    **_rows(_GRANITE, granite="Granite"),
    **_rows(_GRANITE, _EXPERTS, granitemoe="Granite MoE"),
    **_rows(_HYPERCLOVA, hyperclovax="HyperCLOVA X"),
    **_rows(_STABLELM, stablelm="StableLM"),
    **_rows(_COHERE, cohere="Cohere", cohere2="Cohere 2"),
    **_rows(_MINICPM, _LATENT, minicpm3="MiniCPM 3"),
    "gpt_neox": Architecture(title="GPT-NeoX", roles=_NEOX_ROLES, conversion=_NEOX),
    "phi": Architecture(title="Phi", roles=_PHI_ROLES, conversion=_PHI),
    "modernbert": Architecture(title="ModernBERT", roles=_MODERNBERT),
    "vit": Architecture(title="ViT", roles=_VIT),
}
_STARCODER2 = {"feed_forward.c_fc": "feed_forward_in", "feed_forward.c_proj": "feed_forward_out"}
_STARCODER2 |= {"attention.out_proj": "attention_out"}  # of Mamba's relatives
# The names of all rows, because other backbones may use the same names. No two rows disagree on a name.
ROLES: dict[str, str] = {name: role for row in ARCHITECTURES.values() for name, role in row.roles.items()} | _STARCODER2
HIDDEN = "hidden"  # a weight of a block whose name has no role


def conversions() -> dict[str, Conversion]:
    return {name: row.conversion for name, row in ARCHITECTURES.items() if row.conversion is not None}


def convertible() -> str:
    """List as text, for each norm placement, the model types that Lamina can convert."""
    groups: dict[str, list[str]] = {}
    for model_type, conversion in conversions().items():
        groups.setdefault(conversion.placement.partition("(")[0], []).append(ARCHITECTURES[model_type].title)
    return ", ".join(f"{', '.join(names)} ({placement})" for placement, names in groups.items())
