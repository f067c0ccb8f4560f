"""`lamina pretrain --eval-tasks`: scores of the saved model's tasks, and a training that does not notice."""

import pytest
from training.tiny_runs import records, result, settings, write_corpus

import lamina
from lamina.errors import UserError
from lamina.papers.trials import trial
from lamina.reports import report
from lamina.training.pretrain import pretrain

pytest.importorskip("lm_eval")


def test_the_scores_are_the_saved_model_s_and_the_training_is_undisturbed(tmp_path, data_dir):
    corpus = write_corpus(tmp_path / "words.txt")
    given = {"steps": 4, "eval_steps": 2, "precision": "fp32", "compile": "off", "sequence_length": 128}
    tasks = {"eval_tasks": "quiz,quiz@1", "eval_data_dir": str(data_dir), "eval_task_limit": 12}
    pretrain(settings(corpus, tmp_path / "plain", **given), bar=False)
    pretrain(settings(corpus, tmp_path / "scored", **given, **tasks), bar=False)
    plain, scored = result(tmp_path / "plain"), result(tmp_path / "scored")
    assert scored["eval_loss"] == plain["eval_loss"]
    assert "tasks" not in plain
    assert set(scored["tasks"]) == {"quiz", "quiz@1"}
    evaluated = [record for record in records(tmp_path / "scored") if "eval_loss" in record]
    assert [set(record["tasks"]) for record in evaluated] == [{"quiz", "quiz@1"}] * 2
    assert evaluated[-1]["tasks"] == scored["tasks"]
    assert "On tasks" in report(tmp_path / "scored").read_text()
    assert "On tasks" not in report(tmp_path / "plain").read_text()
    found = lamina.evaluate(
        models=str(tmp_path / "scored"), tasks="quiz,quiz@1", data_dir=str(data_dir), limit=12,
        output=str(tmp_path / "out"), bar=False,
    )  # fmt: skip
    values = {unit["unit"]: unit["scores"][0]["value"] for unit in found["units"]}
    assert scored["tasks"] == pytest.approx(values)


def test_an_unknown_task_is_refused_before_the_folder_is_touched(tmp_path, data_dir):
    run = settings(
        write_corpus(tmp_path / "words.txt"), tmp_path / "run", eval_tasks="quizz", eval_data_dir=str(data_dir)
    )
    with pytest.raises(UserError, match=r"eval_tasks: unknown task 'quizz'; did you mean 'quiz'"):
        pretrain(run, bar=False)
    assert not (tmp_path / "run").exists()


def test_tasks_change_a_trial_s_key_and_their_absence_does_not(tmp_path):
    from lamina.training.settings import PretrainSettings

    plain = trial.identity("pretrain", PretrainSettings())
    assert "eval_tasks" not in plain["settings"]
    assert "eval_task_limit" not in plain["settings"]
    other = trial.identity("pretrain", PretrainSettings(eval_tasks="quiz"))
    assert trial.key(plain) != trial.key(other)


def test_an_objective_that_writes_no_text_has_no_tasks(tmp_path):
    with pytest.raises(UserError, match=r"eval_tasks: 'quiz' has no effect on the objective 'image_classification'"):
        pretrain(
            settings(tmp_path, tmp_path / "run", backbone="vit-tiny", num_heads=None, eval_tasks="quiz"), bar=False
        )
    assert not (tmp_path / "run").exists()
