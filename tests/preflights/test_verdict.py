"""The verdict on recorded burn-ins: what it says, why, and that it asks for nobody's name."""

import json
import math
from dataclasses import replace

import pytest

from lamina.placements import resolve
from lamina.preflights.features import Features
from lamina.preflights.verdict import Case, calibration, chance, judge, progress, projected

FINE = Features(
    step=32,
    finite=1.0,
    excess=-0.30,
    excess_error=0.02,
    excess_middle=0.13,
    context=0.32,
    context_middle=0.05,
    variation=0.30,
    similarity=0.49,
    similarity_middle=0.93,
    jacobian=-0.05,
    jacobian_layer=30,
    jacobian_middle=-0.02,
    jacobian_start=0.0,
    jacobian_largest=2.0,
    weight_gradient=-1.7,
    weight_gradient_layer=20,
    weight_gradient_start=-0.2,
    spike=0.3,
    magnitude=30.0,
    magnitude_layer=32,
    growth=4.3,
    remaining=100 / 32,
)
# Post-LN, 32 layers, 5e-3: measured
COLLAPSED = replace(
    FINE, excess=0.009, context=-2e-5, variation=0.0, similarity=1.0, jacobian=-13.9, jacobian_layer=0, magnitude=5.0
)
SLOW = replace(FINE, excess=0.13, excess_middle=0.93, context=0.0001, similarity=1.0)


def case(placement="post_ln", **changed):
    plan = resolve(placement, 32)
    given = {"init": "normal", "learning_rate": 5e-3, "warmup": 10, "steps": 100, "burn_in": 32, **changed}
    return Case(plan=plan, **given)


def test_a_run_that_uses_its_input_is_fine():
    verdict = judge(FINE, case("pre_ln"))
    assert verdict.verdict == "fine"
    assert verdict.change == ""
    assert "worth 0.32 nats" in verdict.reason
    assert "0.30 nats below" in verdict.reason
    assert "0.89, from block 30" in verdict.reason


def test_a_layer_that_is_cut_off_is_named_with_its_gain():
    verdict = judge(COLLAPSED, case())
    assert (verdict.verdict, verdict.chance) == ("will not train", 0.0)
    assert "the embedding" in verdict.reason
    assert "1e-14" in verdict.reason
    assert "mean cosine 1.000" in verdict.reason
    assert "0.002" in verdict.change
    assert "--init scaled" in verdict.change
    assert "64 of 64 sub-layers" in verdict.change
    assert "--init scaled" not in judge(COLLAPSED, case(init="scaled")).change
    assert "skip path" not in judge(COLLAPSED, case("pre_ln")).change


def test_a_run_that_is_only_slow_is_told_to_go_on_longer():
    verdict = judge(SLOW, case("pre_ln"))
    assert verdict.verdict != "fine"
    assert "after 32 of 100 steps" in verdict.reason
    assert "more steps than 100" in verdict.change
    assert chance(replace(SLOW, remaining=100.0), calibration()) >= verdict.chance


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


def test_the_headroom():
    assert replace(FINE, magnitude=655.04).headroom == pytest.approx(100.0)


@pytest.mark.parametrize("numbers", [FINE, COLLAPSED, SLOW])
def test_the_placements_name_does_not_matter(numbers):
    given = case()
    renamed = replace(given, plan=replace(given.plan, placement="somebody_elses"))
    assert judge(numbers, given) == judge(numbers, renamed)


def test_the_rule_on_progress_written_out():
    fitted = json.loads(json.dumps(calibration()))
    weights, x = fitted["progress"]["weights"], progress(SLOW)
    assert x == {
        "context": -4.0,
        "excess": 0.13,
        "projected": 0.0,
        "remaining": pytest.approx(math.log10(100 / 32)),
        "jacobian": -0.05,
    }
    score = fitted["progress"]["intercept"] + sum(weights[name] * x[name] for name in x)
    assert chance(SLOW, fitted) == pytest.approx(1 / (1 + math.exp(-score)))


def test_a_loss_that_falls_too_slowly_for_the_steps_that_are_left():
    slow = replace(FINE, excess=1.3, excess_middle=1.5, context=0.02, remaining=2.0)
    # 0.2 nats in 16 steps: at half that pace 32 more bring 0.2
    assert projected(slow) == pytest.approx(1.3 - 0.2)
    assert judge(slow, case("pre_ln", steps=64)).verdict == "will not train"
    assert projected(replace(slow, excess_middle=1.0)) == pytest.approx(1.3)


def test_every_direction_makes_sense():
    """More use of the input, a lower loss, more steps left and a stronger connection never make it worse."""
    middle = replace(SLOW, context=0.01, jacobian=-1.0)
    for better in ({"context": 0.05}, {"excess": 0.0}, {"remaining": 10.0}, {"jacobian": 0.0}):
        assert chance(replace(middle, **better), calibration()) >= chance(middle, calibration()), better


def test_the_numbers_say_where_they_come_from():
    provenance = calibration()["provenance"]
    assert provenance["made by"] == "benchmarks/preflight_calibration.py fit"
    assert sum(provenance["fitted on"].values()) == sum(provenance["trained, trained badly, did not train"])
