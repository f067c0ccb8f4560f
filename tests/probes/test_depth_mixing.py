"""The depth-mixing matrix against the formulas of the skips and against explicit Jacobians."""

import math

import pytest
import torch
from probes.small_models import small_model, stir
from probes.tiny import blocks, llama, value

import lamina
from lamina.errors import UserError
from lamina.modeling.streams_lamina import LaminaWiring
from lamina.probes.engine import registry

LAYERS = 3


def measured(model):
    return lamina.probe(model, "depth_mixing", blocks(2, 8, 40))["depth_mixing"]


def built(placement):
    torch.manual_seed(0)
    return stir(lamina.build(llama(layers=LAYERS).config, placement, init="normal"))


def matrix(frame):
    """[state, the embedding and then the sub-layers], 0 where a branch comes later."""
    mixing = frame[frame["metric"] == "mixing"]
    assert (mixing["index"].min(), mixing["index"].max()) == (-1, 2 * LAYERS - 1)  # sub-layers count from 0, too
    table = mixing.pivot_table(index="layer", columns="index", values="value")
    return torch.tensor(table.fillna(0.0).to_numpy())


def triangle(weight):
    """``weight(l, k)`` of the branches before each state."""
    rows = [[weight(x, i) if i <= 2 * x else 0.0 for i in range(2 * LAYERS + 1)] for x in range(1, LAYERS + 1)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("placement", "weight"),
    [
        ("pre_ln", lambda layer, index: 1.0),
        ("peri_ln", lambda layer, index: 1.0),
        ("granite(multiplier=0.22)", lambda layer, index: 0.22 if index else 1.0),
        ("minicpm", lambda layer, index: 1.4 / math.sqrt(LAYERS) if index else 1.0),
    ],
)
def test_where_no_norm_is_on_the_skip_the_entries_are_its_factors(placement, weight):
    frame = measured(built(placement))
    assert torch.allclose(matrix(frame), triangle(weight), atol=1e-5)
    assert frame.loc[frame["metric"] == "composite_gain", "value"].to_numpy() == pytest.approx([1.0] * LAYERS, abs=1e-5)


def test_a_coupled_skip_shrinks_what_came_before():
    torch.manual_seed(0)
    model = lamina.build(llama(layers=LAYERS).config, "muse_spark(start=0.6)", init="normal")
    found = matrix(measured(model))
    # skip 0.8 at each sub-layer behind, branch 0.6
    expected = triangle(lambda layer, index: 0.8 ** (2 * layer - index) * (0.6 if index else 1.0))
    assert torch.allclose(found, expected, atol=1e-5)


def test_fusenorms_attention_reaches_no_later_layer_but_through_its_feed_forward():
    found = matrix(measured(built("fusenorm")))
    assert (found[:, 1::2] == 0).all()
    assert (found[:, 2::2][torch.tril(torch.ones(LAYERS, LAYERS)).bool()] > 0).all()


def test_behind_a_norm_the_stretch_is_the_jacobians_frobenius_norm():
    """Of Post-LN's last feed-forward: the Jacobian of LN at the sum, built in full."""
    model = built("post_ln")
    ids = blocks(1, 6)
    sums = []
    last = model.model.layers[-1].feed_forward
    last.post_norm.register_forward_pre_hook(lambda m, args: sums.append(args[0].detach().double()))
    with torch.no_grad():
        model(input_ids=ids)
    gain, eps = last.post_norm.weight.detach().double(), last.post_norm.eps

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain

    squares = [torch.autograd.functional.jacobian(norm, x).pow(2).sum() for x in sums[0][0]]
    expected = math.sqrt(float(sum(squares)) / sums[0].numel())
    frame = lamina.probe(model, "depth_mixing", ids)["depth_mixing"]
    assert value(frame, "mixing", layer=LAYERS, index=2 * LAYERS - 1) == pytest.approx(expected, rel=0.1)


