"""Searches: rungs prune, paused trials go on from their checkpoints, a killed search goes on, the race is paired."""

import json

import pandas as pd
import pytest
from studies.study_files import write_study

import lamina
from lamina.api import study
from lamina.errors import UserError
from lamina.studies.catalog.study import read_study
from lamina.studies.engine import searched
from lamina.studies.search.candidates import Candidate, best_at, in_order, loss_at, worse
from lamina.studies.search.searching import Searching

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
            opened = searching._study()
            for _ in range(asked):
                searching._ask(opened)
        return [trial.user_attrs["settings"]["learning_rate"] for trial in opened.trials]

    whole = proposed(tmp_path / "whole", reopen=False)
    assert len(set(whole)) == 6
    assert proposed(tmp_path / "reopened", reopen=True) == whole


def test_the_race_needs_pairs():
    def by_seed(*losses):
        return dict(enumerate(losses))

    best = by_seed(2.0, 2.1, 2.2, 2.0, 2.1)
    assert worse({seed: loss + 0.1 for seed, loss in best.items()}, best)
    assert not worse(by_seed(2.1, 2.0, 2.3, 1.9, 2.15), best)
    assert not worse(by_seed(3.0, 3.0), best), "two seeds say nothing"
    assert not worse({7: 3.0, 8: 3.0, 9: 3.0, **by_seed(3.0)}, best), "only seeds of both are compared"


def test_seeds_that_were_lost_are_counted_and_rank_last():
    def candidate(number, *statuses):
        one = Candidate(number=number, settings={}, state="raced")
        one.count(
            [{"status": s, "eval_loss": None if s == "diverged" else 3.0 if s == "stuck" else 2.0} for s in statuses]
        )
        return one

    sound, unsound, none = (
        candidate(number, *statuses)
        for number, statuses in enumerate((("finished", "short"), ("finished", "stuck", "diverged"), ("diverged",)))
    )
    assert (sound.loss, sound.seeds, sound.lost) == (2.0, 2, 0)
    assert (unsound.loss, unsound.seeds, unsound.lost) == (2.0, 3, 2), "what was lost is in no mean"
    assert (none.seeds, none.lost) == (1, 1)
    assert none.loss != none.loss
    assert in_order([none, unsound, sound]) == [sound, unsound, none]


def test_of_all_that_came_to_a_rung_one_in_so_many_goes_on_in_whatever_order():
    def batch(losses):
        return [Candidate(number=number, settings={}, rungs={0: loss}) for number, loss in enumerate(losses)]

    losses = [9.0, 8.0, 1.0, 2.0, 3.0, 7.0, 6.0, 5.0, 4.0]
    assert best_at(batch(losses), 0, 3) == {2, 3, 4}, "the first to come is not among the best"
    assert best_at(batch(losses[::-1]), 0, 3) == {4, 5, 6}
    assert best_at(batch([2.0, 1.0]), 0, 3) == {1}
    assert best_at(batch([1.0] * 4), 0, 2) == {0, 1}


def test_a_trial_that_has_gone_on_counts_with_its_loss_at_the_rung(tmp_path):
    lines = [{"step": 2, "loss": 5.0}, {"step": 2, "eval_loss": 4.5}, {"step": 4, "eval_loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ended = {"status": "stuck", "eval_loss": 3.0}
    assert [loss_at(tmp_path, step, ended) for step in (1, 2, 3, 4)] == [3.0, 4.5, 4.5, 3.0]
    assert loss_at(tmp_path / "only-in-the-records", 2, ended) == 3.0


def test_a_resumed_search_knows_what_failed_and_what_diverged(run, tmp_path):
    space = {"learning_rate": [1e-3, 1e30], "num_heads": [2, 3]}  # 3 heads do not divide a width of 16
    search = {**SEARCH, "space": space, "trials": 8, "sampler": "random", "rungs": []}
    first = run(search=search)
    table = pd.read_csv(tmp_path / "out" / "search.csv")
    assert set(table[table["num_heads"] == 3]["state"]) == {"failed"}
    assert set(table[table.eval("num_heads == 2 and learning_rate > 1")]["state"]) == {"diverged"}
    assert {str(loss) for loss in table[table["num_heads"] == 3]["eval_loss"]} == {"nan"}
    assert set(first.results[first.results["status"] == "failed"]["reason"].str.partition(":")[0]) == {"num_heads"}
    again = run(resume=True, search=search)
    pd.testing.assert_frame_equal(table, pd.read_csv(tmp_path / "out" / "search.csv"))
    pd.testing.assert_frame_equal(first.results, again.results)


def test_a_search_whose_text_has_changed_is_not_resumed(run, corpus):
    search = {**SEARCH, "trials": 1, "rungs": []}
    run(search=search)
    corpus.write_text(corpus.read_text()[:20000])
    with pytest.raises(UserError, match="candidate 0 of its search is another trial than when it ran here: its text"):
        run(resume=True, search=search)


def test_a_search_that_was_killed_ends_as_an_uninterrupted_one(run, tmp_path, monkeypatch):
    search = {**SEARCH, "trials": 7, "rungs": [1, 2]}
    run("whole", "whole-trials", search=search)
    whole = pd.read_csv(tmp_path / "whole" / "search.csv")
    calls, once = iter(range(1000)), searched.run_tasks

    def killed(tasks, **given):
        once(tasks, **given)
        if next(calls) % 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(searched, "run_tasks", killed)
    attempts = 0
    while attempts < 30:
        try:
            attempts += 1
            run(resume=attempts > 1, search=search)
            break
        except KeyboardInterrupt:
            continue
    assert 2 < attempts < 30
    pd.testing.assert_frame_equal(whole, pd.read_csv(tmp_path / "out" / "search.csv"))


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
