"""Several drivers: workers share a store trial by trial, and a study's folder has one driver."""

import pytest
from studies.study_files import write_study
from training.tiny_runs import start

from lamina.api import study
from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.folder import lock
from lamina.papers.engine.settings import StudySettings
from lamina.papers.engine.study_run import work


def places(tmp_path):
    return ["--store", str(tmp_path / "trials"), "--records", str(tmp_path / "records")]


@pytest.mark.slow
def test_workers_share_the_trials_of_a_store(tmp_path, corpus):
    file = write_study(tmp_path / "files", corpus=corpus)
    workers = [start("study", "worker", str(file), *places(tmp_path), "--workers", "1") for _ in range(2)]
    for worker in workers:
        out, err = worker.communicate(timeout=300)
        assert worker.returncode == 0, err
        assert "4 trials are done" in out
    logs = {path: path.stat().st_mtime_ns for path in (tmp_path / "trials").glob("*/result.json")}
    assert len(logs) == 4
    assert main(["study", "run", str(file), *places(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert {path: path.stat().st_mtime_ns for path in logs} == logs, "run finds what the workers trained"


@pytest.mark.slow
def test_a_trial_that_another_driver_runs_is_waited_for(tmp_path, corpus):
    file = write_study(tmp_path / "files", corpus=corpus)
    assert main(["study", "worker", str(file), *places(tmp_path)]) == 0
    folder = sorted((tmp_path / "trials").glob("*/result.json"))[0].parent
    (folder / "result.json").unlink()
    with lock(tmp_path / "trials" / ".claims" / folder.name):
        worker = start("study", "worker", str(file), *places(tmp_path))
        with pytest.raises(Exception, match="timed out"):
            worker.wait(15)
        assert not (folder / "result.json").exists()
    assert worker.wait(120) == 0
    assert (folder / "result.json").exists()


def test_a_scale_without_trials_has_no_workers(tmp_path, corpus):
    file = write_study(tmp_path / "later", corpus=corpus, claims="", needs="a cluster")
    settings = StudySettings(study=str(file), store=str(tmp_path / "trials"), records=str(tmp_path / "records"))
    with pytest.raises(UserError, match="scale: 'cpu' has no trials: a cluster"):
        work(settings, bar=False)
    assert not (tmp_path / "trials").exists()


def test_the_default_output_is_resumed(tmp_path, corpus, monkeypatch, capsys):
    file = write_study(tmp_path / "files", corpus=corpus)
    monkeypatch.chdir(tmp_path)
    assert main(["study", "run", str(file), "--resume", *places(tmp_path)]) == 2
    assert "runs/studies/mine-cpu" in capsys.readouterr().err


def test_a_study_folder_has_one_driver(tmp_path, corpus):
    file = write_study(tmp_path / "files", corpus=corpus)
    given = {"store": str(tmp_path / "trials"), "records": str(tmp_path / "records"), "bar": False}
    with lock(tmp_path / "out"), pytest.raises(UserError, match="another process"):
        study(study=str(file), output=str(tmp_path / "out"), **given)
    assert not list((tmp_path / "trials").glob("*/result.json"))


def test_trials_that_failed_are_said_and_are_the_exit_code(tmp_path, corpus, capsys, monkeypatch):
    short = tmp_path / "short.txt"
    short.write_text("a few words\n")
    file = write_study(tmp_path / "files", corpus=short, claims="")
    for command in (["worker"], ["run", "--output", str(tmp_path / "out")]):
        assert main(["study", command[0], str(file), *places(tmp_path), *command[1:]]) == 1
        out, err = capsys.readouterr()
        assert "4 trials are done" not in out
        assert "lamina: 4 trials failed; the first: " in err
        assert "short.txt" in err
