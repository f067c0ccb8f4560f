"""Placements of the user's own: options in brackets, YAML rules, full plans and Python files."""

import subprocess
import sys
import textwrap

import pytest
import yaml

from lamina.core.initializers import INITIALIZERS
from lamina.errors import UserError
from lamina.placements import Norm, registry, resolve
from lamina.placements.resolution import find, parse_spec

RULES = """
placement: my_ln
title: Mine
equation: ["y = x + A(LN(x))", "x' = y + F(LN(y))"]
final_norm: true
rules:
  - attention: {pre_norm: true}
    feed_forward: {pre_norm: true, pre_scale: "(layer + 1) ** -0.5"}
  - layers: "0:2"
    feed_forward: {out_norm: {kind: layer, initial_gain: "num_layers ** -0.5"}}
  - layers: -1
    attention: {pre_norm: false, skip_scale: "2 * num_layers"}
"""
PYTHON = """
from lamina.placements import Layer, Norm, Plan, Sublayer, placement

@placement("file_ln", title="From a file", equation=("y = LN(a x + A(x))",), source="here")
def file_ln(num_layers: int, *, strength: float = 2.0) -> Plan:
    sublayer = Sublayer(post_norm=Norm(), skip_scale=strength)
    return Plan(placement="file_ln", layers=(Layer(attention=sublayer, feed_forward=sublayer),) * num_layers)
"""


@pytest.fixture(autouse=True)
def registry_as_before():
    with registry.PLACEMENTS.isolated():
        yield


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("mix_ln", "mix_ln", {}),
        (" keel ", "keel", {}),
        ("mix_ln(alpha=0.5, final_norm=false)", "mix_ln", {"alpha": 0.5, "final_norm": False}),
        ("mix_ln(alpha=1/3)", "mix_ln", {"alpha": "1/3"}),
        ("keel(variant=scale_gain,learnable_alpha=true)", "keel", {"variant": "scale_gain", "learnable_alpha": True}),
        ("pre_ln()", "pre_ln", {}),
        ("keel(alpha=1e1)", "keel", {"alpha": 10.0}),  # YAML reads a word
    ],
)
def test_options_are_read_from_behind_the_name(spec, name, options):
    assert parse_spec(spec) == (name, options)
    assert resolve(spec, 6) == resolve(name, 6, **options)


def test_an_option_given_by_keyword_wins_over_one_in_brackets():
    assert resolve("keel(alpha=2)", 3, alpha=5).layers[1].attention.skip_scale == 5


def test_yaml_rules_give_a_plan_and_later_rules_change_the_layers_they_name(file):
    plan = resolve(file(RULES), 4)
    assert (plan.placement, plan.num_layers, plan.final_norm) == ("my_ln", 4, Norm())
    assert [x.feed_forward.pre_scale for x in plan.layers] == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5], rel=1e-15)
    assert [x.feed_forward.out_norm for x in plan.layers] == [Norm(kind="layer", initial_gain=0.5)] * 2 + [None] * 2
    assert [x.attention.skip_scale for x in plan.layers] == [1, 1, 1, 8]
    assert [x.attention.pre_norm is None for x in plan.layers] == [False, False, False, True]
    assert find(file(RULES)).title == "Mine"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("0", [0]), ("-2", [3]), ("[0, -1]", [0, 4]), ('"1:3"', [1, 2]), ('"::2"', [0, 2, 4]), ('"-2:"', [3, 4])],
)
def test_layers_are_named_by_index_slice_or_list(file, layers, expected):
    plan = resolve(file(f"rules:\n  - layers: {layers}\n    attention: {{pre_norm: true}}\n"), 5)
    assert [i for i, layer in enumerate(plan.layers) if layer.attention.pre_norm] == expected
    assert plan.placement == "mine"


@pytest.mark.parametrize("formula", ["num_sublayers ** 0.25", "(2 * num_layers) ** (1 / 4)", "-(-1.6817928305074292)"])
def test_numbers_may_be_formulas(file, formula):
    plan = resolve(file(f"rules:\n  - attention: {{post_norm: true, skip_scale: '{formula}'}}\n"), 4)
    assert plan.layers[2].attention.skip_scale == pytest.approx(8**0.25, rel=1e-15)


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        ("1 / layer", "divides by zero in layer 0."),
        ("layer ** -1", "divides by zero in layer 0."),
        ("(layer - 1) ** 0.5", "is a root of a negative number in layer 0."),
        ("1e308 * 10 * (layer + 1)", "is no finite number in layer 0."),
        ("2 * num_layer", "has the unknown name 'num_layer'; did you mean 'num_layers'?"),
        ("2 * width", "has the unknown name 'width'."),
        ("sqrt(2)", "calls a function. Write a root as a power, such as 2 ** 0.5."),
        ("2 +", "is not a formula."),
    ],
)
def test_a_mistake_in_a_formula_is_named(file, formula, reason):
    path = file(f"rules:\n  - attention: {{post_norm: true, skip_scale: '{formula}'}}\n")
    with pytest.raises(UserError) as error:
        resolve(path, 4)
    assert f"mine.yaml': rules[0].attention.skip_scale: {formula!r} {reason} Use numbers" in str(error.value)


def test_an_unknown_initialization_is_named_with_the_file(file):
    texts = [
        RULES + "initialization: scald\n",
        PYTHON.replace('source="here"', 'source="here", initialization="scald"'),
    ]
    for path in map(file, texts, ("mine.yaml", "mine.py")):
        with pytest.raises(UserError, match=rf"{path}': unknown initialization 'scald'; did you mean 'scaled'"):
            resolve(path, 4)


