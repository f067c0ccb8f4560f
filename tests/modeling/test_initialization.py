"""What the weights start from: the standard deviation of each role, seeds, and no parameter forgotten."""

import math

import pytest
import torch
from modeling.tiny import OF_EXPERTS, OF_TEXT, llama, token_ids
from spread import KINDS
from test_backbone_parity import ALIKE, KNOWN_ROLES, configuration
from transformers import AutoConfig, Starcoder2Config

import lamina
from lamina.core import architectures, initializers
from lamina.modeling import initialization
from lamina.modeling.initialization import weights
from lamina.modeling.parts import decaying
from lamina.placements import names, resolve

WIDTH, FFN, VOCABULARY, NUM_LAYERS = 256, 640, 512, 3
ROLES = {"embedding", "readout", "query", "key", "value", "attention_out"}
ROLES |= {"gate", "feed_forward_in", "feed_forward_out"}
BETA = (8 * NUM_LAYERS) ** -0.25


def xavier(fan_in, fan_out):
    return math.sqrt(2 / (fan_in + fan_out))


STD = {
    "normal": dict.fromkeys(ROLES, 0.02),
    "scaled": dict.fromkeys(ROLES, 0.02) | dict.fromkeys(("attention_out", "feed_forward_out"), 0.02 / math.sqrt(6)),
    "small": dict.fromkeys(ROLES, math.sqrt(2 / (5 * WIDTH))),
    "xavier": dict.fromkeys(("embedding", "readout"), 0.02)
    | dict.fromkeys(("query", "attention_out"), xavier(WIDTH, WIDTH))
    | dict.fromkeys(("key", "value"), xavier(WIDTH, WIDTH // 2))
    | dict.fromkeys(("gate", "feed_forward_in", "feed_forward_out"), xavier(WIDTH, FFN)),
}
STD["deepnorm"] = STD["xavier"] | {
    role: BETA * STD["xavier"][role] for role in ("value", "attention_out", "feed_forward_in", "feed_forward_out")
}
SCALED_OUT = dict.fromkeys(("attention_out", "feed_forward_out"), 1 / math.sqrt(6))  # sqrt(2 N)
STD["admin"] = STD["normal"]
# A normal distribution cut off at 3 sigma has 0.9866 of its standard deviation.
STD["small_scaled"] = {r: 0.9866 * s * SCALED_OUT.get(r, 1) for r, s in STD["small"].items()}
STD["small_scaled_uncut"] = {r: s * SCALED_OUT.get(r, 1) for r, s in STD["small"].items()}
for name, variance in (("he", 2), ("lecun", 1), ("10/d", 10), ("1/(10d)", 0.1)):
    STD[name] = dict.fromkeys(ROLES, math.sqrt(variance / WIDTH))
TAKE_STD = ("normal", "scaled", "xavier", "deepnorm", "admin")


def model_of(init, placement=None, **options):
    config = llama(NUM_LAYERS, hidden_size=WIDTH, intermediate_size=FFN, vocab_size=VOCABULARY)
    placement = placement or ("admin" if init.startswith("admin") else "deepnorm")
    return lamina.build(config, placement, init=init, **options)


def assert_drawn_with(parameter, std):
    """The mean of n draws strays by std / sqrt(n), their deviation by std / sqrt(2 n): five of those are allowed."""
    n = parameter.numel()
    assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    assert abs(parameter.mean().item()) < 5 * std / math.sqrt(n)


@pytest.mark.parametrize("init", STD)
def test_every_role_starts_with_its_standard_deviation(init):
    model, seen = model_of(init), set()
    for weight in weights(model):
        if weight.role not in ("vector", "wiring"):
            assert_drawn_with(weight.parameter, STD[init][weight.role])
            seen.add(weight.role)
    assert seen == ROLES


def test_every_initializer_is_tested_here():
    assert set(initializers.INITIALIZERS) == set(STD)


@pytest.mark.parametrize("init", TAKE_STD)
def test_the_base_standard_deviation_is_read_by_every_initializer_that_takes_it(init):
    stds = [p.std().item() for p in model_of(f"{init}(std=0.5)").parameters() if p.ndim > 1]
    assert max(stds) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("name", names())
def test_the_recommended_initializer_is_the_schemes(name):
    torch.manual_seed(0)
    recommended = lamina.build(llama(2), name)
    torch.manual_seed(0)
    named = lamina.build(llama(2), name, init=lamina.placements.get(name).initialization)
    for (key, one), other in zip(recommended.named_parameters(), named.parameters(), strict=True):
        assert torch.equal(one, other), key


@pytest.mark.parametrize("name", KINDS)
def test_the_seed_decides_the_weights(name):
    def drawn(seed):
        torch.manual_seed(seed)
        return {k: p for k, p in lamina.build(llama(2), name).named_parameters() if p.ndim > 1}

    first, again, other = drawn(7), drawn(7), drawn(8)
    for key, parameter in first.items():
        assert torch.equal(parameter, again[key]), key
        assert not torch.equal(parameter, other[key]), key


def test_placements_with_the_same_parameters_start_from_the_same_weights_at_the_same_seed():
    """A comparison of placements is then one of placements."""
    drawn = []
    for name in ("pre_ln", "post_ln", "fusenorm"):
        torch.manual_seed(5)
        model = lamina.build(llama(2), name, init="normal")
        drawn.append([p for p in model.parameters() if p.ndim > 1])
    assert all(torch.equal(a, b) for other in drawn[1:] for a, b in zip(drawn[0], other, strict=True))


@pytest.mark.parametrize(
    "model_type", [name for name in ALIKE if "router" in architectures.ARCHITECTURES[name].roles.values()]
)
def test_the_weights_of_experts_have_roles(model_type):
    assert {weight.role for weight in weights(lamina.build(configuration(model_type), "peri_ln"))} <= KNOWN_ROLES


@pytest.mark.parametrize(
    ("model_type", "more"), [("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2}), ("gpt_oss", {})]
)
def test_biases_of_experts_which_are_matrices_are_neither_drawn_nor_decayed(model_type, more):
    config = AutoConfig.for_model(model_type, **{**OF_TEXT, **OF_EXPERTS, "moe_layer_end_index": 1, **more})
    model = lamina.build(config, "pre_ln")
    biases = {name: p for name, p in model.named_parameters() if name.endswith("_bias") and p.ndim > 1}
    assert biases
    assert not any(p.any() for p in biases.values())
    assert not biases.keys() & set(decaying(model))


def test_deepnorms_weights_are_normal_and_its_beta_an_option():
    values = model_of("deepnorm", "deepnorm(beta=0.5)").model.layers[1].attention.module.o_proj.weight
    std = 0.5 * xavier(WIDTH, WIDTH)
    assert_drawn_with(values, std)
    assert values.abs().max().item() > 3.5 * std  # a uniform distribution would end at 1.73 standard deviations
    assert (values.abs() < std).double().mean().item() == pytest.approx(0.6827, abs=0.01)


@pytest.mark.parametrize("name", names())
def test_every_gain_of_a_norm_starts_at_one_and_every_bias_at_zero(name):
    model = lamina.build(configuration("qwen2"), name, norm="group" if name == "group_ln" else "layer")
    gains = {key: p for key, p in model.named_parameters() if "norm" in key.split(".")[-2] or key.endswith("bias")}
    assert len(gains) >= 4
    outer = model.config.num_hidden_layers**-0.5 if name == "sandwich_depth_scaled" else 1.0
    for key, parameter in gains.items():
        offset = float(getattr(model.get_submodule(key.rpartition(".")[0]), "zero_centered", False))
        start = 0.0 if key.endswith("bias") else (outer if "out_norm" in key else 1.0) - offset
        assert torch.equal(parameter, torch.full_like(parameter, start)), key


def test_the_row_of_the_padding_token_starts_at_zero_as_in_transformers():
    model = lamina.build(llama(2, pad_token_id=0), "pre_ln")
    assert not model.get_input_embeddings().weight[0].any()


@pytest.mark.parametrize("kind", ["LaminaModel", "LaminaForSequenceClassification"])
def test_weights_names_the_parameters_of_the_other_heads_too(kind):
    from lamina import modeling

    config = lamina.build(llama(2), "keel").config
    model = getattr(modeling, kind)(config)
    assert [w.name for w in weights(model)] == [key for key, _ in model.named_parameters()]
    initialization.initialize(model, "normal")
    assert model(input_ids=token_ids(batch=1))[0].isfinite().all()


def test_small_scaled_is_cut_off_at_three_standard_deviations_and_its_other_form_is_not():
    """HybridNorm cuts (arXiv 2503.04598's code); Mix-LN's N(0, std) has no cut (its Table 8)."""

    def largest(init):
        weights_of = {w.role: w for w in weights(model_of(init)) if w.role in STD["small"]}
        found = {role: weight.parameter.abs().max().item() for role, weight in weights_of.items()}
        return max(value / STD["small"][role] / SCALED_OUT.get(role, 1) for role, value in found.items())

    assert 2.5 < largest("small_scaled") <= 3.0
    assert largest("small_scaled_uncut") > 3.3


def test_deepnorm_scales_the_values_of_latent_attention_by_beta():
    """MLA's kv_b_proj holds each head's key rows, then its value rows."""
    torch.manual_seed(0)
    model = lamina.build("deepseek-nano", "deepnorm", num_layers=4, hidden_size=96, num_heads=4)
    config, plan = model.config.get_text_config(), resolve("deepnorm", 4)
    key_rows, value_rows = config.qk_nope_head_dim, config.v_head_dim
    for block, layer in zip(model.model.layers, plan.layers, strict=True):
        stored = block.attention.module.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        rank = stored.shape[-1]
        for part, rows, gain in (
            (stored[:, :key_rows], key_rows, 1.0),
            (stored[:, key_rows:], value_rows, layer.attention.weight_gain),
        ):
            xavier = math.sqrt(2 / (rank + config.num_attention_heads * rows))
            assert part.std().item() == pytest.approx(gain * xavier, rel=0.15)


@pytest.fixture
def starcoder():
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    return Starcoder2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)


def test_feed_forwards_by_other_names_are_scaled_too(starcoder, caplog):
    torch.manual_seed(0)
    mlp = lamina.build(starcoder, "fusenorm", init="scaled").model.layers[1].feed_forward.module
    assert mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert "does not know" not in caplog.text


def test_weights_without_a_role_are_counted_where_it_matters(starcoder, caplog, monkeypatch):
    monkeypatch.delitem(architectures.ROLES, "feed_forward.c_proj")
    lamina.build(starcoder, "pre_ln", init="normal")
    assert "does not know" not in caplog.text
    lamina.build(starcoder, "pre_ln", init="scaled")
    assert "does not know the roles of 4 weights in the blocks" in caplog.text
