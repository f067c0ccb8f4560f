"""A trial that several studies have recorded."""

import pandas as pd
import pytest

from lamina.errors import UserError
from lamina.papers.trials.store import Records, write_results, write_table


@pytest.fixture
def two(tmp_path):
    """Writes two studies' rows of the same trial, in the order in which they are read; returns the trial's row."""

    def write(first, second):
        for name, row in (("a-cpu", first), ("b-cpu", second)):
            write_results(tmp_path / name, pd.DataFrame([{"key": "k", "tuned": True, "status": "finished", **row}]))
        return Records(tmp_path).rows["k"]

    return write


@pytest.mark.parametrize("swap", [False, True])
def test_what_one_record_lacks_another_fills(two, swap):
    old, new = {"eval_loss": 2.5}, {"eval_loss": 2.5, "loss_surges": 3.0}
    assert two(*((new, old) if swap else (old, new)))["loss_surges"] == 3


def test_an_empty_value_is_filled_too(two):
    assert two({"eval_loss": 2.5, "loss_surges": 3.0}, {"eval_loss": 2.5, "loss_surges": None})["loss_surges"] == 3


def test_a_trial_trained_again_elsewhere_is_not_mixed_with_the_older_one(two):
    row = two({"eval_loss": 2.5, "loss_surges": 3.0}, {"eval_loss": 2.5001})
    assert row["eval_loss"] == 2.5001
    assert "loss_surges" not in row


def test_a_study_reads_its_own_record_of_a_trial(tmp_path):
    for name, loss in (("a-cpu", 2.5), ("b-cpu", 2.5001)):
        write_results(
            tmp_path / name, pd.DataFrame([{"key": "k", "tuned": True, "status": "finished", "eval_loss": loss}])
        )
        write_table(tmp_path / name, "probe", pd.DataFrame([{"key": "k", "value": loss}]))
    for own, loss in (("a-cpu", 2.5), ("b-cpu", 2.5001), ("c-cpu", 2.5001)):
        records = Records(tmp_path, own=own)
        assert records.rows["k"]["eval_loss"] == loss
        assert records.table("k", "probe")["value"].tolist() == [loss]


def test_a_trials_place_in_one_study_is_no_result_in_another(tmp_path):
    """A study without stages would be drawn as one with them; a record written before kept such columns at its end."""
    row = {"key": "k", "seed": 0, "tuned": True, "status": "finished", "eval_loss": 2.5, "steps": 9}
    write_results(tmp_path / "a-cpu", pd.DataFrame([row | {"stage": "pretrain", "shelf": "b"}]))
    write_results(tmp_path / "b-cpu", pd.DataFrame([{"key": "k", "stage": "pretrain", "shelf": "b", **row}]))
    write_results(tmp_path / "c-cpu", pd.DataFrame([{"key": "k", "steps": 9, **row}]))
    found = Records(tmp_path).rows["k"]
    assert not {"stage", "shelf"} & set(found)
    assert found["steps"] == 9, "an axis that is a column of every result"


def test_a_file_without_the_columns_of_a_record_is_refused(tmp_path):
    write_results(tmp_path / "a-cpu", pd.DataFrame([{"key": "k", "status": "finished"}]))
    with pytest.raises(UserError, match=r"a-cpu.*no record of a study"):
        _ = Records(tmp_path).rows
