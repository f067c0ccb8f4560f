"""What a tuned model forgets: a second text and tasks with every evaluation, and the model that is kept by them."""

import json

import pytest
import torch
from evaluation.conftest import data_dir  # noqa: F401
from lab.posttraining.tiny import common, preferences, same_weights, sorting, write_rows
from torch.nn import functional
from training.tiny_runs import records
from transformers import AutoModelForCausalLM

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.lab.posttraining.pairs import dpo
from lamina.lab.posttraining.sft import sft
from lamina.reports import report

pytest.importorskip("lm_eval")
TEXT = "the norm sits before the layer and after it, between every layer of a deep model.\n" * 12


@pytest.fixture
def flags(base, data_dir, tmp_path):  # noqa: F811
    (tmp_path / "text.txt").write_text(TEXT)
    rows = write_rows(tmp_path / "rows.jsonl", sorting(24))
    watched = {"eval_corpus": str(tmp_path / "text.txt"), "eval_tasks": "quiz"}
    watched |= {"eval_data_dir": str(data_dir), "run_code": True}
    return {**common(base, rows, tmp_path / "run"), **watched, "eval_task_limit": 12, "eval_steps": 2, "steps": 6}


def evaluations(folder):
    return [line for line in records(folder) if "eval_loss" in line]


def typed(given):
    words = ((f"--{'from' if name == 'from_model' else name.replace('_', '-')}", str(v)) for name, v in given.items())
    return [word for pair in words for word in pair]


def test_a_second_text_and_tasks_are_measured_and_training_does_not_notice(flags, base, tmp_path):
    assert main(["sft", *typed(flags)]) == 0
    plain = {n: v for n, v in flags.items() if not n.startswith(("eval_", "run_code"))} | {"eval_fraction": 0.25}
    sft({**plain, "eval_steps": 2, "output": str(tmp_path / "plain")}, bar=False)
    assert same_weights(tmp_path / "run", tmp_path / "plain")
    first, *_, last = evaluations(tmp_path / "run")
    ids = torch.tensor(list(TEXT.encode()))  # one document, a block of as many bytes as the model reads
    with torch.no_grad():
        blocks = ids[: len(ids) // 256 * 256].view(-1, 256)
        logits = AutoModelForCausalLM.from_pretrained(base).eval()(input_ids=blocks).logits
        loss = float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten()))
    assert first["eval_corpus_loss"] == pytest.approx(loss, rel=1e-5)
    assert set(first["tasks"]) == {"quiz"}
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["tasks"], result["eval_corpus_loss"]) == (last["tasks"], last["eval_corpus_loss"])
    found = lamina.evaluate(
        models=str(tmp_path / "run"), tasks="quiz", data_dir=flags["eval_data_dir"], run_code=True, limit=12, bar=False,
        output=str(tmp_path / "out"),
    )  # fmt: skip
    assert last["tasks"]["quiz"] == pytest.approx(found["units"][0]["scores"][0]["value"])
    page = report(tmp_path / "run").read_text()
    assert "On tasks" in page
    assert "On the second corpus" in page


def test_the_best_score_on_a_task_decides_which_model_is_kept_also_after_a_pause(flags, tmp_path, monkeypatch):
    from lamina.evaluation.job import TaskMeasure

    scores = iter([0.1, 0.6, 0.3, 0.2] * 2)
    monkeypatch.setattr(TaskMeasure, "scores", lambda self, model, tokenizer: {"quiz": next(scores)})
    result = sft({**flags, "best_by": "quiz"}, bar=False)
    assert result["best_step"] == 2
    assert not list((tmp_path / "run").glob("best*")), "no checkpoint needs it"
    best = evaluations(tmp_path / "run")[1]
    assert all(result[name] == best[name] for name in ("eval_loss", "eval_corpus_loss", "tasks"))
    part = {**flags, "best_by": "quiz", "output": str(tmp_path / "part"), "save_steps": 2}
    assert sft({**part, "pause_step": 4}, bar=False)["status"] == "interrupted"
    assert sft({**part, "pause_step": None}, resume=True, bar=False)["best_step"] == 2
    assert same_weights(tmp_path / "run", tmp_path / "part")


def test_preferences_are_watched_too(flags, tmp_path):
    pairs = write_rows(tmp_path / "pairs.jsonl", preferences(12))
    result = dpo({**flags, "data": str(pairs), "lora_rank": 2, "pause_step": 2}, bar=False)
    assert {"eval_corpus_loss", "tasks"} <= set(result)
    with pytest.raises(UserError, match=r"unknown best_by 'quizz'; did you mean 'quiz'"):
        sft({**flags, "best_by": "quizz", "output": str(tmp_path / "none")}, bar=False)
    with pytest.raises(UserError, match=r"unknown best_by 'generated'.*lamina_sorting"):
        sft({**flags, "eval_tasks": "generated", "best_by": "generated", "output": str(tmp_path / "none")}, bar=False)
    assert not (tmp_path / "none").exists()
    (tmp_path / "text.txt").write_text(TEXT * 2)
    with pytest.raises(UserError, match=r"^eval_corpus: .*text.txt' has changed since the run"):
        dpo({"output": flags["output"]}, resume=True, bar=False)
