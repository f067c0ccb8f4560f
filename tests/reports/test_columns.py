"""A column is said once, in lamina/jobs/columns.py; its value stands in lamina/training/pretrain.py."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lamina
from lamina.jobs import columns

PACKAGE = Path(lamina.__file__).parent
NEW = (
    '    Column(name="tokens_per_parameter", title="tokens/parameter", format=".4f", aggregate="mean",\n'
    "        in_ranking=105, in_trials=True),\n"
)
VALUE = '            "tokens_per_parameter": tokens / parameters,\n'
COMPARE = (
    "compare --placements pre_ln --num-layers 2 --hidden-size 32 --num-heads 2 --steps 4 --batch-size 2 "
    "--sequence-length 16 --eval-blocks 4 --threads 1 --workers 1 --output study"
)


@pytest.fixture
def copy(tmp_path) -> Path:
    """A folder with a copy of the package, to be changed."""
    shutil.copytree(PACKAGE, tmp_path / "lamina", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def insert(path: Path, before: str, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, line + before), encoding="utf-8")


def compare(copy: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "lamina", *COMPARE.split()]
    return subprocess.run(line, cwd=copy, env=environment, capture_output=True, text=True, timeout=300)


def test_a_column_and_its_value_are_all_that_a_scalar_needs(copy):
    insert(copy / "lamina/jobs/columns.py", '    Column("parameters"', NEW)
    insert(copy / "lamina/training/pretrain.py", '            "parameters": parameters,', VALUE)
    assert compare(copy).returncode == 0
    (row,) = csv.DictReader((copy / "study/results.csv").open())
    result = json.loads(next(copy.glob("study/trials/*/result.json")).read_text())
    value = float(row["tokens_per_parameter"])
    assert value == pytest.approx(result["tokens_per_parameter"]) == result["tokens"] / result["parameters"] > 0
    page = (copy / "study/report.html").read_text()
    ranking, trials = page.split('<table class="ranking">')[1].split('<table class="trials">')
    for table in (ranking, trials.split("</table>")[0]):
        assert 'class="number">tokens/parameter</th>' in table
        assert f'<td class="number">{value:.4f}</td>' in table


def test_a_column_without_a_value_fails(copy):
    insert(copy / "lamina/jobs/columns.py", '    Column("parameters"', NEW)
    done = compare(copy)
    assert done.returncode == 1
    assert "tokens_per_parameter" in (copy / "study/results.csv").read_text()
    assert "no value for ['tokens_per_parameter']" in next(copy.glob("study/trials/*/result.json")).read_text()


def test_a_value_without_a_column_is_refused():
    measured = {column.name: 0 for column in columns.RESULT_COLUMNS if column.measured}
    assert columns.checked(measured) is measured
    with pytest.raises(KeyError, match="no column for \\['surprise'\\]"):
        columns.checked({**measured, "surprise": 1})


def test_every_aggregated_column_is_in_the_ranking():
    from lamina.reports import summarize

    row = dict.fromkeys(columns.NUMBERS, 1.0) | dict.fromkeys(columns.TEXTS, "x") | {"status": "finished"}
    import pandas as pd

    summary = summarize(pd.DataFrame([row]))
    assert {c.name for c in columns.RESULT_COLUMNS if c.aggregate} <= set(summary)
    assert {c.name for c in columns.RANKING} <= set(summary)
