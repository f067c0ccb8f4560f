"""`lamina pretrain` as a process of its own: Ctrl-C, a kill, a terminal that is closed."""

import signal
import subprocess
import sys

import pytest
from training.tiny_runs import SMALL, alive, flags, last_step, records, result, start, wait_for

from lamina.cli import main

LONG = {**SMALL, "steps": 240, "logging_steps": 10, "save_steps": 40, "eval_steps": 80}


@pytest.fixture(scope="module")
def whole(corpus, session_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE", str(session_cache))
        assert main(["pretrain", *flags(**LONG, corpus=corpus, output=folder)]) == 0
    return folder


@pytest.fixture
def argv(corpus, tmp_path):
    return ["pretrain", *flags(**LONG, corpus=corpus, output=tmp_path / "run")]


def test_ctrl_c_saves_says_how_to_go_on_and_resumes_to_the_same_end(argv, tmp_path, whole, capsys):
    folder = tmp_path / "run"
    process = start(*argv)
    wait_for(lambda: last_step(folder) >= 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert result(folder)["status"] == "interrupted"
    assert "SIGINT" in result(folder)["reason"]
    assert sum("interrupted" in line for line in (out + err).splitlines()) == 1
    assert "--resume" in out + err
    assert len(list((folder / "checkpoints").glob(f"checkpoint-{result(folder)['steps']}"))) == 1
    assert main(["pretrain", "--output", str(folder), "--resume"]) == 0
    assert result(folder)["eval_loss"] == result(whole)["eval_loss"]
    assert len(records(folder)) == len(records(whole))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(argv, tmp_path):
    process = start(*argv)
    wait_for(lambda: last_step(tmp_path / "run") >= 10)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert result(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.3, 1.5, 3.0])
def test_ctrl_c_while_it_starts_is_one_line(argv, delay):
    process = start(*argv)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    # A KeyboardInterrupt that passed through C code on its way makes Python end by SIGINT: 130 in a shell, too.
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err
    assert sum("interrupted" in line for line in (out + err).splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_a_run_goes_on_when_the_shell_that_started_it_is_gone(argv, tmp_path):
    """`nohup lamina pretrain &`, then the terminal is closed."""
    folder = tmp_path / "run"
    script = '"$@" >/dev/null 2>&1 & echo $!; read wait_for_a_line'
    shell = subprocess.Popen(
        ["sh", "-c", script, "sh", sys.executable, "-m", "lamina", *argv],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    run = int(shell.stdout.readline())
    wait_for(lambda: last_step(folder) >= 10)
    shell.communicate("\n", timeout=10)
    wait_for(lambda: not alive(run))
    assert result(folder)["status"] in ("finished", "short", "stuck"), result(folder)["reason"]
    assert result(folder)["steps"] == LONG["steps"]
