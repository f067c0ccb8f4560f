"""A column is said once, in lamina/jobs/columns.py; its value stands in lamina/training/pretrain.py."""

import pandas as pd
import pytest

from lamina.jobs import columns
from lamina.reports import summarize


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
