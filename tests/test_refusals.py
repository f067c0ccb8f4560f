"""What a person reads who gives a command something that it cannot take: word for word in refusals.txt.

Its first part is made from the rows of all jobs: each of their settings is given values that it may not have. The
second part is written by hand: a command line, and below it what is said. Neither begins any work. When a message is
changed on purpose, ``python tests/test_refusals.py`` writes the file again, and its difference is read like any other.
"""

import contextlib
import io
import re
import shlex
import tempfile
import types
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest

from lamina import catalog
from lamina.cli import main

FILE = Path(__file__).with_name("refusals.txt")
MADE = "# Made from the settings of all jobs."
BY_HAND = "# Written by hand: values that contradict one another or name what is not there."
BEFORE = {  # what else a command needs before it looks at a setting
    **{name: ["--from", "model", "--data", "rows.jsonl"] for name in ("sft", "reward", "dpo")},
    "rlhf": ["--from", "model", "--data", "rows.jsonl", "--reward-model", "model"],
    "study": ["run", "mix-ppl"],
    "probe": ["model"],
    "eval": ["model", "--corpus", "words.txt"],
}
NEEDS_THE_HARNESS = {"eval_tasks", "tasks"}  # tests/evaluation: importing it takes seconds
WORKS = ("lamina.lab.papers.engine.study_run.work", "lamina.preflights.planned_runs.run_preflight")
FILES = {
    "model": b"",
    "words.txt": b"The norm sits before, after and between.\n" * 400,
    "rows.jsonl": b'{"prompt": "a", "completion": "b"}\n' * 9,
    "images.csv": b"".join(b"9," * 64 + b"%d\n" % (number % 2) for number in range(40)),
    "empty.txt": b"",
    "short.txt": b"too short",
    "binary.txt": b"\x89PNG\x00\x01\x02\xff\xfe" * 50,
    "no-utf-8.txt": b"\xff\xfeabc" * 99,
    "no-utf-8.yaml": b"\xff\xfe\x00\x80",
    "empty.yaml": b"",
    "misspelled.yaml": b"num_layer: 3",
    "text.yaml": b"steps: many",
    "list.yaml": b"steps: [1, 2]",
    "open.yaml": b"a: [",
    "no-mapping.yaml": b"- 1",
    "trainer.yaml": b"trainer: {optimm: x}",
}


class Begun(BaseException):
    """The command would begin its work now."""


def begin(*args, **kwargs):
    raise Begun


def said(words: list[str]) -> str:
    """What a command line says on one line, without "lamina:"; "" where it is taken."""
    err = io.StringIO()
    with contextlib.ExitStack() as stack:
        for place in ("lamina.jobs.job.Job.__enter__", *WORKS):
            stack.enter_context(mock.patch(place, begin))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            code = main(words)
        except Begun:
            return ""
    lines = [line for line in err.getvalue().splitlines() if line.strip() and "%|" not in line]
    assert code == 2, words
    assert len(lines) == 1, lines
    assert lines[0].startswith("lamina: ")
    return re.sub(r"one of \d{3,} names", "one of N names", lines[0].removeprefix("lamina: "))  # own ones count, too


def settings():
    """Each setting of each job, where it is declared first: the command, the name, and its kinds."""
    seen = set()
    for row in catalog.ROWS:
        for name in row.settings().names():
            check, kind = row.settings().check_of(name), row.settings().kind(name)
            key = (name, str(kind), id(check))
            if key not in seen and name not in NEEDS_THE_HARNESS:
                seen.add(key)
                yield row, name, get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def bad_values(kinds):
    """Words that few settings take."""
    numbers = ["-1", *(["1.5", "99999999999"] if int in kinds and float not in kinds else [])]
    return ["nonsense"] if bool in kinds else ["nonsense", *numbers]


def made() -> dict[str, str]:
    """The first part of the file: what is said to each command line."""
    lines = {}
    for row, name, kinds in settings():
        wordings = set()
        for value in bad_values(kinds):
            flag = "--from" if name == "from_model" else f"--{name.replace('_', '-')}"
            is_plain = name in row.positional or f"{name}..." in row.positional
            given = [value] if is_plain else [f"{flag}={value}"]
            words = [row.name, *([] if is_plain else BEFORE.get(row.name, [])), *given]
            line = said(words)
            wording = line.replace(value, "")
            about = name.removesuffix("_model").replace("_", "-")
            if line and wording not in wordings and about in line.replace("_", "-"):
                wordings.add(wording)
                lines[f"lamina {shlex.join(words)}"] = line
    return lines


def parts() -> list[dict[str, str]]:
    """Both parts of the file."""
    found = []
    for text in FILE.read_text("utf-8").split(BY_HAND):
        said_to = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert all(line.startswith("$ ") for line in said_to[::2])
        pairs = zip(said_to[::2], said_to[1::2], strict=True)
        found.append({command.removeprefix("$ "): line for command, line in pairs})
    return found


def lay(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    lay(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_setting_takes_a_value_without_meaning(folder):
    assert made() == parts()[0], "run python tests/test_refusals.py"
    assert {path.name for path in folder.iterdir()} == set(FILES), "a refused command leaves nothing behind"


@pytest.mark.parametrize("command", parts()[1])
def test_what_is_said_to_a_command_that_cannot_be(folder, command):
    assert said(shlex.split(command)[1:]) == parts()[1][command], "run python tests/test_refusals.py"
    assert {path.name for path in folder.iterdir()} == set(FILES)


def write() -> None:
    import conftest  # noqa: F401  # what every test stands on: no network, no GPU

    by_hand = list(parts()[1])
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        lay(Path(folder))
        found = (made(), {command: said(shlex.split(command)[1:]) for command in by_hand})
    texts = ["".join(f"$ {command}\n{line}\n\n" for command, line in part.items()) for part in found]
    FILE.write_text(f"{MADE}\n\n{texts[0]}{BY_HAND}\n\n{texts[1]}".rstrip() + "\n", "utf-8")


if __name__ == "__main__":
    write()
