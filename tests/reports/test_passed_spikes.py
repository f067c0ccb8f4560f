"""A spike that passed is not the cause of what follows it."""

import colorsys
import json
import math
import random
import re
from dataclasses import replace

import pytest

from lamina.reports.causes import CAUSES, NOT_KNOWN, Learned, causes_of
from lamina.reports.diagnosis import Evidence, answer
from lamina.reports.pages.diagnosis import loss_chart
from lamina.reports.signs import Signs
from lamina.training.monitor.alarms import Alarm, Alarms, describe
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.writers import Row

SPIKE = 100
WHOLE = {"layer": -1, "sublayer": "model", "role": "all"}
INSIDE = {"layer": 2, "sublayer": "attention", "role": "all"}
GRADIENT = Alarm(step=SPIKE, rule="rise", metric="step_gradient_norm", value=12.0, usual=1.0, **WHOLE)
LOSS = replace(GRADIENT, step=SPIKE + 2, metric="step_loss", value=4.0, usual=3.0)
STREAM = replace(GRADIENT, step=SPIKE + 1, metric="hidden_variance", **INSIDE)
LATER = {
    "not finite": ("not_finite", "gradient_norm", INSIDE),
    "infinite loss": ("not_finite", "step_loss", WHOLE),
    "overwritten": ("written", "written_ratio", INSIDE),
    "dead": ("dead", "gradient_norm", INSIDE),
    "unmoved": ("unmoved", "update_norm", INSIDE),
    "lost state": ("forgotten", "forgotten_share", WHOLE),
    "not zeroed": ("kept", "kept_gradient", WHOLE),
    "same batch": ("repeated", "batch_repeats", WHOLE),
    "wrong labels": ("fall", "label_match", WHOLE),
    "higher rate": ("rise", "learning_rate", WHOLE),
    "shrinking gains": ("fall", "gain_mean", INSIDE),
}


def later(name, step):
    rule, metric, place = LATER[name]
    return Alarm(step=step, rule=rule, metric=metric, value=2.0, usual=1.0, **place)


def course(usual, high, until, steps=200):
    """A noisy series that is ``high`` from the spike until a step."""
    draw = random.Random(0)
    return {at: (high if SPIKE <= at < until else usual) * draw.gauss(1.0, 0.02) for at in range(1, steps)}


def signs(*alarms, loss_until=SPIKE + 3, norm_until=SPIKE + 3, **more):
    courses = {"losses": course(3.0, 4.0, loss_until), "norms": course(1.0, 12.0, norm_until)}
    return Signs(alarms=alarms, rose=SPIKE, **{**courses, **more})


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("spike", [(GRADIENT,), (LOSS,), (GRADIENT, STREAM, LOSS)])
@pytest.mark.parametrize("after", [8, 14, 20])
def test_a_hard_sign_after_a_spike_that_passed_is_not_the_spikes(name, spike, after):
    found = later(name, spike[-1].step + after)
    seen = signs(*spike, found)
    assert seen.first == found
    assert (seen.passed_spike, seen.place) == (spike[0], found)


@pytest.mark.parametrize("name", ["not finite", "dead", "shrinking gains"])
@pytest.mark.parametrize("still", ["loss_until", "norm_until"])
def test_a_spike_that_has_not_passed_explains_what_follows(name, still):
    found = later(name, SPIKE + 14)
    seen = signs(GRADIENT, LOSS, found, **{still: SPIKE + 14})
    assert seen.first == GRADIENT
    assert seen.passed_spike is None


@pytest.mark.parametrize("unknown", ["losses", "norms"])
def test_a_spike_of_which_the_end_was_not_recorded_has_not_passed(unknown):
    assert signs(GRADIENT, later("dead", SPIKE + 14), **{unknown: {}}).first == GRADIENT


def test_what_a_spike_can_leave_behind_is_the_spikes_unless_it_comes_much_later():
    grown = replace(GRADIENT, step=SPIKE + 12, metric="row_norm_abs_max", role="embedding")
    assert signs(GRADIENT, LOSS, grown).first == GRADIENT
    much_later = replace(grown, step=SPIKE + 40)
    assert signs(GRADIENT, LOSS, much_later).first == much_later
    other_spike = replace(GRADIENT, step=SPIKE + 40)
    assert signs(GRADIENT, LOSS, other_spike).first == GRADIENT  # both passed


