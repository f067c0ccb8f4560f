"""Healthy histories of other tools have no rise, no alarm and no cause, whatever their noise and their distance."""

import json
import random
from dataclasses import replace
from math import cos, exp, floor, pi

import pytest
from spread import rotated

import lamina
from lamina.reports.causes import Learned
from lamina.reports.diagnosis import gather
from lamina.reports.histories import import_history, read_history
from lamina.reports.histories.importing import judge
from lamina.reports.loss_course import loss_rise
from lamina.reports.signs import Signs
from lamina.training.monitor.alarms import NOTABLE, Alarm, Alarms
from lamina.training.monitor.writers import LOSS, Row

RECORDS = 300


def falling(step):
    return 2 + 3 * exp(-step / 40)


def cosine(step):
    return 3e-4 * min(1, step / 20) * (0.5 + 0.5 * cos(pi * step / RECORDS))


def averaged(draw, over=20):
    """Noise of which neighbors share most, as of a running mean."""
    whole = [draw.gauss(0, 0.15) for _ in range(RECORDS + over)]
    return lambda step: falling(step) + sum(whole[step - 1 : step - 1 + over]) / over**0.5


def restarted(step):
    return 3e-4 * (0.5 + 0.5 * cos(pi * (step % 100) / 100))


CURVES = {
    "noise 0.01": lambda draw: (lambda t: falling(t) + draw.gauss(0, 0.01), 0.15, cosine, None),
    "noise 0.1": lambda draw: (lambda t: falling(t) + draw.gauss(0, 0.1), 0.3, cosine, None),
    "noise 0.4": lambda draw: (lambda t: falling(t) + draw.gauss(0, 0.4), 0.6, cosine, None),
    "flat": lambda draw: (lambda t: 2.1 + draw.gauss(0, 0.12), 0.3, cosine, None),
    "batch 1": lambda draw: (lambda t: 2.5 + abs(draw.gauss(0, 1.0)), 0.8, cosine, None),
    "first loss 20": lambda draw: (lambda t: {1: 20.5, 2: 3.9}.get(t, 0.2 + draw.gauss(0, 0.04)), 0.4, cosine, None),
    "fine-tuning": lambda draw: (lambda t: 1.1 + exp(-t / 30) + draw.gauss(0, 0.06), 0.2, cosine, None),
    "stairs": lambda draw: (lambda t: 2 - 0.45 * floor(t / 100) + draw.gauss(0, 0.06), 0.2, cosine, 100),
    "stairs without epochs": lambda draw: (
        lambda t: 1 - 0.25 * floor(t / 100) + draw.gauss(0, 0.03), 0.2, cosine, None,
    ),
    "restarts": lambda draw: (
        lambda t: falling(t) + 0.5 * (t >= 100) * exp(-(t % 100) / 25) + draw.gauss(0, 0.05), 0.2, restarted, None,
    ),
    "spikes": lambda draw: (lambda t: falling(t) + (t % 97 == 0) + draw.gauss(0, 0.05), 0.2, cosine, None),
    "averaged": lambda draw: (averaged(draw), 0.2, cosine, None),
    "plateau": lambda draw: (
        lambda t: (5 if t < 100 else 2 + 3 * exp((100 - t) / 20)) + draw.gauss(0, 0.02), 0.2, cosine, None,
    ),
    "reward": lambda draw: (lambda t: draw.gauss(0, 0.05), 0.5, cosine, None),
}  # fmt: skip


def written(path, kind, seed, every, norms=True):
    draw = random.Random(seed)
    loss, noise, rate, epoch = CURVES[kind](draw)
    lines = []
    for record in range(1, RECORDS + 1):
        line = {"step": record * every, "loss": loss(record), "learning_rate": rate(record)}
        line |= {"grad_norm": (1 + 3 * exp(-record / 10)) * exp(draw.gauss(0, noise))} if norms else {}
        line |= {"epoch": record / epoch} if epoch else {}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(("kind", "every"), rotated(CURVES, (1, 20), every=2))
def test_a_healthy_history_has_no_alarm_and_has_not_risen(tmp_path, kind, every):
    for seed, norms in ((1, True), (2, False)):
        import_history(written(tmp_path / "h.jsonl", kind, seed, every, norms), tmp_path / "read")
        evidence = gather(tmp_path / "read")
        assert evidence.rose is None
        assert evidence.first is None


def test_stairs_name_their_epochs(tmp_path):
    found = lamina.diagnose(written(tmp_path / "h.jsonl", "stairs", 1, 20))
    said = " ".join(found.sentences)
    assert "epoch 1 at step 2000, epoch 2 at step 4000" in said
    assert "No problem found" in found.page.read_text(encoding="utf-8")


