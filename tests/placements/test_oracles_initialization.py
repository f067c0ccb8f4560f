"""What the weights start from: the papers' standard deviations, measured on built models.

The relative error of a standard deviation measured on n normal numbers is 1 / sqrt(2 n). Weights of one role are pooled
over the layers, so that n is at least 45,000: 0.34 % at most, and the tolerance of 2 % is six times that.
"""

import math

import pytest
import torch
from naive import llama

import lamina

NAMES = lamina.placements.names()
SIX_SIGMA = {"rel": 0.02}
WIDTH, INNER, KEY_VALUE_WIDTH = 96, 160, 48
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAIN = ["keel", "layernorm_scaling", "peri_ln"]  # what their papers use; FuseNorm's trains all its baselines scaled


def initial(name, num_layers, **options):
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": 512, "tie_word_embeddings": False}
    torch.manual_seed(0)
    return lamina.build(llama(num_layers, **sizes), name, **options)


def weights(model, role):
    modules = [m for block in model.model.layers for m in (block.attention.module, block.feed_forward.module)]
    return torch.cat([getattr(m, role).weight.detach().flatten() for m in modules if hasattr(m, role)])


def xavier(fan_in, fan_out):
    return math.sqrt(2 / (fan_in + fan_out))


@pytest.mark.parametrize(("num_layers", "beta"), [(12, 0.31947), (24, 0.26864), (32, 0.25), (64, 0.21022)])
def test_deepnorm_scales_value_output_up_and_down_by_beta_and_query_and_key_not_at_all(num_layers, beta):
    assert (8 * num_layers) ** -0.25 == pytest.approx(beta, abs=5e-6)
    model = initial("deepnorm", num_layers)
    expected = {
        "q_proj": xavier(WIDTH, WIDTH),
        "k_proj": xavier(WIDTH, KEY_VALUE_WIDTH),
        "v_proj": beta * xavier(WIDTH, KEY_VALUE_WIDTH),
        "o_proj": beta * xavier(WIDTH, WIDTH),
        "gate_proj": xavier(WIDTH, INNER),
        "up_proj": beta * xavier(WIDTH, INNER),
        "down_proj": beta * xavier(WIDTH, INNER),
    }
    for role, std in expected.items():
        assert weights(model, role).std().item() == pytest.approx(std, **SIX_SIGMA), role


def test_deepnorms_weights_are_normal_and_its_beta_an_option():
    values = weights(initial("deepnorm", 12, beta=0.5), "o_proj")
    std = 0.5 * xavier(WIDTH, WIDTH)
    assert values.std().item() == pytest.approx(std, **SIX_SIGMA)
    assert values.abs().max().item() > 3.5 * std  # a uniform distribution would end at 1.73 standard deviations
    assert (values.abs() < std).double().mean().item() == pytest.approx(0.6827, abs=0.01)


def assert_starts_from(model, std, *, output_std=None):
    for role in ROLES:
        expected = output_std if output_std and role in ("o_proj", "down_proj") else std
        assert weights(model, role).std().item() == pytest.approx(expected, **SIX_SIGMA), role


@pytest.mark.parametrize("num_layers", [12, 24])
def test_fusenorm_divides_the_two_output_projections_by_the_root_of_twice_the_number_of_layers(num_layers):
    """Megatron's scheme: N(0, 0.02^2), and N(0, 0.02^2 / (2 N)) for what is added to the stream."""
    assert_starts_from(initial("fusenorm", num_layers), 0.02, output_std=0.02 / math.sqrt(2 * num_layers))


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_placements_start_every_matrix_from_the_same_standard_deviation(name):
    model = initial(name, 12)
    assert_starts_from(model, 0.02)
    for matrix in (model.get_input_embeddings().weight, model.lm_head.weight):
        assert matrix.std().item() == pytest.approx(0.02, **SIX_SIGMA)


@pytest.mark.parametrize("name", ["hybridnorm", "hybridnorm_star"])
def test_hybridnorm_starts_from_the_megatron_init_of_its_paper(name):
    """arXiv 2503.04598: std 1 / sqrt(2.5 d), truncated at 3 sigma; the output projections divided by sqrt(2 N).

    Truncation at 3 sigma leaves a standard deviation of 0.987 sigma.
    """
    model = initial(name, 12)
    for role in ROLES:
        sigma = 1 / math.sqrt(2.5 * WIDTH) / (math.sqrt(24) if role in ("o_proj", "down_proj") else 1)
        assert weights(model, role).std().item() == pytest.approx(0.9866 * sigma, rel=0.03), role
        assert weights(model, role).abs().max().item() <= 3 * sigma * (1 + 1e-5), role


@pytest.mark.parametrize("name", NAMES)
def test_every_gain_of_a_norm_starts_at_one_and_every_bias_at_zero(name):
    model = lamina.build(llama(2), name, norm="group" if name == "group_ln" else "layer")
    seen = 0
    for key, parameter in model.named_parameters():
        if "norm" in key.split(".")[-2]:
            seen += 1
            assert (parameter == (0.0 if key.endswith("bias") else 1.0)).all(), key
    assert seen >= 4
