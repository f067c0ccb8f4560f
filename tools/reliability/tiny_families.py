"""Tiny models with random weights of every family of transformers that one configuration describes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING

LAYERS = 3
MOST_PARAMETERS = 2_000_000
HEADS = (
    *("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModelForSeq2SeqLM"),
    *("AutoModelForPreTraining", "AutoModel"),
)
# What the families call their sizes; of a configuration those that it has by a plain number are set.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "n_inner", "d_inner", "ffn_hidden_size"), 48
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_key_value_heads", "moe_k", "num_kv_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "embedding_size", "q_lora_rank"), 16),
    **dict.fromkeys(
        ("image_size", "sliding_window", "mamba_d_head", "expert_dim", "moe_shared_expert_intermediate_size"), 16
    ),
    **dict.fromkeys(("patch_size", "head_dim", "kv_lora_rank", "v_head_dim", "d_kv", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "mamba_n_heads", "index_n_heads", "rotary_dim"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "n_mamba_heads", "mlp_ratio"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "eos_token_id"), 1),
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "num_channels": 3,
    "initializer_range": 0.2,
    "attention_hidden_size": 32,
    "num_decoder_heads": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Sizes that fit one family only; None: left as the configuration has it.
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": None},
    "deepseek_v32": {"num_key_value_heads": 4, "head_dim": None},
    "mistral4": {"num_key_value_heads": 4, "head_dim": None},
    "axk1": {"num_key_value_heads": 4, "head_dim": None},
    "minicpm3": {"num_key_value_heads": 4, "head_dim": None},
    "falcon": {"head_dim": None},
    "dots1": {"n_shared_experts": 1},
    "qwen3_next": {"num_hidden_layers": 4},
    "yolos": {"image_size": [32, 32]},
    "hiera": {
        "embed_dim": 16,
        "image_size": [32, 32],
        "depths": [1, 1],
        "num_heads": [1, 2],
        "masked_unit_size": [2, 2],
        "query_stride": [1, 1],
        "num_query_pool": 1,
    },
    "vit_mae": {
        "patch_size": 4,
        "decoder_hidden_size": 16,
        "decoder_intermediate_size": 32,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
    },
    "xlnet": {"max_position_embeddings": None},
    "swin": SWIN,
    "swinv2": SWIN,
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1, 1], "num_decoder_layers": 1},
    **{name: {"initializer_range": 1.0} for name in ("xlm", "flaubert")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "deit": {"image_size": 16, "patch_size": 8},
    **{name: {"rope_parameters": ROPE} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron")},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2, "n_groups": 1},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 3, "num_decoder_layers": 3},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 32},
    "olmo_hybrid": {"num_hidden_layers": 4},
    "squeezebert": {"embedding_size": 32},
}


def families() -> list[str]:
    """The model types that one configuration describes, without the towers that are put together of others."""
    return [name for name in sorted(CONFIG_MAPPING) if not getattr(CONFIG_MAPPING[name], "sub_configs", None)]


def tiny_model(family: str, seed: int = 0) -> nn.Module:
    """A model of the family, its gains and biases not ones and zeros. Raises where it can't be built small."""
    made = CONFIG_MAPPING[family]
    default = made()
    sizes = {**SIZES, **MORE.get(family, {})}
    given = {}
    for name, value in sizes.items():
        now = _plain(default, name)
        if value is not None and now is not None and (isinstance(now, int | float) or name in MORE.get(family, {})):
            given[name] = float(value) if type(now) is float else value
    config = made(**given)
    auto = next((getattr(transformers, a) for a in HEADS if made in getattr(transformers, a)._model_mapping), None)
    if auto is None:
        raise ValueError("no class of its own")
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(seed)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def layer_calls(model: nn.Module, count: int) -> list[nn.Module]:
    """The layers in the order of their calls: the outermost list of ``count`` modules of the model; ALBERT's one."""
    if model.config.model_type == "albert":
        return [model.albert.encoder.albert_layer_groups[0]] * count
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and _is_layer(module[0]):
            return list(module)
    raise LookupError(f"no list of {count} layers")


def inputs(model: nn.Module, sequences: int = 4, tokens: int = 10, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens or images; nothing for a model that reads something else."""
    if model.main_input_name not in ("input_ids", "pixel_values"):
        return {}
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", None) or 16
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.randn(sequences, 3, height, width, generator=generator)}
    return {"input_ids": torch.randint(6, 61, (sequences, tokens), generator=generator)}


def count_of(family: str) -> int:
    """How many layers ``tiny_model`` asks for."""
    more = MORE.get(family, {})
    if "depths" in more:
        return sum(more["depths"])
    return more.get("num_hidden_layers") or LAYERS


def _plain(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # some have a value for each layer
        return None


def _is_layer(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and len(list(module.parameters())) > 2


def buildable() -> Iterator[tuple[str, str]]:
    """Each family and why it can't be built small ("" where it can)."""
    for family in families():
        try:
            tiny_model(family)
        except Exception as error:
            yield family, " ".join(f"{type(error).__name__}: {error}".split())[:150]
        else:
            yield family, ""


if __name__ == "__main__":
    for name, why in buildable():
        print(name, why or "OK", flush=True)
