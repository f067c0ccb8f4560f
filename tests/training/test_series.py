"""Every step's loss and gradient norm, whatever the interval of the records, and the spikes among them."""

import math

import pytest
import torch
from torch.nn.utils import get_total_norm
from training.tiny_runs import layers, records, result
from transformers import Trainer

from lamina.probes.engine.spikes import surges
from lamina.training.monitor.writers import LOSS, NORM, LayersWriter, StepSeries, spike_columns


def series(folder, metric) -> dict[int, float]:
    table = layers(folder)
    rows = table[table.metric == metric]
    assert rows.step.is_unique
    return dict(zip(rows.step, rows.value, strict=True))


@pytest.mark.parametrize(("accumulation", "clip"), [(1, 1.0), (2, 0.0)])
def test_each_step_has_its_own_loss_and_norm_before_clipping(trained, tmp_path, monkeypatch, accumulation, clip):
    norms, name = {}, "_clip_grad_norm" if clip else "_get_grad_norm"
    original = getattr(Trainer, name)

    def method(self, model, *args, **kwargs):
        norms[self.state.global_step + 1] = get_total_norm([p.grad for p in model.parameters()]).item()
        return original(self, model, *args, **kwargs)

    monkeypatch.setattr(Trainer, name, method)
    trained(steps=7, logging_steps=3, gradient_accumulation=accumulation, max_grad_norm=clip)
    assert series(tmp_path / "run", NORM) == pytest.approx(norms, rel=1e-6)
    losses, before = series(tmp_path / "run", LOSS), 0
    assert sorted(losses) == sorted(norms) == [*range(1, 8)]
    for record in records(tmp_path / "run"):
        if "loss" in record:  # a record's loss is the mean since the one before
            steps = range(before + 1, record["step"] + 1)
            assert sum(losses[s] for s in steps) / len(steps) == pytest.approx(record["loss"], rel=1e-6)
            before = record["step"]
    assert before >= 6


def test_a_step_that_the_scaler_skipped_has_a_loss_and_no_norm():
    found = StepSeries()
    for step in (1, 2, 3):
        found.add_loss(torch.tensor(float(step)))
        found.add_norm(torch.tensor(math.inf if step == 2 else 1.0))
        found.end_step(step, skipped=step == 2)
    rows = found.rows()
    assert [(row[0], row[6]) for row in rows if row[5] == LOSS] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [row[0] for row in rows if row[5] == NORM] == [1, 3]
    assert found.rows() == []


def test_a_rare_record_keeps_its_steps_in_order(monkeypatch):
    monkeypatch.setattr("lamina.training.monitor.writers._CHUNK", 4)
    found = StepSeries()
    for step in range(1, 12):
        found.add_loss(torch.tensor(float(step)))
        found.end_step(step)
    assert [(row[0], row[6]) for row in found.rows()] == [(step, float(step)) for step in range(1, 12)]


def test_spikes_are_counted_over_all_steps(tmp_path):
    writer = LayersWriter(tmp_path)
    values = [1.0 + 0.01 * (step % 3) for step in range(1, 101)]
    values[49], values[79] = 5.0, math.nan
    writer.add((step, -1, "model", "all", 0, LOSS, value) for step, value in enumerate(values[:60], start=1))
    writer.flush()
    writer.add((step, -1, "model", "all", 0, LOSS, value) for step, value in enumerate(values[60:], start=61))
    writer.add((step, -1, "model", "all", 0, NORM, 1.0) for step in range(1, 101))
    writer.add([(1, 0, "attention", "all", 0, "hidden_abs_max", 1e9)])
    writer.flush()
    found = {"loss_spikes": 2, "loss_spike_score": 0.02, "gradient_spikes": 0, "gradient_spike_score": 0.0}
    assert spike_columns(tmp_path) == {**found, "loss_surges": 2, "gradient_surges": 0}


def test_a_surge_is_measured_by_the_twenty_steps_before():
    falling = [100.0 * 0.8**step for step in range(40)]
    falling[15] *= 4
    assert surges(falling).nonzero()[0].tolist() == []  # the median lies ten steps back, where the series was higher
    level = [1.0] * 10 + [3.1, 1.0, 2.9, math.inf]
    assert surges(level).nonzero()[0].tolist() == [10, 13]
    assert not surges([1.0] * 9 + [50.0]).any()  # too few before it


def test_a_run_says_how_often_it_spiked_once_it_is_long_enough(trained, tmp_path, before_step):
    assert trained("short")["loss_spikes"] is None

    def shake(trainer, model):
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(200.0)

    before_step(38, shake)
    found = trained("long", steps=40, logging_steps=20, divergence_margin=1e6)
    assert found["loss_spikes"] >= 1
    assert found["gradient_spikes"] >= 1
    assert found["loss_spike_score"] == found["loss_spikes"] / 40
    assert result(tmp_path / "long")["gradient_spike_score"] == found["gradient_spikes"] / 40


def test_the_loss_that_ended_a_run_is_among_them(trained, tmp_path, before_step):
    def spoil(trainer, model):
        with torch.no_grad():
            model.get_output_embeddings().weight.fill_(math.nan)

    before_step(36, spoil)
    found = trained(steps=40, logging_steps=40)
    assert (found["status"], found["loss_spikes"]) == ("diverged", 1)
    assert math.isnan(series(tmp_path / "run", LOSS)[36])
