"""Scores survive the folder's JSON files."""

import json
import math

from lamina.evaluation.job import rows
from lamina.evaluation.scores import Score, from_rows, to_rows
from lamina.jobs.files import write_json


def perplexity(value, metric="word_perplexity"):
    return Score(task="perplexity", metric=metric, value=value, items=1, higher_is_better=False)


def test_infinite_scores_come_back_as_they_were(tmp_path):
    """A text without spaces has an infinite perplexity per word; JSON has no number for it."""
    scores = [perplexity(value) for value in (math.inf, math.nan, 2.5)]
    write_json(tmp_path / "scores.json", to_rows(scores))
    stored = json.loads((tmp_path / "scores.json").read_text())
    assert repr(from_rows(stored)) == repr(from_rows(to_rows(scores))) == repr(scores)
    tables = [rows([{"model": "m", "scores": found}], [_Candidate]).to_csv() for found in (to_rows(scores), stored)]
    assert tables[0] == tables[1], "a resumed evaluation writes the same results.csv"
    assert ",inf," in tables[1]


class _Candidate:
    name, arm, seed = "m", "arm", 0
