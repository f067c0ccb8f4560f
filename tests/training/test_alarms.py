"""The alarms: what leaves is named once, and what changes as healthy training does is not."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lamina.reports.diagnosis import gather
from lamina.training.monitor.alarms import Alarms, describe, events, place_of, read_alarms
from lamina.training.monitor.pasts import PASTS
from lamina.training.monitor.rules import calibration, limits
from lamina.training.monitor.writers import Row

LASTS = math.floor(limits()["rise/gradient_norm"]) + 1  # steps in a row at which a gradient is told


def row(step, value, *, layer=1, sublayer="attention", metric="gradient_norm", role="all"):
    return Row(step, layer, sublayer, role, 0, metric, value)


def outside(step, value, role="model", **place):
    return row(step, value, layer=-1, sublayer="block", role=role, **place)


def told(records, alarms=None):
    """What is said of records, each a list of rows."""
    alarms = alarms or Alarms()
    return [alarm for rows in records for alarm in alarms.see(rows)]


def resumed(alarms):
    """The same alarms from what a checkpoint holds of them."""
    again = Alarms()
    again.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    assert again.state_dict() == alarms.state_dict()
    return again


def run(values, every=1, half=False, vocabulary=None, **kind):
    """What is told of one series."""
    records = ([row(every * at, value, **kind)] for at, value in enumerate(values, 1))
    return told(records, Alarms(half=half, vocabulary=vocabulary))


def noise(count, spread=0.3):
    draw = random.Random(0)
    return [math.exp(draw.gauss(0.0, spread)) for _ in range(count)]


def losses_of(classes):
    """As a tiny Hiera's, of two classes, which falls from 0.7 to 0.25 within 12 steps."""
    draw, shares = random.Random(1), [1.0] * 40 + [1.0 - 0.055 * step for step in range(13)] + [0.34] * 30
    return [math.log(classes) * share + 0.02 * draw.gauss(0.0, 1.0) for share in shares]


# A healthy OLMo 2 under LayerDrop, which learns nothing in the first 25 steps of its warm-up
FALLS = [5.34, 5.25, 5.4, 5.16, 5.09, 5.14, 5.1, 5.04, 4.92, 4.95, 4.84, 4.8, 4.7, 4.65, 4.53, 4.54, 4.43, 4.33]
LEARNS = [*(5.5 + 0.05 * math.log(each) for each in noise(27, 1.0)), *FALLS, 4.2, 4.22, 4.09, 3.95, 4.25, 3.93]
BY_HEART = [0.7, 0.43, 0.36, 0.34, 0.32, 0.32, 0.34, 0.34, 0.37, 0.42, 0.48, 0.63]  # a healthy Llama's embedding
FROM_ZERO = [0.0, 0.0006, 0.0026, 0.008, 0.016, 0.047, 0.08, 0.19, 0.31, 0.42, 0.51, 0.58, 0.61]  # Gemma 2's last norm
ROWS = [*[0.195] * 6, 0.2, 0.21, 0.29, 0.35, 0.42, 0.45, 0.47]  # of a healthy GPT-2's embedding
GROWN = [0.06 * 1.5**record for record in range(16)]  # to 26, as with Muon's usual rates
WHOLE, EVERY_20TH = {"layer": -1, "sublayer": "block"}, {"every": 20}
LARGEST, LOGIT, GAIN = ({"metric": name} for name in ("hidden_abs_max", "attention_logit", "gain_mean"))
MEAN_ROW = {**WHOLE, "role": "embedding", "metric": "row_norm_mean"}
VARIANCE, HEAD = {"metric": "hidden_variance"}, {**WHOLE, "role": "readout", "metric": "row_norm_abs_max"}
READOUT = {**WHOLE, **EVERY_20TH, "role": "readout", "metric": "weight_norm"}
LONGEST, LOSS = {**MEAN_ROW, "metric": "row_norm_abs_max"}, {**WHOLE, "role": "model", "metric": "step_loss"}
MANYFOLD = [0.16 * 13.0 ** (at / 7) for at in range(8)]
KEPT, FIRST = {**WHOLE, "metric": "kept_gradient"}, {**WHOLE, "metric": "step_loss", "vocabulary": 256}
COURSES = {  # of one series each: its values, what else is so, and (step, rule) of what is told
    "a rise": ([*noise(40), 50.0, 60.0, *noise(10), 55.0], LARGEST, [(41, "rise"), (53, "rise")]),
    "a gradient that grows at the start": ([*BY_HEART, 1.33, 1.9, 1.47, 3.16, 2.0, 3.15, 3.86, 3.03, 4.15], {}, []),
    "a gradient that jumps": ([*BY_HEART, *[0.6] * 20, *([6.0, 8.0, 7.0] * LASTS)[:LASTS]], {}, [(33, "rise")]),
    "a stream that grows from nothing and stays": ([*GROWN, *[GROWN[-1]] * 5], LARGEST, []),
    "a stream that grows on": ([GROWN[-1] * 1.5**record for record in range(16)], LARGEST, [(9, "rise")]),
    "what is not finite": ([1.0, math.nan, math.inf], {}, [(2, "not_finite")]),
    "a saturated attention": ([10.0, 60.0, 700.0], LOGIT, [(3, "logit")]),  # 60: at high rates
    "logits that begin large": ([70.0, 100.0, 400.0, 600.0], LOGIT, [(4, "logit")]),
    "an attention that begins saturated": ([400.0], LOGIT, [(1, "logit")]),
    "the end of float16": ([10.0, 2e4], {**LARGEST, "half": True}, [(2, "fp16")]),
    "the end of float16, in another type": ([10.0, 2e4], LARGEST, []),
    "gains that shrink": ([0.9 * 0.7**at for at in range(1, 14)], GAIN | EVERY_20TH, [(120, "fall")]),
    "gains that shrink a little": ([0.9 * 0.98**at for at in range(1, 14)], GAIN | EVERY_20TH, []),
    "rows that grew and then shrink": ([*ROWS, 0.22, 0.18], MEAN_ROW | EVERY_20TH, [(20 * len(ROWS) + 20, "fall")]),
    "rows that grew and stay": ([*ROWS, 0.46, 0.45, 0.44], MEAN_ROW | EVERY_20TH, []),
    "rows that fall as often as they rise": ([0.3, 0.45] * 12, MEAN_ROW | EVERY_20TH, []),
    "a small variance that doubles": ([1e-4 * 2.0**at for at in range(1, 12)], VARIANCE | EVERY_20TH, []),
    "a large variance that doubles": ([3.0 * 2.0**at for at in range(1, 12)], VARIANCE | EVERY_20TH, [(200, "rise")]),
    "weights that start at zero": (FROM_ZERO, READOUT, []),
    "weights that start small": (FROM_ZERO[1:], READOUT, [(120, "rise")]),
    "a gradient that is not set to zero": ([0.6 * (step > 5) for step in range(1, 9)], KEPT, [(6, "kept")]),
    "a head that starts near zero": ([0.01 * 1.3**at for at in range(11)], HEAD | EVERY_20TH, []),
    "a head that does not": ([0.5 * 1.3**at for at in range(11)], HEAD | EVERY_20TH, [(220, "rise")]),
    "a short row of an embedding that grows manyfold": (MANYFOLD, LONGEST | EVERY_20TH, []),
    "a long one": ([0.3 / 0.16 * length for length in MANYFOLD], LONGEST | EVERY_20TH, [(160, "rise")]),
    "a loss of two classes that falls at once": (losses_of(2), LOSS, []),
    "a loss of many classes that does": (losses_of(1000), LOSS, [(47, "fall")]),
    "a loss near chance that begins to fall": (LEARNS, {**LOSS, "vocabulary": 256}, []),
    "a first loss near that of guessing": ([5.7], FIRST, []),
    "a first loss far above it": ([40.0], FIRST, [(1, "guess")]),
}


