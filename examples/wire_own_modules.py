"""Wire your own modules into blocks, and watch your own training loop.

    python examples/wire_own_modules.py [--placement peri_ln] [--folder runs/own-loop] [--steps 200]

The script does not use transformers. It takes about a minute on two cores, ends with a loss below 0.5 after 200 steps,
and writes runs/own-loop/report.html.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lamina
from lamina.reports import report

WIDTH, HEADS, LENGTH = 64, 4, 64
TEXT = b"The norm sits before the module, after it, or on the sum. Where it sits decides how deep a model may be. "


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """A language model of bytes. A placement decides where the norms and skips of the layers sit."""

    def __init__(self, placement: str, num_layers: int) -> None:
        super().__init__()
        plan = lamina.placements.resolve(placement, num_layers)
        if (plan.qk_norm, plan.v_norm) != ("off", "off"):
            raise SystemExit(f"placement: {placement!r} has norms on q, k or v, which Attention lacks. Choose peri_ln.")
        self.scale = WIDTH**0.5 if plan.embedding_scale == "sqrt_hidden_size" else plan.embedding_scale
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.first_norm = nn.RMSNorm(WIDTH) if plan.embedding_norm else nn.Identity()
        self.layers = nn.ModuleList(lamina.wire(Attention(), feed_forward(), layer, WIDTH) for layer in plan.layers)
        self.last_norm = nn.RMSNorm(WIDTH) if plan.final_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first_norm(self.scale * self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last_norm(x))


def feed_forward() -> nn.Module:
    """Return a feed-forward without norms, because `lamina.wire` adds the norms."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--placement", default="peri_ln")
    parser.add_argument("--folder", type=Path, default=Path("runs/own-loop"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--num-layers", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(options.placement, options.num_layers)
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    gains = [gain for gain in model.parameters() if gain.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    text = torch.tensor(list(TEXT * 20))
    with lamina.watch(model, optimizer, output=str(options.folder), overwrite=True) as monitor:
        for _ in range(options.steps):
            starts = torch.randint(0, len(text) - LENGTH - 1, (16, 1))
            rows = text[starts + torch.arange(LENGTH + 1)]
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    print(f"loss {loss.item():.3f}; the page is {report(options.folder)}")


if __name__ == "__main__":
    main()
