"""Bad paths, configuration files, placements and probes of one's own, and what is around them on the disk."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tools.reliability.bad_values import BASE, Row, line, options, word
from tools.reliability.record import called, environment_as_before

_pristine: dict[Path, Path] = {}
STEERING = "x\x1b]0;title\x07\u202e.txt"  # sets the title of a terminal's window
# Every flag that may name a file or a folder.
PLACES = (
    *("corpus", "eval_corpus", "tokenizer", "backbone", "placement", "placements", "config", "from_model", "probes"),
    *("output", "svg", "screenshot"),
)


def prepare(folder: Path) -> None:
    """Fill the folder as every case finds it: a corpus, a trained run, a model, and what is no such thing."""
    if folder not in _pristine:
        _make(folder)
        _pristine[folder] = folder / "cache" / "pristine"  # not looked at, and gone with the folder
        shutil.copytree(folder, _pristine[folder], symlinks=True, ignore=shutil.ignore_patterns("cache", "pipe"))
        return
    for child in folder.iterdir():
        if child.name not in ("cache", "pipe"):
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    shutil.copytree(_pristine[folder], folder, symlinks=True, dirs_exist_ok=True)


def _make(folder: Path) -> None:
    from lamina.cli import main

    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    drawn = random.Random(0)
    (folder / "corpus.txt").write_text("\n".join(" ".join(drawn.choices(words, k=9)) for _ in range(400)))
    argv = line("pretrain", output="run", steps="1", eval_blocks="1", precision="fp32", compile="off")
    with contextlib.chdir(folder), environment_as_before(LAMINA_CACHE=str(folder / "cache")):
        code, said = called(lambda: main(argv))
    assert code == 0, said
    shutil.copytree(folder / "run" / "model", folder / "model")
    (folder / "thesis").mkdir()
    (folder / "thesis" / "thesis.tex").write_text("years of work")
    (folder / "nothing").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / STEERING).write_text("")
    (folder / "short.txt").write_text("too short")
    (folder / "binary.txt").write_bytes(b"\x89PNG\x00\x01\x02\xff\xfe" * 50)
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 900)
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n' * 50)
    (folder / "bad.txt.gz").write_bytes(b"\x1f\x8bno gzip" * 20)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("gone")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": ')
    os.mkfifo(folder / "pipe")
    for name, text in {**CONFIGS, **PLACEMENTS, **PYTHON}.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def _laughs(key: str) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    return "\n".join([*lines, f"{key}: *a11"])


# Each is refused by `pretrain --config`; the file's name or the field stands in the line.
CONFIGS: dict[str, str | bytes] = {
    "c-unknown.yaml": "num_layer: 3",
    "c-text.yaml": "steps: many",
    "c-list.yaml": "- steps",
    "c-empty.yaml": "",
    "c-number.yaml": "7",
    "c-unclosed.yaml": "steps: [1, 2",
    "c-tab.yaml": "\tsteps: 2",
    "c-utf16.yaml": "steps: 2".encode("utf-16"),
    "c-nul.yaml": b"steps: 2\0",
    "c-twice.yaml": "steps: 2\nsteps: 3\n",
    "c-python.yaml": "steps: !!python/object/apply:os.system ['true']",
    "c-laughs.yaml": _laughs("steps"),
    "c-cycle.yaml": "steps: &a [*a]",
    "c-merge.yaml": "a: &a {x: 1}\n" + "\n".join(f"b{i}: {{<<: [*a, *a]}}" for i in range(9)),
    "c-deep.yaml": "steps: " + "[" * 3000 + "]" * 3000,
    "c-deep-map.yaml": "".join(" " * i + "a:\n" for i in range(200)),
    "c-digits.yaml": "steps: " + "9" * 6000,
    "c-huge-int.yaml": "steps: 1" + "0" * 400,
    "c-nan.yaml": "learning_rate: .nan",
    "c-inf.yaml": "warmup: .inf",
    "c-negative.yaml": "batch_size: -3",
    "c-null-key.yaml": "~: 3",
    "c-list-key.yaml": "? [a, b]\n: 3",
    "c-date.yaml": "steps: 2026-99-99",
    "c-bool.yaml": "steps: true",
    "c-mapping.yaml": "steps: {a: 1}",
    "c-seed.yaml": "seed: 4294967296",
    "c-trainer.yaml": "trainer: [1]",
    "c-trainer-name.yaml": "trainer: {optimm: x}",
    "c-escape.yaml": '"\\e[31mred\\e[0m": 3',
    "c-bidi.yaml": "backbone: \u202egnp.exe",
    "c-large.yaml": "a: " + "x" * (5 * 2**20),
    "c-two.yaml": "steps: 2\n---\nsteps: 3\n",
    "c-output.yaml": "output: [a]",
}
_FORMULAS = [
    '"9**9**9**9"', '"10**400"', '"1e400"', '"(" ', '"' + "(" * 150 + "1" + ")" * 150 + '"', '"' + "-" * 5000 + '1"',
    '"1/0"', '"(-8)**0.5"', '"layer.real"', '"__import__(1)"', '"[1]*9"', '"layer if 1 else 2"', '"lambda: 1"',
    '"True"', '"1j"', "'\"a\"*9'", '"layers"', '"1+' + "1+" * 4000 + '1"', ".inf", ".nan", "1" + "0" * 400,
    "9" * 6000, "[1]", "{a: 1}", '"0x"', "2026-01-01", '""', '"\u202e1"',
]  # fmt: skip
_RULE = "rules: [{{attention: {{skip_scale: {}}}}}]"
PLACEMENTS: dict[str, str | bytes] = {
    **{f"p-formula-{number}.yaml": _RULE.format(formula) for number, formula in enumerate(_FORMULAS)},
    "p-laughs.yaml": _laughs("rules"),
    "p-deep.yaml": "rules: " + "[" * 2000 + "]" * 2000,
    "p-cycle.yaml": "rules: &a [*a]",
    "p-field.yaml": "final_nrom: true\nrules: [{}]",
    "p-no-rules.yaml": "placement: x",
    "p-rules-text.yaml": "rules: pre_ln",
    "p-layer.yaml": "rules: [{layers: 99, attention: {pre_norm: true}}]",
    "p-layers.yaml": "rules: [{layers: 'a:b'}]",
    "p-step.yaml": "rules: [{layers: '0:2:0'}]",
    "p-skip.yaml": "rules: [{attention: {skip: sideways}}]",
    "p-norm.yaml": "rules: [{attention: {pre_norm: batch}}]",
    "p-norm-field.yaml": "rules: [{attention: {pre_norm: {kindd: rms}}}]",
    "p-groups.yaml": "rules: [{attention: {pre_norm: {kind: group, groups: 0}}}]",
    "p-final.yaml": "final_norm: 3\nrules: [{attention: {pre_norm: true}}]",
    "p-title.yaml": "title: [1]\nrules: [{attention: {pre_norm: true}}]",
    "p-long.yaml": f"title: {'x' * 9000}\nrules: [{{attention: {{pre_norm: true}}}}]",
    "p-equation.yaml": "equation: 5\nrules: [{attention: {pre_norm: true}}]",
    "p-init.yaml": "initialization: nosuch\nrules: [{attention: {pre_norm: true}}]",
    "p-many.yaml": "rules: [" + "{attention: {}}, " * 120000 + "{}]",
    "p-full.yaml": "layers: 3",
    "p-full-short.yaml": "layers: [{}]\nfinal_norm: true",
    "p-full-int.yaml": "layers: [1, 2]",
    "p-qk.yaml": "qk_norm: all\nrules: [{attention: {pre_norm: true}}]",
    "p-binary.yaml": b"\xff\xfe\x00rules",
}
_PLAN = "from lamina.placements import Layer, Norm, Plan, Sublayer, placement\n"
_MADE = '\n@placement("mine", title="t", equation=("y = x",), source="s")\ndef mine(num_layers: int) -> Plan:\n    '
PYTHON: dict[str, str | bytes] = {
    "x-exit.py": "import sys; sys.exit(0)",
    "x-exit-text.py": "raise SystemExit('all is well')",
    "x-quit.py": "quit()",
    "x-syntax.py": "def (",
    "x-nul.py": b"a = 1\0",
    "x-latin.py": b"a = '\xe9'",
    "x-raise.py": "raise RuntimeError('\\x1b[31mred\\x1b[0m ' + 'x' * 9000)",
    "x-import.py": "import no_such_module",
    "x-none.py": "a = 1",
    "x-recursion.py": "def f(): f()\nf()",
    "x-make.py": _PLAN + _MADE + "1 / 0",
    "x-make-exit.py": _PLAN + _MADE + "raise SystemExit(0)",
    "x-make-none.py": _PLAN + _MADE + "return None",
    "x-make-depth.py": _PLAN + _MADE + "return Plan(placement='mine', layers=(Layer(),))",
    "x-two.py": _PLAN + _MADE + "return 1\n" + _MADE.replace("mine", "yours") + "return 1\n",
    "x-keyboard.py": "raise BaseException('neither')",
}


def shown(place: str) -> str:
    """The beginning of a path as a message shows it."""
    return repr(place)[1:-1][:50]


def cases(folder: Path, drawn: random.Random) -> Iterator[Row]:
    """Bad command lines that name these."""
    places = {
        "thesis": "thesis", "corpus.txt": "corpus.txt", "corpus.txt/out": "corpus.txt", "loop": "loop",
        "loop/out": "loop", "dangling": "dangling", "a\0b": "output", "x" * 300: "output",
        "/".join(["x" * 200] * 30): "output",
        "/dev/null": "null", "/dev/null/x": "null", "/proc/x/y": "proc", "pipe": "pipe", "": "output",
    }  # fmt: skip
    for name in ("pretrain", "compare", "preflight", "coord-check", "transfer", "probe"):
        for place, said in places.items():
            yield "paths", line(name, output=place), ("output", said), {}, False
        corpora = (
            "missing.txt", "empty.txt", "short.txt", "binary.txt", "latin.txt", "bad.jsonl", "bad.txt.gz", "nothing",
            "loop", "dangling", "pipe", "~nouser/x", "/dev/null", "x" * 300, "a\0b", "corpus.txt:2,b:x",
        )  # fmt: skip
        for place in corpora:
            yield "paths", line(name, corpus=place), ("corpus", shown(place)), {}, False
        for place in ("missing.yaml", "thesis", "loop", "pipe", "/dev/zero", "a\0b", "x" * 300, "", word(drawn)):
            yield "paths", [*line(name), f"--config={place}"], ("config", shown(place)), {}, False
        for place in ("missing/", "nothing", "broken", "loop", "corpus.txt", "x" * 300):
            if name != "probe":
                yield "paths", line(name, backbone=place), ("backbone",), {}, False
                yield "paths", line(name, tokenizer=place), ("tokenizer",), {}, False
    models = ("missing", "corpus.txt", "loop", "dangling", "nothing", "broken", "a\0b", "", "~nouser/x", "x" * 300)
    for name in ("generate", "probe", "convert", "report"):
        for place in models:
            words = [name, place, *line(name)[1 + len(BASE[name][0][:1]) :]]
            said = ("model", "checkpoint", "source", "folder", "config.json", shown(place) or "none given")
            yield "paths", words, said, {}, False
    for place, said in places.items():
        yield "paths", ["convert", "model", place], ("output", said), {}, False
    for place in ("dangling/a.svg", "nothing", "loop", "a\0b", "x" * 300, "corpus.txt/a.svg"):
        yield "paths", [*line("placements"), f"--svg={place}"], ("svg", "missing", shown(place)), {}, False
    yield from special_files()
    for file in CONFIGS:
        for name in (drawn.choice(["compare", "coord-check", "transfer"]), "pretrain"):
            bare = [word for word in line(name) if not word.startswith(("--steps", "--batch-size", "--output"))]
            words = (file, *FIELDS)
            yield "configuration files", [*bare, f"--config={file}"], words, {}, False
    for file in PLACEMENTS:
        said = (file, file.removesuffix(".yaml"), *["nosuch"] * (file == "p-init.yaml"))
        yield "placement files", line("pretrain", placement=file), said, {}, False
        yield "placement files", line("compare", placements=f"pre_ln,{file}"), said, {}, False
        yield "placement files", line("preflight", placements=file), said, {}, False
    for file in PYTHON:
        said = (file, "mine")
        yield "Python files", line("pretrain", placement=file), said, {}, file == "x-quit.py"
        yield "Python files", ["placements", file], said, {}, file == "x-quit.py"
        yield "Python files", line("probe", probes=file), said, {}, file == "x-quit.py"


def special_files() -> Iterator[Row]:
    """A pipe, which nobody writes into, and a name that steers a terminal, in every place of a command."""
    for name in BASE:
        fields = [field for field in PLACES if any(option.name == field for option in options(name))]
        for field in fields:
            said = (field, field.replace("_", "-"), field.removesuffix("s"), "from:", "pipe")
            yield "pipes", line(name, **{field: "pipe"}), said, {}, False
            if field not in ("output", "svg", "screenshot"):
                yield "names that steer", line(name, **{field: STEERING}), (*said, "title"), {}, False
        if name not in ("pretrain", "compare", "preflight", "coord-check", "transfer", "backbones"):
            for group, place in (("pipes", "pipe"), ("names that steer", STEERING)):
                words = [name, place, *line(name)[1 + len(BASE[name][0][:1]) :]]
                yield group, words, ("pipe", "title"), {}, False


FIELDS = (
    *("steps", "learning_rate", "learning-rate", "warmup", "batch_size", "batch-size", "seed", "trainer", "backbone"),
    "output",
)