@pytest.mark.parametrize("name", COURSES)
def test_what_leaves_its_course_is_told_once(name):
    values, kind, said = COURSES[name]
    assert [(alarm.step, alarm.rule) for alarm in run(values, **kind)] == said


def test_a_resumed_run_knows_its_layers_first_logits():
    alarms = Alarms()
    assert told([[row(1, 70.0, metric="attention_logit")]], alarms) == []
    assert told([[row(2, 400.0, metric="attention_logit")]], resumed(alarms)) == []


def test_an_alarm_says_where_and_how_much():
    (alarm,) = run([*[1.0] * 20, *[12.0] * LASTS], sublayer="feed_forward")
    assert describe(alarm) == "step 21, layer 1 (feed-forward): the gradient norm is 12 times its recent median"
    (kept,) = run([0.0, 0.0, 0.6], **KEPT)
    assert "your code did not set the gradient to zero" in describe(kept)


@pytest.mark.parametrize("metric", ["gradient_norm", "hidden_abs_max", "attention_logit", "first_moment"])
def test_noise_and_a_slow_drift_are_no_alarm(metric):
    assert run(noise(2000, 0.15), metric=metric) == []
    assert run([0.1 * 1.01**step for step in range(400)], metric=metric) == []


def test_a_series_may_go_further_where_records_are_further_apart():
    steps, norms = [1, 2, 4, 7, 11, 50], [10.0, 10.1, 10.3, 10.6, 11.1, 20.0]  # a warm-up's, then every 50th
    alarms = Alarms()
    assert told(([row(*at, metric="weight_norm")] for at in zip(steps, norms, strict=True)), alarms) == []
    assert [(a.rule, a.step) for a in run(norms, metric="weight_norm")] == [("rise", 6)]
    for each in (resumed(alarms), alarms):
        assert each.see([row(100, 28.0, metric="weight_norm")]) == []


def test_a_step_that_comes_twice_is_judged_as_two_values():
    norms = [(1, 10.0), (2, 10.1), (3, 10.2), (3, 10.3), (4, 10.3), (5, 10.4)]
    assert told([row(*at, metric="weight_norm")] for at in norms) == []


def test_the_page_says_how_often_in_a_row_a_gradient_must_stand_out():
    page = " ".join((Path(__file__).parents[2] / "docs" / "evidence" / "alarms.md").read_text().split())
    words = dict(enumerate(("three", "four", "five", "six", "seven", "eight", "nine"), 3))
    model = words[math.floor(limits()["rise/step_gradient_norm"]) + 1]
    assert f"raises an alarm if it is unusual {words[LASTS]} times in a row. The gradient of the whole model" in page
    assert f" {model} times" in page.partition("The gradient of the whole model")[2][:80]


def test_a_warm_up_is_no_alarm_since_updates_are_divided_by_the_rate():
    alarms, found = Alarms(), []
    for step in range(1, 60):
        found += alarms.see([row(step, 0.01 * step, metric="update_norm")], rate=1e-5 * step)
    assert found == []
    assert [a.rule for a in alarms.see([row(60, 6.0, metric="update_norm")], rate=6e-4)] == ["rise"]


