"""Balance the load of experts as in the DeepSeek papers, and measure each expert's load.

The mode "bias" (DeepSeek-V3, arXiv 2412.19437 Section 2.1.2; Wang et al., arXiv 2408.15664 Algorithm 1) changes each
expert's bias after each optimizer step:

    bias_e += rate * sign(mean load - load_e)

The router adds the bias to the scores only for the choice of experts. The mode "loss" (DeepSeek-V2, arXiv 2405.04434 Eq
23-25; DeepSeek-V3 Eq 17-20) adds a loss for each sequence:

    rate * sum_e f_e P_e

f_e is the number of tokens that chose expert e, times num_experts / (top_k * tokens). P_e is expert e's mean score.
Lamina averages this loss over the sequences and sums it over the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import distributed, nn
from transformers import TrainerCallback

from lamina.core.values import one_of
from lamina.errors import UserError
from lamina.modeling.parts import body_of, sublayers
from lamina.training.monitor.writers import Row
from lamina.training.setting_groups import Balance


def find_routers(model: nn.Module) -> dict[int, Any]:
    """Return each layer's router: the module "gate" of the feed-forward, as in transformers' DeepSeek models."""
    routers: dict[int, Any] = {}
    for index, sublayer, residual in sublayers(body_of(model, "expert_balance")):
        gate = getattr(residual.module, "gate", None) if sublayer == "feed_forward" else None
        if isinstance(gate, nn.Module) and hasattr(gate, "num_experts") and hasattr(gate, "top_k"):
            routers[index] = gate
    return routers


def has_bias(router: nn.Module) -> bool:
    """Return whether a router adds a bias to its scores when it chooses experts, as in DeepSeek-V3."""
    return isinstance(getattr(router, "e_score_correction_bias", None), torch.Tensor)


def choose(mode: str, routers: dict[int, Any]) -> str:
    """Choose "none", "bias" or "loss" for these routers. Raises UserError if the routers do not support the mode."""
    one_of("expert_balance", mode, get_args(Balance))
    biased = bool(routers) and all(has_bias(router) for router in routers.values())
    if mode in ("bias", "loss") and not routers:
        raise UserError(f"expert_balance: {mode!r} needs a backbone with experts. Use auto or none.")
    if mode == "bias" and not biased:
        raise UserError("expert_balance: 'bias' needs routers with a correction bias. Use auto, loss or none.")
    if mode == "auto":
        return "none" if not routers else "bias" if biased else "loss"
    return mode


class ExpertBalance(TrainerCallback):
    """Count every expert's tokens in a step, and balance the experts.

    Args:
        model: a Lamina model. The callback does nothing for a dense model.
        mode: "bias", "loss", "none" (only count), or "auto" (bias if the routers have biases, otherwise loss).
        rate: the amount by which a bias changes per step, or the factor on the auxiliary loss.
    """

    def __init__(self, model: nn.Module, mode: str = "auto", rate: float = 1e-3):
        self.routers = find_routers(model)
        self.mode, self.rate = choose(mode, self.routers), rate
        self.load: dict[int, torch.Tensor] = {}  # by layer: each expert's fraction of the last step's tokens
        self._counts: dict[int, torch.Tensor] = {}
        self._tokens = 0
        self._watching = False
        for router in self.routers.values():
            router.register_forward_hook(self._remember)

    def _remember(self, router: Any, args: tuple, output: tuple[torch.Tensor, ...]) -> None:
        # Compute nothing here, because a checkpointed block would compute it again. Do not name the layer, because
        # torch.compile would then compile every layer separately.
        if self._watching:
            router.seen = (output[0], output[-1])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside this context, count how often a forward pass chooses each expert."""
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
        tokens = 0
        for layer, router in self.routers.items():
            if hasattr(router, "seen"):
                counts = _count(router.seen[1].unsqueeze(0), router.num_experts)[0]
                self._counts[layer] = counts if layer not in self._counts else self._counts[layer] + counts
                tokens = len(router.seen[1])
        self._tokens += tokens

    def loss(self, sequences: int) -> torch.Tensor | None:
        """Return the auxiliary loss of the last forward pass, or None if the mode is not "loss"."""
        losses = []
        for router in self.routers.values():
            if hasattr(router, "seen"):
                logits, chosen = router.seen
                del router.seen  # it holds the graph
                if self.mode == "loss":
                    losses.append(balance_loss(scores(logits, router), chosen, sequences))
        return self.rate * torch.stack(losses).sum() if losses else None

    def on_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.finish_step()

    @torch.no_grad()
    def finish_step(self) -> None:
        """Compute each expert's load from the counts of all processes, and update the biases."""
        if not self._counts:
            return
        layers, tokens = list(self._counts), self._tokens
        counts = [self._counts[layer] for layer in layers]
        self._counts, self._tokens = {}, 0
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            flat = torch.cat([*counts, torch.tensor([float(tokens)], device=counts[0].device)])
            distributed.all_reduce(flat)
            *counts, total = flat.split([*(len(c) for c in counts), 1])
            tokens = int(total)
        self.load = {layer: count / tokens for layer, count in zip(layers, counts, strict=True)}
        for layer, count in zip(layers, counts, strict=True) if self.mode == "bias" else ():
            bias = self.routers[layer].e_score_correction_bias
            bias += self.rate * torch.sign(count.mean() - count).to(bias)

    def rows(self, step: int) -> list[Row]:
        """Return each expert's load (its tokens / all tokens). A balanced load is top_k / num_experts."""
        return [
            Row(step, layer, "feed_forward", "expert", expert, "expert_load", value)
            for layer, load in self.load.items()
            for expert, value in enumerate(load.tolist())
        ]


def scores(logits: torch.Tensor, router: nn.Module) -> torch.Tensor:
    """Return each token's softmax or sigmoid (DeepSeek-V3) scores, scaled to sum to 1: [tokens, num_experts]."""
    logits = logits.float()
    if not has_bias(router):
        return logits.softmax(-1)
    affinities = logits.sigmoid()
    return affinities / affinities.sum(-1, keepdim=True)


def balance_loss(shares: torch.Tensor, chosen: torch.Tensor, sequences: int) -> torch.Tensor:
    """Return the auxiliary loss, averaged over sequences. The loss is 1 for balanced experts.

    Args:
        shares: scores that sum to 1 for each token, [sequences * tokens, num_experts].
        chosen: the chosen experts, [sequences * tokens, top_k].
        sequences: the number of sequences, which have equal lengths.
    """
    num_experts = shares.shape[-1]
    by_sequence = chosen.unflatten(0, (sequences, -1))
    frequency = _count(by_sequence, num_experts) * num_experts / by_sequence[0].numel()
    return (frequency * shares.unflatten(0, (sequences, -1)).mean(1)).sum(-1).mean()


@torch.no_grad()
def _count(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count how often each expert was chosen, without a device sync: [groups, tokens, top_k] to [groups, experts]."""
    flat = chosen.flatten(1)
    counts = torch.zeros(flat.shape[0], num_experts, device=flat.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=counts.dtype))
