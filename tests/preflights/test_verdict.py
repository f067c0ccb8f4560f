"""The verdict on recorded burn-ins, and that docs/evidence/preflight.md says its mistakes as the records give them."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from lamina.placements import resolve
from lamina.preflights.verdict import (
    Features,
    calibration,
    chance,
    deciding_share,
    judge,
    learns,
    progress,
    projected,
    verdict_of,
)
from lamina.reports.pages.preflight import headline
from lamina.training.settings import PretrainSettings
from tools.calibration import preflight_calibration as calibrating
from tools.calibration import preflight_fit as fitting

FINE = Features(
    step=32, finite=1.0, excess=-0.30, excess_error=0.02, context=0.32, similarity=0.49, jacobian=-0.05,
    jacobian_layer=30, weight_gradient=-1.7, weight_gradient_layer=20, spike=0.3, magnitude=30.0, magnitude_layer=32,
    growth=4.3, spent=0.45, pace=1.6,
)  # fmt: skip
# Post-LN, 32 layers, 5e-3: measured
COLLAPSED = replace(FINE, excess=0.009, context=-2e-5, similarity=1.0, jacobian=-13.9, jacobian_layer=-1, magnitude=5.0)
SLOW = replace(FINE, excess=0.13, context=0.0001, similarity=1.0, pace=0.2)
# Pre-LN, 8 layers, 3.4e-4, 400 steps: what was called fine, far above the loss of a constant prediction
FALLING = replace(FINE, excess=1.13, excess_error=0.04, context=0.06, spent=0.15, pace=6.0)


def case(placement="post_ln", init="normal", steps=100, stopped=""):
    """A burn-in of 32 steps, as far as the verdict reads it."""
    planned = SimpleNamespace(learning_rate=5e-3, steps=steps)
    proxy = SimpleNamespace(plan=resolve(placement, 32), init=init)
    done = {"losses": [3.0] * 32, "stopped": stopped, "step_at": lambda share: math.ceil(share * steps)}
    return SimpleNamespace(planned=planned, proxy=proxy, **done)


def test_a_run_that_uses_its_input_is_fine():
    verdict = judge(FINE, case("pre_ln"))
    assert verdict.verdict == "fine"
    assert verdict.change == ""
    assert "improves the predictions by 0.32 nats" in verdict.reason
    assert "0.30 ± 0.04 nats below" in verdict.reason
    assert verdict.deciding_steps == 0
    assert "0.89, from layer 30" in verdict.reason


@pytest.mark.parametrize(
    ("verdicts", "title"),
    [
        (["fine"], "keel: fine"),
        (["fine", "fine"], "All planned runs are fine"),
        (["risky", "fine", "risky"], "2 of 3 planned runs are risky: keel and pre_ln"),
        (["risky", "undecided", "fine"], "2 of 3 planned runs are risky or undecided: keel and peri_ln"),
        (["will not train", "risky", "fine"], "1 of 3 planned runs will not train: keel"),
    ],
)
def test_the_page_is_titled_by_the_worst_verdict(verdicts, title):
    labels = ["keel", "peri_ln", "pre_ln"][: len(verdicts)]
    assert headline([{"verdict": verdict} for verdict in verdicts], labels) == title


def test_a_layer_that_is_cut_off_is_named_with_its_gain():
    verdict = judge(COLLAPSED, case())
    assert (verdict.verdict, verdict.chance) == ("will not train", 0.0)
    assert all(words in verdict.reason for words in ("the embedding", "1e-14", "mean cosine 1.000"))
    assert verdict.change.startswith(
        "a placement with fewer norms on the residual stream (here, 64 of 64 sub-layers have such a norm) or fewer"
    )
    assert judge(COLLAPSED, case("pre_ln")).change.startswith("fewer layers")
    assert judge(COLLAPSED, case(), "--init small_scaled").change == "--init small_scaled"


def test_a_run_that_is_only_slow_is_told_what_would_make_it_faster():
    verdict = judge(replace(SLOW, spent=0.9), case("pre_ln"))
    assert verdict.verdict == "will not train"
    assert "after 32 of 100 steps" in verdict.reason
    assert "more than 100 steps" in verdict.change
    assert chance(replace(SLOW, spent=0.05), calibration()) >= verdict.chance


def test_nothing_is_fine_before_it_was_seen_to_learn():
    """However many steps are left, and however fast the loss falls: it may stay at the tokens' frequencies."""
    for spent in (0.001, 0.05, 0.5):
        for excess in (1.5, 0.3, 0.0, -0.01):
            numbers = replace(FALLING, spent=spent, excess=excess, context=0.5)
            assert judge(numbers, case("pre_ln", steps=400)).verdict in ("undecided", "will not train")
    assert judge(FALLING, case("pre_ln", steps=400)).verdict == "undecided"


