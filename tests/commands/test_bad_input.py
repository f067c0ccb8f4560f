"""What goes wrong: one line, exit code 2, nothing written over; full disks; and no text steers the terminal."""

import contextlib
import errno
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from huggingface_hub import constants
from lab.papers.study_files import write_study
from tqdm import tqdm
from training.tiny_runs import SMALL, flags, start

from lamina.cli import main
from lamina.core.terminal import printable, show, show_error
from lamina.errors import UserError
from lamina.jobs.files import disk_full
from lamina.training.monitor.writers import MetricsWriter

TINY = {**SMALL, "steps": 2}


@pytest.fixture
def tiny(corpus, tmp_path):
    return lambda command="pretrain", **given: [
        command, *flags(**{**TINY, "corpus": corpus, "output": tmp_path / "out", **given})
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "number", "said"), [("pretrain", "two", "'two'"), ("compare", "2", "you started 2 processes")]
)
def test_a_launchers_number_without_meaning(refused, tiny, command, number, said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", number)
    assert f"WORLD_SIZE: {said}" in refused(*tiny(command))


@pytest.mark.parametrize("name", [300 * "x", "no\0where"])
def test_a_name_that_no_file_can_have_is_refused_early(refused, name):
    assert "backbone: '" in refused("transfer", "--proxy-width", "16", f"--backbone={name}")


def test_the_command_line_wins_over_the_file_whose_1e_3_is_a_number(tmp_path, corpus):
    """YAML 1.1 reads 1e-3 as a string."""
    path = tmp_path / "c.yaml"
    path.write_text("seed: 5\nsteps: 3\nlearning_rate: 1e-3\nbeta1: 0.8\n")
    assert main(["pretrain", *flags(**TINY, config=path, corpus=corpus, output=tmp_path / "out")]) == 0
    stored = (tmp_path / "out" / "config.yaml").read_text()
    assert "seed: 5" in stored
    assert "learning_rate: 0.001" in stored
    assert "steps: 2" in stored


def test_a_run_with_an_initializer_that_does_not_suit_its_width_says_so(corpus, tmp_path, capsys):
    given = {**TINY, "corpus": corpus, "output": tmp_path / "out", "hidden_size": 48, "num_heads": 2}
    for init, warned in (("normal", True), ("small_scaled", False)):
        assert main(["pretrain", "--overwrite", *flags(**given, init=init)]) == 0
        err = capsys.readouterr().err
        assert ("note: The initializer normal has a standard deviation of 0.02 in the blocks" in err) == warned


@pytest.mark.parametrize("command", ["pretrain", "compare"])
class TestOutputFolders:
    def test_what_lamina_did_not_write_is_left_alone(self, refused, tiny, tmp_path, command):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
        assert "is not empty" in refused(*tiny(command))
        assert "did not write" in refused(*tiny(command, overwrite=True))
        assert "contradict" in refused(*tiny(command, resume=True, overwrite=True))

    @pytest.mark.parametrize("below", [".", "out"])
    def test_a_file_is_no_folder_and_holds_none(self, refused, tiny, tmp_path, command, below):
        (tmp_path / "file").write_text("a file")
        assert "file' is a file. Give a folder" in refused(*tiny(command, output=tmp_path / "file" / below))

    @pytest.mark.parametrize("name", ["config.yaml", "study.yaml"])
    def test_resuming_what_lamina_did_not_write_is_refused(self, refused, tiny, tmp_path, command, name):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / name).write_text("settings: {debug: true}\ndebug: true\n")
        refused(*tiny(command, resume=True))
        refused(command, "--output", tmp_path / "out", "--steps", 2, "--resume")


def test_a_diagram_into_a_folder_that_is_missing(tmp_path):
    assert main(["placements", "keel", "--svg", str(tmp_path / "missing" / "keel.svg")]) == 0
    assert (tmp_path / "missing" / "keel.svg").is_file()


