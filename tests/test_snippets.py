"""Every code block of README and docs is read: what can be checked of all of them in seconds.

Commands are read, their settings checked, and stopped where the work would begin. test_documented.py runs them, and
lists those that cannot run.
"""

import contextlib
import re
import tomllib

import pytest
import yaml
from documented import BLOCKS, PAGES, ROOT, blocks, commands, words_of
from test_documented import NOT_RUN

from lamina.cli import main
from lamina.jobs.job import Job

COMMANDS = sorted(set(commands()))
OWN = {"placement:mine": "mine.yaml", "fromlamina.placements": "mine.py", "importpandas": "small_values.py"}


def begun(command):
    """The words that begin a documented command's work; None if it is not Lamina's."""
    words = words_of(command)
    return words and [word for word in words if word not in ("...", "--resume", "--resume=auto", "--dry-run")]


class Reached(BaseException):
    """The work would begin now."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the pages name."""
    for name in ("recipes", "docs", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    texts = tmp_path / "my_texts"
    texts.mkdir()
    for name in ("qwen-small", "gpt2-small"):
        (tmp_path / name).mkdir()
    words = "The norm sits before, after and between.\n" * 400
    for name in ("words.txt", "my_text.txt", "my_texts/a.txt"):
        (tmp_path / name).write_text(words, encoding="utf-8")
    for page, code in (*blocks("yaml"), *blocks("python")):
        name = OWN.get(code.split()[0] + code.split()[1]) if page == "own.md" else None
        if name:
            (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_says_its_language():
    languages = {(page, language) for page, found in BLOCKS.items() for language, _ in found}
    assert {language for _, language in languages} <= {"bash", "python", "yaml", "text"}


def test_the_extras_and_make_targets_of_the_pages_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = {page: set(re.findall(r"pip\s+install\s+'\.\[([\w,]+)\]'", text)) for page, text in PAGES.items()}
    assert named["README.md"] == {"train", "watch"}
    for page, text in PAGES.items():
        assert {extra for names in named[page] for extra in names.split(",")} <= set(extras), page
        assert all(f"\n{name}:" in makefile for name in re.findall(r"`make ([\w-]+)", text)), page
        assert all(f"\n{name}:" in makefile for name in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)), page


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command[:60]}" for page, command in COMMANDS])
def test_a_command_is_one(folder, monkeypatch, capsys, page, command):
    argv = begun(command)
    if argv is None:
        assert command.startswith(tuple(NOT_RUN)), "a command of another program, and no reason why it is not run"
        return
    monkeypatch.setattr(Job, "__init__", reached)
    for work in ("lamina.lab.papers.engine.study_run.work", "lamina.preflights.planned_runs.run_preflight"):
        monkeypatch.setattr(work, reached)
    with contextlib.suppress(Reached):
        code = main(argv)
        error = capsys.readouterr().err
        # a model, run or data that the page takes for granted
        parts = [part for word in argv[1:] for part in re.split("[,:]", word) if "/" in part or "." in part]
        missing = any(part in error for part in parts) and "unknown" not in error
        assert code == 0 or missing, error


def reached(*args, **kwargs):
    raise Reached


@pytest.mark.parametrize("code", [code for page, code in blocks("yaml") if page != "own.md"])
def test_a_yaml_block_is_read(code):
    read = yaml.safe_load(code)
    assert isinstance(read, dict)
    assert set(read) <= {"study", "title", "scales", "axes", "then", "figures"}
