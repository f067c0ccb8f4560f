"""Gains and row norms between two records: a pace that does harm is told, and no such value is written."""

import math
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from training.tiny_runs import layers
from training.watching.loops import llama, loop

from lamina.reports.signs import Signs
from lamina.training.monitor.alarms import Alarms, read_alarms
from lamina.training.monitor.gain_measures import rows_of_gains
from lamina.training.monitor.writers import BETWEEN, Row

EMBEDDING = (-1, "block", "embedding", 0)
GAIN = (1, "attention", "pre_norm", 0)


def told(values, place=GAIN, metric="gain_mean", every=20, rates=None, more=None):
    """What is told of a value of each step, of which each ``every``-th is recorded."""
    alarms, found = Alarms(), []
    for step, value in enumerate(values, 1):
        name = metric if step == 1 or step % every == 0 else f"{BETWEEN}{metric}"
        rows = [Row(step, *place, name, value), *(more(step) if more else [])]
        found += alarms.see(rows, rates and rates(step))
    return found, alarms


def falling(pace, begin=105, steps=125, value=0.9):
    return [value * (1.0 - pace) ** max(0, step - begin) for step in range(1, steps)]


@pytest.mark.parametrize(
    ("pace", "every", "said"),
    [
        (0.05, 20, [108]),  # 14 % below the past, and fast enough
        (0.018, 20, [114]),
        (0.018, 5, [114]),
        (0.05, 100, [108]),
        (0.004, 20, []),  # as healthy gains do
    ],
)
def test_a_gain_that_shrinks_fast_is_told_before_the_next_record(pace, every, said):
    begin = 405 if every == 100 else 105
    found, _ = told(falling(pace, begin, begin + 14), every=every)
    assert [alarm.step + 105 - begin for alarm in found] == said
    assert all((alarm.rule, alarm.metric, round(alarm.usual, 2)) == ("fall", "gain_mean", 0.9) for alarm in found)


