"""Numbers of the papers: scales, borders, exceptions of the first layer, and how many parameters the norms have."""

import pytest
import torch
from naive import EXPECTED, WIDTH, built, llama
from torch import nn
from transformers import LlamaForCausalLM

import lamina
from lamina.placements import names, resolve

NAMES = [name for name in names() if name in EXPECTED]  # test_formulas.py names those without a row
d = WIDTH


def positions(plan, index):
    """Which of A (pre_norm), B (out_norm) and C (post_norm) the attention and the feed-forward of a layer have."""
    letters, layer = {"pre_norm": "A", "out_norm": "B", "post_norm": "C"}, plan.layers[index]
    halves = layer.attention, layer.feed_forward
    return tuple("".join(letters[name] for name in letters if getattr(half, name) is not None) for half in halves)


@pytest.mark.parametrize("name", [name for name in NAMES if EXPECTED[name].norms])
def test_the_norms_sit_where_the_paper_puts_them_at_1024_layers(name):
    plan = resolve(name, num_layers=1024)
    assert len(plan.layers) == 1024
    first, others = EXPECTED[name].positions
    assert positions(plan, 0) == first
    assert {positions(plan, index) for index in range(1, 1024)} == {others}


def test_keels_alpha_counts_sublayers_and_can_be_learned():
    assert resolve("keel", num_layers=256).layers[-1].attention.skip_scale == 512.0
    model = built("keel", 4, learnable_alpha=True)
    scales = [r.skip_scale for block in model.model.layers for r in (block.attention, block.feed_forward)]
    assert [float(torch.as_tensor(scale).detach()) for scale in scales] == [1.0, 1.0, *[8.0] * 6]
    assert all(isinstance(scale, nn.Parameter) and scale.requires_grad for scale in scales[2:])
    assert not any(isinstance(scale, nn.Parameter) for scale in scales[:2])


BORDERS = [(12, {}, 3), (24, {}, 6), (64, {}, 16), (24, {"num_post_layers": 8}, 8)]
BORDERS += [(24, {"alpha": 0.0}, 0), (24, {"alpha": 1.0}, 24), (32, {"alpha": 0.0625}, 2), (3, {"alpha": "1/3"}, 1)]
BORDERS += [(100, {"alpha": 0.29}, 29)]  # floor(0.29 * 100) is 28 in floats
BORDERS += [(10, {"alpha": 0.25}, 2), (11, {"alpha": 0.25}, 2)]  # floor, not round


@pytest.mark.parametrize(("num_layers", "options", "border"), BORDERS)
def test_mix_lns_border_is_the_floor_in_exact_arithmetic(num_layers, options, border):
    plan = resolve("mix_ln", num_layers=num_layers, **options)
    kinds = [positions(plan, index) for index in range(num_layers)]
    assert kinds == [("C", "C")] * border + [("A", "A")] * (num_layers - border)


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_norms_have_as_many_parameters_as_the_paper_says(name, num_layers):
    bare = size(LlamaForCausalLM(llama(num_layers))) - (2 * num_layers + 1) * d
    model = lamina.build(llama(num_layers), name, final_norm=False, embedding_norm=False)
    expected = EXPECTED[name].parameters(num_layers)
    assert size(model) - bare == expected
    both = lamina.build(llama(num_layers), name, final_norm=True, embedding_norm=True)
    assert size(both) - bare == expected + 2 * d
