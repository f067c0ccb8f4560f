"""Keel's theory (arXiv 2601.19895): how much of a gradient the skips alone carry through 128 sub-layers."""

import math

import pytest
import torch
from naive import llama
from torch import nn

import lamina

NUM_SUBLAYERS = 128
WIDTH = 136  # room for 128 branch outputs, the input and a direction of change, all at right angles to each other
CLOSE = {"rel": 2e-4}  # the norms round in float32 and have an eps of 1e-6: 128 times 1e-6 at most


class Constant(nn.Module):
    """A branch whose output does not depend on its input: the skip alone carries the gradient."""

    def __init__(self, is_attention):
        super().__init__()
        self.is_attention = is_attention
        self.value = None

    def forward(self, hidden_states, *args, **kwargs):
        value = self.value.expand_as(hidden_states).detach()
        return (value, None) if self.is_attention else value


def through(block, x):
    output = block(x)
    return output[0] if isinstance(output, tuple) else output


def gradient_through_the_skips(blocks):
    """|J^T u| / |u| for a u at right angles to the stream, every branch a random vector of root mean square one."""
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
    vectors = iter(basis.T * math.sqrt(WIDTH))
    x0 = next(vectors).view(1, 1, -1).clone().requires_grad_()
    x = x0
    for block in blocks:
        for residual, is_attention in ((block.attention, True), (block.feed_forward, False)):
            residual.module = Constant(is_attention)
            residual.module.value = next(vectors)
        x = through(block, x)
    u = next(vectors).view(1, 1, -1)
    (gradient,) = torch.autograd.grad(x, x0, grad_outputs=u)
    return (gradient.norm() / u.norm()).item()


def blocks_of(name, num_layers, **options):
    sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "rms_norm_eps": 1e-9}
    return lamina.build(llama(num_layers, **sizes), name, **options).double().model.layers


def test_post_lns_skips_lose_half_of_the_gradients_square_at_every_sublayer():
    share = gradient_through_the_skips(blocks_of("post_ln", NUM_SUBLAYERS // 2))
    assert share == pytest.approx(0.5 ** (NUM_SUBLAYERS / 2), **CLOSE)
    assert share == pytest.approx(5.4e-20, rel=0.01)


def test_keels_default_is_the_papers_alpha_for_the_models_own_depth():
    num_sublayers = NUM_SUBLAYERS
    share = gradient_through_the_skips(blocks_of("keel", num_sublayers // 2))
    assert share == pytest.approx((1 + 1 / num_sublayers**2) ** (-(num_sublayers - 2) / 2) / math.sqrt(3), **CLOSE)


@pytest.mark.parametrize("name", ["pre_ln", "peri_ln"])
def test_an_unscaled_stream_without_norms_carries_the_whole_gradient(name):
    assert gradient_through_the_skips(blocks_of(name, 8)) == pytest.approx(1.0, rel=1e-12)


def test_deepnorms_skips_carry_more_than_post_lns():
    """Each sub-layer alpha / sqrt(alpha^2 + 1) with alpha = (2 N)^(1/4)."""
    alpha_squared = math.sqrt(NUM_SUBLAYERS)
    share = gradient_through_the_skips(blocks_of("deepnorm", NUM_SUBLAYERS // 2))
    assert share == pytest.approx((1 + 1 / alpha_squared) ** (-NUM_SUBLAYERS / 2), **CLOSE)


def test_fusenorms_stream_is_halved_once_a_block_by_its_feed_forward_and_never_by_its_attention():
    """With constant branches the block's output is LN(x + F): (1/2)^(N/2) after N blocks, against Post-LN's (1/2)^N."""
    num_layers = NUM_SUBLAYERS // 2
    share = gradient_through_the_skips(blocks_of("fusenorm", num_layers))
    assert share == pytest.approx(0.5 ** (num_layers / 2), **CLOSE)