@pytest.mark.parametrize("estimates", [True, False])
def test_while_an_optimizer_raises_its_own_rate_weights_may_move_far(estimates):
    """As under Prodigy: its estimate doubles at each step, and stays level from step 16 on."""
    alarms, found = Alarms(), []
    for step in range(1, 81):
        part = min(1.0, 2.0 ** (step - 16))
        rate = outside(step, 0.01 * part, metric="rate_estimate", role="all")
        ratio = 0.3 if step == 70 else 0.25 * part * 0.9 ** max(0, step - 16)
        rows = [row(step, ratio, metric="update_ratio"), row(step, 1.0, metric="update_norm")]
        rows += [row(step, 1.0 + 20 * part, metric=metric) for metric in ("weight_norm", "hidden_variance")]
        found += alarms.see([*rows, rate] if estimates else rows)
    first = [(70, "rewritten")]
    said = [(alarm.step, alarm.rule) for alarm in found]
    assert said == first if estimates else (15, "rewritten") in said and (16, "rise") in said
    assert len(alarms.notes) == estimates
    resumed(alarms)


def test_parameters_that_stay_without_a_gradient_are_named_from_the_first_record_on():
    alarms = Alarms()
    records = [steady(step, **({} if step in (20, 60) else {"without_gradient": 1.0})) for step in range(20, 161, 20)]
    (first,) = told(records, alarms)
    assert (first.step, first.rule, first.layer, first.metric) == (80, "dead", 1, "without_gradient")
    assert "1 of the layer's parameters get no gradient" in describe(first)


def gradients(step, dead=(), layers=4, left_out=(), readout=1.0):
    rows = [row(step, 0.0 if layer in dead else 1.0, layer=layer) for layer in range(layers)]
    skipped = [row(step, 1.0, layer=layer, metric="not_called") for layer in left_out]
    return [*rows, *skipped, row(step, readout, layer=-1, sublayer="block", role="readout")]


@pytest.mark.parametrize(
    ("dead", "steps", "said"),
    [
        ((2,), 4, []),
        ((2,), 20, [("dead", 2, 1)]),
        (range(4), 40, [("dead", -1, 1)]),
        ((1, 2, 3), 40, [("dead", -1, 1)]),
    ],
)
def test_sublayers_without_a_gradient_are_named_once_it_is_no_chance(dead, steps, said):
    found = told(gradients(step, dead) for step in range(1, steps))
    assert [(alarm.rule, alarm.layer, alarm.step) for alarm in found] == said
    assert "no layer gets a gradient" in describe(replace(found[0], layer=-1)) if found else True


def test_a_loss_without_any_gradient_is_no_dead_layer():
    assert told(gradients(step, range(4), readout=0.0) for step in range(1, 60)) == []


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_layers_that_are_left_out_or_switched_off_by_chance_are_not_dead_but_those_that_stay_so_are(share):
    draw, alarms = random.Random(0), Alarms()
    by_chance = [[layer for layer in range(4) if draw.random() < share] for _ in range(3000)]
    assert told((gradients(step, dead) for step, dead in enumerate(by_chance, 1)), alarms) == []
    later = [gradients(step, {2, *dead}) for step, dead in enumerate(by_chance[:60], 3001)]
    assert {(alarm.rule, alarm.layer) for alarm in told(later, alarms)} == {("dead", 2)}
    never = [gradients(step, [1], left_out=[1]) for step in range(1, 200)]
    assert told(never) == []


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_an_update_is_compared_with_those_of_layers_that_were_not_switched_off(gradient):
    rows = [row(1, 1.0 if layer in (1, 2) else gradient, layer=layer) for layer in range(6)]
    rows += [row(1, 0.08 if layer in (1, 2) else 1e-3, layer=layer, metric="update_ratio") for layer in range(6)]
    assert {alarm.layer for alarm in told([rows])} == ({1, 2} if gradient else set())


@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize(
    ("metric", "values", "stays"),
    [
        ("step_gradient_norm", [12.6, 0.7, 4.8, 4.8, 71.7, 5.6, 4.2, 1.0], 90.0),
        ("step_loss", [0.9, 0.7, 3.8, 1.0, 0.8, 2.5, 0.7, 0.9], 3.0),
    ],
)
def test_where_layers_are_left_out_by_chance_only_what_is_above_all_before_counts(left_out, metric, values, stays):
    """As a Llama's gradient norm under LayerDrop, and a GPT-2's loss (less 2) under stochastic depth."""
    values = [*(0.7 * value for value in noise(60, 0.1)), *values]
    for later, rings in (([], not left_out), ([stays] * 12, True)):
        series = enumerate([*values, *later], 1)
        steps = [[row(at, value, layer=-1, sublayer="model", metric=metric)] for at, value in series]
        steps[9] += [row(10, 1.0, metric="not_called")] * left_out
        assert bool(told(steps)) == rings


@pytest.mark.parametrize(("left_out", "factor", "rings"), [(True, 2.1, False), (False, 2.1, True), (True, 9.0, True)])
def test_an_update_may_be_larger_where_layers_are_left_out_by_chance(left_out, factor, rings):
    """As in a Qwen3 under LayerDrop: how often a layer ran since the last record decides the size of its update."""
    values = [*noise(30, 0.05), factor]
    steps = [[row(20 * at, value, metric="update_norm")] for at, value in enumerate(values, 1)]
    steps[9] += [row(200, 1.0, metric="not_called")] * left_out
    assert bool(told(steps)) == rings


def test_series_start_anew_where_other_parameters_are_trained():
    for changed, said in (([], [26]), ([row(26, 9.0, metric="trained_changed")], [])):
        steps = [[row(step, 1.0 if step <= 25 else 30.0)] for step in range(1, 40)]
        steps[25] += changed
        assert [alarm.step for alarm in told(steps)] == said


