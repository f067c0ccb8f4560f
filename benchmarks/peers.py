"""Define the peers' models. Each module maps token ids [batch, tokens] to the loss."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from common import PEERS, llama_config, sizes_of
from torch import nn
from torch.nn import functional


class NanoAttention(nn.Module):
    """Causal attention with rotary positions, in plain PyTorch."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.first, self.second = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = NanoAttention(width, heads)
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x), cos, sin)
        gate, up = self.gate_up(self.second(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Nano(nn.Module):
    """A Llama in nanoGPT's style: one file, fused projections, and F.cross_entropy on all logits."""

    def __init__(self, size: str, sequence_length: int):
        super().__init__()
        s = sizes_of(size)
        width, heads = s["hidden_size"], s["num_heads"]
        self.embed = nn.Embedding(s["vocab_size"], width)
        self.blocks = nn.ModuleList(
            NanoBlock(width, heads, s["intermediate_size"]) for _ in range(s["num_hidden_layers"])
        )
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, s["vocab_size"], bias=False)
        dim = width // heads
        angles = torch.outer(torch.arange(sequence_length), 1e4 ** (-torch.arange(0, dim, 2) / dim))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return _next_token_loss(self.head(self.norm(x)), ids)


def _next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LitGPT(nn.Module):
    def __init__(self, size: str, sequence_length: int):
        super().__init__()
        sys.path.append(str(PEERS))
        from litgpt.model import GPT, Config  # pyright: ignore[reportMissingImports]
        from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]

        s = sizes_of(size)
        config = Config(
            n_embd=s["hidden_size"],
            n_layer=s["num_hidden_layers"],
            n_head=s["num_heads"],
            n_query_groups=s["num_heads"],
            vocab_size=s["vocab_size"],
            padded_vocab_size=s["vocab_size"],
            block_size=sequence_length,
            intermediate_size=s["intermediate_size"],
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            bias=False,
            parallel_residual=False,
            rotary_percentage=1.0,
        )
        self.model, self.loss = GPT(config), chunked_cross_entropy
        self.model.apply(self.model._init_weights)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(ids)[:, :-1], ids[:, 1:])


class XTransformers(nn.Module):
    def __init__(self, size: str, sequence_length: int):
        super().__init__()
        sys.path.append(str(PEERS))
        from x_transformers import Decoder, TransformerWrapper  # pyright: ignore[reportMissingImports]

        s = sizes_of(size)
        layers = Decoder(
            dim=s["hidden_size"],
            depth=s["num_hidden_layers"],
            heads=s["num_heads"],
            attn_dim_head=s["hidden_size"] // s["num_heads"],
            attn_flash=True,
            rotary_pos_emb=True,
            use_rmsnorm=True,
            ff_swish=True,
            ff_glu=True,
            ff_no_bias=True,
            ff_mult=s["intermediate_size"] / s["hidden_size"],
        )
        self.model = TransformerWrapper(
            num_tokens=s["vocab_size"], max_seq_len=sequence_length, attn_layers=layers, use_abs_pos_emb=False
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _next_token_loss(self.model(ids), ids)


def transformers_llama(size: str, sequence_length: int) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(size, sequence_length))


LOOPS: dict[str, Callable[[str, int], nn.Module]] = {
    "litgpt": LitGPT,
    "x-transformers": XTransformers,
    "nanogpt-style": Nano,
}
