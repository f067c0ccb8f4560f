"""What docs/preflight.md says of the verdict's mistakes is what the committed records give."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from lamina.preflights.rules import calibration

ROOT = Path(__file__).parents[2]
SCRIPTS = ("preflight_calibration", "preflight_fit", "preflight_tables")


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        loaded = {}
        for name in SCRIPTS:
            spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
            loaded[name] = importlib.util.module_from_spec(spec)
            sys.modules[name] = loaded[name]
            spec.loader.exec_module(loaded[name])
        yield tuple(loaded.values())
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in SCRIPTS:
            sys.modules.pop(name, None)


def test_the_pages_tables_are_those_of_the_records(scripts):
    calibrating, fitting, printing = scripts
    runs, measured = calibrating.read("runs.jsonl"), calibrating.read("measurements.jsonl")
    made = fitting.judged(runs, measured, calibration())
    assert made == json.loads(fitting.JUDGED.read_text())
    assert printing.tables(made) in fitting.PAGE.read_text()


def test_nothing_is_judged_on_what_it_was_fitted_on(scripts):
    calibrating, fitting, _ = scripts
    sets = {}
    for run in calibrating.read("runs.jsonl"):
        sets.setdefault(run["set"], set()).add(calibrating.key_of(run["case"]))
    fitted = set().union(*(sets.get(name, set()) for name in fitting.FITTED))
    for name in fitting.JUDGED_ON:
        assert sets[name]
        assert not sets[name] & fitted


def test_the_grid_is_every_placement_depth_initializer_and_rate(scripts):
    calibrating, *_ = scripts
    grid = list(calibrating.cases("grid"))
    assert len(grid) == len({calibrating.key_of(c) for c in grid}) == 17 * 3 * 2 * 2 == calibrating.SETS["grid"]
    assert {c["num_layers"] for c in grid} == {12, 24, 48}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "trained"),
        ({"status": "stuck"}, "did not train"),
        ({"status": "diverged", "eval_losses": []}, "did not train"),
        ({"eval_losses": [[40, 2.95], [80, 2.87]]}, "trained badly"),  # 3.0 - 0.1 is the border to stuck
        ({"eval_losses": [[40, 2.4], [80, 2.52]]}, "trained badly"),
        ({"losses": [[4, 3.0], [8, 3.6], [12, 2.5]]}, "trained badly"),
    ],
)
def test_what_a_run_came_to(scripts, changed, expected):
    result = {
        "status": "finished",
        "unigram_entropy": 3.0,
        "losses": [[4, 5.5], [8, 3.1], [12, 2.5]],
        "eval_losses": [[40, 2.7], [80, 2.5]],
    }
    assert scripts[1].outcome({**result, **changed}) == expected