@pytest.mark.parametrize("every", [1, 5, 20, 50])
def test_a_rise_is_the_same_at_any_distance_of_records(every):
    draw = random.Random(3)
    losses = {every * t: falling(t) + draw.gauss(0, 0.2) + 2.0 * (t >= 200) for t in range(1, RECORDS + 1)}
    assert loss_rise(losses) == 200 * every
    assert loss_rise({step: loss for step, loss in losses.items() if step < 200 * every}) is None


def test_a_rate_that_jumps_in_the_record_is_the_cause(tmp_path):
    path = tmp_path / "trainer_state.json"
    log, draw = [], random.Random(0)
    for step in range(10, 2000, 10):
        broken = step >= 1000
        loss = 2 + 3 * exp(-step / 400) + draw.gauss(0, 0.03) + (min(3.0, (step - 990) / 40) if broken else 0)
        norm = exp(draw.gauss(0, 0.1)) * (8 if broken else 1)
        log.append({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": 3e-3 if broken else 1e-4})
    path.write_text(json.dumps({"log_history": log}))
    said = " ".join(lamina.diagnose(path).sentences)
    assert said.startswith("Cause: learning rate too high from step 1")
    assert "the learning rate went from 0.0001 to 0.003 at step 1000" in said
    assert "To change: restore the learning rate 0.0001 (the record shows 0.003 from step 1000)." in said
    for line in log:  # the rate came back by itself
        line["learning_rate"] = 3e-3 if 1000 <= line["step"] < 1100 else 1e-4
    path.write_text(json.dumps({"log_history": log}))
    back = " ".join(lamina.diagnose(path).sentences)
    assert "keep the learning rate 0.0001 (the record shows 0.003 until step 1090, but 0.0001 at step 1100)." in back
    assert "warm-up" not in said  # no general advice where the record decides
    assert "odds" not in said
    assert "weights were as before" not in said
    page = (tmp_path / "trainer_state.json-lamina" / "diagnosis.html").read_text(encoding="utf-8")
    assert "Learning rate too high from step 1" in page
    assert page.count("Learning rate that the run recorded.") == 1  # not once more among the other series
    path.write_text(json.dumps({"log_history": [{**line, "learning_rate": 1e-4, "grad_norm": 1.0} for line in log]}))
    lamina.diagnose(path)
    page = (tmp_path / "trainer_state.json-lamina" / "diagnosis.html").read_text(encoding="utf-8")
    other = page.partition("<summary>Other recorded series")[2]
    assert "Gradient norm that the run recorded." in other
    assert "Learning rate that the run recorded." in other


def test_a_restart_after_which_the_loss_stays_a_nat_higher_is_a_rise():
    draw = random.Random(0)
    losses = {t: 2 + draw.gauss(0, 0.05) + 1.5 * (t >= 100) for t in range(1, 150)}
    rates = {t: 3e-4 * (0.5 + 0.5 * cos(pi * (t % 100) / 100)) for t in losses}
    assert loss_rise(losses, (), rates) == 100


def layered(path, records, spike):
    """A history by layer, whose layer 2 has a gradient of its own from a record on."""
    draw = random.Random(0)
    lines = []
    for step in range(1, records + 1):
        line = {"step": step, "loss": falling(step) + draw.gauss(0, 0.05), "grad_norm": exp(draw.gauss(0, 0.1))}
        for layer in range(4):
            high = 60.0 if layer == 2 and spike <= step < spike + 20 else 1.0
            line[f"gradients/model.layers.{layer}.self_attn.q_proj.weight"] = high * exp(draw.gauss(0, 0.1))
            line[f"gradients/model.layers.{layer}.mlp.up_proj.weight"] = exp(draw.gauss(0, 0.1))
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("spike", [120, 700])
def test_of_a_long_history_the_records_around_what_is_odd_are_judged_and_say_the_same(tmp_path, monkeypatch, spike):
    history = read_history(layered(tmp_path / "h.jsonl", 900, spike))
    every, _ = judge(history)
    monkeypatch.setattr("lamina.reports.histories.importing._LONG", 100)
    some, _ = judge(history)
    assert every
    assert [(alarm.step, alarm.layer, alarm.rule) for alarm in some] == [(a.step, a.layer, a.rule) for a in every]


def test_a_hard_sign_is_not_preceded_by_a_single_gradient():
    place = {"layer": -1, "sublayer": "model", "role": "all", "metric": "step_gradient_norm", "usual": 1.0}
    rise = Alarm(step=400, rule="rise", value=9.0, **place)
    bad = Alarm(step=440, rule="not_finite", value=float("nan"), **place)
    clock = {step: step // 20 for step in range(20, 2000, 20)}
    assert Signs(alarms=(rise, bad), rose=440, clock=clock).first == bad  # two records later
    lasting = replace(rise, step=425)
    assert Signs(alarms=(lasting, bad), rose=440).first == lasting  # fifteen steps later


def test_what_is_not_recorded_is_no_evidence():
    learned = Learned()
    for _ in range(6):
        learned.see("bad batch", {"first": "rise gradient", "rate": "level", "half": "False"})
        learned.see("number range", {"first": "rise gradient", "rate": "grown", "half": "True"})
    odds = learned.odds({"first": "rise gradient", "rate": "unknown"})
    assert odds["bad batch"] == pytest.approx(odds["number range"])
    assert learned.odds({"first": "rise gradient", "rate": "level"})["bad batch"] > 0.6


@pytest.mark.parametrize("shift", [0.0, 0.3, 1.0, -0.6])
def test_a_history_of_many_records_says_the_same_as_if_all_were_judged(tmp_path, monkeypatch, shift):
    draw, lines = random.Random(5), []
    for step in range(1, 3001):
        norm = exp(draw.gauss(0, 0.15)) * (25 if 1500 <= step < 1512 else 1)
        loss = 2 + 3 * exp(-step / 400) + draw.gauss(0, 0.05) + shift * (step >= 2200)
        lines.append(json.dumps({"step": step, "loss": loss, "grad_norm": norm}))
    (tmp_path / "h.jsonl").write_text("\n".join(lines))
    history = read_history(tmp_path / "h.jsonl")
    every = judge(history)
    monkeypatch.setattr("lamina.reports.histories.importing._MANY", 100)
    seen = []
    monkeypatch.setattr("lamina.reports.histories.importing.Alarms.see", spied(seen))
    assert judge(history) == every
    assert len(seen) < 0.7 * len(history.steps)
    assert {alarm.step // 100 for alarm in every[0]} == ({15, 22} if shift > 0 else {15})


def spied(seen):
    """Return ``Alarms.see`` that notes the records which it is given."""
    whole = Alarms.see

    def see(self, rows, rate=None):
        seen.extend([1] if rows else [])
        return whole(self, rows, rate)

    return see


def log_of_few(path, rates, losses, high=()):
    """A console log with a line at every tenth step, with a high gradient in some lines."""
    lines = [
        f"step {10 * at} | loss {loss:.2f} | lr {rate:.1e} | grad norm {30.0 if at in high else 1.0}"
        for at, (rate, loss) in enumerate(zip(rates, losses, strict=True))
    ]
    path.write_text("\n".join(lines))
    return lamina.diagnose(path)


FALLING = [5.5, 4.6, 3.9, 3.7, 3.5, 3.3, 3.3, 3.2, 3.1, 3.0, 3.1, 3.0]


@pytest.mark.parametrize("after", [[3.0, 3.8, 3.5, 3.3, 3.3, 3.3, 3.4, 3.4], [3.0, 6.8, 7.5, 7.3, 7.3, 7.3, 7.4, 7.4]])
def test_a_learning_rate_that_jumps_before_the_loss_does_is_the_cause_in_few_records_too(tmp_path, after):
    """Twenty records are what a Trainer logs of 200 steps; no other series leaves its range in so few."""
    found = log_of_few(tmp_path / "run.log", [1e-3] * 12 + [5e-2] * 8, [*FALLING, *after])
    assert found.sentences[0] == (
        "Cause: learning rate too high from step 120. The record shows that the learning rate went from 0.001 to 0.05 "
        "at step 120."
    )
    assert "<title>Learning rate too high from step 120" in found.page.read_text()


def test_without_a_jump_or_after_a_schedules_restart_the_learning_rate_is_no_cause(tmp_path):
    losses = [*FALLING, 3.0, 3.8, 3.5, 3.3, 3.3, 3.3, 3.4, 3.4]
    for name, rates in (("level", [1e-3] * 20), ("restart", [5e-2] * 6 + [1e-3] * 6 + [5e-2] * 8)):
        said = " ".join(log_of_few(tmp_path / f"{name}.log", rates, losses).sentences)
        assert "Cause" not in said
        assert "The loss spiked at step 130" in said


def test_large_gradients_of_a_risen_loss_are_not_called_harmless(tmp_path):
    found = log_of_few(tmp_path / "run.log", [1e-3] * 15, [*FALLING, 6.8, 7.5, 7.3], high=(12, 13, 14))
    said = " ".join(found.sentences)
    assert "The batches of steps 120, 130, 140 had unusually large gradients." in said
    assert "The loss rose at step 120 of 140." in said


def test_alarms_look_only_at_the_alarms_of_the_same_steps(monkeypatch):
    alarms = Alarms()
    alarms.told = [
        Alarm(step=n, rule=NOTABLE, layer=0, sublayer="", role="", metric=LOSS, value=1.0, usual=1.0)
        for n in range(5000)
    ]
    seen = []
    monkeypatch.setattr("lamina.training.monitor.alarms._key", lambda alarm: seen.append(alarm) or alarm.step)
    for step in range(5000, 5100):
        alarms.see([Row(step, -1, "model", "all", 0, LOSS, 1.0)])
    assert len(seen) < 1000
