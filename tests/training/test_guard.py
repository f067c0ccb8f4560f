"""Runs that diverge or stick: how they end, what they blame, and what going back to the last good checkpoint tells."""

import json
import math
import os
import random
import re
import signal

import pytest
import torch
from training.tiny_runs import assert_same_records, at_step, last_step, layers, records, result

from lamina.training import run as training
from lamina.training.checkpointing.resuming import Rollbacks
from lamina.training.monitor import recorder
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.writers import Row
from lamina.training.optimization.order import TrainOrder
from lamina.training.trainer import LaminaTrainer


def named(layer, sublayer) -> str:
    """A pattern for the clause that blames a sub-layer, as one indexes it."""
    return rf"layer {layer} \({sublayer.replace('_', '-')}\): .*layers\[{layer}\]"


def guard(**changed) -> DivergenceGuard:
    return DivergenceGuard(**{"margin": 1.0, "patience": 5, **changed})


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_has_diverged(loss):
    with pytest.raises(Diverged, match=f"{loss} at step 7") as caught:
        guard().see_loss(7, loss)
    assert caught.value.step == 7


def test_a_loss_above_its_best_by_the_margin_for_patience_steps_has_diverged():
    watch = guard()
    watch.see_loss(1, 2.0)
    for step in range(2, 6):
        watch.see_loss(step, 3.5)
    with pytest.raises(Diverged, match="from step 2 to 6") as caught:
        watch.see_loss(6, 3.5)
    assert (caught.value.step, caught.value.since) == (6, 2)


@pytest.mark.parametrize("patience", [5, 20])
def test_a_noisy_loss_with_a_lucky_step_has_not_diverged_but_one_that_climbs_has(patience):
    """A batch of 1: losses of 2.7, give or take 0.7, and one of 1.2."""
    draw, watch = random.Random(0), guard(patience=patience)
    for step in range(1, 400):
        watch.see_loss(step, 1.2 if step == 150 else 2.7 + 0.7 * draw.gauss(0.0, 1.0))
    climbing = ((step, 6.5 + 0.7 * draw.gauss(0.0, 1.0)) for step in range(400, 500))
    with pytest.raises(Diverged, match="more than 1 nats above its lowest level"):
        all(watch.see_loss(*pair) is None for pair in climbing)
    resumed = guard(patience=patience)
    resumed.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert resumed.state_dict() == {"guard": {**watch.state_dict()["guard"]}}
    resumed.load_state_dict({"guard": {"best": 2.0, "above_since": None, "recent": [], "left": []}})  # an older one


@pytest.mark.parametrize("loss", [lambda step: 9.0 if step % 5 else 2.0, lambda step: 2.0 if step == 1 else 2.99])
def test_a_spike_shorter_than_patience_and_a_loss_within_the_margin_are_forgiven(loss):
    watch = guard()
    for step in range(1, 60):
        watch.see_loss(step, loss(step))
    with pytest.raises(Diverged, match="above its lowest level"):  # it still looks
        all(watch.see_loss(step, 90.0) is None for step in range(60, 99))


def test_a_layer_that_broke_is_named_although_another_one_grew_harmlessly_long_before():
    """Variances of Pre-LN grow by ten early in every healthy run."""
    watch = guard()
    for step in range(1, 5):
        watch.alarms.see([Row(step, 0, "attention", "all", 0, "hidden_variance", 0.001)])
    for step in range(5, 100):
        watch.alarms.see([Row(step, 0, "attention", "all", 0, "hidden_variance", 0.02)])
        watch.see_loss(step, 2.0)
    watch.alarms.see([Row(100, 3, "feed_forward", "all", 0, "hidden_variance", math.nan)])
    with pytest.raises(Diverged, match=named(3, "feed_forward")):
        watch.see_loss(100, math.nan)


def poison(layer, sublayer):
    def act(trainer, model):
        with torch.no_grad():
            module = getattr(model.model.layers[layer], sublayer).module
            next(module.parameters()).fill_(math.nan)

    return act


