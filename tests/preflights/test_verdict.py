"""The verdict on recorded burn-ins: what it says, why, and that it asks for nobody's name."""

import json
import math
from dataclasses import replace

import pytest

from lamina.placements import resolve
from lamina.preflights.verdict import (
    Case,
    Features,
    calibration,
    chance,
    deciding_share,
    judge,
    kind_of,
    learns,
    progress,
    projected,
)

FINE = Features(
    step=32, finite=1.0, excess=-0.30, excess_error=0.02, excess_middle=0.13, context=0.32, context_middle=0.05,
    variation=0.30, similarity=0.49, similarity_middle=0.93, jacobian=-0.05, jacobian_layer=30,
    jacobian_middle=-0.02, jacobian_start=0.0, jacobian_largest=2.0, weight_gradient=-1.7,
    weight_gradient_layer=20, weight_gradient_start=-0.2, spike=0.3, magnitude=30.0, magnitude_layer=32,
    growth=4.3, spent=0.45, pace=1.6,
)  # fmt: skip
# Post-LN, 32 layers, 5e-3: measured
COLLAPSED = replace(
    FINE, excess=0.009, context=-2e-5, variation=0.0, similarity=1.0, jacobian=-13.9, jacobian_layer=0, magnitude=5.0
)
SLOW = replace(FINE, excess=0.13, excess_middle=0.93, context=0.0001, similarity=1.0, pace=0.2)
# Pre-LN, 8 layers, 3.4e-4, 400 steps: what was called fine, far above the loss of a constant prediction
FALLING = replace(FINE, excess=1.13, excess_middle=1.83, excess_error=0.04, context=0.06, spent=0.15, pace=6.0)


def case(placement="post_ln", **changed):
    plan = resolve(placement, 32)
    given = {"init": "normal", "learning_rate": 5e-3, "steps": 100, "burn_in": 32, **changed}
    given.setdefault("step_at", lambda share: math.ceil(share * given["steps"]))
    return Case(plan=plan, **given)


def test_a_run_that_uses_its_input_is_fine():
    verdict = judge(FINE, case("pre_ln"))
    assert verdict.verdict == "fine"
    assert verdict.change == ""
    assert "worth 0.32 nats" in verdict.reason
    assert "0.30 ± 0.04 nats below" in verdict.reason
    assert verdict.deciding_steps == 0
    assert "0.89, from block 30" in verdict.reason


def test_a_layer_that_is_cut_off_is_named_with_its_gain():
    verdict = judge(COLLAPSED, case())
    assert (verdict.verdict, verdict.chance) == ("will not train", 0.0)
    assert all(words in verdict.reason for words in ("the embedding", "1e-14", "mean cosine 1.000"))
    assert all(words in verdict.change for words in ("0.002", "--init scaled", "64 of 64 sub-layers"))
    assert "--init scaled" not in judge(COLLAPSED, case(init="scaled")).change
    assert "skip path" not in judge(COLLAPSED, case("pre_ln")).change


def test_a_run_that_is_only_slow_is_told_what_would_make_it_faster():
    verdict = judge(replace(SLOW, spent=0.9), case("pre_ln"))
    assert verdict.verdict == "will not train"
    assert "after 32 of 100 steps" in verdict.reason
    assert "more steps than 100" in verdict.change
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
    assert (
        deciding_share(replace(FALLING, pace=-0.1), fitted) == deciding_share(replace(FALLING, spent=0.9), fitted) == 1
    )
    verdict = judge(FALLING, case("pre_ln", steps=400))
    step = math.ceil(400 * deciding_share(FALLING, calibration()))
    assert verdict.deciding_steps == step < 400
    assert verdict.reason.startswith(
        "not decided by these steps: after 32 of 400 the held-out loss is 1.13 ± 0.08 nats"
    )
    assert verdict.change.startswith(f"look longer, with --burn-in {step}: at the pace of these steps")
    close = judge(replace(FALLING, excess=0.02, spent=0.3), case("pre_ln", steps=400))
    assert f"{calibration()['deciding']['times']:g} times the learning rates spent, by step " in close.change
    late = judge(replace(FALLING, pace=1.2, context=0.5, spent=0.1), case("pre_ln", steps=400))
    assert (late.verdict, late.deciding_steps) == ("undecided", 400)
    assert "only the whole run decides it" in late.change


def test_a_run_that_learns_with_a_small_chance_is_risky():
    fitted = calibration()
    numbers = replace(
        FINE, excess=-fitted["evidence"]["margin"] - 0.06, spent=1.0, pace=0.0, context=0.01, jacobian=-3.0
    )
    assert chance(numbers, fitted) < fitted["bands"][1]
    assert kind_of(numbers, fitted) == "risky"
    assert "a chance of only" in judge(numbers, case("pre_ln")).reason


def test_a_loss_that_is_not_finite_will_not_train():
    verdict = judge(replace(FINE, finite=0.0), case(), "the loss was not finite at step 3")
    assert verdict.verdict == "will not train"
    assert "the loss was not finite at step 3" in verdict.reason
    assert "lower learning rate (0.0005)" in verdict.change
    assert judge(replace(FINE, context=math.nan), case()).verdict == "will not train"


def test_little_room_under_fp16_is_said_with_the_layer():
    verdict = judge(replace(FINE, magnitude=50_000.0, magnitude_layer=31), case("pre_ln"))
    assert verdict.verdict == "fine"
    assert "5e+04 behind block 31" in verdict.change
    assert "1.3 ×" in verdict.change
    assert "fp16" not in judge(FINE, case()).change.lower()
    over = judge(replace(FINE, magnitude=131_008.0, magnitude_layer=0), case("pre_ln")).change
    assert "1.31e+05 behind the embedding, 2 × over FP16's largest number" in over


def test_the_rule_on_progress_written_out():
    fitted = json.loads(json.dumps(calibration()))
    weights, x = fitted["progress"]["weights"], progress(SLOW)
    assert x == {
        "context": -4.0,
        "excess": 0.13,
        "projected": pytest.approx(0.13 - 0.5 * 0.2 * 0.55),
        "left": pytest.approx(math.log10(1 / 0.45)),
        "jacobian": -0.05,
    }
    score = fitted["progress"]["intercept"] + sum(weights[name] * x[name] for name in x)
    assert chance(SLOW, fitted) == pytest.approx(1 / (1 + math.exp(-score)))


def test_a_loss_that_falls_too_slowly_for_the_steps_that_are_left():
    slow = replace(FINE, excess=1.3, excess_middle=1.5, context=0.02, spent=0.5, pace=0.8)
    # 0.2 nats in a quarter of the schedule: at half that pace the other half brings 0.2
    assert projected(slow) == pytest.approx(1.3 - 0.2)
    assert judge(slow, case("pre_ln", steps=64)).verdict == "will not train"
    assert projected(replace(slow, pace=-0.3)) == pytest.approx(1.3)


def test_every_direction_makes_sense():
    """More use of the input, a lower loss, more of the run left and a stronger connection never make it worse."""
    middle = replace(SLOW, context=0.01, jacobian=-1.0)
    for better in ({"context": 0.05}, {"excess": 0.0}, {"spent": 0.1}, {"jacobian": 0.0}):
        assert chance(replace(middle, **better), calibration()) >= chance(middle, calibration()), better
