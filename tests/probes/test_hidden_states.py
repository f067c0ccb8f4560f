"""hidden_states against the definitions written out in float64."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from probes.tiny import bert, blocks, llama, outputs, states, value

import lamina
from lamina.probes.engine.context import Context
from lamina.probes.engine.measure import make_context, probe, run
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.statistics import TokenStates, as_tokens
from lamina.probes.hidden_states import HiddenStates, growth, moments, r_squared


def measure(model, ids, spec="hidden_states", **settings):
    return probe(model, [spec], ids, tolerance=0.0, batch_size=2, **settings)["hidden_states"]


def test_variance_and_magnitudes_of_every_state_equal_the_definitions():
    model, ids = llama(), blocks()
    frame = measure(model, ids)
    for layer, x in enumerate(states(model, ids)):
        place = {"layer": layer, "role": "state"}
        expected = {
            "variance": ((x - x.mean()) ** 2).mean(),
            "token_variance": ((x - x.mean(-1, keepdim=True)) ** 2).mean(),
            "mean": x.mean(),
            "abs_mean": x.abs().mean(),
            "rms": (x**2).mean().sqrt(),
            "abs_max": x.abs().max(),
            "median": sum(one.abs().median() for one in x) / len(x),
            "max_to_median": sum(one.abs().max() / one.abs().median() for one in x) / len(x),
        }
        for metric, wanted in expected.items():
            assert value(frame, metric, **place) == pytest.approx(float(wanted), rel=2e-6, abs=1e-9), metric
        top = torch.stack([one.abs().flatten().sort(descending=True).values[:3] for one in x]).mean(0)
        for rank in (1, 2, 3):
            assert value(frame, "top_magnitude", index=rank, **place) == pytest.approx(float(top[rank - 1]), rel=1e-6)


def test_standard_error_is_that_of_the_sequences():
    model, ids = llama(), blocks()
    frame = measure(model, ids)
    each = torch.stack([one.var(correction=0) for one in states(model, ids)[2]])
    wanted = each.std(correction=1) / math.sqrt(len(each))
    assert value(frame, "variance", "standard_error", layer=2, role="state") == pytest.approx(float(wanted), rel=1e-5)


def test_contributions_the_stream_behind_them_and_sigma_at_the_norms():
    model, ids = llama(), blocks()
    frame = measure(model, ids)
    layer = model.model.layers[1]
    (_, attention), (middle, _), (_, added), (_, behind) = outputs(
        model, ids, [layer.self_attn, layer.post_attention_layernorm, layer.mlp, layer]
    )
    wanted = {("attention", "contribution"): attention, ("attention", "after"): middle}
    wanted |= {("feed_forward", "contribution"): added, ("feed_forward", "after"): behind}
    for (sublayer, role), x in wanted.items():
        place = {"layer": 1, "sublayer": sublayer, "role": role}
        assert value(frame, "variance", **place) == pytest.approx(float(x.var(correction=0)), rel=2e-6)
        assert value(frame, "abs_mean", **place) == pytest.approx(float(x.abs().mean()), rel=2e-6)
        assert value(frame, "abs_max", **place) == pytest.approx(float(x.abs().max()), rel=1e-6)
    place = {"layer": 1, "sublayer": "feed_forward", "role": "pre_norm"}
    assert value(frame, "sigma", **place) == pytest.approx(float(middle.std(-1, correction=0).mean()), rel=2e-6)
    assert value(frame, "rms", **place) == pytest.approx(float((middle**2).mean(-1).sqrt().mean()), rel=2e-6)
    final = {"layer": -1, "sublayer": "model", "role": "final_norm"}
    last = states(model, ids)[-1]
    assert value(frame, "sigma", **final) == pytest.approx(float(last.std(-1, correction=0).mean()), rel=2e-6)


def test_a_post_ln_encoder_keeps_its_variance():
    model, ids = bert(), blocks()
    frame = measure(model, ids)
    for layer in (1, 2):  # unit gains: a LayerNorm's output has variance 1
        assert value(frame, "token_variance", layer=layer, role="state") == pytest.approx(1.0, rel=1e-3)
    said = list(HiddenStates().sentences(frame))
    assert "stays between" in said[0]
    assert any("no massive activations" in one for one in said)


def plant(model, channel, position, size):
    """A layer that writes one large value into the stream at one position."""

    def hook(module, args, output):
        changed = output.clone()
        changed[:, position, channel] = size
        return changed

    return model.model.layers[1].register_forward_hook(hook)


def test_a_massive_activation_is_found_with_its_channel_and_token():
    model, ids = llama(), blocks()
    context = make_context(model, ProbeSettings(batch_size=2, tolerance=0.0), ids)
    handle = plant(model, 7, 3, -5000.0)

    class Tokenizer:
        def decode(self, ids):
            return f"<{ids[0]}>"

    context.tokenizer = Tokenizer()
    instance = HiddenStates()
    frame = run(context, [instance])["hidden_states"]
    handle.remove()
    place = {"layer": 2, "role": "state"}
    row = frame[(frame["metric"] == "abs_max") & (frame["layer"] == 2) & (frame["role"] == "state")].iloc[0]
    assert (row["value"], row["channel"], row["position"]) == (5000.0, 7, 3)
    assert row["token"] in {f"<{i}>" for i in ids[:, 3].tolist()}
    assert value(frame, "massive_activation", channel=7, position=3, **place) == -5000.0
    assert value(frame, "massive_sequences", channel=7, position=3, **place) == len(ids)
    assert value(frame, "massive_count", **place) == 1.0
    assert value(frame, "massive_count", layer=1, role="state") == 0.0
    assert value(frame, "headroom_factor", **place) == pytest.approx(65504 / 5000)
    assert value(frame, "headroom_bits", **place) == pytest.approx(math.log2(65504 / 5000))
    assert any("channel 7, token 3" in one and "massive" in one for one in instance.sentences(frame))


@pytest.mark.parametrize(
    ("rest", "size", "count"),
    [(0.01, 99.0, 0.0), (0.01, 101.0, 1.0), (0.2001, 200.01, 0.0), (0.2, 200.01, 1.0)],
)
def test_massive_needs_more_than_100_and_a_thousand_medians(rest, size, count):
    x = torch.full((1, 4, 8), rest)
    x[0, 2, 5] = size
    assert value(of_tensor(x), "massive_count", layer=0, role="state") == count


def of_tensor(x, ids=None, mask=None):
    """The probe of a model whose stream is ``x`` throughout."""
    model = llama(layers=1)
    inputs = {"input_ids": ids if ids is not None else torch.zeros(x.shape[:2], dtype=torch.long)}
    if mask is not None:
        inputs["attention_mask"] = mask
    structure = make_context(model, ProbeSettings(), blocks()).structure
    context = Context(model=model, base=model.model, structure=structure, batches=[inputs])
    instance = HiddenStates()
    instance.begin(context)
    for key in instance.points():
        instance.see(key, x)
    instance.end_batch(inputs, None)
    return instance.finish(context)


def test_the_band_is_of_the_hundred_largest_of_the_whole_sample():
    model, ids = llama(), blocks(sequences=7)
    frame = measure(model, ids)
    for layer, x in enumerate(states(model, ids)):
        band = x.abs().flatten().sort(descending=True).values[:100]
        assert value(frame, "top100_max", layer=layer, role="state") == pytest.approx(float(band[0]), rel=1e-6)
        assert value(frame, "top100_min", layer=layer, role="state") == pytest.approx(float(band[-1]), rel=1e-6)


def test_padding_is_left_out():
    x = torch.randn(3, 6, 8)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    x[0, 5], x[1, 0] = 1000.0, float("nan")  # what padding holds is of no concern
    x[1, 3, 2] = 50.0
    frame = of_tensor(x, mask=mask)
    kept = [x[i][mask[i].bool()].double() for i in range(3)]
    everything = torch.cat([one.flatten() for one in kept])
    place = {"layer": 0, "role": "state"}
    assert value(frame, "variance", **place) == pytest.approx(float(everything.var(correction=0)), rel=1e-6)
    median = sum(float(one.abs().median()) for one in kept) / 3
    assert value(frame, "median", **place) == pytest.approx(median, rel=1e-6)
    assert value(frame, "abs_max", **place) == 50.0
    assert value(frame, "abs_max", "position", **place) == 1  # the second token of its text


def test_variance_under_a_large_mean_keeps_its_digits():
    x = torch.randn(2, 5, 64) * 0.01 + 300.0
    found = moments(TokenStates(x, None))
    torch.testing.assert_close(found.variance, x.double().var(-1, correction=0), rtol=1e-9, atol=0.0)
    found = value(of_tensor(x), "variance", layer=0, role="state")
    assert found == pytest.approx(float(x.double().var(correction=0)), rel=1e-6)


def test_what_is_not_finite_is_said():
    x = torch.randn(2, 4, 8)
    x[1, 2, 3] = float("nan")
    frame = of_tensor(x)
    for metric in ("variance", "abs_max", "median"):
        assert math.isnan(value(frame, metric, layer=0, role="state")), metric
    assert "not finite" in next(HiddenStates().sentences(frame))


def test_a_norm_of_heads_counts_each_head_of_a_token():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    inputs = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": mask}
    behind = as_tokens(torch.randn(2, 3, 4, 8), inputs)
    before = as_tokens(torch.randn(2, 4, 3, 8), inputs)
    assert behind.x.shape == before.x.shape == (2, 12, 8)
    assert behind.valid is not None
    assert before.valid is not None
    assert behind.valid[0].tolist() == [True] * 8 + [False] * 4
    assert before.valid[0].tolist() == [True, True, False] * 4
    assert as_tokens(torch.randn(6, 8), inputs).x.shape == (2, 3, 8)


def test_growth_tells_a_line_from_an_exponential():
    frame = measure(llama(), blocks())
    variance = [float(value(frame, "variance", layer=layer, role="state")) for layer in range(4)]
    steps = [float(value(frame, "variance_step", layer=layer)) for layer in range(3)]
    assert steps == pytest.approx([variance[i + 1] - variance[i] for i in range(3)], rel=1e-9)
    linear = np.polyfit(range(4), variance, 1)
    residual = np.square(np.polyval(linear, range(4)) - variance).sum() / np.square(variance - np.mean(variance)).sum()
    assert value(frame, "growth_linear_r2") == pytest.approx(1 - residual, rel=1e-6)
    assert r_squared([1.0, 2.0, 3.0]) == pytest.approx(1.0)
    assert math.isnan(r_squared([1.0, 1.0, 1.0]))
    assert r_squared(np.exp(np.arange(12.0)).tolist()) < r_squared(np.arange(12.0).tolist())
    states = pd.Series([0.1, 0.9, 1.0])
    assert growth(states, 0.754, 0.746).endswith("equally well (R^2 0.75 linear, 0.75 exponential).")
    assert "A linear curve fits better" in growth(states, 0.76, 0.75)


def test_one_tensor_watched_at_two_points_is_not_mistaken_for_another():
    model = lamina.build(llama().config, "peri_ln", num_layers=2).eval()
    ids = blocks(sequences=4)
    frame = measure(model, ids)
    found = outputs(model, ids, [model.model.layers[0].attention, model.model.layers[0].attention.out_norm])
    for (_, x), role in zip(found, ("after", "contribution"), strict=True):
        wanted = float(x.var(correction=0))
        assert value(frame, "variance", layer=0, sublayer="attention", role=role) == pytest.approx(wanted, rel=1e-5)
    (given, _), *_ = outputs(model, ids, [model.model.layers[0].attention.out_norm])
    found = value(frame, "sigma", layer=0, sublayer="attention", role="out_norm")
    assert found == pytest.approx(float(given.std(-1, correction=0).mean()), rel=1e-5)
