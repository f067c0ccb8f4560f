"""`lamina study run`: trials are shared, paired and never mixed, by one driver or several; what is missing is run."""

import json
import shutil

import pandas as pd
import pytest
import torch
import yaml
from lab.papers.study_files import CLAIMS, run_here, write_study
from scripts import loaded
from training.tiny_runs import result, start

from lamina.api import study
from lamina.cli import main
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError
from lamina.jobs.folder import lock
from lamina.lab.papers.engine import study_run as studies_run
from lamina.lab.papers.engine import verdicts
from lamina.lab.papers.engine.settings import StudySettings
from lamina.lab.papers.engine.study_run import work
from lamina.lab.papers.pages.folder import read_folder
from lamina.lab.papers.study_catalog import read_study
from lamina.lab.papers.trials.store import Records


@pytest.fixture
def run(tmp_path, corpus):
    """Runs a study of ``tmp_path`` with a store and records of its own."""

    def call(file, name="out", **given):
        places = {"store": str(tmp_path / "trials"), "records": str(tmp_path / "records")}
        return study(study=str(file), output=str(tmp_path / name), workers=2, bar=False, **places, **given)

    return call


def times(tmp_path):
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "trials").glob("*/result.json")}


def test_a_study_trains_its_trials_and_judges_its_claims(run, tmp_path, corpus):
    outcome = run(write_study(tmp_path / "files", corpus=corpus))
    rows = outcome.results
    trained = sorted(zip(rows["placement"], rows["seed"], strict=True))
    assert trained == [("keel", 0), ("keel", 1), ("pre_ln", 0), ("pre_ln", 1)]
    assert rows["eval_loss"].notna().all()
    assert rows["tuned"].all()
    (claim,) = outcome.claims
    assert (claim["claim"], claim["verdict"], claim["study"], claim["scale"]) == ("mine", "holds", "mine", "cpu")
    mean = rows[rows["placement"] == "keel"]["eval_loss"].mean()
    assert claim["ours"] == f"{mean:.3f}"
    assert json.loads((tmp_path / "out" / "claims.json").read_text()) == outcome.claims
    assert (tmp_path / "out" / "report.html").is_file()


def test_nothing_is_judged_before_its_planned_end(tmp_path, corpus):
    mine = read_study(write_study(tmp_path / "files", corpus=corpus))
    rows = pd.DataFrame({"key": list("abcd"), "seconds": [90.0, 90.0, 90.0, None]})
    (one,) = verdicts.judge_study(mine, mine.scale("cpu"), rows, None, missing=1)
    assert one["verdict"] == "not run yet"
    assert one["note"] == "1 of 4 planned trials have not ended (about 2 core-minutes)"


def test_a_record_counts_the_looks_at_its_verdicts(run, tmp_path, corpus):
    axes = {"placement": ["pre_ln"], "learning_rate": [3e-3]}
    claims = CLAIMS.format(a="pre_ln", name="mine")
    for name, seeds in (("one", 1), ("again", 1), ("two", 2)):
        file = write_study(tmp_path / "files", claims=claims, corpus=corpus, axes={**axes, "seed": seeds})
        run(file, name, record=True)
    record = tmp_path / "records" / "mine-cpu"
    assert read_mapping(record / "study.yaml")["looks"] == [1, 2], "judged again over the same trials is no look"
    (key, *_) = verdicts.recorded_keys(record)
    assert verdicts.looks_of(record, [key, "b", "c"]) == [1, 2, 3]
    assert verdicts.looks_of(record, ["a", "b", "c"]) == [3], "another experiment"


def test_a_second_study_takes_the_trials_that_it_shares(run, tmp_path, corpus):
    run(write_study(tmp_path / "files", "first", corpus=corpus))
    before = times(tmp_path)
    axes = {"placement": ["keel", "peri_ln"], "learning_rate": [3e-3], "seed": 2}
    rows = run(write_study(tmp_path / "files", "second", corpus=corpus, axes=axes), "other").results
    after = times(tmp_path)
    assert len(before) == 4
    assert len(after) == 6
    assert {path: after[path] for path in before} == before
    assert len(rows) == 4


def test_records_stand_in_for_trials(run, tmp_path, corpus):
    file = write_study(tmp_path / "files", corpus=corpus, measures={"end": ["hidden_states"], "records": ["metrics"]})
    first = run(file, record=True)
    shutil.rmtree(tmp_path / "trials")
    again = run(file, "again")
    assert not times(tmp_path)
    columns = ["key", "placement", "seed", "eval_loss", "status"]
    pd.testing.assert_frame_equal(first.results[columns], again.results[columns])
    record = read_folder(tmp_path / "records" / "mine-cpu")
    assert (record.name, record.scale, record.axes) == ("mine", "cpu", ("learning_rate", "placement", "seed"))
    assert str(tmp_path) not in (record.folder / "study.yaml").read_text()
    (trained,) = yaml.safe_load((record.folder / "study.yaml").read_text())["trained"]
    assert (trained["trials"], trained["torch"]) == (len(first.results), torch.__version__)
    run(file, "more", record=True)
    assert yaml.safe_load((record.folder / "study.yaml").read_text())["trained"] == [trained], "without the trials"
    tables = {path.name for path in (record.folder / "tables").iterdir()}
    assert tables == {"end-hidden_states.parquet", "records-metrics.parquet"}
    for name in tables:
        pd.testing.assert_frame_equal(*(pd.read_parquet(tmp_path / f / "tables" / name) for f in ("out", "again")))