def test_learning_is_a_loss_below_by_more_than_its_error():
    fitted = calibration()
    border = -fitted["evidence"]["margin"]
    assert learns(replace(FINE, excess=border - 0.05, excess_error=0.024), fitted)
    assert not learns(replace(FINE, excess=border - 0.05, excess_error=0.026), fitted)
    assert not learns(replace(FINE, excess=-1.0, excess_error=math.inf), fitted)
    assert not learns(replace(FINE, excess=-1.0, finite=0.0), fitted)
    assert not learns(replace(FINE, excess=math.nan), fitted)


def test_an_undecided_run_is_told_the_step_that_decides():
    fitted = {**calibration(), "deciding": {"slowing": 2.0, "times": 1.5}, "evidence": {"margin": 0.05}}
    # 1.13 + 2 * 0.04 + 0.05 nats at 6 nats for the whole schedule, twice that, on top of what was spent
    assert deciding_share(FALLING, fitted) == pytest.approx(0.15 + 2.0 * 1.26 / 6.0)
    assert deciding_share(replace(FALLING, excess=0.2), fitted) == pytest.approx(1.5 * 0.15)
    shares = [deciding_share(replace(FALLING, **one), fitted) for one in ({"pace": -0.1}, {"spent": 0.9})]
    assert shares == [1, 1]
    verdict = judge(FALLING, case("pre_ln", steps=400))
    step = math.ceil(400 * deciding_share(FALLING, calibration()))
    assert verdict.deciding_steps == step < 400
    said = "a verdict needs more steps: after 32 of 400 steps the held-out loss is 1.13 ± 0.08 nats"
    assert verdict.reason.startswith(said)
    assert verdict.change.startswith(f"measure more steps, with --burn-in {step}: at the pace of these steps")
    close = judge(replace(FALLING, excess=0.02, spent=0.3), case("pre_ln", steps=400))
    assert f"{calibration()['deciding']['times']:g} times as large. This run reaches that sum by step " in close.change
    late = judge(replace(FALLING, pace=1.2, context=0.5, spent=0.1), case("pre_ln", steps=400))
    assert (late.verdict, late.deciding_steps) == ("undecided", 400)
    assert "only the whole run can decide" in late.change


def test_a_run_that_learns_with_a_small_chance_is_risky():
    fitted = calibration()
    margin = fitted["evidence"]["margin"]
    numbers = replace(FINE, excess=-margin - 0.06, spent=1.0, pace=0.0, context=0.01, jacobian=-3.0)
    assert chance(numbers, fitted) < fitted["bands"][1]
    assert verdict_of(numbers, fitted) == "risky"
    assert "The run has an estimated chance of only" in judge(numbers, case("pre_ln")).reason


def test_a_loss_that_is_not_finite_will_not_train():
    verdict = judge(replace(FINE, finite=0.0), case(stopped="the loss was not finite at step 3"))
    assert verdict.verdict == "will not train"
    assert "the loss was not finite at step 3" in verdict.reason
    assert verdict.change.startswith("a much lower learning rate, gradient clipping")
    assert judge(replace(FINE, context=math.nan), case()).verdict == "will not train"


def test_little_room_under_fp16_is_said_with_the_layer():
    verdict = judge(replace(FINE, magnitude=50_000.0, magnitude_layer=31), case("pre_ln"))
    assert verdict.verdict == "fine"
    assert "5e+04 after layer 31" in verdict.change
    assert "1.3 ×" in verdict.change
    assert "fp16" not in judge(FINE, case()).change.lower()
    over = judge(replace(FINE, magnitude=131_008.0, magnitude_layer=-1), case("pre_ln")).change
    assert "1.31e+05 after the embedding, 2 × over FP16's largest number" in over


def test_the_rule_on_progress_written_out():
    fitted = json.loads(json.dumps(calibration()))
    weights, x = fitted["progress"]["weights"], progress(SLOW)
    computed = {"projected": pytest.approx(0.13 - 0.5 * 0.2 * 0.55), "left": pytest.approx(math.log10(1 / 0.45))}
    assert x == {"context": -4.0, "excess": 0.13, "jacobian": -0.05, **computed}
    score = fitted["progress"]["intercept"] + sum(weights[name] * x[name] for name in x)
    assert chance(SLOW, fitted) == pytest.approx(1 / (1 + math.exp(-score)))


def test_a_loss_that_falls_too_slowly_for_the_steps_that_are_left():
    slow = replace(FINE, excess=1.3, context=0.02, spent=0.5, pace=0.8)
    # 0.2 nats in a quarter of the schedule: at half that pace the other half brings 0.2
    assert projected(slow) == pytest.approx(1.3 - 0.2)
    assert judge(slow, case("pre_ln", steps=64)).verdict == "will not train"
    assert projected(replace(slow, pace=-0.3)) == pytest.approx(1.3)