def test_families_of_transformers_and_their_page():
    frame = measured(small_model("cohere"))
    assert torch.allclose(matrix(frame), triangle(lambda layer, index: 1.0), atol=1e-5)
    frame = measured(small_model("granite"))
    assert torch.allclose(matrix(frame), triangle(lambda layer, index: 0.25 if index else 1.0), atol=1e-5)
    probe = registry.make("depth_mixing")
    said = next(iter(probe.sentences(frame)))
    assert "outputs by 0.25 to 0.25, and the embedding by 1." in said
    assert len(list(probe.figures(frame))) == 2


@torch.no_grad()
def wired(wiring, placement="pre_ln", **options):
    """A model of a wiring whose weights are not where they start, but do not move with the streams."""
    torch.manual_seed(0)
    model = lamina.build(llama(layers=LAYERS).config, placement, init="normal", wiring=wiring, **options).eval()
    for module in (m for m in model.modules() if isinstance(m, LaminaWiring)):
        for name, parameter in module.named_parameters():
            if name not in ("projection", "query"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("wiring", ["hc", "identity_hc", "mhc"])
@torch.no_grad()
def test_of_streams_it_is_what_their_weights_come_to(wiring):
    """Read * mix * ... * write by hand, each branch a channel of its own."""
    model = wired(wiring)
    streams, found = torch.zeros(1, 1, 4, 32), []
    streams[..., 0] = 1.0  # channel k holds the weight of branch k
    for layer, block in enumerate(model.model.layers):
        for number, half in enumerate((block.attention, block.feed_forward)):
            read, mix, write = half.mixer(streams)
            if layer and not number:
                found.append(read[0, 0, : 2 * LAYERS + 1])
            streams = streams if mix is None else mix.transpose(-1, -2) @ streams
            streams[..., 1 + 2 * layer + number] += write
    found.append(model.model.norm.reader(streams)[0][0, 0, : 2 * LAYERS + 1])
    frame = measured(model)
    torch.testing.assert_close(matrix(frame), torch.stack(found).abs().double(), rtol=1e-4, atol=1e-5)
    gains = frame.loc[frame["metric"] == "composite_gain", "value"].to_numpy()
    if wiring == "identity_hc":
        assert gains == pytest.approx([1.0] * LAYERS, abs=0.05)  # random directions of four equal streams
    elif wiring == "mhc":  # doubly stochastic: stretches nothing, and keeps the mean
        assert (gains > 0.5).all()
        assert (gains < 1 + 1e-3).all()


@pytest.mark.parametrize("wiring", ["x0", "denseformer"])
@torch.no_grad()
def test_of_earlier_states_it_is_what_the_sources_weigh(wiring):
    model = wired(wiring)
    state, states, found = torch.eye(2 * LAYERS + 1)[0], [], []
    for layer in range(LAYERS + 1):
        states.append(state)
        sources = model.model.layers[layer].sources if layer < LAYERS else getattr(model.model.norm, "reader", None)
        if sources is not None:
            named = [0] if wiring == "x0" else range(layer)
            earlier = zip(named, sources.weight[1:], strict=True)
            state = sources.weight[0] * state + sum(w * states[i] for i, w in earlier)
        found.append(state)
        state = state + torch.eye(2 * LAYERS + 1)[[1 + 2 * layer, 2 + 2 * layer]].sum(0) if layer < LAYERS else state
    torch.testing.assert_close(matrix(measured(model)), torch.stack(found[1:]).abs().double(), rtol=1e-4, atol=1e-5)


def test_attention_over_depth_weighs_all_blocks_alike_at_the_start():
    found = matrix(measured(wired("attn_res", size=1)))
    # layer l reads x^0 and l blocks; the readout all three and x^0
    assert torch.allclose(found, triangle(lambda layer, index: 1 / (layer + 1)), atol=1e-5)


def test_a_model_whose_sub_layers_were_not_found_is_refused():
    model = llama()
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda x, **more: forward(x, **more) * torch.sigmoid(x)
    with pytest.raises(UserError, match="layer"):
        measured(model)
