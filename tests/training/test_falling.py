"""Short or stuck: whether a run ended while its loss was still falling."""

import math

import pytest
from training.tiny_runs import result, settings

from lamina.training.monitor.guard import STILL_FALLING, still_falling
from lamina.training.pretrain import pretrain


def evals(**losses):
    return [{"step": int(step[1:]), "eval_loss": loss} for step, loss in losses.items()]


def course(steps, loss, every=5):
    return [{"step": step, "loss": loss(step)} for step in range(every, steps + 1, every)]


def test_a_plateau_is_not_falling_and_a_descent_is():
    plateau = evals(s20=3.6, s40=3.27, s60=3.252, s80=3.251, s100=3.2505)
    assert still_falling(plateau, 100) is None
    descent = evals(s4=5.2, s8=4.8, s12=4.4, s16=4.1, s20=3.9)
    assert still_falling(descent, 20) == "the eval loss still falls, from 4.100 at step 16 to 3.900 at step 20"


def test_the_pace_decides_not_the_difference():
    drop = STILL_FALLING / 5
    assert still_falling(evals(s80=3.5, s100=3.5 - 1.01 * drop), 100)
    assert still_falling(evals(s80=3.5, s100=3.5 - 0.99 * drop), 100) is None


def test_a_slow_descent_that_does_not_slow_down_is_falling_above_the_plateau_only():
    slow = evals(s1=5.565, s2=5.547, s3=5.525, s4=5.514)
    assert still_falling(slow, 4, entropy=3.2)
    assert still_falling(slow, 4, entropy=5.6) is None
    assert still_falling(evals(s1=5.5651, s2=5.565, s3=5.5649, s4=5.5648), 4, entropy=3.2) is None
    high = evals(s20=4.0, s40=3.5, s60=3.43, s80=3.42, s100=3.405)
    assert still_falling(high, 100, entropy=3.24) is None


def test_evaluations_at_every_step_are_compared_over_a_fifth_of_the_run():
    dense = [{"step": s, "eval_loss": 3.25 + 0.004 * (-1) ** s} for s in range(1, 101)]
    assert still_falling(dense, 100) is None


def test_without_evaluations_the_training_loss_tells_and_noise_does_not():
    one = [{"step": 100, "eval_loss": 3.25}]
    assert still_falling([*course(100, lambda s: 5.5 - 0.02 * s), *one], 100).startswith(
        "the training loss still falls"
    )
    noisy = course(100, lambda s: 3.25 + (0.2 if s in (65, 75) else 0.0))
    assert still_falling([*noisy, *one], 100) is None


def test_a_rising_or_broken_loss_is_not_falling():
    assert still_falling(evals(s80=3.2, s100=3.4), 100) is None
    assert still_falling([*evals(s80=3.2), {"step": 90, "loss": None}, {"step": 95, "loss": math.nan}], 100)
    assert still_falling([], 1) == "only one loss was recorded"


@pytest.mark.parametrize(("rate", "status"), [(3e-3, "short"), (1e-9, "stuck")])
def test_a_run_of_a_few_steps_is_short_where_its_loss_falls(corpus, tmp_path, rate, status):
    given = settings(corpus, tmp_path / "run", steps=8, learning_rate=rate)
    found = pretrain(given, bar=False)
    assert found["status"] == status
    assert ("too few to tell" in found["reason"]) == (status == "short")
    assert found == result(tmp_path / "run")
    assert (tmp_path / "run" / "model").is_dir()
    assert pretrain(given, resume=True, bar=False) == found  # it has ended