@pytest.mark.parametrize(("changed", "said"), [(False, ["fall", "rise"]), (True, [])])
def test_what_begins_to_be_trained_may_grow_and_let_the_loss_fall(changed, said):
    """As a GPT-2's embedding, frozen until step 80: the loss falls by 0.8, and the weight norm nearly doubles."""
    draw, steps = random.Random(1), []
    for step in range(1, 121):
        loss = 5.3 + 0.02 * draw.gauss(0.0, 1.0) - 0.12 * max(0, step - 80)
        steps.append([row(step, loss, layer=-1, sublayer="model", metric="step_loss")])
        if step % 20 == 0:
            steps[-1].append(outside(step, 3.0 if step <= 80 else 5.7, role="embedding", metric="weight_norm"))
    if changed:
        steps[79].append(outside(80, 1.0, role="embedding", metric="trained_changed"))
    assert sorted(alarm.rule for alarm in told(steps)) == said


@pytest.mark.parametrize("metric", ["gradient_norm", "hidden_variance"])
@pytest.mark.parametrize(("layers", "said"), [(1, [0]), (6, [])])
def test_all_series_start_anew_where_many_other_parameters_are_trained(layers, said, metric):
    """Layer 0, which was trained before, rises with what is trained from step 30 on."""
    alarms, found = Alarms(), []
    for step in range(1, 45):
        high = 36 if metric == "gradient_norm" else 31
        rows = [row(step, 30.0 if step >= high else 1.0, layer=0, metric=metric)]
        rows += [row(step, 1.0, layer=layer, metric="weight_norm") for layer in range(8)]
        changed = [row(step, 9.0, layer=layer, metric="trained_changed") for layer in range(1, 1 + layers)]
        found += alarms.see([*rows, *(changed if step == 30 else [])])
    assert [alarm.layer for alarm in found] == said


def scheduled(rates, rows=lambda step: [], alarms=None):
    """The steps and series of a run whose learning rate has this course."""
    alarms = alarms or Alarms()
    found = [alarm for step, rate in enumerate(rates, 1) for alarm in alarms.see([row(step, 1.0), *rows(step)], rate)]
    return [(alarm.step, alarm.metric) for alarm in found]


