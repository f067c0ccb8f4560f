"""A run that was cut short goes on as if it had not been."""

import json
import os
import signal

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from training.tiny_runs import SMALL, flags, layers, records, result

from lamina.cli import main
from lamina.errors import UserError
from lamina.training import pretrain as pretraining
from lamina.training.trainer import LaminaTrainer

LONG = {"steps": 12, "logging_steps": 2, "save_steps": 2, "eval_steps": 4}


@pytest.fixture
def whole(trained, tmp_path):
    """The same run, never interrupted."""
    trained("whole", **LONG)
    return tmp_path / "whole"


@pytest.fixture
def stop_at(monkeypatch):
    """Do something in the middle of a step, once."""

    def install(step, act):
        original = LaminaTrainer.training_step
        done = []

        def training_step(self, *args, **kwargs):
            if self.state.global_step + 1 == step and not done:
                done.append(step)
                act()
            return original(self, *args, **kwargs)

        monkeypatch.setattr(LaminaTrainer, "training_step", training_step)

    return install


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def crash():
    raise RuntimeError("pulled the plug")


def assert_same_run(a, b):
    assert result(a)["eval_loss"] == result(b)["eval_loss"]
    assert result(a)["status"] == result(b)["status"]
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (a, b)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def assert_same_records(a, b):
    assert records(a) == records(b)
    pd.testing.assert_frame_equal(layers(a), layers(b))


def assert_no_duplicates(folder):
    logged = [(r["step"], "loss" in r) for r in records(folder)]
    assert len(logged) == len(set(logged))
    assert not layers(folder).duplicated(["step", "layer", "sublayer", "role", "index", "metric"]).any()


@pytest.mark.parametrize("step", [6, 8])
def test_an_interrupted_run_ends_with_a_checkpoint_and_resumes_bit_for_bit(trained, tmp_path, whole, stop_at, step):
    stop_at(step, interrupt)
    found = trained(**LONG)
    assert found["status"] == "interrupted"
    assert f"at step {step}" in found["reason"]
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}").is_dir()
    trained(resume=True, **LONG)
    assert_same_run(tmp_path / "run", whole)
    assert_same_records(tmp_path / "run", whole)
    assert_no_duplicates(tmp_path / "run")


def test_an_interruption_between_two_records_changes_neither_the_model_nor_the_result(
    trained, tmp_path, whole, stop_at
):
    stop_at(7, interrupt)
    trained(**LONG)
    trained(resume=True, **LONG)
    assert_same_run(tmp_path / "run", whole)
    assert_no_duplicates(tmp_path / "run")


def test_a_run_without_save_steps_saves_when_it_is_interrupted(trained, tmp_path, whole, stop_at):
    stop_at(6, interrupt)
    options = {**LONG, "save_steps": 0}
    assert trained(**options)["status"] == "interrupted"
    trained(resume=True, **options)
    assert_same_run(tmp_path / "run", whole)


