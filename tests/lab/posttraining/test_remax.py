"""ReMax's advantages and losses equal the formula, and verl's estimator, on recorded rollouts."""

import pytest
import torch

from lamina.lab.posttraining.rlhf import remax_loss, remax_weights


def remax_of_verl(rewards, baselines, mask):
    """verl's estimator REMAX by its definition: each token's return is the sum of the rewards from it on, and its
    advantage that return less the greedy answer's reward. Both [answers, tokens]."""
    returns = torch.zeros_like(rewards)
    for answer, token in torch.nonzero(torch.ones_like(mask)).tolist():
        returns[answer, token] = sum(rewards[answer, x] * mask[answer, x] for x in range(token, len(mask[0])))
    return returns - baselines[:, None] * mask, returns


@pytest.fixture
def rollouts():
    """Rewards of three sampled and three greedy answers of 4, 2 and 5 tokens, and their log-probabilities."""
    generator = torch.Generator().manual_seed(1)
    lengths = [4, 2, 5]
    mask = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in lengths])
    logps = (-2.0 * torch.rand(3, 5, generator=generator) * mask).requires_grad_()
    reference = -2.0 * torch.rand(3, 5, generator=generator) * mask
    rewards = {"sampled": torch.tensor([1.5, -0.25, 5.0]), "greedy": torch.tensor([0.5, 1.0, -5.0])}
    return {**rewards, "mask": mask, "logps": logps, "reference": reference}


def weights_of(rollouts, beta, kl_per="step"):
    advantage = rollouts["sampled"] - rollouts["greedy"]
    parts = (rollouts["logps"], rollouts["reference"], rollouts["mask"])
    return remax_weights(advantage, *parts, beta=beta, kl_per=kl_per)


def test_the_kl_of_a_sequence_is_verls_return_of_its_first_token(rollouts):
    """With each token's KL as a reward, verl's return at the first token is the reward less the whole answer's KL."""
    mask, beta = rollouts["mask"], 0.1
    rewards = -beta * (rollouts["logps"].detach() - rollouts["reference"]) * mask
    rewards[torch.arange(3), mask.sum(1).long() - 1] += rollouts["sampled"]
    theirs, _ = remax_of_verl(rewards, rollouts["greedy"], mask)
    ours = weights_of(rollouts, beta=beta, kl_per="sequence")
    torch.testing.assert_close(ours[:, 0], theirs[:, 0])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_loss_and_gradient_equal_the_formula_written_naively(rollouts, beta):
    """Adam-mini's: return_t = A + kl_ctl * -(logp - logp_ref)_t; loss = - sum(return_t logp_t mask) / sum(mask)."""
    logps = rollouts["logps"]
    ours = remax_loss(weights_of(rollouts, beta), logps, rollouts["mask"])
    (gradient,) = torch.autograd.grad(ours, logps, retain_graph=True)
    total, count, expected = 0.0, 0, torch.zeros_like(logps)
    tokens = int(rollouts["mask"].sum())
    for answer in range(3):
        advantage = float(rollouts["sampled"][answer] - rollouts["greedy"][answer])
        for t in range(5):
            if rollouts["mask"][answer, t]:
                logp = float(logps[answer, t])
                charged = advantage + beta * -(logp - float(rollouts["reference"][answer, t]))
                total, count = total + charged * logp, count + 1
                expected[answer, t] = -charged / tokens
    assert count == tokens
    assert float(ours) == pytest.approx(-total / count, rel=1e-5)
    torch.testing.assert_close(gradient, expected)
