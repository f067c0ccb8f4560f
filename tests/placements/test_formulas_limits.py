"""Where one placement becomes another, and what each does when its branches are silent or its gains are one."""

import pytest
import torch
from naive import EXPECTED, built, llama, observe, rms_norm, token_ids
from torch import nn

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
def silenced(model, *, feed_forward=True):
    for block in model.model.layers:
        block.attention.module.o_proj.weight.zero_()
        if feed_forward:
            block.feed_forward.module.down_proj.weight.zero_()
    return model


def copied(target, source):
    """The same weights, name by name: both plans must have the same parameters."""
    target.load_state_dict(source.state_dict(), strict=True)
    return target


def assert_equal_bit_for_bit(one, other):
    seen, expected = observe(one, token_ids()), observe(other, token_ids())
    for state, expected_state in zip(seen.states, expected.states, strict=True):
        assert torch.equal(state, expected_state)
    assert torch.equal(seen.logits, expected.logits)


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


def test_inside_keels_first_block_the_state_after_attention_is_not_normed():
    model = gains_of_one(built("keel", 2, config=tiny_eps(2)))
    seen = []
    for block in model.model.layers:
        block.attention.register_forward_hook(lambda _, args, output: seen.append(output))
    observe(model, token_ids())
    first, second = (state[0] if isinstance(state, tuple) else state for state in seen)
    assert not torch.allclose(first.pow(2).mean(-1), torch.tensor(1.0).double(), atol=0.05)
    torch.testing.assert_close(second.pow(2).mean(-1), torch.ones(2, 7).double(), **NORMED_AGAIN)


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize(("num_post_layers", "limit"), [(0, "pre_ln"), (4, "post_ln")])
def test_mix_ln_with_no_post_layers_is_pre_ln_and_with_all_of_them_post_ln(num_post_layers, limit, final_norm):
    mix = built("mix_ln", 4, num_post_layers=num_post_layers, final_norm=final_norm)
    assert_equal_bit_for_bit(mix, copied(built(limit, 4, final_norm=final_norm), mix))


def test_deepnorm_with_an_alpha_of_one_is_post_ln():
    deepnorm = built("deepnorm", 3, alpha=1.0)
    assert_equal_bit_for_bit(deepnorm, copied(built("post_ln", 3), deepnorm))


@torch.no_grad()
def test_keel_with_an_alpha_of_one_and_no_inner_norms_is_post_ln_after_its_first_block():
    keel, post = built("keel", 3, alpha=1.0), built("post_ln", 3)
    for block in keel.model.layers[1:]:
        block.attention.pre_norm = nn.Identity()
        block.feed_forward.pre_norm = nn.Identity()
    seen = observe(keel, token_ids())
    for index in (1, 2):
        block = copied(post.model.layers[index], keel.model.layers[index])
        output = block(seen.states[index], **seen.block_kwargs[index])
        assert torch.equal(output[0] if isinstance(output, tuple) else output, seen.states[index + 1])


@pytest.mark.parametrize(("name", "relative"), [("sandwich_ln", "peri_ln"), ("layernorm_scaling", "pre_ln")])
def test_placements_that_differ_in_nothing_else_agree(name, relative):
    model = built(name, 1, embedding_norm=False)
    assert_equal_bit_for_bit(model, copied(built(relative, 1, embedding_norm=False), model))
