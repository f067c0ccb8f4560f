"""Evaluations of `lamina reward` and `lamina dpo`: every held-out pair once, whatever the batches and the processes."""

import json
from pathlib import Path

import pytest
from posttraining.tiny import common, preferences, write_rows
from training.test_distributed import torchrun
from transformers import Trainer

from lamina.posttraining.dpo import dpo
from lamina.posttraining.reward import reward
from lamina.training.execution.processes import Processes

JOBS = {"reward": reward, "dpo": dpo}


@pytest.fixture
def seven(tmp_path):
    """Held-out pairs of several lengths, which neither batches of four nor two processes divide."""
    rows = preferences(7, seed=1)
    for row in rows[3:]:
        row["rejected"] = row["chosen"] + " and more" * len(row["prompt"][:2])
    return write_rows(tmp_path / "held_out.jsonl", rows)


def given(base, pairs, seven, folder, **changed):
    own = {"eval_data": str(seven), "eval_steps": 2, "learning_rate": 1e-2, "precision": "fp32", "threads": 1}
    return {**common(base, pairs, folder), **own, **changed}


def evaluations(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.startswith("eval_")} for line in lines if "eval_loss" in line]


@pytest.mark.parametrize("job", list(JOBS))
def test_the_processes_parts_are_one_evaluation(job, base, pairs, seven, tmp_path, monkeypatch):
    trainers = []
    train = Trainer.train

    def seen(self, *args, **kwargs):
        # accelerate would not wrap a model that an evaluation has prepared: processes would train apart
        assert not getattr(self.model, "_is_accelerate_prepared", False)
        trainers.append(self)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", seen)
    result = JOBS[job](given(base, pairs, seven, tmp_path / "run", steps=2), bar=False)
    (trainer,) = trainers
    parts = []
    for rank in range(2):
        trainer.processes = Processes(rank=rank, size=2)
        parts.append(trainer._held_out_batches())
    assert [sum(batch.counts["pairs"] for batch in part) for part in parts] == [4, 3]

    class Both(Processes):
        def everyones(self, value):
            return parts

    trainer.processes = Both()
    measured = {name.replace("/", "_"): value for name, value in trainer.evaluate().items()}
    last = {name: value for name, value in result.items() if name.startswith("eval_") and value is not None}
    assert len(last) > 4
    assert {name: measured[name] for name in last} == pytest.approx(last, abs=1e-5)


def test_the_lowest_and_the_highest_reward_are_of_all_pairs(base, pairs, seven, tmp_path):
    by_batch = []
    for size in (2, 8):
        reward(given(base, pairs, seven, tmp_path / str(size), batch_size=size, learning_rate=1e-9), bar=False)
        by_batch.append(evaluations(tmp_path / str(size))[0])
    assert by_batch[0] == pytest.approx(by_batch[1], abs=1e-5)


@pytest.mark.slow
def test_two_processes_train_and_evaluate_as_one_does(base, pairs, seven, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([(job, given(base, pairs, seven, tmp_path / f"{job}-two")) for job in JOBS]))
    done = torchrun(Path(__file__).with_name("two_stages.py"), plan)
    assert done.returncode == 0, done.stderr[-4000:]
    for name, job in JOBS.items():
        job(given(base, pairs, seven, tmp_path / f"{name}-one"), bar=False)
        one, two = (
            [json.loads(line) for line in (tmp_path / f"{name}-{count}" / "metrics.jsonl").read_text().splitlines()]
            for count in ("one", "two")
        )
        assert [r["grad_norm"] for r in two if "grad_norm" in r] == pytest.approx(
            [r["grad_norm"] for r in one if "grad_norm" in r], rel=1e-3
        )
        for ours, theirs in zip(*(evaluations(tmp_path / f"{name}-{c}") for c in ("one", "two")), strict=True):
            assert theirs == pytest.approx(ours, abs=1e-4)
