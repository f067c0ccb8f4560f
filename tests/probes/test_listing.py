"""The list of probes that is read without running them says what the probes themselves say."""

import inspect
import subprocess
import sys

import pytest

from lamina.probes.engine import registry
from lamina.probes.engine.registry import listed, read


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


def test_the_list_loads_neither_torch_nor_pandas():
    code = "import sys; from lamina.probes.engine.registry import listed; listed(); "
    code += "assert not {'torch', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