def poison_gradient(layer):
    def act(trainer, model):
        weight = next(model.model.layers[layer].feed_forward.module.parameters())
        weight.register_hook(lambda gradient: gradient * math.nan)

    return act


@pytest.mark.parametrize(
    ("layer", "sublayer", "logging_steps"), [(0, "feed_forward", 10), (2, "attention", 1), (3, "feed_forward", 10)]
)
def test_a_poisoned_weight_ends_the_run_and_is_named(trained, tmp_path, before_step, layer, sublayer, logging_steps):
    before_step(5, poison(layer, sublayer))
    found = trained(num_layers=4, steps=12, eval_steps=12, logging_steps=logging_steps)
    assert found["status"] == "diverged"
    assert re.search(named(layer, sublayer), found["reason"])
    assert "at step 5" in found["reason"]
    assert result(tmp_path / "run")["status"] == "diverged"
    assert found["steps"] <= 5
    assert logging_steps > 1 or layers(tmp_path / "run").step.max() >= 4  # the records reach up to its end


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Values are read at recorded steps only, as where reading waits for the device."""
    monkeypatch.setattr(recorder, "reading_waits", lambda tensor: True)


@pytest.mark.parametrize(
    ("clip", "late", "accumulation", "layer"),
    [(1.0, False, 1, 0), (0.0, False, 2, 1), (1.0, True, 2, 0), (1.0, True, 1, 1)],
)
def test_a_poisoned_gradient_ends_the_run_and_is_named(trained, before_step, request, clip, late, accumulation, layer):
    if late:
        request.getfixturevalue("as_on_a_gpu")
    before_step(3, poison_gradient(layer))
    found = trained(steps=8, logging_steps=8, max_grad_norm=clip, gradient_accumulation=accumulation)
    assert found["status"] == "diverged"
    assert re.search(named(layer, "feed_forward"), found["reason"])
    assert ("at step 3 (Lamina read the norm at step 8)" if late else "at step 3") in found["reason"]


def test_a_weight_that_is_read_late_names_its_layer_only_where_it_can(trained, before_step, as_on_a_gpu):
    before_step(5, poison(2, "attention"))
    at_once = trained(num_layers=4, steps=12, eval_steps=12, logging_steps=1)
    assert re.search(named(2, "attention"), at_once["reason"])
    assert "at step 5" in at_once["reason"]
    before_step(5, poison(2, "attention"))
    late = trained("late", num_layers=4, steps=12, eval_steps=12, logging_steps=10)
    assert "at step 5 (Lamina read the norm at step 10)" in late["reason"]
    assert "no layer" in late["reason"]


def test_a_run_that_diverged_never_logs_a_loss_of_zero(trained, tmp_path):
    found = trained(steps=30, learning_rate=1e30, warmup=0, logging_steps=1)
    assert found["status"] == "diverged"
    assert all(r["loss"] is None or r["loss"] > 0.01 for r in records(tmp_path / "run") if "loss" in r)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    written = result(tmp_path / "run")
    assert written["eval_loss"] is None
    assert written["reason"]
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_that_climbs_above_its_best_ends_before_its_last_step(trained, before_step, tmp_path):
    def spoil(trainer, model):
        with torch.no_grad():
            model.lm_head.weight.mul_(0).add_(torch.randn_like(model.lm_head.weight) * 30)

    for step in range(10, 60):
        before_step(step, spoil)
    found = trained(steps=60, logging_steps=1, divergence_patience=6, eval_steps=60, learning_rate=1e-3)
    assert found["status"] == "diverged"
    assert "from step 10 to 15" in found["reason"]
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["diverged_since"] == 10


LEARNS = {"steps": 60, "learning_rate": 2e-2, "batch_size": 8, "logging_steps": 20, "eval_steps": 60}


def test_a_run_that_learns_is_finished(trained):
    found = trained(**LEARNS)
    assert (found["status"], found["reason"]) == ("finished", "")
    assert found["eval_loss"] < found["unigram_entropy"] - 0.1


def test_the_margin_below_the_unigram_entropy_can_be_set(trained):
    assert trained(**LEARNS, stuck_margin=50.0)["status"] in ("stuck", "short")


ROLLBACK = {
    "steps": 16, "logging_steps": 1, "save_steps": 4, "eval_steps": 8, "rollback": 2,
    "trainer": {"lr_scheduler_type": "constant"}, "warmup": 0, "learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture
def spoiled_data(before_each_pass):
    """Let blocks of some steps of the data's order make the loss NaN, whichever step trains on them."""

    def spoil(*places):
        seen = []

        def see(trainer, model, inputs):
            step = trainer.state.global_step + 1
            place = trainer.order.data_step(step)
            seen.append((step, place, trainer.optimizer.param_groups[0]["lr"]))
            if place in places:
                trainer.guard.see_loss(step, float("nan"))

        before_each_pass(see)
        return seen

    return spoil


