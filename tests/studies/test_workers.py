"""The workers of a study: its processes, and the progress that they show."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from lab.papers.study_files import note_the_gpu
from training.tiny_runs import SMALL, wait_for

from lamina.jobs.files import read_result, write_json
from lamina.studies import processes, running, worker
from lamina.studies.task import Task
from lamina.training.settings import PretrainSettings

LONG = {**SMALL, "steps": 4000, "compile": "off"}  # else a run of that length first tries whether compiling pays off
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import lamina

_ = open("ran.txt", "a").write("once; ")
results = lamina.compare(placements=["pre_ln"], workers=1, output="study", corpus={corpus!r}, bar=False, **{small!r})
assert "failed" not in set(results.status), list(results.reason)
"""
WAYS = {"script": (["mine.py"], False), "-m": (["-m", "mine"], False), "-c": (["-c"], False)}
WAYS |= {"standard input": (["-"], True), "an interactive shell": (["-i", "-q"], True)}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_callers_code_runs_once(way, corpus, tmp_path):
    code = SCRIPT.format(corpus=str(corpus), small=SMALL)
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    words, typed = WAYS[way]
    words = [*words, code] if words == ["-c"] else words
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "input": code if typed else None}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, **how)
    assert done.returncode == 0, done.stderr
    assert "AssertionError" not in done.stderr
    assert (tmp_path / "ran.txt").read_text() == "once; "
    assert set(pd.read_csv(tmp_path / "study" / "results.csv").status) <= {"finished", "stuck", "short"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the SVD did not converge")])
def test_a_measurement_that_fails_leaves_the_trials_result(tmp_path, monkeypatch, error):
    def run(task):
        write_json(task.folder / "result.json", {"status": "finished", "eval_loss": 2.0})
        raise error

    monkeypatch.setattr(Task, "run", run)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    monkeypatch.setattr(worker.signal, "signal", lambda *handlers: None)
    monkeypatch.setattr(worker, "_like_the_driver", lambda request: None)
    task = Task(settings=PretrainSettings(**SMALL, output=str(tmp_path / "run")))
    code = worker.run({**task.to_request(), "directory": str(tmp_path)})
    assert code == (0 if isinstance(error, KeyboardInterrupt) else 1)
    assert read_result(tmp_path / "run") == {"status": "finished", "eval_loss": 2.0}


def test_a_trial_alone_in_its_interpreter_does_the_same_and_stops(corpus, tmp_path):
    """How trials run where forking is not safe."""
    settings = PretrainSettings(**LONG, corpus=str(corpus), output=str(tmp_path / "run"))
    request = {**Task(settings=settings).to_request(), "environment": dict(os.environ), "path": list(sys.path)}
    trial = processes.Alone({**request, "argv": ["x"], "directory": str(tmp_path)})
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) > 1)
    assert trial.exit_code() is None
    trial.terminate()
    assert wait_for(lambda: trial.exit_code() is not None)
    assert read_result(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.slow
def test_a_lost_server_is_a_failed_trial_and_the_next_one_gets_another(corpus, tmp_path):
    if sys.platform != "linux":
        pytest.skip("no server elsewhere")
    server = processes.Server.running()
    settings = PretrainSettings(**LONG, corpus=str(corpus), output=str(tmp_path / "run"))
    trial = processes.start(Task(settings=settings))
    assert trial.exit_code() is None
    wait_for(lambda: (tmp_path / "run" / "log.txt").is_file())
    assert trial.exit_code() is None
    server.process.kill()
    server.process.wait()
    assert trial.exit_code() == processes.LOST
    assert processes.Server.running() is not server


@pytest.fixture
def built_for_gpus(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)


@pytest.mark.parametrize(("visible", "workers", "seen"), [("0,3", 4, ["0", "0", "3", "3"]), ("5", None, ["5"] * 4)])
def test_trials_share_out_the_gpus_that_the_study_sees(built_for_gpus, monkeypatch, tmp_path, visible, workers, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tasks = {name: Task(settings=PretrainSettings(output=str(tmp_path / name)), job=note_the_gpu) for name in "abcd"}
    found = {}
    running.run_tasks(
        tasks, done=0, workers=workers, bar=False, ended=lambda name, result: found.update({name: result})
    )
    assert sorted(result["gpu"] for result in found.values()) == seen


@pytest.mark.parametrize(
    ("visible", "device", "workers"), [("0,1", "auto", 2), ("0,1", "cpu", None), ("", "auto", None)]
)
def test_a_study_runs_one_trial_per_gpu_or_one_per_core(built_for_gpus, monkeypatch, visible, device, workers):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert running.usual_workers(device) == (workers or running.cores())


def test_a_pytorch_for_the_cpu_runs_one_trial_per_core(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert running.usual_workers() == running.cores()


def test_an_interrupted_trial_is_not_done(tmp_path, capsys):
    tasks = {name: Task(settings=PretrainSettings(**LONG, output=str(tmp_path / name))) for name in ("a", "b")}
    progress = running.Progress(tasks, done=0, show=True)
    progress.ended("a", {"status": "finished", "eval_loss": 2.0})
    progress.ended("b", {"status": "interrupted", "reason": "stopped by SIGINT"})
    progress.close()
    printed = capsys.readouterr()
    assert progress.count == 1
    assert "interrupted" not in printed.out + printed.err  # the command says so once, after the last trial
    assert "trials done 2/2" not in printed.out + printed.err
    assert "(100%)" not in printed.out + printed.err
