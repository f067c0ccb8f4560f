"""Every kind of folder has its page; every column of a result is in the table of columns."""

import json

import pandas as pd
import pytest

from lamina.errors import UserError
from lamina.jobs import columns
from lamina.reports import report, summarize


@pytest.mark.parametrize("content", [{}, {"notes.txt": "mine"}])
def test_a_folder_that_no_job_wrote_is_refused(tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(
        UserError, match=r"holds no job.*\(allowed: a folder of: claims, coord-check, dpo, evaluation, "
    ):
        report(tmp_path)


def test_a_transfer_killed_before_it_had_numbers_gets_the_page_of_its_trials(study):
    (study / "environment.json").write_text(json.dumps({"kind": "transfer"}))
    page = report(study).read_text(encoding="utf-8")
    assert "Ranking by eval loss" in page


def test_a_value_without_a_column_is_refused():
    measured = {column.name: 0 for column in columns.RESULT_COLUMNS if column.measured}
    assert columns.checked(measured) is measured
    with pytest.raises(KeyError, match="no column for \\['surprise'\\]"):
        columns.checked({**measured, "surprise": 1})


def test_every_aggregated_column_is_in_the_ranking():
    row = dict.fromkeys(columns.NUMBERS, 1.0) | dict.fromkeys(columns.TEXTS, "x") | {"status": "finished"}
    summary = summarize(pd.DataFrame([row]))
    assert {c.name for c in columns.RESULT_COLUMNS if c.aggregate} <= set(summary)
    assert {c.name for c in columns.RANKING} <= set(summary)
