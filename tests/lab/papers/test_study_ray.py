"""Trials on a Ray cluster of this machine: the local engine's numbers, and lost workers and drivers."""

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from lab.papers.study_files import plan_of, run_here, store_of, write_study
from training.tiny_runs import start, wait_for

from lamina.cli import main
from lamina.lab.papers.engine.study_run import results_table, run_plan

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LONG = {"steps": 600, "save_steps": 20, "eval_steps": 600, "logging_steps": 20}


def argv(tmp_path, file, name, *more):
    places = ["--output", tmp_path / name, "--store", tmp_path / f"{name}-trials", "--records", tmp_path / "records"]
    return ["study", "run", str(file), *map(str, places), "--workers", "2", *more]


def losses(tmp_path, name):
    import pandas as pd

    return pd.read_csv(tmp_path / name / "results.csv")[["key", "status", "eval_loss"]].to_dict("records")


@pytest.fixture(autouse=True)
def ray_folder(monkeypatch):
    """Where Ray writes; at the end none of its processes is left. A short path: the names of sockets are limited."""
    folder = tempfile.mkdtemp(prefix="ray-")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    yield folder
    wait_for(lambda: not processes_in(folder))
    shutil.rmtree(folder)


def processes_in(folder: str) -> list[int]:
    """The processes with a folder in their command line, as all of a Ray cluster's have."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if folder.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def process_of(folder: Path) -> int | None:
    """The process that runs the trial of a folder, by the name of its log."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) == str(folder / "log.txt") for link in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue
    return None


@pytest.mark.slow
def test_a_trial_on_ray_has_the_numbers_of_this_process(tmp_path, corpus):
    axes = {"placement": ["keel"], "learning_rate": [3e-3], "seed": 1}
    file = write_study(tmp_path / "files", corpus=corpus, axes=axes, claims="")
    for _ in range(3):  # a busy machine may not start a cluster within Ray's 30 s
        driver = start(*argv(tmp_path, file, "ray", "--engine", "ray", "--workers", "1", "--overwrite"))
        try:
            _, said = driver.communicate(timeout=180)
        finally:
            driver.kill()
        if "could not start a cluster" not in said:
            break
    assert driver.returncode == 0, said
    plan, store = plan_of(file), store_of(tmp_path, "here")
    run_plan(plan, store, workers=1, bar=False, execute=run_here)
    here = results_table(plan, store)[["key", "status", "eval_loss"]].to_dict("records")
    assert here == losses(tmp_path, "ray")


def test_a_cluster_that_does_not_start_is_one_line(tmp_path, corpus, capsys, monkeypatch):
    import ray

    def too_busy(**options):
        raise Exception("The current node timed out during startup.\nThis could happen.")

    monkeypatch.setattr(ray, "init", too_busy)
    file = write_study(tmp_path / "files", corpus=corpus)
    assert main(argv(tmp_path, file, "ray", "--engine", "ray")) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "engine" in line]
    assert "engine: 'ray': Lamina could not start a cluster on this machine" in line
    assert "The current node timed out during startup. This could happen." in line


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_driver_lose_nothing(tmp_path, corpus, ray_folder):
    axes = {"placement": ["pre_ln"], "learning_rate": [3e-3], "seed": 2}
    file = write_study(tmp_path / "files", corpus=corpus, axes=axes, changed=LONG, claims="")
    assert main(argv(tmp_path, file, "local")) == 0
    driver = start(*argv(tmp_path, file, "ray", "--engine", "ray"))
    store = tmp_path / "ray-trials"
    folder = wait_for(lambda: next((p.parents[1] for p in store.glob("*/checkpoints/checkpoint-*")), None), 400)
    worker = wait_for(lambda: process_of(folder.resolve()))
    parent = int((Path("/proc") / str(worker) / "stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)  # Ray's worker, whose task is run again
    time.sleep(5)
    driver.kill()
    driver.wait()
    wait_for(lambda: not processes_in(ray_folder))  # a local cluster ends with its driver
    assert main(argv(tmp_path, file, "ray", "--engine", "ray", "--resume")) == 0
    assert losses(tmp_path, "local") == losses(tmp_path, "ray")


@pytest.mark.slow
def test_two_processes_share_a_trial(tmp_path, corpus):
    axes = {"placement": ["keel"], "learning_rate": [3e-3], "seed": 1}
    file = write_study(tmp_path / "files", corpus=corpus, axes=axes)
    assert main(argv(tmp_path, file, "ray", "--engine", "ray", "--processes", "2")) == 0
    assert main(argv(tmp_path, file, "local")) == 0
    (one,), (two,) = losses(tmp_path, "local"), losses(tmp_path, "ray")
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-5)  # sums of gradients in another order


def test_a_cluster_that_cannot_be_reached_is_one_line(tmp_path, corpus, capsys):
    file = write_study(tmp_path / "files", corpus=corpus)
    assert main(argv(tmp_path, file, "ray", "--engine", "ray", "--address", "127.0.0.1:1")) == 2
    assert "cannot reach the cluster" in capsys.readouterr().err
    assert not list((tmp_path / "ray-trials").glob("*/result.json"))


def test_a_relative_corpus_is_the_drivers(tmp_path, corpus, monkeypatch):
    """Not the folder's in which Ray was started: a worker may have been started anywhere."""
    from lamina.lab.papers.engine import ray_cluster

    seen = {}

    class Alone:
        def __init__(self, request):
            seen.update(request)

        def exit_code(self):
            return 0

    monkeypatch.setattr(ray_cluster.processes, "Alone", Alone)
    (tmp_path / "worker").mkdir()
    monkeypatch.chdir(tmp_path / "worker")
    request = {"settings": {"corpus": "words.txt"}}
    assert ray_cluster.run_alone({**request, "directory": str(tmp_path)}, {}) == 0
    assert seen["directory"] == str(tmp_path)
    ray_cluster.run_alone({**request, "directory": str(tmp_path / "on another host")}, {})
    assert seen["directory"] == str(tmp_path / "worker")
