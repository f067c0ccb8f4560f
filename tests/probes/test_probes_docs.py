"""docs/probes.md and the list of probes say what is true of each probe."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import lamina
from lamina.errors import UserError
from lamina.probes.engine import registry
from lamina.probes.engine.measure import MIN_SEQUENCES
from lamina.probes.engine.registry import listed, read

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "probes.md").read_text(encoding="utf-8")
OWN = (DOCS / "own.md").read_text(encoding="utf-8")
INSPECT = (DOCS / "inspect.md").read_text(encoding="utf-8")


def test_every_probe_has_its_heading_and_no_other():
    headings = re.findall(r"^### (.+)$", TEXT, re.M)
    assert sorted(name for heading in headings for name in heading.split(", ")) == list(listed())


@pytest.mark.parametrize("name", listed())
def test_every_probe_has_a_test_of_its_own(name):
    """Of its numbers: a file of this folder, besides those of all probes, names it."""
    of_all = {Path(__file__).name, "test_engine.py", "test_proof.py", "tiny.py"}
    files = [path for path in Path(__file__).parent.glob("*.py") if path.name not in of_all]
    assert any(re.search(rf"[\"'.( ]{name}\b", path.read_text(encoding="utf-8")) for path in files), (
        f"prove the numbers of {name} in tests/probes, against its formula"
    )


def test_the_python_example_runs():
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", INSPECT, re.S)[0], names)
    assert set(names["distances"]["size"]) == {1, 2, 3, 4}


def test_the_probe_of_ones_own_measures_what_it_says(tmp_path, tiny_llama):
    code = re.findall(r"<!-- own probe -->\n```python\n(.*?)```", OWN, re.S)[0]
    (tmp_path / "small_values.py").write_text(code, encoding="utf-8")
    model = LlamaForCausalLM(tiny_llama).eval()
    blocks = torch.randint(0, 61, (MIN_SEQUENCES, 8))
    spec = f"{tmp_path / 'small_values.py'}(limit=0.3)"
    frame = lamina.probe(model, spec, blocks, tolerance=1e-9)["small_values"]  # asks for its standard error
    states = model(input_ids=blocks, output_hidden_states=True).hidden_states
    for layer in (0, 1):
        size = states[layer].double().abs()
        expected = torch.stack([(x < 0.3 * x.mean()).double().mean() for x in size]).mean().item()
        assert frame.loc[frame.layer == layer, "value"].item() == pytest.approx(expected, abs=1e-6)
    assert registry.make(spec).sentences(frame)
    assert len(registry.make(spec).figures(frame)) == 1
    with pytest.raises(UserError, match="limt"):
        registry.make(spec.replace("limit", "limt"))


@pytest.mark.parametrize("link", sorted(set(re.findall(r"!\[[^]]*\]\((?!http)([^)#]+)\)", INSPECT))))
def test_every_picture_is_there_and_small(link):
    assert (DOCS / link).stat().st_size < 150_000


def test_the_list_is_that_of_the_registry():
    assert list(listed()) == registry.names()


@pytest.mark.parametrize("name", list(listed()))
def test_what_is_read_is_what_the_class_says(name):
    one, made = listed()[name], registry.get(name)
    assert (one.name, one.title, one.summary, one.source) == (made.name, made.title, made.summary, made.source)
    assert one.summary
    assert one.source
    given = {k: "" if v is inspect.Parameter.empty else v for k, v in registry.options_of(made).items()}
    assert list(one.options) == list(given)


def test_every_way_of_writing_an_attribute_is_read(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "@registry.probe\n"
        "class Mine(Probe):\n"
        "    name: ClassVar[str] = 'mine'\n"
        "    title = 'My' ' own'\n"
        "    summary = ('one '\n        'two')\n"
        "    over_steps = ('a', 'b')\n"
        "    needs = frozenset()\n"
        "    def __init__(self, top: int = 3, *, share=0.5, strict):\n        pass\n"
        "class Other(Probe):\n    name = 'other'\n",
        encoding="utf-8",
    )
    (one,) = read(path)
    assert (one.name, one.title, one.summary, one.over_steps) == ("mine", "My own", "one two", ("a", "b"))
    assert one.options == {"top": "3", "share": "0.5", "strict": ""}
