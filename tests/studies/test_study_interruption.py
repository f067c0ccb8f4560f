"""A study that is stopped or killed: no process outlives it, and it goes on."""

import os
import signal
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from training.tiny_runs import alive, last_step, result, start, wait_for

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs import folder as run_folder
from lamina.studies.compare import compare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# The first placement's trial is short enough to be finished while another runs.
LONG = {"placements": "pre_ln,keel,peri_ln", "steps": 120, "logging_steps": 5, "save_steps": 20, "eval_steps": 120}
ENDLESS = {**LONG, "steps": 4000, "compile": "off"}  # else it first tries whether compiling pays off


def descendants(pid: int) -> set[int]:
    """Every process below one, whatever sessions they are in."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, todo = set(), [pid]
    while todo:
        parent = todo.pop()
        children = {p for p, above in parents.items() if above == parent} - found
        found |= children
        todo += children
    return found


def trial(folder: Path, name: str) -> Path:
    return next(folder.glob(f"trials/{name}*"), folder / "trials" / "none")


@pytest.fixture
def running(command, tmp_path):
    """A study in a process and session of its own, stopped in the middle of its second trial."""
    processes = []

    def run(**changed):
        process = start(*command(**{**LONG, "workers": 1, **changed}), start_new_session=True)
        processes.append(process)
        folder = tmp_path / "study"
        wait_for(lambda: (trial(folder, "pre_ln") / "result.json").is_file() and last_step(trial(folder, "keel")) >= 10)
        return process, folder

    yield run
    for process in processes:
        for pid in descendants(process.pid) | {process.pid}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_writes_the_page_and_resumes(running, command):
    process, folder = running()
    below = descendants(process.pid)
    assert below
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    out, err = process.communicate(timeout=45)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    assert "--resume" in err
    assert (folder / "report.html").is_file()
    wait_for(lambda: not any(alive(pid) for pid in below), 10)
    table = pd.read_csv(folder / "results.csv").set_index("placement")
    assert table.status["pre_ln"] in ("finished", "short", "stuck")
    assert table.status["keel"] == "interrupted"
    assert "peri_ln" not in table.index
    stopped = result(trial(folder, "keel"))["steps"]
    assert list(trial(folder, "keel").glob(f"checkpoints/checkpoint-{stopped}"))
    finished = (trial(folder, "pre_ln") / "result.json").stat().st_mtime_ns
    assert main([*command(**LONG), "--resume"]) == 0
    assert (trial(folder, "pre_ln") / "result.json").stat().st_mtime_ns == finished
    assert set(pd.read_csv(folder / "results.csv").status) <= {"finished", "short", "stuck"}


@pytest.mark.slow
def test_no_trial_outlives_a_killed_study(running, command, study):
    process, folder = running()
    below = descendants(process.pid)
    assert len(below) >= 2
    process.kill()
    process.wait(10)
    wait_for(lambda: not any(alive(pid) for pid in below), 8)
    reached = last_step(trial(folder, "keel"))
    assert reached < LONG["steps"]
    assert main([*command(**LONG), "--resume"]) == 0
    table = pd.read_csv(folder / "results.csv").set_index("placement")
    assert set(table.status) <= {"finished", "short", "stuck"}
    assert set(table.steps) == {LONG["steps"]}
    again = compare(study("whole", **LONG), bar=False).set_index("placement")
    assert dict(table.eval_loss) == dict(again.eval_loss)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.01, 0.2])
def test_no_trial_outlives_a_study_killed_while_its_trials_start(command, tmp_path, delay):
    process = start(*command(**ENDLESS), start_new_session=True, stdout=None, stderr=None)
    try:
        wait_for(lambda: list((tmp_path / "study").glob("trials/*/log.txt")))
        time.sleep(delay)
        below = descendants(process.pid)
    finally:
        process.kill()
        process.wait(10)
    try:
        wait_for(lambda: not any(alive(pid) for pid in below), 8)
    finally:
        for pid in filter(alive, below):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.5, 2.0, 3.5, "first trial"])
def test_ctrl_c_while_a_study_starts_is_one_line_and_no_trial_has_failed(command, tmp_path, delay):
    process = start(*command(**ENDLESS), start_new_session=True)
    if delay == "first trial":
        wait_for(lambda: list((tmp_path / "study").glob("trials/*/log.txt")))
    else:
        time.sleep(delay)
    below = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=45)
    # A KeyboardInterrupt that passed through C code on its way makes Python end by SIGINT: 130 in a shell, too.
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in out + err
    assert sum("lamina:" in line for line in err.splitlines()) == 1
    wait_for(lambda: not any(alive(pid) for pid in below), 10)
    results = tmp_path / "study" / "results.csv"
    assert not results.is_file() or "failed" not in set(pd.read_csv(results).status)


def test_two_studies_in_one_folder_are_refused(study, command, tmp_path, capsys):
    compare(study(), bar=False)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "study").rglob("*") if p.name != ".lock"}
    with run_folder.lock(tmp_path / "study"):
        with pytest.raises(UserError, match="another process writes"):
            compare(study(), resume=True, bar=False)
        capsys.readouterr()
        assert main([*command(), "--overwrite"]) == 2
        assert "another process writes" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in before} == before
