"""A user's YAML and Python files: bounded in size, depth and time, and whatever they raise is one line."""

import time
from dataclasses import replace

import pytest

from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError
from lamina.placements import registry, resolve
from lamina.placements.matching import resolved


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    monkeypatch.setenv("LAMINA_PYTHON_FILES", "")
    with registry.PLACEMENTS.isolated():
        yield


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def rule(value):
    return f"rules: [{{attention: {{pre_norm: true, skip_scale: {value}}}}}]"


@pytest.mark.parametrize(
    "formula",
    ["9**9**9**9", "10**400", "1e400", "(-8)**0.5", "1/0", "(" * 150 + "1" + ")" * 150, "-" * 5000 + "1", "True", "1j",
     "layer.real", "__import__('os')", "lambda: 1", "9" * 250, "depth", "num_layers if 1 else 2", "2 *"],
)  # fmt: skip
def test_a_formula_that_is_none_or_that_no_number_can_hold_is_refused_at_once_and_never_run(file, formula):
    start = time.monotonic()
    with pytest.raises(UserError, match=r"rules\[0\].attention.skip_scale"):
        resolve(str(file(rule(f'"{formula}"'))), 4)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("value", [".inf", "1" + "0" * 400, "9" * 6000])
def test_a_number_that_no_float_can_hold_is_refused(file, value):
    with pytest.raises(UserError, match=r"mine\.yaml"):
        resolve(str(file(rule(value))), 4)


def laughs():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    return "\n".join([*lines, *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30))])


def merges():
    return "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 60))])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (laughs(), "each alias expanded"),
        (merges(), "each alias expanded"),
        ("a: &a [*a]", "inside the anchor's value"),
        ("a: " + "[" * 100_000, "nested too deep"),
        ("a: " + "x" * 5 * 2**20, "too large"),
        ("a: " + "9" * 6000, "not valid YAML"),
        ("a: 2026-99-99", "not valid YAML"),
        ("a: 1\na: 2", "'a' is given twice"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_file_that_would_fill_memory_or_time_is_refused_at_once(file, text, said):
    start = time.monotonic()
    with pytest.raises(UserError, match=said):
        read_mapping(file(text))
    assert time.monotonic() - start < 2


def test_aliases_within_the_bounds_are_read(file):
    assert read_mapping(file("a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}")) == {
        "a": {"x": 1}, "b": [{"x": 1}] * 2, "c": {"x": 1, "y": 2},
    }  # fmt: skip


MADE = """
from lamina.placements import Plan, placement

@placement("mine", title="t", equation=("y = x",), source="s")
def mine(num_layers: int) -> Plan:
    {}
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise SystemExit(0)", "the file raised SystemExit: 0"),
        ("import sys; sys.exit('all is well')", "raised SystemExit: all is well"),
        ("def f(): f()\nf()", "raised RecursionError"),
        (MADE.format("raise SystemExit(0)"), "'mine' raised SystemExit: 0"),
        (MADE.format("return 1 / 0"), "'mine' raised ZeroDivisionError"),
        (MADE.format("return None"), "its function returns None"),
    ],
)
def test_what_a_python_file_raises_is_a_mistake_that_names_it(file, text, said):
    with pytest.raises(UserError, match="mine") as error:
        resolve(str(file(text, "mine.py")), 2)
    assert said in str(error.value)


def test_so_is_what_a_registered_placement_raises_and_the_census_leaves_it_out(monkeypatch):
    def make(num_layers):
        return 1 / 0

    broken = replace(registry.get("pre_ln"), name="mine", make=make)
    monkeypatch.setitem(registry.PLACEMENTS._entries, "mine", (broken, "a notebook"))
    with pytest.raises(UserError, match="'mine': its function raised ZeroDivisionError"):
        resolve("mine", 2)
    assert resolved("mine", 2) is None


def test_the_first_use_of_a_python_file_says_that_it_runs_as_code(file, caplog):
    path = str(file("raise SystemExit", "mine.py"))
    for _ in range(2):
        with pytest.raises(UserError):
            resolve(path, 2)
    (record,) = caplog.records
    assert record.getMessage() == f"placement {path!r} runs as code, with your rights. Use only files that you trust"
