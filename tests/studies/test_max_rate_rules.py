"""The rules that end a run whose learning rate rises, on curves made for them."""

import math

import numpy as np
import pytest

from lamina.studies.max_rate_rules import MaxRateRules, find_stop, no_stop, smoothed
from lamina.studies.settings import MaxRateSettings

STEPS, ENTROPY = 400, 3.0


def rules(**changed):
    given = {"max_learning_rate": 0.1, "steps": STEPS, "spike_patience": 20.0, **changed}
    return MaxRateRules(MaxRateSettings(**given), ENTROPY)


def stopped(losses, **options):
    stop = find_stop(losses, rules(), **options)
    assert stop is not None
    return stop


def learning(steps=STEPS, noise=0.03):
    """A run that learns throughout: fast to the unigram entropy, then on; with the noise of a small batch."""
    at = np.arange(1, steps + 1)
    jitter = noise * np.random.default_rng(0).standard_normal(steps)
    return 2.6 * np.exp(-at / 12) + 4.4 - 0.45 * np.log(at + 10) + jitter


def stuck(steps=STEPS, noise=0.03):
    """Post-LN by hand: down to the unigram entropy, and there it stays, whatever the rate."""
    at = np.arange(1, steps + 1)
    return ENTROPY + 2.6 * np.exp(-at / 12) + noise * np.random.default_rng(0).standard_normal(steps)


def test_the_rate_of_a_step_rises_linearly_from_zero():
    rates = [rules().rate(step) for step in (1, 2, STEPS // 2 + 1, STEPS + 1)]
    assert rates == pytest.approx([0.0, 0.1 / STEPS, 0.05, 0.1])


def test_smoothing_is_the_mean_of_the_last_losses():
    losses = np.random.default_rng(1).random(30)
    expected = [losses[max(0, end - 8) : end].mean() for end in range(1, 31)]
    assert smoothed(losses, 8) == pytest.approx(expected)
    assert len(smoothed([], 8)) == 0


def test_a_run_that_learns_throughout_does_not_stop():
    losses = learning()
    assert find_stop(losses, rules()) is None
    assert no_stop(losses, rules()).rule == "none"
    assert no_stop(losses, rules()).rate == 0.1


def test_a_spike_that_returns_is_no_failure():
    losses = learning()
    losses[200:215] += 2.0
    assert find_stop(losses, rules()) is None


def test_a_spike_that_stays_stops_at_the_rate_before_it():
    losses = learning()
    losses[200:] += 2.0
    stop = stopped(losses)
    assert (stop.rule, stop.step, stop.seen) == ("spike", 200, 220)
    assert stop.rate == rules().rate(200)
    assert stop.loss == pytest.approx(smoothed(losses, 8)[199])


def test_a_slow_climb_stops_at_the_rate_where_it_began():
    losses = learning(noise=0.0)
    losses[200:] = losses[199] + 0.02 * np.arange(1, STEPS - 199)
    stop = stopped(losses)
    assert stop.rule == "spike"
    assert 200 <= stop.step <= 210


def test_a_later_spike_does_not_move_the_first():
    losses = learning()
    losses[200:] += 2.0
    first = find_stop(losses[:260], rules())
    losses[300:] += 5.0
    assert find_stop(losses, rules()) == first


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_at_the_step_before(value):
    losses = learning()
    losses[150] = value
    stop = stopped(losses)
    assert (stop.rule, stop.seen) == ("non-finite", 151)
    assert 145 <= stop.step <= 150
    assert str(value) in stop.reason


def test_a_rise_that_ends_in_nan_stops_where_the_rise_began():
    losses = learning(noise=0.0)
    losses[140:150] += 3.0
    losses[150] = math.nan
    stop = stopped(losses)
    assert (stop.rule, stop.step) == ("non-finite", 140)


def test_a_gradient_that_is_not_finite_counts_as_well():
    losses = learning(noise=0.0)[:100]
    assert find_stop(losses, rules()) is None
    stop = stopped(losses, broken=True)
    assert (stop.rule, stop.seen) == ("non-finite", 100)
    assert "gradient" in stop.reason


def test_the_first_step_may_break():
    stop = stopped([math.nan])
    assert (stop.rule, stop.step, stop.rate) == ("non-finite", 0, 0.0)
    assert find_stop([], rules()) is None


def test_a_run_that_stays_at_the_unigram_entropy_is_stuck_early():
    losses = stuck()
    stop = stopped(losses)
    assert stop.rule == "stuck"
    assert 40 <= stop.step <= 65  # where the fall ends
    assert stop.seen <= 2 * 65
    assert stop.loss == pytest.approx(ENTROPY, abs=0.1)


def test_a_plateau_below_the_entropy_stops_at_the_last_fall():
    losses = learning(noise=0.0)
    losses[100:] = losses[99]
    stop = stopped(losses)
    assert stop.rule == "plateau"
    assert 90 <= stop.step <= 108
    assert stop.seen == pytest.approx(2 * stop.step, abs=1)


def test_a_descent_slower_than_the_margin_is_a_plateau():
    at = np.arange(1, STEPS + 1)
    begun = 3.0 * np.exp(-at)
    assert find_stop(begun + 2.9 - 0.04 * np.log2(at), rules()) is not None  # under the margin as the rate doubles
    assert find_stop(begun + 2.9 - 0.06 * np.log2(at), rules()) is None


def test_a_wait_at_the_entropy_that_ends_in_time_is_no_plateau():
    losses = stuck(noise=0.0)
    losses[80:] -= 0.02 * np.arange(STEPS - 80)
    assert find_stop(losses[:200], rules()) is None
    assert find_stop(losses[:200], rules(plateau_factor=1.2)) is not None


def test_rates_too_low_to_move_anything_are_no_plateau():
    at = np.arange(1, STEPS + 1)
    losses = 5.5 - np.where(at < 100, 0.0, 2.0 * (1 - np.exp(-(at - 100) / 60))) - 0.0005 * np.maximum(0, at - 200)
    assert find_stop(losses[:180], rules()) is None
    assert find_stop(losses[:99], rules()) is None
    never = no_stop(losses[:99], rules())
    assert (never.rule, never.rate) == ("stuck", 0.0)
    assert "from its first value, 5.500" in never.reason


def test_what_is_found_does_not_depend_on_when_one_looks():
    losses = np.concatenate([learning()[:200], learning()[200:] + 2.0])
    found = [find_stop(losses[:count], rules()) for count in range(220, STEPS, 17)]
    assert len(set(found)) == 1
