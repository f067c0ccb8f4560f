"""The alarms: what leaves is named once, and what changes as healthy training does is not."""

import math
import random
from pathlib import Path

import pytest
import torch

from lamina.reports.diagnosis import gather
from lamina.training.monitor.alarms import Alarms, describe


def row(step, value, *, layer=1, sublayer="attention", metric="gradient_norm", role="all"):
    return (step, layer, sublayer, role, 0, metric, value)


def run(values, **kind):
    alarms = Alarms(half=kind.pop("half", False))
    return [alarm for step, value in enumerate(values, 1) for alarm in alarms.see([row(step, value, **kind)])]


def noise(count, spread=0.3):
    draw = random.Random(0)
    return [math.exp(draw.gauss(0.0, spread)) for _ in range(count)]


def test_a_rise_is_told_once_until_it_is_over():
    found = run([*noise(40), 50.0, 60.0, *noise(10), 55.0])
    assert [(alarm.step, alarm.rule) for alarm in found] == [(41, "rise"), (53, "rise")]
    assert found[0].usual == pytest.approx(1.0, rel=0.4)


@pytest.mark.parametrize("metric", ["gradient_norm", "hidden_abs_max", "attention_logit", "first_moment"])
def test_noise_and_a_slow_drift_are_no_alarm(metric):
    assert run(noise(2000, 0.15), metric=metric) == []
    assert run([0.1 * 1.01**step for step in range(400)], metric=metric) == []


def test_a_warm_up_is_no_alarm_since_updates_are_divided_by_the_rate():
    alarms, found = Alarms(), []
    for step in range(1, 60):
        found += alarms.see([row(step, 0.01 * step, metric="update_norm")], rate=1e-5 * step)
    assert found == []
    assert [a.rule for a in alarms.see([row(60, 6.0, metric="update_norm")], rate=6e-4)] == ["rise"]


def test_what_is_not_finite_a_saturated_attention_and_the_end_of_float16():
    assert [a.rule for a in run([1.0, math.nan, math.inf])] == ["not_finite"]
    assert [a.rule for a in run([10.0, 60.0, 70.0], metric="attention_logit")] == ["logit"]
    assert [a.rule for a in run([10.0, 2e4], metric="hidden_abs_max", half=True)] == ["fp16"]
    assert run([10.0, 2e4], metric="hidden_abs_max") == []


def test_a_dead_sublayer_and_one_apart_from_its_peers_are_named():
    dead = [row(1, 0.0 if layer == 2 else 1.0, layer=layer) for layer in range(4)]
    assert [(a.rule, a.layer) for a in Alarms().see(dead)] == [("dead", 2)]
    apart = [row(1, 100.0 if layer == 3 else 1.0, layer=layer) for layer in range(4)]
    assert [(a.rule, a.layer) for a in Alarms().see(apart)] == [("apart", 3)]
    assert Alarms().see([row(1, 10.0**layer, layer=layer) for layer in range(2)]) == []


@pytest.mark.parametrize("value", [30.0, 1 / 30])
def test_weights_apart_from_their_peers_are_named(value):
    weights = [row(1, value if layer == 2 else 1.0, layer=layer, metric="weight_norm") for layer in range(4)]
    assert [(a.rule, a.layer, a.metric) for a in Alarms().see(weights)] == [("apart", 2, "weight_norm")]
    scaled = [row(1, (layer + 1) ** -0.5, layer=layer, metric="weight_norm") for layer in range(48)]
    assert Alarms().see(scaled) == []  # a depth-scaled initializer
    kinds = [row(1, value if layer % 2 else 1.0, layer=layer, metric="weight_norm") for layer in range(9)]
    assert Alarms().see(kinds) == []  # experts in every other layer


def test_a_small_part_of_the_models_gradient_is_told_where_it_stays_up():
    def step(number, part):
        whole = row(number, math.hypot(1.0, part), sublayer="block")
        return [row(number, part), row(number, 1.0, sublayer="feed_forward"), whole]

    alarms = Alarms()
    values = [*[0.1] * 20, 1.0, *[0.1] * 20, 1.0, 1.1]  # ten times its usual, which the model does not notice
    found = [alarm for number, part in enumerate(values, 1) for alarm in alarms.see(step(number, part))]
    assert [(alarm.step, alarm.sublayer) for alarm in found] == [(43, "attention")]
    found = [*alarms.see(step(44, 0.1)), *alarms.see(step(45, 30.0))]
    assert {(alarm.step, alarm.sublayer) for alarm in found} == {(45, "attention"), (45, "block")}


def test_an_alarm_says_where_and_how_much():
    (alarm,) = run([*[1.0] * 20, 12.0], sublayer="feed_forward")
    assert describe(alarm) == "step 21, layer 1 (feed-forward): gradient norm is 12 times its recent median"


def test_a_run_of_laminas_own_raises_alarms_which_a_resumed_one_continues(trained, tiny, before_step):
    def spoil(trainer, model):
        with torch.no_grad():
            trainer.bare_model().model.layers[1].feed_forward.module.down_proj.weight.mul_(1e3)

    before_step(11, spoil)
    spoiled = {"steps": 16, "logging_steps": 1, "save_steps": 6, "divergence_patience": 100}
    trained("whole", **spoiled)
    trained("parts", **spoiled, pause_step=9)
    found = trained("parts", resume=True, **spoiled)
    assert found["status"] != "interrupted"
    whole, parts = (Path(tiny(name).output) / "alarms.jsonl" for name in ("whole", "parts"))
    assert whole.read_text() == parts.read_text()
    first = gather(whole.parent).first
    assert (first.step, first.layer, first.sublayer) == (11, 1, "feed_forward")
