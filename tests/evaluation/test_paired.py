"""Models compared on the same items: numbers against scipy and written-out sums, and what is refused."""

import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest
from evaluation.conftest import saved_model
from scipy import stats

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.evaluation import paired as pairing
from lamina.evaluation.candidates import Candidate
from lamina.evaluation.scores import Score
from lamina.evaluation.task_sets import Wanted
from lamina.jobs.seals import write_result
from lamina.reports import terminal


def items(right, *, task="quiz", metric="acc", choices=4, first=0):
    whole = {"task": task, "filter": "none", "target": "0", "log_likelihoods": [0.0] * choices}
    values = [{"doc_hash": f"hash {at}", "metrics": json.dumps({metric: one})} for at, one in enumerate(right, first)]
    rows = [{**whole, "doc_id": at, **value} for at, value in enumerate(values, first)]
    return pd.DataFrame(rows)


def compared(tables, metric="acc"):
    """The rows of the models in ``tables``, by name and task."""
    names = list(dict.fromkeys(name for name, _ in tables))
    columns = [Wanted(task=task) for task in dict.fromkeys(task for _, task in tables)]
    numbers = {(n, column): Score(task=column.task, metric=metric, value=0.0) for n in names for column in columns}
    candidates = [Candidate(name=name, path=name, arm=name) for name in names]
    return pairing.compared(columns, candidates, numbers, tables)


def test_the_numbers_of_right_and_wrong_answers_are_scipys():
    draw = np.random.default_rng(0)
    one, other = ((draw.random(300) < share).astype(float) for share in (0.5, 0.58))
    shuffled = items(other).sample(frac=1, random_state=1)  # the order of the rows means nothing
    (row,) = compared({("a", "quiz"): items(one), ("b", "quiz"): shuffled})
    differences = other - one
    won, lost = int((differences > 0).sum()), int((differences < 0).sum())
    assert (row.model, row.against, row.won, row.lost, row.items) == ("b", "a", won, lost, 300)
    assert row.difference == pytest.approx(differences.mean())
    interval = stats.ttest_rel(other, one).confidence_interval(0.95)
    assert (row.low, row.high) == pytest.approx((interval.low, interval.high))
    assert row.p == pytest.approx(stats.binomtest(won, won + lost, 0.5).pvalue)
    assert row.p_holm == row.p  # one task
    reach = stats.t.ppf(0.975, 299) + stats.norm.ppf(0.8)
    assert row.smallest == pytest.approx(reach * differences.std(ddof=1) / math.sqrt(300))


def test_the_smallest_difference_is_seen_four_times_in_five():
    """Drawn: models that disagree on 20 % of 400 items, and differ by the smallest difference on average."""
    draw = np.random.default_rng(3)

    def drawn(difference):
        signs = np.where(draw.random(400) < 0.5 + 0.5 * difference / 0.2, 1.0, -1.0) * (draw.random(400) < 0.2)
        one = (signs < 0).astype(float)
        return pairing.paired(pd.Series(one), pd.Series(one + signs))

    smallest = np.median([drawn(0.0)["smallest"] for _ in range(100)])
    assert np.mean([drawn(smallest)["low"] > 0 for _ in range(400)]) == pytest.approx(0.8, abs=0.06)


def test_fewer_than_six_items_that_differ_are_never_significant():
    one = [0.0] * 50
    found = pairing.paired(pd.Series(one), pd.Series([1.0] * 5 + one[5:]))
    assert found["p"] == pytest.approx(2 * 0.5**5)
    assert found["p"] > 0.05
    assert pairing.paired(pd.Series(one), pd.Series([1.0] * 6 + one[6:]))["p"] < 0.05
    same = pairing.paired(pd.Series(one), pd.Series(one))
    assert (same["p"], same["difference"], same["smallest"]) == (1.0, 0.0, 6 / 50)