def test_a_run_goes_back_leaves_out_the_data_and_lowers_the_rate(trained, tmp_path, spoiled_data, caplog):
    seen = spoiled_data(7)
    found = trained(**ROLLBACK)
    assert found["status"] in ("finished", "short", "stuck")
    assert found["steps"] == 16
    first, second = seen[:7], seen[7:]
    assert [(step, place) for step, place, _ in first] == [(s, s) for s in range(1, 8)]
    # step 5 takes the data after those of step 7, the last that were seen
    assert [(step, place) for step, place, _ in second] == [(s, s + 3) for s in range(5, 17)]
    assert {rate for *_, rate in first} == {1e-2}
    assert {rate for *_, rate in second} == {5e-3}
    (told,) = found["rollbacks"]
    assert told["number"] == 1
    assert (told["step"], told["diverged_at"], told["skipped"]) == (4, 7, (5, 7))
    assert told["learning_rate_factor"] == 0.5
    assert "nan" in told["reason"]
    assert "rollback 1 of 2" in caplog.text
    assert "back to step 4" in caplog.text
    folder = tmp_path / "run"  # its records hold the return, and each step once
    lines = records(folder)
    assert [r["step"] for r in lines if "loss" in r] == list(range(1, 17))
    (told,) = [r for r in lines if "rollback" in r]
    assert (told["rollback"], told["step"]) == (1, 4)
    assert lines.index(told) == max(i for i, r in enumerate(lines) if r["step"] == 4)
    assert not layers(folder).duplicated(["step", "layer", "sublayer", "role", "index", "metric"]).any()
    gone = [json.loads(line) for line in (folder / "metrics-rollback-1.jsonl").read_text().splitlines()]
    assert [r["step"] for r in gone] == [5, 6, 7]
    assert gone[-1]["diverged"]
    assert result(folder)["rollbacks"] == json.loads((folder / "rollbacks.json").read_text())


def test_after_the_last_return_the_run_has_diverged(trained, spoiled_data):
    seen = spoiled_data(7, 9, 11)
    found = trained(**ROLLBACK)
    assert found["status"] == "diverged"
    assert [entry["learning_rate_factor"] for entry in found["rollbacks"]] == [0.5, 0.25]
    # 7 and then 9 (as step 6) spoil; the second return leaves out what the first brought in
    assert [entry["skipped"] for entry in found["rollbacks"]] == [(5, 7), (8, 9)]
    assert seen[-1][1] == 11
    assert "at step 6" in found["reason"]


def test_how_much_data_is_left_out_can_be_said(trained, spoiled_data):
    seen = spoiled_data(7)
    trained(**{**ROLLBACK, "steps": 8}, rollback_skip=10)
    assert [(step, place) for step, place, _ in seen[7:]] == [(s, s + 10) for s in range(5, 9)]


