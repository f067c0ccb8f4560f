"""The table in its three forms, from given numbers."""

import csv
import io
import json
import math
from dataclasses import replace

import pytest

from lamina.evaluation.candidates import Candidate
from lamina.evaluation.job import rows
from lamina.evaluation.scores import Score, from_rows, number_of, table, to_rows
from lamina.evaluation.task_sets import Wanted
from lamina.jobs.files import write_json

PPL = Wanted(task="wikitext", metric="word_perplexity", heading="Wiki. ppl")
ARC = Wanted(task="arc_easy", heading="ARC-e")
SCIQ = Wanted(task="sciq")


def candidates():
    return [
        *(Candidate(name=f"keel/{seed}", path="-", arm="keel", seed=seed) for seed in (0, 1)),
        Candidate(name="keel/2", path="-", arm="keel", seed=2, status="diverged"),
        Candidate(name="pre", path="-", arm="a_b & <i>", seed=0),
    ]


def numbers():
    values = {"keel/0": (20.0, 0.5, 0.75), "keel/1": (22.0, 0.6, 0.85), "pre": (19.0, 0.4, 0.9)}
    return {
        (name, column): Score(
            task=column.task,
            metric=column.metric or "acc",
            value=value,
            higher_is_better=column is not PPL,
        )
        for name, listed in values.items()
        for column, value in zip((PPL, ARC, SCIQ), listed, strict=True)
    }


def test_a_line_is_the_mean_and_the_standard_deviation_over_its_runs():
    found = table([PPL, ARC, SCIQ], candidates(), numbers())
    assert found.headings == ("Wiki. ppl", "ARC-e", "sciq", "Avg.")
    keel, pre = found.lines
    assert list(keel.means) == pytest.approx([21.0, 55.0, 80.0, 67.5])
    assert keel.stds[1] == pytest.approx(50**0.5)
    assert keel.stds[3] == pytest.approx(50**0.5)  # of the runs' own averages, 62.5 and 72.5
    assert list(pre.means) == pytest.approx([19.0, 40.0, 90.0, 65.0])
    assert math.isnan(pre.stds[1])
    assert found.best == ((1,), (0,), (1,), (0,))


def test_the_three_forms_hold_the_same_numbers():
    found = table([PPL, ARC, SCIQ], candidates(), numbers())
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert rows[0]["ARC-e"] == "55"
    assert rows[0]["left_out"] == "1"
    assert rows[1]["ARC-e std"] == ""
    assert "| keel (1 of 3 runs diverged) | 21.00 ± 1.41 | 55.00 ± 7.07 |" in found.markdown()
    assert r"a\_b & \<i\>" in found.markdown()
    latex = found.latex()
    assert r"\textbf{19.00}" in latex
    assert r"55.00 $\pm$ 7.07" in latex
    assert r"a\_b \& <i>" in latex


def test_every_line_with_the_best_number_as_printed_is_bold():
    tied = numbers()
    for name, value in (("keel/0", 0.5), ("keel/1", 0.5), ("pre", 0.50001)):
        tied[name, ARC] = replace(tied[name, ARC], value=value)
    found = table([ARC], candidates(), tied)
    assert found.best == ((0, 1),)
    assert found.latex().count(r"\textbf{50.00") == 2


def test_a_run_without_every_number_has_no_average():
    known = numbers()
    del known["keel/1", SCIQ]
    keel = table([PPL, ARC, SCIQ], candidates(), known).lines[0]
    assert keel.means[3] == pytest.approx(62.5)
    assert math.isnan(keel.stds[3])


def test_a_group_without_a_number_of_its_own_is_the_mean_of_its_tasks():
    scores = [Score(task=f"part{n}", metric="acc", value=n / 4, items=10) for n in (1, 2, 3)]
    found = number_of(Wanted(task="group"), scores)
    assert (found.value, found.items) == (pytest.approx(0.5), 30)
    assert number_of(Wanted(task="group", metric="f1"), scores) is None


def test_infinite_scores_come_back_as_they_were(tmp_path):
    """A text without spaces has an infinite perplexity per word; JSON has no number for it."""
    scores = [Score(task="perplexity", metric="word_perplexity", value=value) for value in (math.inf, math.nan, 2.5)]
    write_json(tmp_path / "scores.json", to_rows(scores))
    stored = json.loads((tmp_path / "scores.json").read_text())
    assert repr(from_rows(stored)) == repr(from_rows(to_rows(scores))) == repr(scores)
    candidate = Candidate(name="m", path="-", arm="m", seed=0)
    tables = [rows([{"model": "m", "scores": each}], [candidate]).to_csv() for each in (to_rows(scores), stored)]
    assert tables[0] == tables[1], "a resumed evaluation writes the same results.csv"
    assert ",inf," in tables[1]
