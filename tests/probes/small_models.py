"""Small models of many architectures, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", TEXT),
    "gemma2": ("Gemma2", "ForCausalLM", {**TEXT, "num_key_value_heads": 1, "head_dim": 8}),
    "olmo2": ("Olmo2", "ForCausalLM", TEXT),
    "qwen3_moe": (
        "Qwen3Moe",
        "ForCausalLM",
        {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_key_value_heads": 2},
    ),
    "granite": ("Granite", "ForCausalLM", {**TEXT, "residual_multiplier": 0.25}),
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 40}),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", TEXT),
    "phi": ("Phi", "ForCausalLM", TEXT),
    "phi3": ("Phi3", "ForCausalLM", TEXT),
    "cohere": ("Cohere", "ForCausalLM", TEXT),
    "opt": ("OPT", "ForCausalLM", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64}),
    "bloom": ("Bloom", "ForCausalLM", {"hidden_size": 16, "n_layer": 3, "n_head": 2, "vocab_size": 40}),
    "falcon": ("Falcon", "ForCausalLM", TEXT),
    "bert": ("Bert", "ForMaskedLM", TEXT),
    "roberta": ("Roberta", "ForMaskedLM", {**TEXT, "pad_token_id": 1, "bos_token_id": 0}),
    "electra": ("Electra", "ForMaskedLM", {**TEXT, "embedding_size": 16}),
    "distilbert": (
        "DistilBert",
        "ForMaskedLM",
        {"dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2, "vocab_size": 40},
    ),
    "deberta_v2": ("DebertaV2", "ForMaskedLM", TEXT),
    "albert": ("Albert", "ForMaskedLM", {**TEXT, "embedding_size": 8}),
    "modernbert": ("ModernBert", "ForMaskedLM", TEXT),
    "vit": ("ViT", "ForImageClassification", IMAGE),
    "dinov2": ("Dinov2", "ForImageClassification", {**IMAGE, "mlp_ratio": 2}),
    "beit": ("Beit", "ForImageClassification", {**IMAGE, "layer_scale_init_value": 0.5}),
    "yolos": ("Yolos", "Model", {**IMAGE, "image_size": [16, 16], "use_mid_position_embeddings": True}),
    "glm4": ("Glm4", "ForCausalLM", {**TEXT, "num_key_value_heads": 1, "head_dim": 8}),
    "fnet": ("FNet", "ForMaskedLM", {k: v for k, v in TEXT.items() if k != "num_attention_heads"}),
    "siglip": ("SiglipVision", "Model", IMAGE),
}


def small_model(name: str) -> Any:
    """A model of ``MODELS`` in evaluation mode, with gains and biases that are not ones and zeros."""
    family, head, values = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**values)).eval()
    return stir(made)


def stir(model: Any, by: float = 0.3) -> Any:
    """Random gains, biases and scales: what starts at one or zero hides mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1:
                parameter.add_(by * torch.randn_like(parameter))
    return model


def small_inputs(model: Any, sequences: int = 2, tokens: int = 9) -> dict[str, torch.Tensor]:
    """Random inputs for a small model."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(sequences, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(3, 40, (sequences, tokens), generator=generator)}


def llama_and_ids(**sizes: int) -> tuple[Any, torch.Tensor]:
    """A small Llama and ids for it."""
    model = small_model("llama")
    return model, small_inputs(model, **sizes)["input_ids"]