def test_a_run_that_diverged_before_its_first_checkpoint_starts_again(trained, tmp_path, spoiled_data):
    seen = spoiled_data(2)
    found = trained(**ROLLBACK)
    assert found["rollbacks"][0]["step"] == 0
    assert [(step, place) for step, place, _ in seen[2:]] == [(s, s + 2) for s in range(1, 17)]
    assert {rate for *_, rate in seen[:2]} == {1e-2}
    assert {rate for *_, rate in seen[2:]} == {5e-3}, "no checkpoint is read, and the rate is lowered all the same"
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == list(range(1, 17))


def test_a_run_stopped_after_a_return_goes_on_with_it(trained, tmp_path, spoiled_data):
    """The learning rate, the data left out and the number of returns survive the process."""
    spoiled_data(7)
    trained("whole", **ROLLBACK)
    with at_step(10, lambda trainer, model: os.kill(os.getpid(), signal.SIGTERM)):
        assert trained(**ROLLBACK)["status"] == "interrupted"
    trained(resume=True, **ROLLBACK)
    assert_same_records(tmp_path / "run", tmp_path / "whole")


def test_a_kill_right_after_the_decision_changes_nothing(trained, tmp_path, spoiled_data, monkeypatch):
    """The return is on disk, the checkpoint of the line given up still there: it is not gone on from."""
    spoiled_data(11)
    monkeypatch.setattr(training, "is_good", lambda state: state["step"] <= 4)  # 8 was on its way up already
    trained("whole", **ROLLBACK)

    def die(*args):
        raise RuntimeError("pulled the plug")

    with monkeypatch.context() as patch:
        patch.setattr(training.Checkpoints, "discard_after", die)
        with pytest.raises(RuntimeError, match="plug"):
            trained(**ROLLBACK)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-8").is_dir()
    trained(resume=True, **ROLLBACK)
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert last_step(tmp_path / "run") == 16


def test_the_last_good_checkpoint_is_not_pruned(trained, tmp_path, monkeypatch):
    """The loss stays up long before the guard gives up, and checkpoints are taken meanwhile."""
    original = LaminaTrainer.training_step

    def training_step(self, model, *args, **kwargs):
        loss = original(self, model, *args, **kwargs)
        if self.order.data_step(self.state.global_step + 1) in range(6, 15):
            loss = loss + 5.0
        return loss

    monkeypatch.setattr(LaminaTrainer, "training_step", training_step)
    found = trained(**{**ROLLBACK, "save_steps": 2}, keep=1, divergence_patience=9)
    (told,) = found["rollbacks"]
    assert (told["step"], told["diverged_at"], told["skipped"]) == (4, 14, (5, 14))


def test_the_order_of_data_is_every_block_once_a_turn_for_any_number_of_processes():
    options = {"steps": 7, "batch_size": 4, "gradient_accumulation": 2, "seed": 3}
    one = list(TrainOrder(11, **options))
    turns = torch.tensor(one).flatten()
    assert sorted(turns[:11].tolist()) == sorted(turns[11:22].tolist()) == list(range(11))
    assert turns[:11].tolist() != turns[11:22].tolist()
    parts = [list(TrainOrder(11, **options, rank=rank, size=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == one
    assert list(TrainOrder(11, **options, done=3)) == one[6:]


def test_jumps_leave_out_what_was_seen_and_never_bring_it_back(tmp_path):
    rollbacks = Rollbacks(folder=tmp_path)
    rollbacks.add(step=4, diverged_at=7, reason="", factor=0.5, skip=None)
    rollbacks.add(step=8, diverged_at=12, reason="", factor=0.5, skip=2)
    order = TrainOrder(100, steps=20, batch_size=1, skips=Rollbacks.read(tmp_path).skips)
    assert [order.data_step(step) for step in (4, 5, 8, 9)] == [4, 8, 11, 14]
    rollbacks.add(step=4, diverged_at=10, reason="", factor=0.5, skip=None)
    order = TrainOrder(100, steps=20, batch_size=1, skips=rollbacks.skips)
    assert [order.data_step(step) for step in (4, 5, 6)] == [4, 16, 17]