def test_a_run_with_accumulation_resumes_bit_for_bit_too(trained, tmp_path, stop_at):
    options = {**LONG, "gradient_accumulation": 2, "placement": "keel"}
    trained("whole", **options)
    stop_at(6, interrupt)
    trained(**options)
    trained(resume=True, **options)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert_same_records(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_crashed_goes_on_from_its_checkpoint(trained, tmp_path, whole, stop_at):
    stop_at(8, crash)
    with pytest.raises(RuntimeError, match="plug"):
        trained(**LONG)
    assert result(tmp_path / "run")["status"] == "failed"
    assert "pulled the plug" in result(tmp_path / "run")["reason"]
    trained(resume=True, **LONG)
    assert_same_run(tmp_path / "run", whole)
    assert_same_records(tmp_path / "run", whole)


def test_a_run_that_crashed_before_its_first_checkpoint_starts_again_without_duplicates(
    trained, tmp_path, whole, stop_at
):
    stop_at(6, crash)
    options = {**LONG, "save_steps": 0}
    with pytest.raises(RuntimeError, match="plug"):
        trained(**options)
    trained(resume=True, **options)
    assert_no_duplicates(tmp_path / "run")
    assert_same_records(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "missing", ["trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"]
)
def test_a_torn_newest_checkpoint_is_skipped(trained, tmp_path, whole, stop_at, missing):
    stop_at(8, crash)
    with pytest.raises(RuntimeError, match="plug"):
        trained(**LONG)
    (tmp_path / "run" / "checkpoints" / "checkpoint-6" / missing).unlink()
    trained(resume=True, **LONG)
    assert_same_run(tmp_path / "run", whole)
    assert_same_records(tmp_path / "run", whole)


@pytest.mark.parametrize("torn", ["trainer_state.json", "model.safetensors", "optimizer.pt"])
def test_a_newest_checkpoint_with_a_file_cut_short_is_skipped(trained, tmp_path, whole, stop_at, torn):
    """What a power cut leaves."""
    stop_at(8, crash)
    with pytest.raises(RuntimeError, match="plug"):
        trained(**LONG)
    path = tmp_path / "run" / "checkpoints" / "checkpoint-6" / torn
    path.write_bytes(path.read_bytes()[:20])
    trained(resume=True, **LONG)
    assert_same_run(tmp_path / "run", whole)


def test_a_run_killed_after_its_last_checkpoint_gets_its_result(trained, tmp_path, whole, monkeypatch):
    """The kill came while the final model was written; there is no step left to train."""
    trained(**LONG)
    (tmp_path / "run" / "result.json").unlink()
    found = trained(resume=True, **LONG)
    assert found["steps"] == LONG["steps"]
    assert found["status"] == result(whole)["status"], found["reason"]
    assert_same_run(tmp_path / "run", whole)


def test_an_interruption_in_the_last_evaluation_loses_nothing(trained, tmp_path, whole, monkeypatch):
    options = {**LONG, "save_steps": 0}
    original = LaminaTrainer.evaluate

    def evaluate(self, *args, **kwargs):
        if self.state.global_step == 12:
            monkeypatch.setattr(LaminaTrainer, "evaluate", original)
            interrupt()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LaminaTrainer, "evaluate", evaluate)
    found = trained(**options)
    assert found["status"] != "interrupted" or list((tmp_path / "run" / "checkpoints").glob("checkpoint-12"))
    trained(resume=True, **options)
    assert_same_run(tmp_path / "run", whole)


def test_the_speed_of_a_resumed_run_counts_only_what_it_timed(trained, tmp_path, stop_at):
    options = {**LONG, "steps": 40, "eval_steps": 40, "save_steps": 38}
    stop_at(39, interrupt)
    trained(**options)
    speed = trained(resume=True, **options)["tokens_per_second"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert speed <= 2 * max(json.loads(line).get("tokens_per_second", 0) for line in lines)


def test_the_speed_does_not_depend_on_whether_evaluations_and_records_align(trained, tmp_path):
    trained(steps=40, logging_steps=40, eval_steps=3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    fastest = max(line["tokens_per_second"] for line in lines if "loss" in line and line["step"] == 1)
    assert result(tmp_path / "run")["tokens_per_second"] < 4 * fastest


def test_resuming_a_finished_run_changes_nothing(trained, tmp_path):
    trained()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name != "report.html"}
    trained(resume=True)
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_resuming_nothing_is_refused_and_auto_begins(trained, tmp_path):
    with pytest.raises(UserError, match=r"run' holds nothing to resume .*--resume=auto"):
        trained(resume=True)
    assert not (tmp_path / "run").exists()
    assert trained(resume="auto")["steps"] == 4
    before = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    trained(resume="auto")
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"steps": 5}, "steps"),
        ({"placement": "keel"}, "placement"),
        ({"seed": 3}, "seed"),
        ({"corpus": "embedded"}, "corpus"),
    ],
)
def test_a_changed_setting_is_refused_by_name(trained, tmp_path, corpus, capsys, changed, named):
    trained()
    before = (tmp_path / "run" / "config.yaml").read_text()
    given = {**SMALL, "corpus": corpus, **changed}
    assert main(["pretrain", *flags(**given, output=tmp_path / "run", resume=True)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lamina: {named}:")
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_a_changed_setting_is_refused_from_python_too(trained, tiny):
    trained()
    (first,) = {trained(resume=True)["steps"]}
    with pytest.raises(ValueError, match="placement"):
        pretraining.pretrain(tiny(placement="keel", steps=first), resume=True, bar=False)


def test_only_the_output_is_needed_to_resume(trained, tmp_path, stop_at, whole):
    stop_at(6, interrupt)
    trained(**LONG)
    assert main(["pretrain", "--output", str(tmp_path / "run"), "--resume"]) == 0
    assert_same_run(tmp_path / "run", whole)


def test_a_pause_between_evaluations_changes_no_random_number(trained, tmp_path):
    """The pause brings an evaluation of its own, whose data loader draws a seed."""
    trained("whole", **LONG, drop_path=0.5)
    assert trained("paused", **LONG, drop_path=0.5, pause_step=6)["status"] == "interrupted"
    pretraining.pretrain({"output": str(tmp_path / "paused")}, resume=True, bar=False)
    assert_same_run(tmp_path / "whole", tmp_path / "paused")
