"""What docs/preflight.md says of the verdict's mistakes is what the committed records give."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from scripts import loaded

from lamina.preflights.verdict import calibration
from lamina.training.settings import PretrainSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))  # one imports the other
        yield tuple(loaded(f"benchmarks/{name}.py") for name in ("preflight_calibration", "preflight_fit"))


def test_the_pages_tables_are_those_of_the_records(scripts):
    calibrating, fitting = scripts
    runs, measured = calibrating.read("runs.jsonl"), calibrating.read("measurements.jsonl")
    made = fitting.judged(runs, measured, calibration())
    assert made == json.loads(fitting.JUDGED.read_text())
    assert fitting.tables(made) in fitting.PAGE.read_text()


def test_nothing_is_judged_on_what_it_was_fitted_on(scripts):
    calibrating, fitting = scripts
    sets = {}
    for run in calibrating.read("runs.jsonl"):
        sets.setdefault(run["set"], set()).add(calibrating.key_of(run["case"]))
    fitted = set().union(*(sets.get(name, set()) for name in fitting.FITTED))
    for name in fitting.JUDGED_ON:
        assert not sets.get(name, set()) & fitted
    assert sum(name in sets for name in fitting.JUDGED_ON) >= 4


def test_the_grid_is_every_placement_depth_initializer_and_rate(scripts):
    calibrating, _ = scripts
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


def run_of(placement: str, rate: float, outcome: str):
    return SimpleNamespace(case={"placement": placement, "learning_rate": rate}, outcome=outcome)


KNOWN = [
    run_of("keel", 1e-4, "did not train"),
    run_of("keel", 1e-3, "trained"),
    run_of("keel(alpha=8)", 1e-2, "trained badly"),
    run_of("post_ln", 1e-3, "did not train"),
    run_of("post_ln", 1e-1, "did not train"),
]


def test_the_trivial_rules_are_the_best_interval_of_rates_and_the_share_by_name(scripts):
    _, trivial = scripts
    assert trivial.rate_bounds(KNOWN) == (1e-3, 1e-2)  # four of five; 1e-2 alone gets four, too, and comes later
    assert trivial.shares_by_name(KNOWN) == {"keel": 2 / 3, "post_ln": 0.0}


def test_the_preflight_is_compared_on_the_runs_that_it_decides(scripts):
    verdicts = {1e-3: "undecided", 1e-2: "fine", 1e-4: "will not train", 1e-1: "fine"}
    made = scripts[1].compared(KNOWN, KNOWN, lambda r: verdicts[r.case["learning_rate"]])
    assert (made["runs"], made["decided"], made["preflight"]) == (5, 3, 2)
    assert made["rules"]["rate"] == {"of all": 4, "of the decided": 3}
    assert made["rules"]["name"] == {"of all": 4, "of the decided": 2}


def test_a_studys_trials_become_runs_one_per_setting(scripts, tmp_path):
    for number, (seed, kind, status, changes) in enumerate(
        (
            (1, "pretrain", "finished", {}),
            (0, "pretrain", "stuck", {}),
            (0, "pretrain", "interrupted", {"learning_rate": 1e-3}),
            (0, "max-lr", "finished", {"learning_rate": 2e-3}),
            (0, "pretrain", "finished", {"num_layers": 6, "schedule": "wsd"}),
            (0, "pretrain", "finished", {"num_layers": 6, "weight_decay": 0.2}),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "trial.json").write_text(json.dumps({"job": kind}))
        settings = PretrainSettings(num_layers=12, steps=60, seed=seed).to_dict() | changes
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        (folder / "result.json").write_text(json.dumps({"status": status, "eval_loss": 2.0, "unigram_entropy": 3.0}))
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 60, "eval_loss": 2.0}\n')
    runs = list(scripts[0].trial_runs(tmp_path))
    seen = {(r["set"], r["case"]["num_layers"], r["case"]["seed"], r["result"]["status"]) for r in runs}
    assert seen == {("trials", 12, 0, "stuck"), ("other depths", 6, 0, "finished")}
    deep = next(r for r in runs if r["set"] == "other depths")
    assert deep["case"]["weight_decay"] == 0.2
    assert deep["case"]["hidden_size"] == 48
    assert deep["result"]["eval_losses"] == [[60, 2.0]]
