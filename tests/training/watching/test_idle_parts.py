"""Parts that learn little are a note: experts without tokens, layers far behind their own past, a rate of 0."""

import json
import random

import pytest

from lamina.training.monitor.alarms import Alarms


def seen(records, alarms=None):
    """The notes of these records, and that none is an alarm."""
    alarms = alarms or Alarms()
    for rows in records:
        assert alarms.see(rows) == []
    return alarms.notes


def gradients(step, factor, metric="gradient_norm"):
    values = [1.0, 1.2, 0.9 * factor, 1.1]
    return [(step, layer, "attention", "all", 0, metric, value) for layer, value in enumerate(values)]


@pytest.mark.parametrize(("metric", "every", "lasts"), [("gradient_norm", 1, 8), ("update_norm", 20, 3)])
def test_a_layer_that_falls_far_behind_its_past_is_a_note(metric, every, lasts):
    alarms = Alarms()
    course = [(step, 1.0 if step <= 100 else 0.01) for step in range(every, 400, every)]
    (note,) = seen((gradients(*at, metric) for at in course), alarms)
    first = next(step for step, factor in course if factor < 1)
    assert note.startswith(f"step {first + (lasts - 1) * every}: relative to the other layers, the {metric[:6]}")
    assert "layer 2 (attention)" in note
    resumed = Alarms()
    resumed.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    assert resumed.state_dict() == alarms.state_dict()


@pytest.mark.parametrize(("factor", "steps"), [(0.1, range(1, 60)), (0.1, range(30, 60)), (0.01, range(40, 47))])
def test_a_layer_that_is_behind_from_the_start_a_little_or_for_short_gets_no_note(factor, steps):
    assert seen(gradients(step, factor if step in steps else 1.0) for step in range(1, 60)) == []


def loads(step, shares):
    return [(step, 1, "feed_forward", "expert", at, "expert_load", share) for at, share in enumerate(shares)]


def test_an_expert_without_tokens_is_a_note_unless_chance_explains_it():
    alarms = Alarms()
    (note,) = seen((loads(20 * step, [0.4, 0.3, 0.0, 0.3]) for step in range(1, 20)), alarms)
    assert "no tokens to expert 2 of layer 1" in note
    draw = random.Random(0)
    few = [loads(20 * step, [draw.choice((0.0, 0.0, 0.5)) for _ in range(8)]) for step in range(1, 200)]
    ignored = Alarms()
    for rows in few:
        ignored.see(rows)
    assert ignored.notes == []
