"""Tiny models with experts, and batches for them."""

import torch
from transformers import DeepseekV2Config, DeepseekV3Config

import lamina

EXPERTS, CHOSEN = 8, 2
SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {"v2": DeepseekV2Config, "v3": DeepseekV3Config}


def config(version, **changed):
    return CONFIGS[version](**{**SIZES, **changed})


def moe(version="v3", **changed):
    return lamina.build(config(version, **changed), "pre_ln", init="normal(std=0.2)")


def token_ids(batch=3, length=11, seed=1):
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def watched(experts, model, ids):
    with experts.watch():
        model(input_ids=ids)
