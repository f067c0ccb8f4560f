"""What reaches the terminal: one line for a mistake, whatever it holds; no text from a file steers the terminal."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tqdm import tqdm

from lamina.cli import main
from lamina.core.terminal import printable, show, show_error


def process(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "lamina", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **{"text": True, **more},
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\u001b[31mred"),
        ("a\u202eb", "a\\u202eb"),
        ("a\u2028b", "a\\u2028b"),
        ("\ud800", "\\ud800"),
        ("\x07\x00\x7f\x9b", "\\u0007\\u0000\\u007f\\u009b"),
        ("名前 é → \U0001f469\u200d\U0001f680\n\t", "名前 é → \U0001f469\u200d\U0001f680\n\t"),
    ],
)
def test_what_a_terminal_obeys_is_shown_as_text(text, shown):
    assert printable(text) == shown


def test_escaped_json_is_still_json(capsys):
    show(json.dumps({"name": "\u202e\x7f\U000e0001"}, ensure_ascii=False))
    out = capsys.readouterr().out
    assert "\u202e" not in out
    assert json.loads(out) == {"name": "\u202e\x7f\U000e0001"}


def test_a_terminal_without_the_characters_gets_their_numbers():
    started = process("placements", "keel", env={**os.environ, "PYTHONIOENCODING": "ascii"}, encoding="ascii")
    out, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (0, "")
    assert "\\u251c\\u2500 " in out


def test_a_long_line_keeps_its_beginning_and_its_end(capsys):
    show_error("field: " + "x" * 10**6 + "\x1b[2J (allowed:\nless)")
    line = capsys.readouterr().err
    assert len(line) < 2100
    assert line.startswith("lamina: field: xxx")
    assert line.endswith("\\u001b[2J (allowed: less)\n")


def test_an_error_is_a_line_of_its_own_beside_a_progress_bar(capsys):
    with tqdm(total=3, file=sys.stderr):
        show_error("field: no")
    assert "lamina: field: no" in capsys.readouterr().err.splitlines()


def test_a_placements_texts_cannot_steer_the_terminal(tmp_path, capsys):
    file = tmp_path / "evil.yaml"
    file.write_text('title: "\\e[2Jgone"\nadvice: "\\u202eevil"\nrules: [{attention: {pre_norm: true}}]\n')
    assert main(["placements", str(file)]) == 0
    out = capsys.readouterr().out
    assert "\\u001b[2Jgone" in out
    assert not {"\x1b", "\u202e"} & set(out)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"), "on the GPU"),
    ],
)
def test_out_of_memory_is_one_line_that_says_what_to_lower(error, said, monkeypatch, capsys):
    def run(argv):
        raise error

    monkeypatch.setattr("lamina.commands.backbones.run", run)
    assert main(["backbones"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "--batch-size" in line


def test_code_that_ends_the_process_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr("lamina.commands.backbones.run", lambda argv: sys.exit(0))
    assert main(["backbones"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "ended the process (0)" in line


@pytest.mark.parametrize("words", [("--help",), ("placements",), ("compare", "--help")])
def test_a_closed_pipe_is_no_fault(words):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    started = process(*words, env=buffered)
    started.stdout.close()  # as `| true` does
    assert started.wait(60) == 0
    assert started.stderr.read() == ""


CTRL_C = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
SWALLOWED = f"""
import contextlib
with contextlib.suppress(KeyboardInterrupt):
    {CTRL_C}
"""
IN_A_CLASS = f"""
class Name:
    def __set_name__(self, owner, name):
        {CTRL_C}
class Owner:
    name = Name()  # Python 3.11: RuntimeError
"""
IN_A_CALLBACK = f"""
class Deleted:
    def __del__(self):
        {CTRL_C}
Deleted()
"""


@pytest.mark.parametrize("imported", [CTRL_C, SWALLOWED, IN_A_CLASS, IN_A_CALLBACK])
def test_a_ctrl_c_that_an_import_would_swallow_ends_the_command(imported, tmp_path):
    (tmp_path / "swallows.py").write_text(imported)
    script = (
        "import sys; from lamina import cli; from lamina.commands import catalog; "
        "real = catalog.importlib.import_module; "
        "catalog.importlib.import_module = lambda name: (__import__('swallows'), print('went on'), real(name))[2]; "
        "sys.argv = ['lamina', 'placements']; sys.exit(cli.main())"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 130
    assert ended.stderr == "lamina: interrupted\n"  # the command has no --resume
    assert ended.stdout == ""


def test_ctrl_c_keeps_its_handlers():
    """Of a shell's background job it stays ignored; a command called from Python leaves it as it was."""
    script = (
        "import signal, sys; from lamina.cli import main; before = signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "sys.argv = ['lamina', 'placements']; main(); assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN; "
        "signal.signal(signal.SIGINT, before); main(); assert signal.getsignal(signal.SIGINT) is before"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0])
def test_ctrl_c_during_the_imports_is_one_line(seconds, tmp_path):
    words = ["pretrain", "--output", str(tmp_path / "out"), "--steps", "100000"]
    script = (
        f"import sys; from lamina.cli import main; sys.argv = ['lamina', *{words}]; "
        "print('ready', flush=True); sys.exit(main())"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout.readline() == "ready\n"
    time.sleep(seconds)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=120)
    assert "Traceback" not in err
    assert started.returncode == 130
    (line,) = [line for line in err.splitlines() if line.startswith("lamina: ")]
    assert line.endswith("(--resume continues it)")
