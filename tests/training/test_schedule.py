"""The learning rate's schedules: warm-up, stable, decay, and those of transformers that a run takes."""

import math

import pytest
from training.tiny_runs import assert_same_weights, cut_at, layers, records

from lamina.errors import UserError
from lamina.training.optimization.optimizer import schedule_of
from lamina.training.resolve import POLICY
from lamina.training.settings import PretrainSettings


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.5), ("1-sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)], ids=str
)
def test_it_warms_up_stays_level_and_decays_to_the_lowest_rate(shape, middle):
    rate = schedule_of(
        PretrainSettings(schedule="wsd", steps=100, warmup=10, decay=0.2, decay_shape=shape, min_learning_rate=0.1)
    )
    assert [rate(step) for step in (0, 5, 10, 40, 80)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert rate(90) == pytest.approx(0.1 + 0.9 * middle)
    assert rate(100) == pytest.approx(0.1)
    falling = [rate(step) for step in range(80, 101)]
    assert falling == sorted(falling, reverse=True)


def test_a_run_follows_it_and_goes_on_bit_for_bit(trained, tmp_path):
    chosen = {"schedule": "wsd", "decay": 4, "decay_shape": "1-sqrt", "warmup": 2, "steps": 12, "logging_steps": 1}
    trained("whole", save_steps=4, **chosen)
    rates = {r["step"]: r["learning_rate"] for r in records(tmp_path / "whole") if "loss" in r}
    expected = {s: 3e-3 * schedule_of(PretrainSettings(**chosen))(s - 1) for s in rates}  # a record's is the step's own
    assert rates == pytest.approx(expected)
    with cut_at(10):  # in the decay, two steps behind the checkpoint
        trained("cut", save_steps=4, **chosen)
    trained("cut", resume=True, save_steps=4, **chosen)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
    assert layers(tmp_path / "cut").equals(layers(tmp_path / "whole"))


def test_a_run_older_than_the_setting_goes_on_with_the_cosine():
    defaults = PretrainSettings().to_dict()
    stored = {k: v for k, v in defaults.items() if k not in ("schedule", "decay", "decay_shape")}
    assert PretrainSettings.from_dict(POLICY.merge(stored, defaults, defaults)).schedule == "cosine"
    with pytest.raises(UserError, match="schedule: 'wsd' differs from the run's 'cosine'"):
        POLICY.merge(stored, {"schedule": "wsd"}, defaults)


def test_the_decay_and_the_warm_up_must_fit_into_the_steps():
    with pytest.raises(UserError, match=r"decay: 60 steps and 50 of warm-up are more than steps = 100.*at most 50"):
        PretrainSettings(schedule="wsd", steps=100, warmup=50, decay=0.6)
    with pytest.raises(UserError, match=r"schedule: 'wds'; did you mean 'wsd'\? \(allowed: cosine, wsd\)"):
        PretrainSettings(schedule="wds")
    with pytest.raises(UserError, match=r"decay_shape: 'sqrt'; did you mean '1-sqrt'\? \(allowed: linear"):
        PretrainSettings(schedule="wsd", decay_shape="sqrt")
    with pytest.raises(UserError, match="decay: 0"):
        PretrainSettings(schedule="wsd", decay=0)
    with pytest.raises(UserError, match=r"decay: 0\.3 has no effect here \(allowed: with --schedule wsd"):
        PretrainSettings(decay=0.3)
