"""ReMax (Li et al. 2024, arXiv 2310.10505) as Adam-mini's code trains it, on tensors.

One sampled and one greedy answer per prompt. With clipped rewards r, the policy's log-probabilities logp, those of the
model that it started from ref, and the mask of the sampled answer's tokens:

    advantage = r(sampled) - r(greedy)
    weight_t  = advantage - beta * (logp_t - ref_t)             the KL per step: each step is charged its own
    weight_t  = advantage - beta * sum_s (logp_s - ref_s)       the KL per sequence, as TRL's RLOO charges it
    loss      = - sum_t weight_t * logp_t / sum_t 1             over all answers' tokens; the weights are constants
"""

from __future__ import annotations

import torch


def advantages(sampled: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """The sampled answers' rewards over the greedy ones', [answers]. A reward that is missing (NaN) gives 0."""
    return torch.nan_to_num(sampled - greedy, nan=0.0)


def weights(
    advantage: torch.Tensor,
    logps: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    kl_per: str,
) -> torch.Tensor:
    """Each token's weight in the loss, without a gradient.

    Args:
        advantage: [answers].
        logps: the policy's log-probabilities of the tokens in nats, [answers, tokens].
        reference: those of the model that it started from.
        mask: 1 for an answer's tokens, [answers, tokens].
        beta: the factor on the KL.
        kl_per: "step" or "sequence".
    """
    kl = ((logps - reference) * mask).detach()
    if kl_per == "sequence":
        kl = kl.sum(-1, keepdim=True)
    return (advantage[:, None] - beta * kl) * mask


def loss(weight: torch.Tensor, logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The loss of a batch, a scalar, from the tokens' weights and log-probabilities, [answers, tokens]."""
    return -(weight * logps * mask).sum() / mask.sum().clamp(min=1)
