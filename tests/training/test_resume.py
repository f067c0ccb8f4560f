"""A run that was cut short goes on as if it had not been."""

import contextlib
import json
import os
import signal

import pandas as pd
import pytest
from training.tiny_runs import (
    SMALL,
    assert_same_weights,
    at_step,
    flags,
    layers,
    pull_the_plug,
    records,
    result,
)  # fmt: skip

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


def interrupt(trainer, model):
    os.kill(os.getpid(), signal.SIGINT)


def assert_same_run(a, b):
    assert result(a)["eval_loss"] == result(b)["eval_loss"]
    assert result(a)["status"] == result(b)["status"]
    assert_same_weights(a, b)


def assert_same_records(a, b):
    assert records(a) == records(b)
    pd.testing.assert_frame_equal(layers(a), layers(b))


def assert_no_duplicates(folder):
    logged = [(r["step"], "loss" in r) for r in records(folder)]
    assert len(logged) == len(set(logged))
    assert not layers(folder).duplicated(["step", "layer", "sublayer", "role", "index", "metric"]).any()


@pytest.mark.parametrize(
    ("act", "step", "changed"),
    [
        (interrupt, 6, {}),
        (interrupt, 8, {}),
        (interrupt, 7, {}),
        (interrupt, 6, {"save_steps": 0}),
        (interrupt, 6, {"gradient_accumulation": 2, "placement": "keel"}),
        (pull_the_plug, 8, {}),
        (pull_the_plug, 6, {"save_steps": 0}),
    ],
)
def test_a_run_that_was_cut_resumes_bit_for_bit(trained, tmp_path, act, step, changed):
    """From the checkpoint of its interruption, or from its last one; without one it begins again."""
    run, whole, options = tmp_path / "run", tmp_path / "whole", {**LONG, **changed}
    trained("whole", **options)
    with at_step(step, act), contextlib.suppress(RuntimeError):
        trained(**options)
    interrupted = act is interrupt
    assert result(run)["status"] == ("interrupted" if interrupted else "failed")
    assert (f"at step {step}" if interrupted else "pulled the plug") in result(run)["reason"]
    assert (run / "checkpoints" / f"checkpoint-{step}").is_dir() == interrupted
    trained(resume=True, **options)
    assert_same_run(run, whole)
    assert_no_duplicates(run)
    if step % 2 == 0:  # else the interruption is between two records
        assert_same_records(run, whole)


def test_a_run_killed_after_its_last_checkpoint_gets_its_result(trained, tmp_path, whole):
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
            interrupt(self, self.model)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LaminaTrainer, "evaluate", evaluate)
    found = trained(**options)
    assert found["status"] != "interrupted" or list((tmp_path / "run" / "checkpoints").glob("checkpoint-12"))
    trained(resume=True, **options)
    assert_same_run(tmp_path / "run", whole)


def test_the_speed_of_a_resumed_run_counts_only_what_it_timed(trained, tmp_path):
    options = {**LONG, "steps": 40, "eval_steps": 40, "save_steps": 38}
    with at_step(39, interrupt):
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


def test_only_the_output_is_needed_to_resume(trained, tmp_path, whole):
    with at_step(6, interrupt):
        trained(**LONG)
    assert main(["pretrain", "--output", str(tmp_path / "run"), "--resume"]) == 0
    assert_same_run(tmp_path / "run", whole)


def test_a_pause_between_evaluations_changes_no_random_number(trained, tmp_path):
    """The pause brings an evaluation of its own, whose data loader draws a seed."""
    trained("whole", **LONG, drop_path=0.5)
    assert trained("paused", **LONG, drop_path=0.5, pause_step=6)["status"] == "interrupted"
    pretraining.pretrain({"output": str(tmp_path / "paused")}, resume=True, bar=False)
    assert_same_run(tmp_path / "whole", tmp_path / "paused")