@pytest.mark.parametrize("name", [*INITIALIZERS, "normal(std=0.02)"])
def test_every_initializer_is_an_initialization(file, name):
    assert resolve(file(RULES + f"initialization: {name}\n"), 4).initialization == name


def test_an_option_without_an_annotation_is_named(file):
    path = file(PYTHON.replace("strength: float", "strength"), "mine.py")
    with pytest.raises(
        UserError, match=r"^mine.py: annotate the option 'strength' of 'file_ln', as in strength: float"
    ):
        resolve(path, 4)


def test_off_is_a_word_in_brackets_and_in_a_file(file):
    assert resolve("pre_ln(qk_norm=off)", 2).options == {"qk_norm": "off"}
    assert resolve(file("qk_norm: off\nrules: [{attention: {pre_norm: true}}]\n"), 2).qk_norm == "off"


@pytest.mark.parametrize("name", ["keel", "deepnorm"])
def test_a_full_plan_is_read_as_to_dict_writes_it_and_for_no_other_depth(file, name):
    plan, path = resolve(name, 3), file(yaml.safe_dump(resolve(name, 3).to_dict()))
    again = resolve(path, 3)
    assert (again.layers, again.final_norm, again.placement) == (plan.layers, plan.final_norm, name)
    assert again.initialization == plan.initialization
    with pytest.raises(UserError, match=r"3 layers, but num_layers is 4"):
        resolve(path, 4)


def test_a_file_may_have_a_name_of_the_packages_own_for_the_same_plan_alone(file):
    same = "placement: pre_ln\nrules: [{attention: {pre_norm: true}, feed_forward: {pre_norm: true}}]\n"
    assert resolve(file(same), 3).layers == resolve("pre_ln", 3).layers
    with pytest.raises(UserError, match=r"mine.yaml': placement 'keel': the file registers this name, .*another name"):
        resolve(file(RULES.replace("my_ln", "keel")), 3)
    for name in ("keel", "spannorm"):
        with pytest.raises(UserError, match=rf"placement '{name}': mine.py registers this name, but .* has"):
            resolve(file(PYTHON.replace('"file_ln", title', f'"{name}", title'), "mine.py"), 3)


def test_a_file_does_not_change_what_a_wiring_of_the_package_means(file):
    more = "from lamina.placements.wirings import wiring\n"
    more += '@wiring("mhc", equation="", source="")\ndef mhc(plan): ...\n'
    with pytest.raises(UserError, match=r"wiring 'mhc': mine.py registers .*, but lamina.placements.wirings has"):
        resolve(file(PYTHON + more, "mine.py"), 3)
    assert resolve("pre_ln(wiring=mhc)", 3).streams == 4


def test_common_options_apply_to_a_placement_from_a_file(file):
    assert resolve(f"{file(RULES)}(final_norm=false)", 4).final_norm is None
    assert resolve(file(RULES), 4, norm="layer").layers[0].attention.pre_norm == Norm(kind="layer")


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("final_nrom: true\nrules: []", ["'final_nrom'", "'final_norm'"]),
        ("rules: [{atention: {}}]", ["rules[0]", "'atention'", "'attention'"]),
        ("rules: [{attention: {prenorm: true}}]", ["attention", "'prenorm'", "'pre_norm'"]),
        ("rules: [{attention: {skip: both}}]", ["attention.skip", "'both'", "'stream'"]),
        ("rules: [{layers: 4, attention: {}}]", ["rules[0].layers", "4"]),
        ("rules: [{layers: 'a:b'}]", ["rules[0].layers", "'a:b'"]),
        ("rules: [{attention: true}]", ["rules[0].attention", "True"]),
        ("rules: {attention: {}}", ["rules"]),
        ("rules: [pre_ln]", ["rules[0]"]),
        ("- pre_ln", ["rules"]),
        ("", ["rules"]),
        ("rules: [", ["YAML"]),
        ("layers: [{}]\nfinal_nrom: true", ["'final_nrom'", "'final_norm'"]),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(file, text, mentions):
    path = file(text)
    with pytest.raises(UserError) as error:
        resolve(path, 4)
    for mention in ["mine.yaml", *mentions]:
        assert mention in str(error.value)


def test_a_python_file_registers_a_placement_with_options(file):
    path = file(PYTHON, "mine.py")
    assert resolve(path, 2).layers[0].attention.skip_scale == 2
    assert resolve(f"{path}(strength=3.5)", 2).layers[1].feed_forward.skip_scale == 3.5
    assert resolve(path, 2).placement == "file_ln"
    with pytest.raises(UserError, match=r"no option 'strenght'; did you mean 'strength'"):
        resolve(path, 2, strenght=1)


def test_a_python_file_without_a_placement_is_refused(file):
    with pytest.raises(UserError, match=r"mine\.py.*0 placements"):
        resolve(file("x = 1\n", "mine.py"), 2)


def test_a_python_file_may_build_on_a_registered_placement_as_the_first_thing_that_runs(file):
    path = file(PYTHON + "\nfrom lamina.placements import resolve\nBASE = resolve('pre_ln', 2)\n", "mine.py")
    code = f"from lamina.placements import resolve; print(resolve({path!r}, 2).placement)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "file_ln", run.stderr


def test_a_file_of_another_kind_is_no_unknown_placement(tmp_path):
    (tmp_path / "mine.txt").write_text("rules: []\n")
    with pytest.raises(UserError, match=r"mine.txt': the file's suffix is '.txt' \(allowed: .yaml, .yml, .py\)"):
        resolve(str(tmp_path / "mine.txt"), 2)
