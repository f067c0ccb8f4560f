"""Presets: model sizes from papers. This module loads no heavy library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lamina.errors import UserError, nearest


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The sizes of a model. ``fields`` has the values for transformers' configuration class of ``model_type``."""

    name: str
    source: str
    model_type: str = "llama"
    fields: Mapping[str, object] = field(default_factory=dict)


def _llama(name: str, source: str, width: int, ffn: int, heads: int, layers: int, **more: object) -> Preset:
    fields: dict[str, object] = {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        **more,
    }
    return Preset(name=name, source=source, fields=fields)


def _vit(name: str, width: int, heads: int) -> Preset:
    labels = {i: f"class_{i}" for i in range(1000)}
    fields = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "num_hidden_layers": 12,
        "id2label": labels,
        "label2id": {label: i for i, label in labels.items()},
    }
    return Preset(name=name, source=_MIX_VIT, model_type="vit", fields=fields)


_MIX_VIT = "Mix-LN Table 4 (ImageNet-1K), which prints no sizes (we chose DeiT's sizes)"
_MIX = "Mix-LN Table 7 and its repository"
_MIX_250M = "Mix-LN's repository, with width 768 for 247M parameters (Table 7's width 1024 would give 355M)"
_FUSE = "FuseNorm App B"
_PROXY = "FuseNorm Figure 4: 64 layers of width 640 (we chose heads of width 64, and an FFN for 310M parameters)"
_PERI = "Peri-LN Section 4 (we chose an FFN of width 4 d, which gives the paper's parameter counts)"
_DEEP = "FuseNorm's 128 blocks (we chose a width and an FFN that give 6.5B parameters)"
_STRESS = "FuseNorm's stress test (we chose heads of width 64, and an FFN of width 8 d / 3)"
_KEEL = "Keel Section 5.3, with {} sub-layers, which the paper calls layers (we chose the vocabulary)"
_MOE = "FuseNorm's MoE 16B-A2.4B: sizes of DeepSeek-V2-Lite, sigmoid routing of DeepSeek-V3, factor 2.446 of Moonlight"
_MOE_FIELDS = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
}
_NANO_MOE = "Lamina's smallest mixture of experts, a small version of 16b-a2.4b with 2 of 8 experts per token"
_NANO_MOE_FIELDS = {
    **_MOE_FIELDS,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "vocab_size": 32000,
}
_KEEL_FIELDS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_PERI_FIELDS = {"max_position_embeddings": 8192, "vocab_size": 100277}  # cl100k_base
_MIX_FIELDS = {"max_position_embeddings": 1024, "rms_norm_eps": 1e-6}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _llama(
            "llama-nano",
            "Lamina's default, which is deep and narrow, and trains in a minute on two cores",
            48,
            128,
            2,
            32,
        ),
        _llama(
            "llama-micro",
            "The default of `lamina compare`: six models train in three minutes on two cores",
            64,
            176,
            2,
            24,
        ),
        _llama("llama-71m", _MIX, 512, 1368, 8, 12, **_MIX_FIELDS),
        _llama("llama-130m", _MIX, 768, 2048, 12, 12, **_MIX_FIELDS),
        _llama("llama-250m", _MIX_250M, 768, 2560, 16, 24, **_MIX_FIELDS),
        _llama("llama-1b", _MIX, 2048, 5461, 32, 24, **_MIX_FIELDS),
        _llama("llama-7b", _MIX, 4096, 11008, 32, 32, **{**_MIX_FIELDS, "max_position_embeddings": 2048}),
        _llama("llama-310m-proxy", _PROXY, 640, 1728, 10, 64, tie_word_embeddings=True),
        _llama("llama-740m", _FUSE, 1536, 4224, 24, 24, tie_word_embeddings=True),
        _llama("llama-1.3b", _FUSE, 1536, 4224, 24, 48, tie_word_embeddings=True),
        _llama("llama-5b", _FUSE, 2560, 6912, 40, 64),
        _llama("llama-6.5b-deep", _DEEP, 2048, 5504, 32, 128),
        *(_llama(f"llama-stress-384x{depth}", _STRESS, 384, 1024, 6, depth) for depth in (32, 64, 128, 256, 512)),
        Preset(name="deepseek-nano", source=_NANO_MOE, model_type="deepseek_v3", fields=_NANO_MOE_FIELDS),
        Preset(name="16b-a2.4b", source=_MOE, model_type="deepseek_v3", fields=_MOE_FIELDS),
        _llama("llama-400m", _PERI, 1024, 4096, 8, 24, **_PERI_FIELDS),
        _llama("llama-1.5b", _PERI, 2048, 8192, 16, 24, **_PERI_FIELDS),
        _llama("llama-3.2b", _PERI, 2560, 10240, 16, 32, **_PERI_FIELDS),
        _llama("llama-3b-wide", _KEEL.format(128), 2048, 6144, 16, 64, **_KEEL_FIELDS),
        _llama("llama-3b-deep", _KEEL.format(512), 1024, 3072, 16, 256, **_KEEL_FIELDS),
        _vit("vit-tiny", 192, 3),
        _vit("vit-small", 384, 6),
    )
}

_ON_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def names() -> list[str]:
    return list(PRESETS)


def get(name: str) -> Preset:
    """Return a preset by its name. Raises UserError for an unknown name, and suggests the most similar name."""
    if name not in PRESETS:
        problem = f"backbone: {name!r}: no such folder" if "/" in name else f"unknown backbone {name!r}"
        raise UserError(
            f"{problem}{nearest(name, PRESETS)} (allowed: {', '.join(PRESETS)}, a folder with a "
            "transformers config.json, or a model's name on the hub, as OWNER/NAME)"
        )
    return PRESETS[name]


def is_place(name: str) -> bool:
    """Return whether a name is an existing folder or looks like a model's name on the hub. Return False for presets."""
    return name not in PRESETS and (os.path.isdir(name) or _ON_THE_HUB.fullmatch(name) is not None)
