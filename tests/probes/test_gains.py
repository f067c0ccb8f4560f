"""gains: each vector set by the test, its statistics by numpy."""

import numpy as np
import pytest
import torch
from probes.tiny import SIZES, blocks, gemma2, llama, made, value
from torch import nn

import lamina
from lamina.probes.engine.measure import probe
from lamina.probes.gains import Gains


def measure(model):
    return probe(model, ["gains"], blocks(2), tolerance=0.0)["gains"]


def expect(frame, gain, **place):
    gain = np.asarray(gain, dtype=np.float64)
    wanted = {"gain_mean": gain.mean(), "gain_std": gain.std()}
    wanted |= {"gain_rms": np.sqrt(np.square(gain).mean()), "gain_min": gain.min(), "gain_max": gain.max()}
    for metric, number in wanted.items():
        assert value(frame, metric, **place) == pytest.approx(number, rel=1e-6), metric


@torch.no_grad()
def test_every_norm_of_a_llama():
    model = llama()
    norms = {(i, "attention"): layer.input_layernorm for i, layer in enumerate(model.model.layers)}
    norms |= {(i, "feed_forward"): layer.post_attention_layernorm for i, layer in enumerate(model.model.layers)}
    norms[-1, "model"] = model.model.norm
    for norm in norms.values():
        norm.weight.normal_(1.0, 0.5)
    frame = measure(model)
    for (layer, sublayer), norm in norms.items():
        role = "final_norm" if layer < 0 else "pre_norm"
        expect(frame, norm.weight, layer=layer, sublayer=sublayer, role=role)
    assert len(frame) == 5 * len(norms)
    assert frame["standard_error"].isna().all()


@torch.no_grad()
def test_gemmas_gain_is_one_more_than_its_weight():
    model = gemma2()
    layer = model.model.layers[1]
    layer.post_feedforward_layernorm.weight.fill_(0.25)
    frame = measure(model)
    expect(frame, np.full(32, 1.25), layer=1, sublayer="feed_forward", role="out_norm")
    expect(frame, np.ones(32), layer=1, sublayer="attention", role="pre_norm")


@torch.no_grad()
def test_learned_scales_beside_the_norms_and_no_biases():
    model = lamina.build(llama().config, "admin", num_layers=2)
    scale = model.model.layers[1].feed_forward.skip_scale
    assert isinstance(scale, nn.Parameter)
    scale.normal_(2.0, 0.1)
    frame = measure(model)
    expect(frame, scale, layer=1, sublayer="feed_forward", role="skip_scale")
    path = value(frame, "gain_mean", "path", layer=1, sublayer="feed_forward", role="skip_scale")
    assert path.endswith("layers.1.feed_forward")


@torch.no_grad()
def test_layer_scale_of_a_vision_model():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    model = made("Dinov2Model", sizes, layerscale_value=0.3)
    model.encoder.layer[1].layer_scale2.lambda1.fill_(0.7) if hasattr(model, "encoder") else None
    frame = probe(model, ["gains"], torch.randn(2, 3, 16, 16), tolerance=0.0)["gains"]
    scales = frame[(frame["metric"] == "gain_mean") & frame["role"].str.contains("lambda")]
    assert sorted(scales["value"].round(6)) == [0.3, 0.3, 0.3, 0.7]
    assert not frame["role"].str.contains("bias").any()


def test_norms_without_a_gain_have_no_rows():
    frame = measure(made("OlmoForCausalLM", SIZES, num_hidden_layers=2))
    assert list(frame.columns[:7]) == ["layer", "sublayer", "role", "index", "metric", "value", "standard_error"]
    assert frame.empty
    assert list(Gains().sentences(frame)) == []
    assert list(Gains().figures(frame)) == []


def test_norms_of_the_same_role_are_told_apart_by_index():
    model = made("Qwen3ForCausalLM", SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=8)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_norm.weight.fill_(3.0)
    frame = measure(model)
    inner = frame[(frame["layer"] == 0) & (frame["role"] == "inner_norm") & (frame["metric"] == "gain_mean")]
    assert sorted(inner["index"]) == [0, 1]
    assert sorted(inner["value"]) == [1.0, 3.0]
    figures = list(Gains().figures(frame))
    assert len(figures) == 2
    assert any("inner_norm 2" in one for one in Gains().sentences(frame))