def test_too_few_items_can_show_no_difference():
    found = pairing.paired(pd.Series([0.0, 0.0]), pd.Series([0.0, 0.0]))
    assert math.isnan(found["smallest"])  # six items of two would have to differ
    row = {**found, "model": "b", "against": "a", "column": "Blank", "p_holm": 1.0, "smallest": None}
    assert "none of 2 items" in terminal._paired([row])[-1]


@pytest.mark.parametrize(
    ("one", "other", "low", "high"), [(1.0, 1.0, -0.1, 0.1), (0.0, 0.0, -0.1, 0.1), (0.0, 1.0, 0.9, 1)]
)
def test_items_that_all_agree_leave_an_exact_interval(one, other, low, high):
    """As in Clopper and Pearson's interval of 0 among 100, which scipy has."""
    found = pairing.paired(pd.Series([one] * 100), pd.Series([other] * 100))
    upper = stats.binomtest(0, 100).proportion_ci(method="exact").high
    assert (found["low"], found["high"]) == pytest.approx((other - one - upper, min(1.0, other - one + upper)))
    assert found["low"] > low
    assert found["high"] <= high
    same = pairing.paired(pd.Series([0.5] * 9), pd.Series([0.5] * 9))
    assert math.isnan(same["low"])  # scores between 0 and 1 have no such interval


def test_scores_between_0_and_1_get_a_paired_t_test():
    draw = np.random.default_rng(1)
    one, other = draw.random(40), draw.random(40)
    (row,) = compared({("a", "quiz"): items(one, metric="f1"), ("b", "quiz"): items(other, metric="f1")}, "f1")
    assert row.p == pytest.approx(stats.ttest_rel(other, one).pvalue)
    assert row.won is None


def test_each_models_p_values_are_adjusted_over_its_tasks():
    draw = np.random.default_rng(2)
    tables, one = {}, (draw.random(200) < 0.5).astype(float)
    for name, shift in (("a", 0), ("b", 0.12), ("c", 0.2)):
        for task, more in (("x", 0.0), ("y", 0.1), ("z", 0.2)):
            flips = draw.random(200) < (shift + more if shift else 0)
            tables[name, task] = items(np.maximum(one, flips).astype(float), task=task)
    rows = compared(tables)
    assert [(row.model, row.column) for row in rows] == [(m, t) for m in "bc" for t in "xyz"]
    for model in "bc":
        ps = np.array([row.p for row in rows if row.model == model])
        order, largest, holm = np.argsort(ps), 0.0, np.empty(3)
        for rank, at in enumerate(order):  # Holm's step-down, written out
            largest = max(largest, min(1.0, (3 - rank) * ps[at]))
            holm[at] = largest
        assert [row.p_holm for row in rows if row.model == model] == pytest.approx(holm)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.iloc[:-1],
        lambda table: table.assign(target=["1", *table["target"][1:]]),
        lambda table: table.assign(doc_hash=["other", *table["doc_hash"][1:]]),
    ],
)
def test_other_items_are_refused(change):
    right = [1.0, 0.0] * 5
    with pytest.raises(UserError, match=r"compare: a and b have different items of quiz: \d items are in only one"):
        compared({("a", "quiz"): items(right), ("b", "quiz"): change(items(right))})


def test_tables_without_hashes_are_compared_by_numbers_and_targets():
    right = [1.0, 0.0] * 5
    old = items(right).drop(columns="doc_hash")
    assert len(compared({("a", "quiz"): items(right), ("b", "quiz"): old})) == 1


def test_chance_is_the_mean_share_of_a_choice_and_none_without_choices():
    assert pairing.chance(items([1.0] * 4, choices=4), "acc") == 0.25
    mixed = pd.concat([items([1.0], choices=2), items([1.0], choices=5, first=1)])
    assert pairing.chance(mixed, "acc_norm") == pytest.approx((1 / 2 + 1 / 5) / 2)
    assert pairing.chance(items([1.0], choices=1), "acc") is None
    assert pairing.chance(items([1.0]), "exact_match") is None


