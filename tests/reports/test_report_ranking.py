import math

import pandas as pd
import pytest

from lamina.reports import summarize


def results(*rows):
    names = ("placement", "learning_rate", "seed", "status", "eval_loss")
    return pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows])


def test_each_placement_is_ranked_at_its_best_learning_rate():
    table = summarize(
        results(
            ("a", 1e-3, 0, "finished", 2.9),
            ("a", 3e-3, 0, "finished", 2.5),
            ("b", 1e-3, 0, "finished", 2.6),
            ("b", 3e-3, 0, "diverged", math.nan),
        )
    )
    assert list(table["placement"]) == ["a", "b"]
    assert list(table["learning_rate"]) == [3e-3, 1e-3]
    assert list(table["rank"]) == [1, 2]


def test_mean_and_spread_are_over_the_seeds_that_finished():
    table = summarize(
        results(("a", 1, 0, "finished", 2.0), ("a", 1, 1, "finished", 2.2), ("a", 1, 2, "diverged", math.nan))
    )
    row = table.iloc[0]
    assert row["eval_loss"] == pytest.approx(2.1)
    assert row["eval_loss_std"] == pytest.approx(math.sqrt(0.02))
    assert row["status_text"] == "2/3 finished, 1 diverged"
    assert row["status"] == "diverged"


def test_one_seed_has_no_spread():
    assert math.isnan(summarize(results(("a", 1, 0, "finished", 2.0))).loc[0, "eval_loss_std"])


def test_a_rate_does_not_win_by_losing_its_bad_seeds():
    table = summarize(
        results(
            ("a", 1, 0, "finished", 2.5),
            ("a", 1, 1, "finished", 2.5),
            ("a", 2, 0, "finished", 2.4),
            ("a", 2, 1, "diverged", math.nan),
        )
    )
    assert table.loc[0, "learning_rate"] == 1


def test_what_did_not_finish_ranks_last_whatever_its_loss():
    table = summarize(
        results(
            ("failed", 1, 0, "failed", math.nan),
            ("diverged", 1, 0, "diverged", 0.0),
            ("interrupted", 1, 0, "interrupted", 1.0),
            ("stuck", 1, 0, "stuck", 3.2),
            ("lossless", 1, 0, "finished", math.nan),
            ("short", 1, 0, "short", 3.9),
            ("finished", 1, 0, "finished", 3.5),
        )
    )
    order = ["finished", "lossless", "short", "stuck", "interrupted", "diverged", "failed"]
    assert list(table["placement"]) == order


def test_missing_columns_and_rates_are_no_error():
    table = summarize(pd.DataFrame({"placement": ["a"], "status": ["failed"]}))
    assert table.loc[0, "status_text"] == "failed"