def test_every_direction_makes_sense():
    """More use of the input, a lower loss, more of the run left and a stronger connection never make it worse."""
    middle = replace(SLOW, context=0.01, jacobian=-1.0)
    for better in ({"context": 0.05}, {"excess": 0.0}, {"spent": 0.1}, {"jacobian": 0.0}):
        assert chance(replace(middle, **better), calibration()) >= chance(middle, calibration()), better


def test_the_pages_tables_are_those_of_the_records():
    runs, measured = calibrating.read("runs.jsonl"), calibrating.read("measurements.jsonl")
    made = fitting.judged(runs, measured, calibration())
    assert made == json.loads(fitting.JUDGED.read_text())
    assert fitting.tables(made) in fitting.PAGE.read_text()


def test_nothing_is_judged_on_what_it_was_fitted_on():
    sets = {}
    for run in calibrating.read("runs.jsonl"):
        sets.setdefault(run["set"], set()).add(calibrating.key_of(run["case"]))
    fitted = set().union(*(sets.get(name, set()) for name in fitting.FITTED))
    for name in fitting.JUDGED_ON:
        assert not sets.get(name, set()) & fitted
    assert sum(name in sets for name in fitting.JUDGED_ON) >= 4


def test_the_grid_is_every_placement_depth_initializer_and_rate():
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
def test_what_a_run_came_to(changed, expected):
    result = {"status": "finished", "unigram_entropy": 3.0}
    result |= {"losses": [[4, 5.5], [8, 3.1], [12, 2.5]], "eval_losses": [[40, 2.7], [80, 2.5]]}
    assert fitting.outcome({**result, **changed}) == expected


def run_of(placement: str, rate: float, outcome: str):
    return SimpleNamespace(case={"placement": placement, "learning_rate": rate}, outcome=outcome)


KNOWN = [run_of("keel", 1e-4, "did not train")]
KNOWN += [run_of("keel", 1e-3, "trained"), run_of("keel(alpha=8)", 1e-2, "trained badly")]
KNOWN += [run_of("post_ln", 1e-3, "did not train"), run_of("post_ln", 1e-1, "did not train")]


def test_the_trivial_rules_are_the_best_interval_of_rates_and_the_share_by_name():
    assert fitting.rate_bounds(KNOWN) == (1e-3, 1e-2)  # four of five; 1e-2 alone gets four, too, and comes later
    assert fitting.shares_by_name(KNOWN) == {"keel": 2 / 3, "post_ln": 0.0}


def test_the_preflight_is_compared_on_the_runs_that_it_decides():
    verdicts = {1e-3: "undecided", 1e-2: "fine", 1e-4: "will not train", 1e-1: "fine"}
    made = fitting.compared(KNOWN, KNOWN, lambda r: verdicts[r.case["learning_rate"]])
    assert (made["runs"], made["decided"], made["preflight"]) == (5, 3, 2)
    assert made["rules"]["rate"] == {"of all": 4, "of the decided": 3}
    assert made["rules"]["name"] == {"of all": 4, "of the decided": 2}


def test_a_studys_trials_become_runs_one_per_setting(tmp_path):
    trials = [(1, "pretrain", "finished", {}), (0, "pretrain", "stuck", {})]
    trials += [(0, "pretrain", "interrupted", {"learning_rate": 1e-3})]
    trials += [(0, "max-lr", "finished", {"learning_rate": 2e-3})]
    trials += [(0, "pretrain", "finished", {"num_layers": 6, "schedule": "wsd"})]
    trials += [(0, "pretrain", "finished", {"num_layers": 6, "weight_decay": 0.2})]
    for number, (seed, kind, status, changes) in enumerate(trials):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "trial.json").write_text(json.dumps({"job": kind}))
        settings = PretrainSettings(num_layers=12, steps=60, seed=seed).to_dict() | changes
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        (folder / "result.json").write_text(json.dumps({"status": status, "eval_loss": 2.0, "unigram_entropy": 3.0}))
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 60, "eval_loss": 2.0}\n')
    runs = list(calibrating.trial_runs(tmp_path))
    seen = {(r["set"], r["case"]["num_layers"], r["case"]["seed"], r["result"]["status"]) for r in runs}
    assert seen == {("trials", 12, 0, "stuck"), ("other depths", 6, 0, "finished")}
    deep = next(r for r in runs if r["set"] == "other depths")
    assert deep["case"]["weight_decay"] == 0.2
    assert deep["case"]["hidden_size"] == 48
    assert deep["result"]["eval_losses"] == [[60, 2.0]]
