"""The options that change an equation: Keel's ablations and first layer, FuseNorm without its first norm."""

import pytest
import torch
from naive import built, every_block, llama
from test_formulas import assert_follows_the_formula
from torch import nn

import lamina


def keel(first_feed_forward):
    """Keel whose first block begins as Pre-LN and has this feed-forward; None: a block as all others."""

    def block(x, attention, feed_forward, norms, index, num_layers):
        if index == 0 and first_feed_forward:
            return first_feed_forward(
                x + attention(norms.attention.pre(x)), feed_forward, norms.feed_forward, num_layers
            )
        y = norms.attention.post(2 * num_layers * x + attention(norms.attention.pre(x)))
        return norms.feed_forward.post(2 * num_layers * y + feed_forward(norms.feed_forward.pre(y)))

    return every_block(block)


def standard(y, feed_forward, norms, num_layers):
    return norms.post(y + feed_forward(y))


def pre_ln(y, feed_forward, norms, num_layers):
    return y + feed_forward(norms.pre(y))


def with_alpha(y, feed_forward, norms, num_layers):
    return norms.post(2 * num_layers * y + feed_forward(norms.pre(y)))


@every_block
def scale(x, attention, feed_forward, norms, index, num_layers):
    y = norms.attention.post(2 * num_layers * x + attention(x))
    return norms.feed_forward.post(2 * num_layers * y + feed_forward(y))


@every_block
def scale_gain(x, attention, feed_forward, norms, index, num_layers, gains):
    b1, b2 = gains[index]
    y = norms.attention.post(2 * num_layers * x + attention(b1 * x))
    return norms.feed_forward.post(2 * num_layers * y + feed_forward(b2 * y))


@every_block
def scale_gain_norm(x, attention, feed_forward, norms, index, num_layers, gains):
    b1, b2 = gains[index]
    y = norms.attention.post(2 * num_layers * x + attention(b1 * norms.attention.pre(x)))
    return norms.feed_forward.post(2 * num_layers * y + feed_forward(b2 * norms.feed_forward.pre(y)))


@every_block
def fusenorm_without_its_first_norm(x, attention, feed_forward, norms, index, num_layers):
    y = norms.attention.post(x + attention(x))
    return norms.feed_forward.post(x + feed_forward(y))


def learned_gains(model):
    return [(block.attention.pre_scale, block.feed_forward.pre_scale) for block in model.model.layers]


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(
    ("name", "formula", "options"),
    [
        ("keel", keel(None), {"first_layer": "keel"}),
        ("keel", keel(standard), {"first_layer": "post_ln"}),
        ("keel", keel(pre_ln), {"first_layer": "pre_ln"}),
        ("keel", keel(with_alpha), {"first_layer": "scaled"}),
        ("keel", scale, {"first_layer": "keel", "variant": "scale"}),
        ("fusenorm", fusenorm_without_its_first_norm, {"first_layer_norm": False}),
    ],
)
def test_an_option_that_changes_the_equation_gives_the_changed_equation(name, formula, options, num_layers):
    assert_follows_the_formula(name, num_layers, formula=formula, **options)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(("variant", "formula"), [("scale_gain", scale_gain), ("scale_gain_norm", scale_gain_norm)])
def test_keels_ablations_have_a_learned_vector_on_the_branchs_input(variant, formula, num_layers):
    options = {"variant": variant, "first_layer": "keel"}
    gains = [gain for pair in learned_gains(built("keel", num_layers, **options)) for gain in pair]
    assert all(isinstance(gain, nn.Parameter) and gain.shape == (32,) for gain in gains)
    assert_follows_the_formula("keel", num_layers, formula=formula, formula_options={"gains": learned_gains}, **options)


@pytest.mark.parametrize("variant", ["scale_gain", "scale_gain_norm"])
def test_the_learned_vectors_of_keels_ablations_start_at_one(variant):
    for pair in learned_gains(lamina.build(llama(2), "keel", variant=variant, first_layer="keel")):
        assert all(torch.equal(gain, torch.ones(32)) for gain in pair)


def test_keels_third_ablation_is_keel():
    """LN(alpha x + F(b * LN(x))) with a learned b and a norm without a gain: b is Keel's inner gain."""
    config = llama(3)
    keel = lamina.build(config, "keel", head="causal_lm")
    ablation = lamina.build(config, "keel(variant=scale_gain_norm)", head="causal_lm")
    state = {n: torch.rand_like(value) + 0.5 if value.ndim == 1 else value for n, value in keel.state_dict().items()}
    keel.load_state_dict(state)
    blocks = range(1, 3)  # the first block is the same in both
    halves = [f"model.backbone.layers.{i}.{part}.pre_" for i in blocks for part in ("attention", "feed_forward")]
    renamed = {f"{half}norm.weight": f"{half}scale" for half in halves}
    ablation.load_state_dict({renamed.get(name, name): value for name, value in state.items()})
    ids = torch.randint(0, config.vocab_size, (2, 9))
    torch.testing.assert_close(ablation(ids).logits, keel(ids).logits, rtol=0, atol=1e-6)
    assert sum(p.numel() for p in ablation.parameters()) == sum(p.numel() for p in keel.parameters())
    assert "computes the same function as Keel" in " ".join(x.help for x in lamina.placements.get("keel").options)
