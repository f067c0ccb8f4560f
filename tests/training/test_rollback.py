"""After a divergence: back to the last good checkpoint, past the data, at a lower rate, and every step of it told."""

import json
import os
import signal

import pytest
import torch
from training.tiny_runs import at_step, last_step, layers, records, result

from lamina.errors import UserError
from lamina.training import run as training
from lamina.training.checkpointing.resuming import Rollbacks
from lamina.training.optimization.order import TrainOrder
from lamina.training.settings import PretrainSettings
from lamina.training.trainer import LaminaTrainer

OPTIONS = {
    "steps": 16, "logging_steps": 1, "save_steps": 4, "eval_steps": 8, "rollback": 2,
    "trainer": {"lr_scheduler_type": "constant"}, "warmup": 0, "learning_rate": 1e-2,
}  # fmt: skip


def spoiled_data(monkeypatch, *places):
    """Blocks of these steps of the data's order make the loss NaN, whichever step trains on them."""
    seen = []
    original = LaminaTrainer.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        step = self.state.global_step + 1
        place = self.order.data_step(step)
        rate = self.optimizer.param_groups[0]["lr"]
        seen.append((step, place, rate))
        loss = original(self, model, inputs, *args, **kwargs)
        if place in places:
            self.guard.see_loss(step, float("nan"))
        return loss

    monkeypatch.setattr(LaminaTrainer, "training_step", training_step)
    return seen


def test_a_run_goes_back_leaves_out_the_data_and_lowers_the_rate(trained, tmp_path, monkeypatch, caplog):
    seen = spoiled_data(monkeypatch, 7)
    found = trained(**OPTIONS)
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


def test_after_the_last_return_the_run_has_diverged(trained, tmp_path, monkeypatch):
    seen = spoiled_data(monkeypatch, 7, 9, 11)
    found = trained(**OPTIONS)
    assert found["status"] == "diverged"
    assert [entry["learning_rate_factor"] for entry in found["rollbacks"]] == [0.5, 0.25]
    # 7 and then 9 (as step 6) spoil; the second return leaves out what the first brought in
    assert [entry["skipped"] for entry in found["rollbacks"]] == [(5, 7), (8, 9)]
    assert seen[-1][1] == 11
    assert "at step 6" in found["reason"]


def test_how_much_data_is_left_out_can_be_said(trained, monkeypatch):
    seen = spoiled_data(monkeypatch, 7)
    trained(**OPTIONS, rollback_skip=10)
    assert [(step, place) for step, place, _ in seen[7:]] == [(s, s + 10) for s in range(5, 17)]


def test_without_the_option_a_divergence_ends_the_run(trained, monkeypatch):
    spoiled_data(monkeypatch, 7)
    found = trained(**{**OPTIONS, "rollback": 0})
    assert found["status"] == "diverged"
    assert found["rollbacks"] == []


def test_a_run_that_diverged_before_its_first_checkpoint_starts_again(trained, tmp_path, monkeypatch):
    seen = spoiled_data(monkeypatch, 2)
    found = trained(**OPTIONS)
    assert found["rollbacks"][0]["step"] == 0
    assert [(step, place) for step, place, _ in seen[2:]] == [(s, s + 2) for s in range(1, 17)]
    assert {rate for *_, rate in seen[:2]} == {1e-2}
    assert {rate for *_, rate in seen[2:]} == {5e-3}, "no checkpoint is read, and the rate is lowered all the same"
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == list(range(1, 17))


def test_a_run_stopped_after_a_return_goes_on_with_it(trained, tmp_path, monkeypatch):
    """The learning rate, the data left out and the number of returns survive the process."""
    spoiled_data(monkeypatch, 7)
    trained("whole", **OPTIONS)
    with at_step(10, lambda trainer, model: os.kill(os.getpid(), signal.SIGTERM)):
        assert trained(**OPTIONS)["status"] == "interrupted"
    trained(resume=True, **OPTIONS)
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert layers(tmp_path / "run").equals(layers(tmp_path / "whole"))


def test_a_kill_right_after_the_decision_changes_nothing(trained, tmp_path, monkeypatch):
    """The return is on disk, the checkpoint of the line given up still there: it is not gone on from."""
    spoiled_data(monkeypatch, 11)
    trained("whole", **OPTIONS, divergence_patience=1)
    monkeypatch.setattr(training, "is_good", lambda state: state["step"] <= 4)  # 8 was on its way up already
    trained("whole-4", **OPTIONS)

    def die(*args):
        raise RuntimeError("pulled the plug")

    with monkeypatch.context() as patch:
        patch.setattr(training.Checkpoints, "discard_after", die)
        with pytest.raises(RuntimeError, match="plug"):
            trained(**OPTIONS)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-8").is_dir()
    trained(resume=True, **OPTIONS)
    assert records(tmp_path / "run") == records(tmp_path / "whole-4")
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
    found = trained(**{**OPTIONS, "save_steps": 2}, keep=1, divergence_patience=9)
    (told,) = found["rollbacks"]
    assert (told["step"], told["diverged_at"], told["skipped"]) == (4, 14, (5, 14))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rollback": 1}, "--save-steps"),
        ({"rollback": -1, "save_steps": 1}, "rollback: -1"),
        ({"rollback_factor": 0.0}, "rollback_factor"),
        ({"rollback_factor": 1.5}, "rollback_factor"),
        ({"rollback_skip": -1}, "rollback_skip"),
    ],
)
def test_settings_without_meaning_are_refused(changed, named):
    with pytest.raises(UserError, match=named):
        PretrainSettings(**changed)


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
