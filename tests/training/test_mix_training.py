"""A run on a mix: its shares in the log and the result, and that a resumed run goes on with the same blocks."""

import json

import pytest
from training.tiny_runs import cut_back, records, result, settings

from lamina.training import pretrain as pretraining
from lamina.training.optimization.order import TrainOrder
from lamina.training.trainer import LaminaTrainer


@pytest.fixture
def mix(corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("few words, other ones\n" * 200)
    return f"{corpus}:0.75,{other}:0.25", str(corpus), str(other)


@pytest.fixture
def trained(mix, tmp_path):
    def run(name="run", resume=False, **changed):
        return pretraining.pretrain(settings(mix[0], tmp_path / name, **changed), resume=resume, bar=False)

    return run


def test_the_shares_are_in_the_log_and_the_result(trained, tmp_path, mix):
    _, first, second = mix
    given = trained(steps=6, batch_size=4, logging_steps=1)
    assert given["mix"][first]["share"] == 0.75
    assert {"wanted": 0.25, "share": 0.25, "blocks": 6}.items() <= given["mix"][second].items()
    shares = [r["mix"] for r in records(tmp_path / "run") if "loss" in r]
    assert shares == [{first: 0.75, second: 0.25}] * 6
    assert result(tmp_path / "run")["mix"] == given["mix"]


def test_the_model_is_given_the_blocks_in_these_shares(trained, monkeypatch):
    seen = []
    original = LaminaTrainer.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        seen.append((inputs["input_ids"] == ord(",")).any(dim=1).sum().item())  # only the other corpus has commas
        return original(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(LaminaTrainer, "training_step", training_step)
    trained(steps=5, batch_size=4, sequence_length=64)
    assert seen == [1] * 5


def test_a_resumed_run_goes_on_with_the_same_blocks(trained, tmp_path):
    given = {"steps": 6, "save_steps": 3, "logging_steps": 1}
    whole = trained("whole", **given)
    trained("cut", **given)
    cut_back(tmp_path / "cut", 3)
    again = trained("cut", resume=True, **given)
    assert again["eval_loss"] == whole["eval_loss"]
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_what_is_seen_more_than_once_is_said(trained, tmp_path, mix, caplog):
    trained(steps=40, batch_size=16, sequence_length=64)
    (said,) = [r.getMessage() for r in caplog.records if "are seen" in r.getMessage()]
    epochs = json.loads((tmp_path / "run" / "result.json").read_text())["mix"][mix[2]]["epochs"]
    assert epochs > 1
    assert f"{mix[2]}: its blocks are seen {epochs:.2f} times" in said


def test_the_spans_are_the_blocks_that_the_steps_trained_on():
    """Against the order itself: without skips, after one, and where a second one goes back before the first."""
    for skips in ((), ((3, 2),), ((3, 2), (5, 4)), ((5, 2), (3, 4))):
        order = TrainOrder(10**9, steps=8, batch_size=2, gradient_accumulation=3, skips=skips, shuffled=False)
        blocks = [i for batch in order for i in batch]
        for steps in range(9):
            spans = [i for start, end in order.spans(steps) for i in range(start, end)]
            assert spans == blocks[: steps * 6]