def test_only_a_record_ends_an_alarm_between_records():
    """A gain that keeps shrinking, with calm steps between two records, is no new anomaly at each record."""
    paces = [0.03 if step < 118 else 0.015 * (step // 15 % 2 == 0) for step in range(101, 400)]
    gains = [1.0] * 100 + [*accumulate(paces, lambda gain, pace: gain * (1.0 - pace), initial=1.0)][1:]
    assert [alarm.step for alarm in told(gains)[0]] == [105, 280]


def test_what_usually_moves_at_this_pace_is_no_alarm():
    waves = [0.3 * math.exp(0.5 * math.sin(step / 13)) for step in range(1, 300)]
    assert told(waves, EMBEDDING, "row_norm_mean")[0] == []


@pytest.mark.parametrize(("schedule", "said"), [("constant", [108]), ("warm-up", []), (None, [108])])
def test_the_longest_row_may_grow_while_the_learning_rate_does(schedule, said):
    values = [0.3 * 1.08 ** max(0, step - 104) for step in range(1, 112)]
    rates = {"constant": lambda step: 1e-3, "warm-up": lambda step: 1e-5 * step, None: None}[schedule]
    found, _ = told(values, EMBEDDING, "row_norm_abs_max", rates=rates)
    assert [alarm.step for alarm in found] == said
    small, _ = told([value / 3 for value in values], EMBEDDING, "row_norm_abs_max")
    assert small == []


@pytest.mark.parametrize("told_at", ["a record", "between"])
def test_weights_that_shrink_are_no_consequence_of_a_gradient_shortly_before(told_at):
    """A healthy outlier of the gradient, some steps before the weights are told to shrink."""

    def more(step):
        gradient = 30.0 if step == at - 3 else 1.0
        return [Row(step, -1, "model", "all", 0, "step_gradient_norm", gradient)]

    at = 120 if told_at == "a record" else 108
    values = [0.9] * 119 + [0.5] * 5 if told_at == "a record" else falling(0.05)
    found, alarms = told(values, more=more)
    assert [(alarm.step, alarm.metric) for alarm in found] == [(at, "gain_mean")]
    assert Signs(alarms=tuple(alarms.told), rose=None).first == found[0]


@pytest.mark.parametrize("skips", [True, False])
def test_a_stream_behind_layers_that_are_left_out_by_chance_is_compared_with_its_peak(skips):
    """An OLMo 2's variance at its records: it depends on the layers that ran before it."""
    alarms, found = Alarms(), []
    for at, value in enumerate([0.03, 0.028, 1.17, 0.031, 0.03, 11.3, 0.03, 10.2, 0.03, 5000.0], 1):
        rows = [Row(20 * at, 2, "attention", "all", 0, "hidden_variance", value)]
        rows += [Row(20 * at, 1, "block", "all", 0, "not_called", 1.0)] * skips
        found += alarms.see(rows)
    assert [alarm.step for alarm in found] == ([200] if skips else [120, 160, 200])


def shrinking(model, optimizer, begin, factor):
    """Let each step of the optimizer shrink all gains."""
    steps = iter(range(1, 10**6))

    def shrink(*_):
        if next(steps) >= begin:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.mul_(factor if "norm" in name else 1.0)

    optimizer.register_step_post_hook(shrink)


def test_a_watched_loop_tells_it_between_two_records_and_writes_no_further_rows(tmp_path):
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shrinking(model, optimizer, 83, 0.95)

    def loss_of(model, batch):
        return model(input_ids=batch, labels=batch).loss

    loop(model, tmp_path / "run", optimizer=optimizer, steps=99, every=20, loss_of=loss_of)
    first = read_alarms(tmp_path / "run")[0]
    assert (first.step, first.rule, first.metric) == (85, "fall", "gain_mean")
    rows = layers(tmp_path / "run")
    gains = rows[rows["metric"].str.contains("gain|row_norm")]
    assert set(gains["metric"]) == {"gain_mean", "gain_abs_max", "row_norm_mean", "row_norm_abs_max"}
    assert set(gains["step"]) == {1, 20, 40, 60, 80}


def test_gains_of_one_size_are_measured_together_as_each_alone():
    torch.manual_seed(0)
    gains = [(layer, "attention", "pre_norm", 0, float(layer % 2), torch.randn(17 + layer // 3)) for layer in range(7)]
    gains += [(-1, "block", role, 0, 0.0, torch.randn(50, 17).bfloat16()) for role in ("embedding", "readout")]
    assert rows_of_gains(gains, 3) == [row for gain in gains for row in rows_of_gains([gain], 3)]
    assert {row[3] for row in rows_of_gains(gains, 3)} == {"pre_norm", "embedding", "readout"}
    assert rows_of_gains([(0, "attention", "scale", 0, 1.0, torch.tensor(2.0))], 1)[0][-1] == 3.0


def test_a_run_of_laminas_own_tells_it_and_a_resumed_one_goes_on(trained, tiny, before_step):
    def shrink(trainer, model):
        with torch.no_grad():
            for name, parameter in trainer.bare_model().named_parameters():
                parameter.mul_(0.93 if "norm" in name else 1.0)

    for step in range(32, 37):
        before_step(step, shrink)
    shrunk = {"steps": 36, "logging_steps": 7, "save_steps": 11}
    trained("whole", **shrunk)
    trained("parts", **shrunk, pause_step=33)
    trained("parts", resume=True, **shrunk)
    whole, parts = (Path(tiny(name).output) for name in ("whole", "parts"))
    said, again = ([one for one in read_alarms(of) if one.metric == "gain_mean"] for of in (whole, parts))
    assert said == again
    assert {alarm.step for alarm in said} == {34}


def test_a_mesh_of_two_dimensions_adds_up_only_shards(monkeypatch):
    """The processes' sums are made by hand: each group's processes have the same numbers."""
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh, gain = init_device_mesh("cpu", (2, 2)), torch.full((4,), 3.0)
        shard = DTensor.from_local(gain[:2].clone(), mesh, [Replicate(), Shard(0)])
        copy = DTensor.from_local(gain.clone(), mesh, [Replicate(), Replicate()])

        def all_reduce(values, op=distributed.ReduceOp.SUM, group=None):
            if op == distributed.ReduceOp.SUM:
                values *= group.size()

        monkeypatch.setattr(distributed, "all_reduce", all_reduce)
        gains = [(0, "attention", "pre_norm", index, 0.0, each) for index, each in enumerate((shard, copy, gain))]
        rows = rows_of_gains(gains, 1)
        assert {row[5]: row[6] for row in rows} == {"gain_mean": 3.0, "gain_abs_max": 3.0}
        assert [row[6] for row in rows] == [3.0] * 6

        def refused(*values, **options):
            raise RuntimeError("no backend for this device")

        monkeypatch.setattr(distributed, "all_reduce", refused)
        assert rows_of_gains(gains, 1) == []
    finally:
        distributed.destroy_process_group()