def test_a_growing_weight_is_no_spike():
    weights = replace(GRADIENT, metric="weight_norm", **INSIDE)
    assert signs(weights, later("not finite", SPIKE + 14), norm_until=SPIKE).first == weights


def test_the_answer_names_the_spike_and_what_came_after_it():
    found = later("not finite", SPIKE + 12)
    seen = signs(GRADIENT, LOSS, found)
    about = {"rows": lambda metrics: [], "notable": (), "status": "finished", "steps": 199, "names": {}}
    evidence = Evidence(alarms=seen.alarms, rose=seen.rose, losses=seen.losses, norms=seen.norms, watched=True, **about)
    told = answer(evidence)
    assert "not finite" in told.cause[0]
    said = f"A spike at step {SPIKE} passed by itself. The first anomaly after the spike is at step {found.step}"
    assert said in " ".join(told.evidence)
    assert evidence.lead is None


@pytest.mark.parametrize("name", ["dead", "not finite"])
def test_the_message_of_a_divergence_names_the_same_alarm_as_the_page(name):
    found = later(name, SPIKE + 12)
    seen = signs(GRADIENT, LOSS, found)
    first = DivergenceGuard(margin=1.0, patience=20, alarms=Alarms(told=list(seen.alarms)))
    first.see_steps([Row(step, -1, "model", "all", 0, "step_loss", loss) for step, loss in seen.losses.items()])
    first.see_steps([Row(step, -1, "model", "all", 0, "step_gradient_norm", norm) for step, norm in seen.norms.items()])
    resumed = DivergenceGuard(margin=1.0, patience=20, alarms=Alarms(told=list(seen.alarms)))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for guard in (first, resumed):
        with pytest.raises(Diverged) as raised:
            guard.see_gradient(199, math.nan)
        assert raised.value.reason.endswith(f"the first anomaly is at {describe(seen.first)} (model.model.layers[2])")


@pytest.mark.parametrize("name", [name for name, cause in CAUSES.items() if cause.shown])
def test_a_cause_is_named_only_with_a_sign_of_what_it_does(name):
    class Sure:
        def odds(self, factors):
            return {name: 0.9, NOT_KNOWN: 0.1}

    seen = signs(replace(GRADIENT, rule="apart", metric="update_ratio", **INSIDE))
    assert [cause for cause, _ in causes_of(seen, Sure())] == [NOT_KNOWN]
    assert [cause for cause, _ in causes_of(replace(seen, view="layers"), Sure())] == [name]  # it records too little
    learned = Learned.read()
    for sign in CAUSES[name].shown:
        assert any(sign in of for of in learned.seen.values())


HUES = {"red": range(-15, 16), "orange": range(25, 46)}  # in degrees


@pytest.mark.parametrize(("rose", "marked"), [(SPIKE + 2, {"red", "orange"}), (SPIKE, {"red"}), (None, {"orange"})])
def test_a_caption_names_the_color_of_each_line_of_the_loss_chart(rose, marked, monkeypatch):
    drawn = []
    monkeypatch.setattr("lamina.reports.pages.diagnosis.figure", lambda *given: drawn.append(given) or "")
    about = {"rows": lambda metrics: [], "notable": (), "status": "finished", "steps": 199, "names": {}}
    losses = {at + (rose or SPIKE) - SPIKE: loss for at, loss in course(3.0, 4.0, 200).items()}
    evidence = Evidence(alarms=(GRADIENT,), rose=rose, losses=losses, norms=course(1.0, 12.0, 200), **about)
    loss_chart(evidence)
    ((picture, caption),) = drawn
    named = dict(re.findall(r"The (\w+) line marks the (rise|first anomaly)", caption))
    assert named == {color: {"red": "rise", "orange": "first anomaly"}[color] for color in marked}
    assert ("The first anomaly is in the same step." in caption) == (rose == SPIKE)
    lines = {int(shape["x0"]): shape["line"]["color"] for shape in picture.layout["shapes"]}
    steps = {"rise": rose, "first anomaly": SPIKE}
    for color, what in named.items():
        hue, *_ = colorsys.rgb_to_hsv(*bytes.fromhex(lines[steps[what]].removeprefix("#")))
        assert round(360 * (hue if hue < 0.9 else hue - 1)) in HUES[color]
    assert lines.keys() == {step for step in (rose, SPIKE) if step is not None}