def test_two_models_and_then_their_folders(model, data_dir, tmp_path, capsys, refused):
    """In one evaluation, and in two: the same differences; on the terminal, the page, in CSV and from Python."""
    pytest.importorskip("lm_eval")
    other = saved_model(tmp_path / "pre_ln", "pre_ln")
    given = ["--tasks", "quiz", "--data-dir", str(data_dir), "--run-code"]
    assert main(["eval", str(model), str(other), *given, "--output", str(tmp_path / "both")]) == 0
    assert "| chance | 25.00 |" in (printed := capsys.readouterr().out)
    assert "scores minus keel, same items:" in printed
    result = json.loads((tmp_path / "both" / "result.json").read_text())
    (row,) = result["paired"]
    right = [
        pd.read_parquet(tmp_path / "both" / "items" / name / "quiz.parquet")
        .set_index("doc_id")["metrics"].map(lambda text: json.loads(text)["acc"])
        for name in ("keel", "pre_ln")
    ]  # fmt: skip
    assert row["difference"] == pytest.approx((right[1] - right[0]).mean())
    assert pd.read_csv(tmp_path / "both" / "paired.csv")["difference"].tolist() == [row["difference"]]
    assert set(pd.read_csv(tmp_path / "both" / "results.csv")["chance"]) == {0.25}
    page = (tmp_path / "both" / "report.html").read_text()
    assert "Is a difference real?" in page
    assert "guessing 25.0 %" in page
    folders = []
    for name in ("keel", "pre_ln"):  # an evaluation of each alone
        folders.append(tmp_path / f"alone-{name}")
        shutil.copytree(tmp_path / "both", folders[-1])
        alone = json.loads((folders[-1] / "result.json").read_text())
        for key, field in (("models", "name"), ("units", "model")):
            alone[key] = [entry for entry in alone[key] if entry[field] == name]
        if name == "pre_ln":  # which has scores on another task as well
            alone["units"] += [{**entry, "unit": "other"} for entry in alone["units"]]
        write_result(folders[-1], {key: entry for key, entry in alone.items() if key != "seal"})
    assert main(["eval", "--compare", *map(str, folders), "--output", str(tmp_path / "compared")]) == 0
    assert "| keel | " in (printed := capsys.readouterr().out)
    assert "scores minus keel, same items:" in printed
    assert json.loads((tmp_path / "compared" / "result.json").read_text())["paired"] == [row]
    again = lamina.evaluate(models=list(map(str, folders)), compare=True, output=str(tmp_path / "again"), bar=False)
    assert again["paired"] == [row]
    items_of = folders[1] / "items" / "pre_ln" / "quiz.parquet"
    pd.read_parquet(items_of).iloc[1:].to_parquet(items_of)
    shutil.copytree(folders[1], altered := tmp_path / "altered")
    written = json.loads((folders[1] / "result.json").read_text())
    del written["seal"]
    write_result(folders[1], written)
    shutil.copytree(folders[1], elsewhere := tmp_path / "elsewhere")
    write_result(elsewhere, {**written, "units": [{**entry, "unit": "other"} for entry in written["units"]]})
    for wrong, about in (
        ([*map(str, folders)], "have different items of quiz"),
        ([str(model), str(folders[0])], "holds no evaluation"),
        ([str(folders[0])], "compare: you gave only one model"),
        ([str(folders[0]), str(folders[0])], "compare: you gave only one model"),
        ([str(folders[0]), str(altered)], "quiz.parquet': altered since Lamina wrote result.json"),
        ([str(folders[0]), str(elsewhere)], "the first evaluation shares no task with another one"),
        ([*map(str, folders), "--tasks", "quiz"], "the tasks and the text come from the earlier evaluations"),
    ):
        assert about in refused("eval", "--compare", *wrong, "--output", str(tmp_path / "none"))
        assert not (tmp_path / "none").exists()
