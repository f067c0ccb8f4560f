"""docs/wire.md works as written: its Python blocks are taken out of the page and run."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lamina

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def page():
    """What the page defines, all its blocks having run in order."""
    names: dict = {"__name__": "wire_page"}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_page_has_the_blocks_that_are_run_here(page):
    assert len(BLOCKS) == 4
    assert {"GPT", "reset_wiring", "AddBias", "losses"} <= set(page)


def test_the_model_of_the_page_learns(page):
    assert page["losses"][-1] < page["losses"][0] - 1


@pytest.mark.parametrize("placement", lamina.placements.names())
def test_the_model_of_the_page_runs_with_every_placement(page, placement):
    model = page["GPT"](placement, n_layer=3)
    ids = torch.randint(256, (2, 9))
    _, loss = model(ids, ids)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    plan = lamina.placements.resolve(placement, 3)
    assert isinstance(model.ln_f, nn.LayerNorm) == (plan.final_norm is not None)


@pytest.mark.parametrize("placement", ["keel", "admin", "peri_ln"])
def test_reset_wiring_gives_the_values_of_a_block_that_was_never_on_meta(page, placement):
    def make():
        layer = lamina.placements.resolve(placement, 4, norm="layer").layers[1]
        return lamina.wire(nn.Linear(8, 8), nn.Linear(8, 8), layer, 8)

    expected = make()
    with torch.device("meta"):
        block = make()
    block = block.to_empty(device="cpu")
    page["reset_wiring"](block)
    for name, parameter in expected.named_parameters():
        if ".module." not in name:
            assert torch.equal(block.get_parameter(name), parameter), name


def test_add_bias_adds_what_megatron_returns_beside_the_output(page):
    class Megatrons(nn.Module):
        def forward(self, x, attention_mask=None, bias=None):
            return 2 * x, bias

    x, bias = torch.randn(5, 2, 8), torch.randn(8)
    layer = lamina.placements.resolve("out_ln", 2).layers[0]
    block = lamina.wire(page["AddBias"](Megatrons()), nn.Identity(), layer, 8)
    branch = block.attention.out_norm(2 * x + bias)
    assert torch.equal(block.attention(x, attention_mask=None, bias=bias), x + branch)
    assert torch.equal(page["AddBias"](Megatrons())(x), 2 * x)
