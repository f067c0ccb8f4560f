"""Searches: rungs prune, paused trials go on from their checkpoints, a killed search goes on, the race is paired."""

import json

import pandas as pd
import pytest
from studies.study_files import write_study

import lamina
from lamina.api import study
from lamina.errors import UserError
from lamina.studies.catalog.study import read_study
from lamina.studies.search.searching import Searching, _worse

optuna = pytest.importorskip("optuna")
SEARCH = {
    "space": {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "placement": ["pre_ln", "keel"]},
    "trials": 6,
    "rungs": [2],
    "keep": 2,
    "race": 2,
}


@pytest.fixture
def run(tmp_path, corpus):
    def call(name="out", trials="trials", search=SEARCH, **given):
        file = write_study(tmp_path / "files", corpus=corpus, axes={"seed": 2}, search=search, claims="")
        places = {"store": str(tmp_path / trials), "records": str(tmp_path / "records")}
        return study(study=str(file), output=str(tmp_path / name), workers=2, bar=False, **places, **given)

    return call


def test_rungs_prune_and_the_others_go_on_from_their_checkpoints(run, tmp_path):
    rows = run().results
    candidates = pd.read_csv(tmp_path / "out" / "search.csv")
    assert len(candidates) == 6
    assert {"won", "pruned"} <= set(candidates["state"])
    assert set(rows.groupby("candidate")["seed"].nunique()) <= {1, 2}
    paused = [json.loads(path.read_text()) for path in (tmp_path / "trials").glob("*/result.json")]
    assert {result["steps"] for result in paused} == {2, 4}
    assert all(result["status"] == "interrupted" for result in paused if result["steps"] == 2)
    row = rows.iloc[0]
    folder = tmp_path / "trials" / row["key"]
    stored = lamina.jobs.files.read_yaml(folder / "config.yaml")
    whole = lamina.pretrain(**{**stored, "output": str(tmp_path / "whole"), "pause_step": None}, bar=False)
    assert whole["eval_loss"] == row["eval_loss"], "a pause changes no bit"


@pytest.mark.slow
def test_a_resumed_search_proposes_the_same_and_repeats_nothing(run, tmp_path):
    run()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "trials").glob("*/result.json")}
    first = pd.read_csv(tmp_path / "out" / "search.csv")
    run(resume=True)
    pd.testing.assert_frame_equal(first, pd.read_csv(tmp_path / "out" / "search.csv"))
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_search_that_was_reopened_proposes_what_an_uninterrupted_one_does(tmp_path, corpus):
    file = write_study(tmp_path / "files", corpus=corpus, axes={"seed": 2}, search=SEARCH, claims="")

    def proposed(folder, *, reopen):
        folder.mkdir()
        for asked in (3, 3) if reopen else (6,):
            searching = Searching(read_study(file).scale("cpu"), {}, None, folder, None)
            opened = searching._study("rungs", optuna.pruners.NopPruner())
            for _ in range(asked):
                searching._ask(opened)
        return [trial.user_attrs["settings"]["learning_rate"] for trial in opened.trials]

    whole = proposed(tmp_path / "whole", reopen=False)
    assert len(set(whole)) == 6
    assert proposed(tmp_path / "reopened", reopen=True) == whole


def test_the_race_needs_pairs():
    best = [2.0, 2.1, 2.2, 2.0, 2.1]
    assert _worse([loss + 0.1 for loss in best], best)
    assert not _worse([2.1, 2.0, 2.3, 1.9, 2.15], best)
    assert not _worse([3.0, 3.0], [2.0, 2.0]), "two seeds say nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": {}}, "space: {}"),
        ({"space": {"learnin_rate": [1]}}, "did you mean 'learning_rate'"),
        ({"space": {"learning_rate": {"low": 1, "high": 0.1}}}, "low < high"),
        ({"sampler": "grid"}, "unknown sampler"),
        ({"rungs": [8]}, "rising steps below the run's 4"),
        ({"trials": 0}, "trials: 0"),
    ],
)
def test_a_wrong_search_is_one_line(run, change, message):
    with pytest.raises(UserError, match=message):
        run(search={**SEARCH, **change})
