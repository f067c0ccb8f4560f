"""Specs, and the one registry: lazy loading, plug-ins, and files of the user's own."""

import re
import subprocess
import sys
import textwrap

import pytest

from lamina.core import specs
from lamina.core.registry import Registry
from lamina.errors import UserError

MODULE = "from colors import COLORS\nCOLORS.add({name!r}, object(), __name__)\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of importable modules and installed packages: ``site(name, text, entry_point)``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LAMINA_PYTHON_FILES", "")
    before = set(sys.modules)

    def write(name, text, entry=None):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        if entry:
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
            (info / "entry_points.txt").write_text(f"[test.colors]\n{entry} = {name}\n", encoding="utf-8")
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def colors(site):
    site("colors", "COLORS = None\n")
    site("own_colors", MODULE.format(name="red"))
    registry = Registry("color", modules=lambda: ["own_colors"], plugins="test.colors")
    import colors  # type: ignore[import-not-found]  # written above

    colors.COLORS = registry
    return registry


def test_modules_are_imported_when_the_first_name_is_asked_for(colors):
    assert "own_colors" not in sys.modules
    assert colors.registered("red") is None
    assert colors.names() == ["red"]
    assert "own_colors" in sys.modules
    assert colors.registered("red") is colors.get("red")


def test_an_unknown_name_suggests_the_nearest_also_of_other_names(colors):
    with pytest.raises(UserError, match=r"unknown color 'rde'; did you mean 'red'\? \(allowed: auto, red\)"):
        colors.get("rde", other_names=["auto"])


def test_a_plug_in_adds_its_entries_and_may_ask_for_the_packages_own(colors, site):
    site("plug", MODULE.format(name="blue") + "assert COLORS.names() == ['blue', 'red']\n", entry="blue")
    assert colors.names() == ["blue", "red"]


@pytest.mark.parametrize("trouble", ["import nothing_of_this_name", "raise SystemExit(3)", "COLORS.get('pink')"])
def test_a_broken_plug_in_is_named_at_every_call_and_leaves_no_half_of_itself(colors, site, trouble):
    site("plug", f"{MODULE.format(name='blue')}{trouble}\n", entry="blue")
    for _ in range(2):
        with pytest.raises(UserError, match=r"^color plug-in 'blue' of the package plug 1\.0: plug") as error:
            colors.names()
        assert "uninstall" in str(error.value)
    assert colors.registered("blue") is None
    assert colors.registered("red") is not None


def test_a_file_gives_its_one_entry_and_leaves_the_registry_as_it_was(colors, site):
    path = site("mine", MODULE.format(name="green")) / "mine.py"
    assert colors.from_file(path) is not colors.from_file(path)
    assert colors.names() == ["red"]


def test_one_name_stands_for_one_thing_whoever_registers_it_first(colors, site):
    path, own = site("mine", MODULE.format(name="red")) / "mine.py", colors.get("red")
    said = "color 'red': mine.py registers this name, but own_colors has already registered it. Choose another name."
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        colors.from_file(path)
    assert colors.get("red") is own
    late = Registry("color", modules=lambda: ["late_colors"])
    late.add("red", object(), "a notebook")
    late.add("red", object(), "a notebook")
    site("late_colors", "import colors\ncolors.LATE.add('red', object(), __name__)\n")
    import colors as module  # type: ignore[import-not-found]  # written by the fixture

    module.LATE = late
    with pytest.raises(UserError, match=r"^color 'red': late_colors registers this name, but a notebook has"):
        late.names()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "registers 0 colors with @color"),
        (MODULE.format(name="a") + MODULE.format(name="b"), "registers 2 colors with @color"),
        (MODULE.format(name="a") + "1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_file_that_registers_not_one_entry_is_refused_and_registers_nothing(colors, site, text, message):
    path = site("mine", text) / "mine.py"
    with pytest.raises(UserError, match=message) as error:
        colors.from_file(path)
    assert "mine.py" in str(error.value)
    assert colors.names() == ["red"]
    with pytest.raises(UserError, match="no such file"):
        colors.from_file(path.with_name("none.py"))


@pytest.mark.parametrize("command", [["placements"], ["pretrain", "--placement", "pre_ln"]])
def test_the_command_line_shows_a_broken_plug_in_as_one_line(tmp_path, command):
    info = tmp_path / "their_norms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-norms\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[lamina.placements]\ntheirs = their_norms\n", encoding="utf-8")
    (tmp_path / "their_norms.py").write_text("raise ImportError('built for another version')\n", encoding="utf-8")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from lamina.cli import main; sys.exit(main(sys.argv[1:]))"
    code = [sys.executable, "-c", code, *command]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "placement plug-in 'theirs' of the package their-norms 1.0" in done.stderr.splitlines()[-1]
    assert "built for another version" in done.stderr


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("name", {}),
        (" name ( ) ", {}),
        ("name(a=1, b=true)", {"a": 1, "b": True}),
        ("name(a=1e-3, b=1/3, c=off, d=)", {"a": 1e-3, "b": "1/3", "c": False, "d": None}),
        ("name(layers=[0, 3], b=2)", {"layers": [0, 3], "b": 2}),
        ("name(table={a: 1, b: [2, 3]})", {"table": {"a": 1, "b": [2, 3]}}),
        ("name(text='a, b', b=2)", {"text": "a, b", "b": 2}),
        ('name(text="a), (b")', {"text": "a), (b"}),
        ("name(texts=['a, b', \"c, d\"])", {"texts": ["a, b", "c, d"]}),
        ("name(text=it's, b=don't)", {"text": "it's", "b": "don't"}),
        ("name(a=(1, 2), b=3)", {"a": "(1, 2)", "b": 3}),
    ],
)
def test_a_value_may_hold_a_comma_inside_brackets_or_quotes(text, options):
    assert specs.parse(text, "placement") == ("name", options)


@pytest.mark.parametrize("text", ["", "a(b", "a)b=1(", "a(b=1)c", "a(b)", "a(b=[1)", "a(b='1)", "a(b={1, c=2)"])
def test_a_spec_of_another_form_is_refused_with_what_it_should_name(text):
    with pytest.raises(UserError, match=r"^probe ") as error:
        specs.parse(text, "probe")
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a, b(c=1, d=2),e,", ["a", "b(c=1, d=2)", "e"]),
        ("a(b=[1, 2]), c(d='x, y)'), e", ["a(b=[1, 2])", "c(d='x, y)')", "e"]),
        ("bob's.yaml, runs[1].yaml, {x}.yaml", ["bob's.yaml", "runs[1].yaml", "{x}.yaml"]),
        ("", []),
        (" , ", []),
    ],
)
def test_a_list_is_split_outside_brackets_and_quotes(text, parts):
    assert specs.split(text, "placement") == parts


def test_a_list_that_is_no_text_is_refused():
    with pytest.raises(UserError, match=r"probes: 3\. Give a text with commas"):
        specs.split(3, "probe")
