"""docs/probes.md says what is true: every probe has its section, and its examples run."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import lamina
from lamina.errors import UserError
from lamina.probes.engine import registry
from lamina.probes.engine.registry import listed

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "probes.md").read_text(encoding="utf-8")
OWN = (DOCS / "own.md").read_text(encoding="utf-8")
GALLERY = (DOCS / "gallery.md").read_text(encoding="utf-8")


def test_every_probe_has_its_heading_and_no_other():
    headings = re.findall(r"^### (.+)$", TEXT, re.M)
    assert sorted(name for heading in headings for name in heading.split(", ")) == list(listed())


def test_the_python_example_runs():
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.S)[0], names)
    assert set(names["distances"]["size"]) == {1, 2, 3, 4}


def test_the_probe_of_ones_own_measures_what_it_says(tmp_path, tiny_llama):
    code = re.findall(r"<!-- own probe -->\n```python\n(.*?)```", OWN, re.S)[0]
    (tmp_path / "small_values.py").write_text(code, encoding="utf-8")
    model = LlamaForCausalLM(tiny_llama).eval()
    blocks = torch.randint(0, 61, (4, 8))
    spec = f"{tmp_path / 'small_values.py'}(limit=0.3)"
    frame = lamina.probe(model, spec, blocks)["small_values"]
    states = model(input_ids=blocks, output_hidden_states=True).hidden_states
    for layer in (0, 1):
        size = states[layer].double().abs()
        expected = torch.stack([(x < 0.3 * x.mean()).double().mean() for x in size]).mean().item()
        assert frame.loc[frame.layer == layer, "value"].item() == pytest.approx(expected, abs=1e-6)
    assert registry.make(spec).sentences(frame)
    assert len(registry.make(spec).figures(frame)) == 1
    with pytest.raises(UserError, match="limt"):
        registry.make(spec.replace("limit", "limt"))


@pytest.mark.parametrize("link", sorted(set(re.findall(r"!\[[^]]*\]\((?!http)([^)#]+)\)", GALLERY))))
def test_every_picture_is_there_and_small(link):
    assert (DOCS / link).stat().st_size < 150_000