def test_a_mistake_is_one_line_in_a_process_too(tiny):
    process = start(*tiny("compare", corpus="no/such/corpus.txt", placements="pre_ln,keel"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1
    assert "no/such/corpus.txt" in err
    assert not out


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


OBEYED = "\x1b]0;title\x07"


def test_a_log_line_cannot_steer_the_terminal_or_make_a_second_line():
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("lamina.any.room")
    logger.addHandler(handler)
    try:
        logger.warning("%s: left out", f"{OBEYED}\nlamina: all is well")
        try:
            raise ValueError(OBEYED)
        except ValueError:
            logger.exception("a fault")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().startswith("\\u001b]0;title\\u0007\\nlamina: all is well: left out\na fault\nTraceback")
    assert "\x1b" not in stream.getvalue()


def test_a_message_to_python_cannot_steer_the_terminal():
    assert str(UserError(f"corpus: {OBEYED}")) == "corpus: \\u001b]0;title\\u0007"


def test_warnings_tracebacks_and_other_libraries_lines_cannot_steer_the_terminal():
    code = """
        import logging, sys, warnings
        from lamina.core.terminal import escape_everything, show_line
        escape_everything()
        logging.getLogger("another.library").warning("log %s", sys.argv[1])
        warnings.warn("warned " + sys.argv[1])
        show_line("bar " + sys.argv[1])
        raise ValueError("raised " + sys.argv[1])
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), OBEYED]
    err = subprocess.run(argv, capture_output=True, text=True, timeout=60).stderr
    assert "\x1b" not in err
    for what in ("log", "warned", "bar", "raised"):
        assert f"{what} \\u001b]0;title" in err


def test_escaped_json_is_still_json(capsys):
    show(json.dumps({"name": "\u202e\x7f\U000e0001"}, ensure_ascii=False))
    out = capsys.readouterr().out
    assert "\u202e" not in out
    assert json.loads(out) == {"name": "\u202e\x7f\U000e0001"}


def test_a_terminal_without_the_characters_gets_their_numbers():
    started = start("placements", "keel", env={**os.environ, "PYTHONIOENCODING": "ascii"}, encoding="ascii")
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


@pytest.mark.parametrize("words", [("placements",), ("compare", "--help")])
def test_a_closed_pipe_is_no_fault(words):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    started = start(*words, env=buffered)
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
        "import sys; from lamina import cli; "
        "real = cli.importlib.import_module; "
        "cli.importlib.import_module = lambda name: (__import__('swallows'), print('went on'), real(name))[2]; "
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
    assert line.endswith("(continue with --resume)")


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")


def test_a_full_disk_is_one_line(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MetricsWriter, "write", full)
    assert main(["pretrain", *flags(**SMALL, corpus=corpus, output=tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "lamina:" in line]
    assert "No space left on device" in line
    assert "Traceback" not in err


@contextlib.contextmanager
def tmpfs(folder, size):
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root on Linux")
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


@pytest.mark.parametrize("values", [76_700, 300_000], ids=["at its end", "in the middle"])
def test_a_disk_that_fills_up_within_torch_save_is_known_as_full(tmp_path, values):
    with tmpfs(tmp_path / "disk", "300k") as folder, pytest.raises(RuntimeError) as error:
        torch.save({"a": torch.zeros(values), "b": torch.zeros(40)}, folder / "optimizer.pt")
    assert disk_full(error.value)


@pytest.mark.slow
def test_a_study_on_a_disk_that_fills_up_keeps_its_trials_and_resumes(corpus, tmp_path):
    study = write_study(tmp_path / "studies", corpus=corpus, changed={"hidden_size": 64, "steps": 5}.items())
    with tmpfs(tmp_path / "disk", "1500k") as disk:
        command = ("study", "run", study, "--store", disk / "store", "--output", disk / "out", "--workers", "1")
        process = start(*command)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert "Traceback" not in err
        (line,) = [line for line in err.splitlines() if "lamina:" in line]
        assert "No space left on device" in line
        ended = {path: path.stat().st_mtime_ns for path in disk.glob("store/*/result.json")}
        assert 0 < len(ended) < 4
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        process = start(*command, "--resume")
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert len(list(disk.glob("store/*/result.json"))) == 4
        assert ended.items() <= {path: path.stat().st_mtime_ns for path in disk.glob("store/*/result.json")}.items()


def test_a_tilde_that_the_shell_leaves_is_the_home_folder(tiny, tmp_path, monkeypatch):
    """Bash does not expand --output=~/runs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(tiny(output="~/runs/mine")) == 0
    assert (tmp_path / "home/runs/mine/model/config.json").is_file()
    assert not (tmp_path / "~").exists()
    assert main(["emit", "keel", "--to", "nanogpt", "--num-layers", "2", "--output", "~/keel_block.py"]) == 0
    assert (tmp_path / "home/keel_block.py").is_file()


@pytest.mark.parametrize("command", ["prune", "graft"])
def test_a_name_of_no_model_is_answered_at_once_without_a_network(refused, tmp_path, command, monkeypatch):
    offline = []

    def fetch(name, file):
        offline.append(constants.HF_HUB_OFFLINE)
        raise OSError(name)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lamina.core.hub_access.hub_resolves", lambda: False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    how = ["--layers", "0"] if command == "prune" else ["--placement", "keel"]
    assert "'no-model' is neither" in refused(command, "no-model", *how, "--output", str(tmp_path / "out"))
    assert offline == [True]  # the hub's client would ask six times, for half a minute


def test_a_link_to_nothing_is_not_suggested_for_itself(refused, tmp_path):
    (tmp_path / "corpus.txt").symlink_to(tmp_path / "gone")
    line = refused("pretrain", "--corpus", str(tmp_path / "corpus.txt"), "--output", str(tmp_path / "out"))
    assert "corpus.txt' is a link to a missing file" in line
    assert "did you mean" not in line


def test_a_study_that_is_named_twice_is_shown_once(capsys):
    assert main(["study", "run", "mix-ppl,mix-ppl", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("mix-ppl, scale cpu") == 1
