"""The house stays one to live in: short functions, few files per room, real types, few ignores."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lamina"
FILES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in FILES.items()}
LONGEST_FUNCTION = 60
LONGEST_FILE = 700


def named(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_no_function_is_longer_than_a_screen():
    functions = [(path, n) for path, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    lengths = {f"{named(path)}: {one.name}": one.end_lineno - one.lineno + 1 for path, one in functions}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_no_file_is_longer_than_a_sitting():
    lengths = {named(path): len(text.splitlines()) for path, text in FILES.items()}
    assert not {name for name, lines in lengths.items() if lines > LONGEST_FILE}


# Names that transformers chose.
THEIRS = {"config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "trainer_state.json", "README.md"}


def test_the_name_of_a_file_is_said_in_one_module():
    """Those of a job's folder in jobs/names.py, or in the one module that needs them."""
    modules = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.fullmatch(r"(?:[\w*./-]*/)?([\w.-]+\.(?:jsonl?|yaml|csv|parquet|html|md))", node.value)
                if match and match[1] not in THEIRS:
                    modules.setdefault(match[1], set()).add(named(path))
    assert {name: places for name, places in modules.items() if len(places) > 1} == {}
    assert "jobs/names.py" in modules["result.json"]


def test_the_records_of_a_run_are_parsed_in_one_module():
    imports = re.compile(r"^from lamina\.jobs\.names import .*\bMETRICS\b", re.MULTILINE)
    parsers = {named(path) for path, text in FILES.items() if imports.search(text) and "json.loads" in text}
    assert parsers == {"jobs/run_folder.py"}


@pytest.mark.parametrize(("room", "most"), [("probes", 32), ("training", 15), ("data", 10)])
def test_a_room_shows_what_is_in_it(room, most):
    assert len(list((PACKAGE / room).glob("*.py"))) <= most


def test_annotations_say_what_a_thing_is():
    """``Any`` stays where a library has no types of its own; there were 606 before the house was rebuilt."""
    count = 0
    for tree in TREES.values():
        for node in ast.walk(tree):
            annotations = []
            if isinstance(node, ast.FunctionDef):
                given = node.args
                every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                annotations = [argument.annotation for argument in every if argument is not None] + [node.returns]
            elif isinstance(node, ast.AnnAssign):
                annotations = [node.annotation]
            names = (part for each in annotations if each is not None for part in ast.walk(each))
            count += sum(isinstance(part, ast.Name) and part.id == "Any" for part in names)
    assert count <= 170


def test_ignores_are_few():
    ignores = [
        line
        for text in FILES.values()
        for line in text.splitlines()
        if re.search(r"# (type|pyright): ?ignore|# noqa", line)
    ]
    assert len(ignores) <= 45, "\n".join(ignores)


def test_a_public_class_has_a_name_of_its_own():
    places: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(named(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_file_name_stands_in_two_packages_at_most():
    """Registries, settings and the pages of jobs have one name in every room on purpose."""
    rooms: dict[str, set[str]] = {}
    for path in FILES:
        if path.stem not in ("__init__", "registry", "settings") and path.parent.name != "pages":
            rooms.setdefault(path.name, set()).add(named(path.parent))
    assert {name: where for name, where in rooms.items() if len(where) > 2} == {}


def test_few_private_functions_of_a_line_or_two_are_called_once():
    """Such a function is read where it is called. There were 162 before the house was made smaller."""
    short = []
    for path, text in FILES.items():
        words = Counter(re.findall(r"\b_\w+\b", text))
        functions = (node for node in ast.walk(TREES[path]) if isinstance(node, ast.FunctionDef))
        once = [one for one in functions if re.match(r"_(?!_)", one.name) and words[one.name] == 2]
        short += [f"{named(path)}: {one.name}" for one in once if one.end_lineno - one.lineno < 4]
    assert len(short) <= 30, "\n".join(short)


def test_a_small_file_serves_more_than_one_file_of_its_folder():
    """What one neighbor alone imports is part of the neighbor, unless it is long enough to be a topic."""
    importers: dict[str, set[str]] = {}
    for path, text in FILES.items():
        for module in set(re.findall(r"lamina(?:\.\w+)+", text)):
            importers.setdefault(module, set()).add(named(path))
    alone = {}
    for path, text in FILES.items():
        module = "lamina." + named(path).removesuffix(".py").replace("/", ".")
        others = importers.get(module, set()) - {named(path)}
        if len(others) == 1 and len(text.splitlines()) < 60:
            (importer,) = others
            if Path(importer).parent == Path(named(path)).parent:
                alone[named(path)] = importer
    assert alone == {}


def test_what_the_scripts_import_is_there():
    """Pyright reads the package alone, and most scripts outside of it run only in slow tests."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.alias
    missing = []
    for path in (each for room in ("docs", "benchmarks", "tools") for each in (PACKAGE.parent / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("lamina"):
                continue
            module = PACKAGE.parent / str(node.module).replace(".", "/")
            parts = list(ast.walk(TREES[module / "__init__.py" if module.is_dir() else module.with_suffix(".py")]))
            known = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
            known |= {getattr(part, "asname", None) or part.name for part in parts if isinstance(part, kinds)}
            known |= {each.stem for each in module.glob("*")}
            lazy = "__getattr__" in known
            missing += [f"{path.name}: {alias.name}" for alias in node.names if alias.name not in known and not lazy]
    assert not missing