WARM_UP = [1e-5 * step for step in range(1, 101)]
SCHEDULES = {  # learning rates, and where an alarm is due
    "a warm-up and a plateau": ([*WARM_UP, *[1e-3] * 50], []),
    "restarts of a cosine": ([*WARM_UP[::5], *[5e-4 * (1 + math.cos(step / 20 * math.pi)) for step in range(60)]], []),
    "twice as high after a rest": ([*WARM_UP, *[1e-4] * 20, *[2e-3] * 20], []),
    "a finder of rates": ([1e-6 * 1.1**step for step in range(100)], []),
    "8 times at once": ([*WARM_UP, 9e-4, *[8e-3] * 60], [102]),
    "a ramp after a plateau": ([*[1e-3] * 40, *[1e-3 * 1.1**step for step in range(30)]], [56]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_learning_rate_far_above_its_highest_is_told_once(name):
    rates, said = SCHEDULES[name]
    alarms = Alarms()
    assert scheduled(rates, alarms=alarms) == [(step, "learning_rate") for step in said]
    resumed(alarms)


def test_a_learning_rate_belongs_to_what_is_trained_and_not_to_an_optimizers_estimate():
    rates = [*WARM_UP, 9e-4, *[8e-3] * 60]
    changed = [row(102, 9.0, layer=layer, metric="trained_changed") for layer in (1, 2)]
    assert scheduled(rates, lambda step: changed if step == 102 else []) == []
    assert scheduled(rates, lambda step: [outside(step, 1e-3, metric="rate_estimate")]) == []


@pytest.mark.parametrize("metric", ["hidden_variance", "row_norm_abs_max", "weight_norm"])
@pytest.mark.parametrize(("warm_up", "said"), [(100, []), (70, []), (40, [80])])
def test_a_stream_or_weights_may_grow_at_once_while_the_learning_rate_does(warm_up, said, metric):
    """As of a Bloom that begins to learn at step 60 of 100 of its warm-up, and of heads and embeddings under SGD."""
    values = dict.fromkeys((1, *range(20, 80, 20)), 1.0) | {80: 20.0, 100: 30.0}
    found = scheduled(
        [1e-5 * min(step, warm_up) for step in range(1, 101)],
        lambda step: [row(step, values[step], metric=metric)] if step in values else [row(step, 1.0)],
        Alarms(),
    )
    assert found == [(step, metric) for step in said]


def test_the_first_updates_of_parameters_that_are_trained_from_now_on_may_be_larger_than_their_peers():
    ratios = [row(20, 0.2 if at == 2 else 0.01, layer=at, metric="update_ratio") for at in range(5)]
    assert [alarm.rule for alarm in Alarms().see(ratios)] == ["apart"]
    assert Alarms().see([*ratios, row(20, 3.0, layer=2, metric="trained_changed")]) == []


APART = [(3, 100.0, [("apart", 3)]), (0, 100.0, []), (2, 1e-3, [("low", 2)]), (4, 1e-3, [("low", 4)]), (0, 1e-3, [])]


@pytest.mark.parametrize(("layer", "value", "said"), APART)
def test_a_gradient_that_stays_apart_is_named_unless_it_is_the_first_layers(layer, value, said):
    found = told([row(step, value if at == layer else 2.0**-at, layer=at) for at in range(5)] for step in (1, 2, 3))
    assert [(alarm.rule, alarm.layer) for alarm in found] == said
    assert Alarms().see([row(1, 10.0**at, layer=at) for at in range(2)]) == []


@pytest.mark.parametrize("value", [30.0, 1 / 30])
def test_weights_apart_from_their_peers_are_named(value):
    weights = [row(1, value if layer == 2 else 1.0, layer=layer, metric="weight_norm") for layer in range(4)]
    assert [(a.rule, a.layer, a.metric) for a in Alarms().see(weights)] == [("apart", 2, "weight_norm")]
    scaled = [row(1, (layer + 1) ** -0.5, layer=layer, metric="weight_norm") for layer in range(48)]
    assert Alarms().see(scaled) == []  # a depth-scaled initializer
    kinds = [row(1, value if layer % 2 else 1.0, layer=layer, metric="weight_norm") for layer in range(9)]
    assert Alarms().see(kinds) == []  # experts in every other layer


def steady(step, **one):
    """A healthy record of a step, in which ``one`` series has another value."""
    values = {"gradient_norm": 1.0, "weight_norm": 10.0, "update_norm": 0.01, "second_moment": 1.0, **one}
    rows = [row(step, value, metric=metric) for metric, value in values.items()]
    return rows + [row(step, 0.01, layer=layer, metric="update_norm") for layer in (2, 3, 4)]


LATER = 240  # the step of a record
BREAKS = {
    "unmoved": (steady, {"update_norm": 0.0, "unmoved_parameters": 2.0}, "weights do not change"),
    "unmoved, a part": (steady, {"unmoved_parameters": 2.0}, "parameters get a gradient but do not change"),
    "written": (
        steady,
        {"written_ratio": 0.3},
        "code other than the optimizer changed the weights by 30% of their norm",
    ),
    "forgotten": (
        steady,
        {"forgotten_share": 1.0},
        "100% of the optimizer's moments were lost or overwritten between two steps",
    ),
    "apart": (steady, {"rate_ratio": 30.0}, "its learning rate is 30 times the other layers' median"),
    "fall": (steady, {"second_moment": 0.1}, "second moment is 0.1 times its recent median"),
    "rise": (steady, {"row_norm_abs_max": 9.0}, "the largest row norm is 9 times"),
}


@pytest.mark.parametrize("rule", BREAKS)
def test_what_moves_by_nothing_or_by_more_than_its_updates_is_named(rule):
    make, changed, said = BREAKS[rule]
    alarms, healthy, rule = Alarms(), dict.fromkeys(changed, 1.0) if rule == "rise" else {}, rule.partition(",")[0]
    assert told((make(step, **healthy) for step in range(20, LATER, 20)), alarms) == []
    (first, *more) = alarms.see(make(LATER, **changed))
    assert (first.step, first.rule, first.layer, more) == (LATER, rule, 1, [])
    assert said in describe(first)


OWN_RATES = {  # learning rates of their own, by part: is it an alarm?
    "muP's embedding and head": ([(-1, "embedding", 64.0), (-1, "readout", 64.0)], {}, []),
    "all layers' norms": ([(layer, "all", 64.0) for layer in (1, 2, 3, 4)], {}, []),
    "one layer": ([(1, "all", 64.0)], {}, [1]),
    "an embedding whose rows grow": ([(-1, "embedding", 64.0)], {"metric": "row_norm_abs_max"}, [-1]),
}


@pytest.mark.parametrize("name", OWN_RATES)
def test_a_rate_of_its_own_is_a_note_unless_it_is_one_layers_or_does_harm(name):
    parts, grown, said = OWN_RATES[name]
    alarms = Alarms()
    for step in range(20, LATER, 20):
        rates = [row(step, 1.0, layer=layer, metric="update_norm") for layer in (1, 2, 3, 4)]
        for layer, role, ratio in parts:
            place = {"layer": layer, "role": role, **({"sublayer": "block"} if layer < 0 else {})}
            rates.append(row(step, ratio, metric="rate_ratio", **place))
            rates += [row(step, 20.0 if step > 180 else 1.0, **place, **grown)] if grown else []
        alarms.see(rates)
    assert [alarm.layer for alarm in alarms.told if alarm.metric == "rate_ratio"] == said
    assert [alarm.metric for alarm in alarms.told][:1] == ["rate_ratio"] * bool(said)  # it comes before what it did
    assert bool(alarms.notes) == (name != "one layer")


def test_a_rate_of_its_own_is_no_cause_of_what_all_parts_share_and_rings_once():
    place = {"layer": -1, "sublayer": "block", "role": "embedding"}

    def records(others):
        for step in range(20, 480, 20):
            large = 20.0 if step in (220, 320, 420) else 1.0
            rows = [row(step, large if others else 1.0, layer=at, metric="update_norm") for at in (1, 2, 3, 4)]
            rows.append(row(step, 20.0, metric="rate_ratio", **place))
            yield [*rows, row(step, large, metric="update_norm", **place)]

    assert "rate_ratio" not in [alarm.metric for alarm in told(records(True))]
    assert [alarm.step for alarm in told(records(False)) if alarm.metric == "rate_ratio"] == [220]


def test_what_a_loop_writes_from_the_start_on_is_its_own_way_and_so_is_a_mean_of_all_weights():
    alarms = Alarms()
    scaled = [steady(step, written_ratio=0.05) for step in range(20, LATER, 20)]  # each step's weights, to a length
    averaged = [row(LATER, 0.025, layer=layer, metric="written_ratio") for layer in (1, 2, 3, 4)]
    assert told([*scaled, [*steady(LATER), *averaged], steady(LATER + 20, written_ratio=0.25)], alarms) == []
    assert [alarm.layer for alarm in alarms.see(steady(LATER + 40, written_ratio=0.4))] == [1]


@pytest.mark.parametrize(("away", "several", "said"), [(0.3, True, False), (0.05, True, True), (0.3, False, True)])
def test_a_way_back_of_all_weights_is_a_note_and_anything_further_an_alarm(away, several, said):
    alarms = Alarms()
    for step in range(20, LATER, 20):
        alarms.see([*steady(step), *(row(step, 10.0, layer=layer, metric="weight_norm") for layer in (2, 3, 4))])
    layers = (1, 2, 3, 4) if several else (1,)
    values = {"written_ratio": 0.3, "moved_ratio": away, "forgotten_share": 1.0}  # a loaded checkpoint's moments
    wrote = [row(LATER + 1, value, layer=layer, metric=name) for layer in layers for name, value in values.items()]
    assert bool(alarms.see(wrote)) == said
    assert bool(alarms.notes) == (several and away == 0.3) or said
    if not said:  # the model goes on from elsewhere: other gradients are its own
        assert told(([row(step, 30.0)] for step in range(LATER + 2, LATER + 20)), alarms) == []


@pytest.mark.parametrize(("before", "rings"), [(0.03, False), (0.002, True)])
def test_an_outer_momentum_carries_earlier_distances_on(before, rings):
    """As in a GPT-2 under DiLoCo: its weights moved little since the last change, and the momentum moves them far."""
    alarms = Alarms()
    for step in range(20, LATER, 20):
        alarms.see([*steady(step), *(row(step, 10.0, layer=layer, metric="weight_norm") for layer in (2, 3, 4))])
    values = [*((before, before + at / 1000) for at in range(4)), (0.003, 0.06)]  # moved, written
    for step, (moved, written) in enumerate(values, LATER + 1):
        ways = [row(step, moved, layer=layer, metric="moved_ratio") for layer in (1, 2, 3, 4)]
        wrote = [row(step, written, layer=layer, metric="written_ratio") for layer in (1, 2, 3, 4)]
        alarms = resumed(alarms)  # a checkpoint holds the distances
        found = alarms.see([*ways, *wrote])
    assert bool(found) == rings


@pytest.mark.parametrize("saves", [range(0), range(LATER, LATER + 6)])
def test_a_warm_restart_after_a_checkpoint_is_still_a_restart(saves):
    """The moments are lost in two steps in a row, and the learning rate jumps in the first of them."""
    alarms = Alarms()
    for step in range(20, LATER, 20):
        alarms.see([*steady(step), *(row(step, 10.0, layer=layer, metric="weight_norm") for layer in (2, 3, 4))], 1e-3)
    for step in range(LATER, LATER + 6):
        alarms = resumed(alarms) if step in saves else alarms
        lost = [row(step, 1.0, layer=layer, metric="forgotten_share") for layer in (1, 2, 3, 4)]
        assert alarms.see(lost if step in (LATER + 3, LATER + 4) else [], 2e-4 if step > LATER + 2 else 1e-3) == []


@pytest.mark.parametrize(("rule", "said"), [("written_ratio", [50]), ("hidden_abs_max", [47, 50])])
def test_a_single_gradient_is_not_what_left_before_weights_were_written(rule, said):
    high = ({"gradient_norm": 10.0 if at == 47 else 1.0, rule: 0.9 if at >= 50 else 0.001} for at in range(1, 60))
    found = told([*steady(at, **one), row(at, 1.0, sublayer="block")] for at, one in enumerate(high, 1))
    assert sorted({alarm.step for alarm in found}) == said


@pytest.mark.parametrize(("began", "said"), [(0.0, []), (1.0, ["rewritten"])])
def test_weights_that_began_at_zero_are_rewritten_by_their_first_updates(began, said):
    first = outside(1, began, role="readout", metric="weight_norm")  # a gain about 1, or the second matrix of LoRA
    ratio = outside(2, 0.9, role="readout", metric="update_ratio")
    second = outside(2, began + 0.1, role="readout", metric="weight_norm")
    assert [alarm.rule for alarm in told([[first], [ratio, second]])] == said


@pytest.mark.parametrize(("rate", "said"), [(1e-3, True), (1e-4, False), (3e-3, False)])
def test_a_state_that_is_lost_everywhere_is_the_models_unless_the_rate_restarts_with_it(rate, said):
    alarms = Alarms()
    for step in range(20, 120, 20):
        weights = [row(step, 1.0, layer=layer, metric="weight_norm") for layer in (2, 3, 4)]
        alarms.see([*steady(step), *weights], 1e-3)
    for step in (101, 102):  # until it is recorded
        lost = [row(step, 1.0, layer=layer, metric="forgotten_share") for layer in (1, 2, 3, 4)]
        smaller = [row(step, 0.05, layer=layer, metric="second_moment") for layer in (1, 2, 3, 4)]
        found = {(alarm.rule, alarm.sublayer) for alarm in alarms.see([*lost, *smaller], rate * step / 101)}
        assert (("forgotten", "model") in found) == (said and step == 101)
        assert said or not found
    assert any("restart" in note for note in alarms.notes) != said


@pytest.mark.parametrize(
    ("metric", "values", "said"),
    [
        ("batch_repeats", range(9), ["repeated"]),
        ("batch_repeats", [0, 1, 2, 3] * 5, []),  # each batch is taken four times
        ("label_match", [1.0] * 20 + [0.02] * 9, ["fall"]),
        ("label_match", [0.1, 0.3] * 10, []),
    ],
)
def test_a_batch_that_comes_again_and_labels_of_something_else_are_told(metric, values, said):
    found = told(
        [outside(step, 3.0, metric="step_loss"), outside(step, float(value), metric=metric)]
        for step, value in enumerate(values, 1)
    )
    assert [alarm.rule for alarm in found] == said


@pytest.mark.parametrize("noise", [0.02, 0.5])
@pytest.mark.parametrize(("moved", "rule"), [(0.0, None), (8.0, "rise"), (-30.0, "fall")])
def test_a_loss_is_judged_in_units_of_its_own_noise(noise, moved, rule):
    draw = random.Random(1)
    losses = [40.0 + noise * (draw.gauss(0.0, 1.0) + (moved if step >= 200 else 0.0)) for step in range(1, 300)]
    found = run(losses, **LOSS)
    assert [alarm.rule for alarm in found] == [rule] * (rule is not None)
    assert all(200 <= alarm.step <= 215 for alarm in found)


def test_a_loss_may_fall_while_it_is_near_chance_only():
    assert run(LEARNS, **LOSS)[0].rule == "fall"


@pytest.mark.parametrize(("loss", "vocabulary", "rings"), [(5.4, 256, False), (3.0, 256, True), (5.4, None, True)])
def test_a_gradient_may_rise_while_the_loss_is_near_chance(loss, vocabulary, rings):
    """As in a healthy GPT-2 whose embedding is trained later: its first attention begins to learn at step 43."""
    alarms, draw = Alarms(vocabulary=vocabulary), random.Random(0)
    values = [*[0.04] * 30, *[0.5] * (LASTS + 1)]
    steps = [
        [
            row(step, value * draw.uniform(0.9, 1.1)),
            row(step, math.hypot(value, 0.1), sublayer="block"),
            row(step, loss + 0.02 * draw.gauss(0.0, 1.0), **WHOLE, role="model", metric="step_loss"),
        ]
        for step, value in enumerate(values, 1)
    ]
    assert ("rise" in {alarm.rule for alarm in told(steps, alarms)}) == rings
    far = [[row(step, 5.0), row(step, 5.0, sublayer="block")] for step in range(60, 61 + LASTS)]
    assert rings or "rise" in {alarm.rule for alarm in told(far, alarms)}


def test_a_loss_that_was_told_is_not_told_again_until_its_chart_is_at_zero():
    draw, moved = random.Random(1), dict.fromkeys((*range(100, 106), 112, 113), 8.0)
    losses = [40.0 + 0.1 * (draw.gauss(0.0, 1.0) + moved.get(step, 0.0)) for step in range(1, 150)]
    assert [alarm.rule for alarm in run(losses, **LOSS)] == ["rise"]


@pytest.mark.parametrize(("skipped", "said"), [(False, ["rise"]), (True, [])])
def test_losses_of_weights_that_a_loss_scaler_left_as_they_were_say_nothing_new(skipped, said):
    alarms, found = Alarms(half=True), []
    for step in range(1, 60):
        bad = 40 <= step < 45
        norms = [] if bad and skipped else [outside(step, 1.0, metric="step_gradient_norm")]
        found += alarms.see([outside(step, 3.0 + 0.1 * (step % 3) + 2.0 * bad, metric="step_loss"), *norms])
    assert [alarm.rule for alarm in found] == said


def test_steps_that_a_loss_scaler_leaves_out_again_and_again_are_told():
    left_out = {1, 2, 9, *range(41, 60)}
    norms = ([outside(step, 1.0, metric="step_gradient_norm")] * (step not in left_out) for step in range(1, 60))
    losses = ([outside(step, 3.0, metric="step_loss"), *norm] for step, norm in enumerate(norms, 1))
    found = told(losses, Alarms(half=True))
    assert [(alarm.step, alarm.rule) for alarm in found] == [(41 + int(limits()["skipped/skipped_steps"]), "skipped")]


def loads(step, shares):
    return [Row(step, 1, "feed_forward", "expert", at, "expert_load", share) for at, share in enumerate(shares)]


def test_experts_that_are_no_longer_chosen_are_told():
    even, uneven = [0.3, 0.2, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]
    found = told(loads(step, uneven if step > 200 else even) for step in range(20, 300, 20))
    assert [(alarm.step, alarm.rule, alarm.metric) for alarm in found] == [(220, "fall", "experts_used")]


def test_every_limit_is_fitted_and_says_on_what():
    record = calibration()
    assert record["provenance"]["revision"]
    assert 0 < record["provenance"]["rate"] < 0.1
    assert {f"rise/{metric}" for metric, past in PASTS.items() if past.rises} <= set(record["limits"])
    assert {f"fall/{metric}" for metric, past in PASTS.items() if past.falls} <= set(record["limits"])


def followed(high, losses=lambda step: 2.0, part=1.0, steps=60):
    """A run whose gradient is tenfold at the steps ``high``, in one sub-layer that has a ``part`` of the model's."""
    alarms, found = Alarms(), []
    for step in range(1, steps):
        value = part * (10.0 if step in high else 1.0)
        rows = [row(step, value), row(step, math.hypot(1.0, value), sublayer="block")]
        found += alarms.see([*rows, row(step, losses(step), layer=-1, sublayer="model", metric="step_loss")])
    alarms.close()
    return [(a.step, a.sublayer) for a in found], [(a.step, a.sublayer) for a in alarms.told if a.rule == "notable"]


def test_a_gradient_that_nothing_follows_is_a_notable_batch_and_no_alarm():
    assert followed({31}) == ([], [(31, "attention")])
    assert followed({31, 32}) == ([], [(31, "attention"), (32, "attention")])
    assert followed({59}) == ([], [(59, "attention")])  # the last step
    assert followed({*range(31, 30 + LASTS)})[0] == []
    assert followed({*range(31, 31 + LASTS)})[0] == [(31, "attention"), (31, "block")]
    assert followed({31}, part=0.05) == ([], [])  # the model's gradient does not show it


def test_notable_batches_have_a_file_of_their_own_and_alarms_have_one_if_there_are_any(tmp_path):
    alarms = Alarms(folder=tmp_path)
    for step in range(1, 60):
        value = 10.0 if step == 31 else 1.0
        alarms.see([row(step, value), row(step, math.hypot(1.0, value), sublayer="block")])
    alarms.close()
    assert [path.name for path in tmp_path.iterdir()] == ["notable.jsonl"]
    assert [(alarm.step, alarm.rule) for alarm in read_alarms(tmp_path)] == [(31, "notable")]
    (tmp_path / "notable.jsonl").rename(tmp_path / "alarms.jsonl")  # as an older version wrote it
    assert [(alarm.step, alarm.rule) for alarm in read_alarms(tmp_path)] == [(31, "notable")]
    Alarms(folder=tmp_path).load_state_dict({"step": 31})
    assert [path.name for path in tmp_path.iterdir()] == ["notable.jsonl"]
    Alarms(folder=tmp_path).load_state_dict({"step": 30})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("part", "said"), [(0.02, []), (1.0, [41])])
def test_an_embeddings_gradient_is_told_where_it_is_not_a_small_part_of_the_models(part, said):
    values = [part] * 40 + [10.0 * part] * 19
    found = told(
        [row(step, 1.0, sublayer="block"), outside(step, value, role="embedding", metric="gradient_norm")]
        for step, value in enumerate(values, 1)
    )
    assert [alarm.step for alarm in found] == said


@pytest.mark.parametrize(
    ("rises", "loss", "said"),
    [
        (range(33, 60), 3.0, True),
        (range(33, 34), 3.0, False),
        (range(45, 60), 3.0, False),
        (range(32, 60), math.nan, True),
    ],
)
def test_a_gradient_that_the_loss_follows_is_an_alarm_of_its_own_step(rises, loss, said):
    found, notable = followed({31}, lambda step: loss if step in rises else 2.0)
    assert ((31, "attention") in found) == said
    assert bool(notable) != said


def test_of_values_that_are_not_finite_the_first_layers_state_is_told_before_any_gradient():
    states = [row(5, math.nan, layer=layer, metric="hidden_variance") for layer in (1, 2, 3)]
    gradients = [row(5, math.nan, layer=layer) for layer in (0, 1, 2, 3)]
    first, *_ = Alarms().see([*gradients, *states])
    assert (first.layer, first.metric) == (1, "hidden_variance")


@pytest.mark.parametrize("cut", [31, 32, 34, 50])
def test_a_checkpoint_holds_what_waits_for_what_follows_it(cut):
    whole, parts = Alarms(), Alarms()
    for step in range(1, 60):
        rows = [row(step, 10.0 if 31 <= step < 31 + LASTS or step == 45 else 1.0, layer=layer) for layer in (0, 1)]
        whole.see([*rows, row(step, 2.0, layer=-1, metric="step_loss")])
        parts.see([*rows, row(step, 2.0, layer=-1, metric="step_loss")])
        if step == cut:
            state, told = json.loads(json.dumps(parts.state_dict())), parts.told
            parts = Alarms(told=told)
            parts.load_state_dict(state)
    assert parts.told == whole.told
    assert [alarm.step for alarm in whole.told] == [31, 31]
    assert parts.state_dict() == whole.state_dict()


def test_an_event_is_told_once_by_the_series_that_left_first():
    alarms, news = Alarms(), []
    for step in range(1, 80):
        high = {10: step >= 31, 11: step in (33, 70)}
        rows = [row(step, 50.0 if up else 1.0, layer=layer, metric="hidden_abs_max") for layer, up in high.items()]
        alarms.see(rows)
        news += [alarms.news] if alarms.news else []
    assert [text.partition(" (")[0] for text in news] == ["step 31, layer 10", "step 70, layer 11"]
    assert [len(event) for event in events(alarms.told)] == [2, 1]
    first = replace(alarms.told[0], step=100, metric="gradient_norm")
    loss = replace(first, step=160, layer=-1, sublayer="model", metric="step_loss")
    assert len(events([first, loss])) == len(events([first, replace(first, step=120)])) == 1
    assert len(events([first, replace(first, step=160)])) == 2
    assert len(events([replace(first, metric="learning_rate"), replace(first, step=160)])) == 1
    weights = [replace(first, step=step, layer=3, rule="written", metric="written_ratio") for step in (120, 121)]
    assert place_of([first, *weights, loss], first) == weights[0]
    assert place_of([first, weights[1], loss], first) == first
    assert place_of([loss, first], replace(loss, step=90)) == first
    kept = replace(loss, step=90, rule="kept", metric="kept_gradient")
    assert place_of([kept, first], kept) == kept


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


def noted(records, alarms=None):
    """The notes of these records, and that none is an alarm."""
    alarms = alarms or Alarms()
    assert told(records, alarms) == []
    return alarms.notes


def behind(step, factor, metric="gradient_norm"):
    values = [1.0, 1.2, 0.9 * factor, 1.1]
    return [row(step, value, layer=layer, metric=metric) for layer, value in enumerate(values)]


@pytest.mark.parametrize(("metric", "every", "lasts"), [("gradient_norm", 1, 8), ("update_norm", 20, 3)])
def test_a_layer_that_falls_far_behind_its_past_is_a_note(metric, every, lasts):
    alarms = Alarms()
    course = [(step, 1.0 if step <= 100 else 0.01) for step in range(every, 400, every)]
    (note,) = noted((behind(*at, metric) for at in course), alarms)
    first = next(step for step, factor in course if factor < 1)
    assert note.startswith(f"step {first + (lasts - 1) * every}: relative to the other layers, the {metric[:6]}")
    assert "layer 2 (attention)" in note
    resumed(alarms)


@pytest.mark.parametrize(("factor", "steps"), [(0.1, range(1, 60)), (0.1, range(30, 60)), (0.01, range(40, 47))])
def test_a_layer_that_is_behind_from_the_start_a_little_or_for_short_gets_no_note(factor, steps):
    assert noted(behind(step, factor if step in steps else 1.0) for step in range(1, 60)) == []


def test_an_expert_without_tokens_is_a_note_unless_chance_explains_it():
    (note,) = noted(loads(20 * step, [0.4, 0.3, 0.0, 0.3]) for step in range(1, 20))
    assert "no tokens to expert 2 of layer 1" in note
    draw, ignored = random.Random(0), Alarms()
    told((loads(20 * at, [draw.choice((0.0, 0.0, 0.5)) for _ in range(8)]) for at in range(1, 200)), ignored)
    assert ignored.notes == []
