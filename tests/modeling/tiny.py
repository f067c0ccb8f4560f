"""The tiny models that these tests build, and what they compare them on."""

import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

import lamina

VOCABULARY = 61
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_TEXT = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
EXPERTS |= {"first_k_dense_replace": 1}
OF_EXPERTS = {**EXPERTS, "num_experts": 4, "num_local_experts": 4, "n_shared_experts": 1, "head_dim": 8}
OF_EXPERTS |= {"shared_expert_intermediate_size": 16}
LATENT = {**EXPERTS, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
OTHER_BACKBONES = {
    "qwen3": Qwen3Config(**OF_TEXT, head_dim=8),
    "deepseek_v3": DeepseekV3Config(**{**OF_TEXT, **LATENT, "num_key_value_heads": 4, "q_lora_rank": 16}),
}


def llama(num_layers=2, **changes):
    return LlamaConfig(**{**OF_TEXT, "num_hidden_layers": num_layers, **changes})


def built(placement, num_layers=2, *, config=None, **options):
    """A model in evaluation mode with large weights and gains that differ, so that no mistake is too small to see."""
    model = lamina.build(config or llama(num_layers), placement, **options).eval()
    shake(model)
    return model


@torch.no_grad()
def shake(model):
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.3)
        else:
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter)).add_(0.05 * torch.randn_like(parameter))


@torch.no_grad()
def opened(model):
    """The model with learned scales on its branches above 0: ReZero's are silent at the start."""
    for name, parameter in model.named_parameters():
        if name.endswith(".out_scale"):
            parameter.add_(0.1)
    return model


def token_ids(batch=2, length=9, seed=1):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def streams(model, ids, **kwargs):
    """The stream x^0 .. x^N as forward hooks on the blocks see it, and the output."""
    seen = []
    handles = [model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))]
    handles += [block.register_forward_hook(lambda _, args, out: seen.append(out)) for block in model.model.layers]
    output = model(input_ids=ids, **kwargs)
    for handle in handles:
        handle.remove()
    return seen, output
