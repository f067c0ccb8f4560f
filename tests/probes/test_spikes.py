"""The spike score against its definition, value by value."""

import json
import math

import numpy as np
import pytest

from lamina.probes.engine.spikes import spike_scores, spikes


def naive(series, window, sigmas, fewest):
    found, before = [], []
    for value in series:
        if not math.isfinite(value):
            found.append(True)
            continue
        last = before[-window:]
        spike = False
        if len(before) >= fewest:
            mean = sum(last) / len(last)
            deviation = math.sqrt(sum((v - mean) ** 2 for v in last) / len(last))
            spike = value - mean >= sigmas * deviation and value > mean
        found.append(spike)
        before.append(value)
    return found


@pytest.mark.parametrize(("window", "sigmas", "fewest"), [(20, 2.0, 5), (1000, 3.0, 32), (7, 1.0, 2)])
def test_a_spike_is_so_many_deviations_above_the_values_before_it(window, sigmas, fewest):
    series = np.random.default_rng(0).normal(3, 1, 300).tolist()
    series[40] = 50.0
    series[90] = math.nan
    series[91] = -50.0
    series[200] = math.inf
    found = spikes(series, window=window, sigmas=sigmas, fewest=fewest)
    wanted = naive(series, window, sigmas, fewest)
    assert found.tolist() == wanted
    assert 2 < sum(wanted) < 100


def test_long_series_are_judged_piece_by_piece_as_in_one():
    series = np.random.default_rng(1).standard_t(2, 5000).tolist()
    assert spikes(series, window=50).tolist() == naive(series, 50, 7.0, 32)
    assert sum(spikes(series, window=50)) > 3


def test_a_fall_is_no_spike_and_a_value_is_not_in_its_own_window():
    quiet = [1.0 + 0.01 * (i % 3) for i in range(50)]
    assert not spikes([*quiet, 0.0]).any()
    # with the value itself among 51, seven deviations could not be reached: (n - 1) / sqrt(n) = 7.0 at n = 51
    assert spikes([*quiet[:40], 2.0])[-1]


def test_a_constant_series_has_none_and_the_first_values_are_not_judged():
    assert not spikes([0.3] * 100).any()
    assert not spikes([0.1] * 10 + [9.0] + [0.1] * 10).any()
    assert spikes([0.3] * 50 + [0.31])[-1]
    assert not len(spikes([]))


def test_it_is_read_off_a_runs_metrics(tmp_path):
    assert spike_scores(tmp_path) == {}
    records = [{"step": s, "loss": 2.0 + 0.01 * (s % 5), "grad_norm": None} for s in range(99)]
    records += [{"step": 99, "loss": 9.0, "grad_norm": None}, {"step": 99, "eval_loss": 3.0}]
    records += [{"step": 50, "loss": 2.0, "grad_norm": None}]  # logged again by a resumed run
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 100, "lo']), encoding="utf-8")
    assert spike_scores(tmp_path) == {"loss": (0.01, 100)}  # a norm that was never logged is none


def test_a_diverged_steps_null_is_a_spike(tmp_path):
    lines = [json.dumps({"step": s, "loss": None if s == 3 else 1.0, "grad_norm": 0.5}) for s in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert spike_scores(tmp_path) == {"loss": (0.25, 4), "grad_norm": (0.0, 4)}