def test_a_study_of_ones_own_is_recorded_beside_its_own_records_alone(run, tmp_path, corpus, capsys):
    file = write_study(tmp_path / "files", "mix-ppl", corpus=corpus)
    with pytest.raises(UserError, match="record: Lamina's records hold only Lamina's studies"):
        study(study=str(file), output=str(tmp_path / "out"), store=str(tmp_path / "trials"), record=True, bar=False)
    assert not (tmp_path / "out").exists()
    places = ["--store", str(tmp_path / "trials"), "--records", str(tmp_path / "records")]
    assert main(["study", "show", str(file), *places[:2]]) == 0
    assert "Mix-LN's loss" not in capsys.readouterr().out, "the catalog's study of this name is another one"
    assert main(["study", "show", str(file), *places]) == 0
    assert "supported" not in capsys.readouterr().out
    run(file, record=True)
    assert main(["study", "show", str(file), *places]) == 0
    assert "supported (cpu): mix-ppl: the loss of keel is a number" in capsys.readouterr().out


def test_a_study_that_is_stopped_records_what_has_ended(run, tmp_path, corpus, monkeypatch):
    file = write_study(tmp_path / "files", corpus=corpus, measures={"end": ["hidden_states"]})

    def stopped(trials, *, ended, **options):
        def one_and_no_more(name, outcome):
            ended(name, outcome)
            raise KeyboardInterrupt

        run_here(trials, workers=1, ended=one_and_no_more, tick=None)

    with monkeypatch.context() as patch:
        patch.setattr(studies_run, "run_trials", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(file, record=True)
    shutil.rmtree(tmp_path / "trials")
    part = Records(tmp_path / "records")
    (key,) = part.rows
    assert part.table(key, "end-hidden_states") is not None
    claim = {"claim": "mine", "says": "so", "study": "mine", "scale": "cpu", "verdict": "not run yet", "paper": ""}
    pages = loaded("docs/results_pages.py")
    pages.write_results([claim], [read_study(str(file))], tmp_path / "records", tmp_path / "pages", draw=False)
    (page,) = (tmp_path / "pages").glob("*.md")
    assert "not run yet" in page.read_text()
    again = run(file, "again", record=True)
    assert len(again.results) == 4
    assert len(times(tmp_path)) == 3, "the recorded trial is not trained again"
    whole = (tmp_path / "records" / "mine-cpu" / "results.csv").read_text()
    monkeypatch.setattr(studies_run, "run_trials", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(file, "third", record=True, seeds="7,8")
    assert (tmp_path / "records" / "mine-cpu" / "results.csv").read_text() == whole, "a part replaces no whole record"


def test_init_trials_train_nothing(run, tmp_path, corpus):
    axes = {"placement": ["pre_ln", "post_ln"], "seed": 2}
    file = write_study(
        tmp_path / "files", corpus=corpus, axes=axes, job="init", measures={"init": ["gradients"]}, claims=""
    )
    rows = run(file).results
    assert list(rows["steps"]) == [0] * 4
    assert pd.read_parquet(tmp_path / "out" / "tables" / "init-gradients.parquet")["key"].nunique() == 4


def test_an_edited_study_says_which_trials_no_longer_fit(run, tmp_path, corpus):
    file = write_study(tmp_path / "files", corpus=corpus)
    run(file)
    data = yaml.safe_load(file.read_text())
    data["scales"]["cpu"]["settings"]["steps"] = 5
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(UserError, match="4 of its 4 trials no longer belong to the study"):
        run(file, resume=True)
    assert result(next((tmp_path / "trials").glob("*/")))["steps"] == 4
    assert set(run(file, overwrite=True).results["steps"]) == {5}
    assert len(times(tmp_path)) == 8


def test_a_misspelled_placement_is_one_line_before_the_folder_is_made(run, tmp_path, corpus):
    with pytest.raises(UserError, match="did you mean 'keel'"):
        run(write_study(tmp_path / "files", corpus=corpus, axes={"placement": ["keell"]}))
    assert not (tmp_path / "out").exists()


def test_a_trial_is_found_and_measured_under_other_words_for_the_same_settings(run, tmp_path, corpus):
    run(write_study(tmp_path / "files", corpus=corpus))
    before = times(tmp_path)
    words = {"init": "recommended"}.items()  # normal, with these two
    file = write_study(tmp_path / "files", "more", corpus=corpus, changed=words, measures={"records": ["metrics"]})
    rows = run(file, "more").results
    assert set(rows["status"]) <= {"finished", "short", "stuck"}, rows["reason"].tolist()
    assert times(tmp_path) == before
    assert pd.read_parquet(tmp_path / "more" / "tables" / "records-metrics.parquet")["key"].nunique() == 4


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


def test_the_default_output_is_resumed(tmp_path, corpus, monkeypatch, refused):
    file = write_study(tmp_path / "files", corpus=corpus)
    monkeypatch.chdir(tmp_path)
    assert "runs/studies/mine-cpu" in refused("study", "run", file, "--resume", *places(tmp_path))


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
        assert "lamina: 4 trials failed. The first trial failed for this reason: " in err
        assert "short.txt" in err
