"""Trainers' checkpoints: how each is read and written, and the transformers configuration of its model."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import GPT2Config

GPT2_ADAPTER = {
    "layers": "h",
    "attention": "attn",
    "feed_forward": "mlp",
    "norm": "ln_f",
    "embeddings": "drop",
    "stacked": "c_attn",
    "roles": {"c_attn": "query_key_value", "attention.c_proj": "attention_out"},
}


def nanogpt_backbone(arguments: Mapping[str, object]) -> tuple[GPT2Config, dict[str, object]]:
    """Return the GPT-2 that a nanoGPT model of these GPTConfig fields is, and the names of its parts for lamina.build.

    A model without biases becomes one whose biases are 0.
    """
    names = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}
    fields = {ours: arguments[theirs] for theirs, ours in (names | {"vocab_size": "vocab_size"}).items()}
    fields |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), arguments.get("dropout", 0.0))
    fields |= {"bos_token_id": None, "eos_token_id": None, "activation_function": "gelu"}
    return GPT2Config.from_dict(fields), dict(GPT2_ADAPTER)
