"""What each placement does when its branches are silent or its gains are one."""

import pytest
import torch
from naive import EXPECTED, built, llama, observe, rms_norm, token_ids

import lamina

NAMES = [name for name in lamina.placements.names() if name in EXPECTED]  # test_formulas.py names those without a row
# Norms of a stream that is normed already change it by eps / 2 = 5e-7 each.
NORMED_AGAIN = {"rtol": 1e-4, "atol": 1e-4}


def tiny_eps(num_layers):
    return llama(num_layers, rms_norm_eps=1e-6)


@torch.no_grad()
def gains_of_one(model):
    for block in model.model.layers:
        for residual in (block.attention, block.feed_forward):
            for norm in (residual.pre_norm, residual.out_norm, residual.post_norm):
                if getattr(norm, "weight", None) is not None:
                    norm.weight.fill_(1.0)
            if isinstance(residual.skip_scale, torch.Tensor):
                residual.skip_scale.fill_(1.0)
    return model


@torch.no_grad()
def silenced(model):
    for block in model.model.layers:
        block.attention.module.o_proj.weight.zero_()
        block.feed_forward.module.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize("name", [name for name in NAMES if EXPECTED[name].stream == "stays"])
def test_with_silent_branches_the_stream_stays_what_it_is(name):
    states = observe(silenced(built(name, 3)), token_ids()).states
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize("name", [name for name in NAMES if EXPECTED[name].stream in ("normed", "some")])
def test_with_silent_branches_and_gains_of_one_the_last_state_is_the_normed_embedding(name):
    model = silenced(gains_of_one(built(name, 4, config=tiny_eps(4))))
    states = observe(model, token_ids()).states
    assert not torch.allclose(states[0], rms_norm(states[0], 1.0, 1e-6), atol=1e-2)
    torch.testing.assert_close(states[-1], rms_norm(states[0], 1.0, 1e-6), **NORMED_AGAIN)


@pytest.mark.parametrize("name", NAMES)
def test_with_gains_of_one_the_rms_of_a_blocks_output_is_one_exactly_where_the_block_ends_in_a_norm(name):
    states = observe(gains_of_one(built(name, 4, config=tiny_eps(4))), token_ids()).states
    for index, state in enumerate(states[1:]):
        rms = state.pow(2).mean(-1).sqrt()
        ends_in_a_norm = EXPECTED[name].stream == "normed" or (name == "mix_ln" and index == 0)
        assert torch.allclose(rms, torch.ones_like(rms), atol=1e-4) == ends_in_a_norm
