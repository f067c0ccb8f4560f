"""A pipe in the place of a file is refused in one line: whoever reads it would wait for ever."""

import json
import os
import signal
import socket

import pytest

from lamina.cli import main
from lamina.jobs import environment
from lamina.jobs.files import write_json, write_sealed


@pytest.fixture(autouse=True)
def no_waiting():
    """Fail rather than hang."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for the pipe"))
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    return str(tmp_path / "pipe.jsonl")


@pytest.fixture
def run(tmp_path):
    """What a killed run leaves."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "environment.json", environment.environment(0, "run"))
    write_sealed(folder / "config.yaml", {"steps": 4})
    return folder


def refused(argv, capsys, word):
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert word in line
    assert "is a pipe, a socket or a device. Give " in line


READ = [[name] for name in ("diagnose", "report", "generate", "convert", "probe")]
READ += [["pretrain", f"--{flag}"] for flag in ("config", "corpus", "tokenizer", "from", "output")]
READ += [["study", "run"], ["compare", "--placements"], ["sft", "--data"], ["eval", "--corpus"]]


@pytest.mark.parametrize("before", READ)
def test_a_pipe_as_an_input_is_named(pipe, capsys, before):
    after = ["out"] if before[0] == "convert" else []
    refused([*before, pipe, *after], capsys, pipe)


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "plan.json", "layers/part-00000.parquet", ".lock"])
@pytest.mark.parametrize("command", [["pretrain", "--resume", "--output"], ["report"], ["diagnose"]])
def test_a_pipe_in_a_runs_folder_is_named(run, capsys, name, command):
    (run / name).parent.mkdir(exist_ok=True)
    os.mkfifo(run / name)
    refused([*command, str(run)], capsys, name)


def test_a_socket_in_a_trial_of_a_study_is_named(tmp_path, capsys, monkeypatch):
    trial = tmp_path / "study" / "trials" / "one"
    trial.mkdir(parents=True)
    write_json(tmp_path / "study" / "environment.json", environment.environment(0, "study"))
    write_sealed(tmp_path / "study" / "study.yaml", {"settings": {}})
    monkeypatch.chdir(trial)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("result.json")
        refused(["compare", "--resume", "--output", str(tmp_path / "study")], capsys, "result.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("command", ["generate", "probe"])
def test_a_pipe_in_a_models_folder_is_named(tmp_path, capsys, name, command):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    refused([command, str(tmp_path)], capsys, name)
