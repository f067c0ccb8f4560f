"""Tasks by name, with data from a folder, scored as lm-evaluation-harness itself scores them."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from evaluation.conftest import QUIZ, loaded

import lamina
from lamina.core.extras import install
from lamina.errors import UserError
from lamina.evaluation import task_files, task_names
from lamina.evaluation.harness import Runner
from lamina.evaluation.scores import item_table, scores_of
from lamina.evaluation.settings import EvalSettings
from lamina.evaluation.task_files import Tasks
from lamina.evaluation.task_sets import GENERATED, SETS, columns_of, listing

lm_eval = pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def shipped():
    return Tasks.find(None)


def test_the_full_list_names_the_tasks_of_each_set():
    told = listing(full=True)
    units = [column.unit for name in (*SETS, GENERATED) for column in columns_of([name])]
    assert len(units) > 20
    assert not [unit for unit in units if unit.partition("@")[0] not in told]


def test_every_task_of_a_paper_s_set_is_the_harness_s(shipped):
    for one in SETS.values():
        shipped.require([column.task for column in one.columns], source="")


def test_a_tag_is_its_tasks_and_a_group_has_its_members(shipped):
    assert {"mrpc", "rte", "cola"} <= set(shipped.tagged("glue"))
    assert shipped.tagged("mmlu") is shipped.tagged("hellaswag") is None
    files = [task for task, entry in shipped._reached("mmlu") if entry.yaml_path is not None]
    assert len(files) == 62  # 57 subjects, 4 groups and the whole


def test_an_unknown_task_names_the_nearest(shipped):
    with pytest.raises(UserError, match="unknown task 'helaswag'; did you mean 'hellaswag'"):
        shipped.require(["helaswag"], source="", others=list(SETS))
    with pytest.raises(UserError, match="did you mean 'fusenorm'"):
        shipped.require(["fusenom"], source="", others=list(SETS))


def test_an_unknown_task_is_rejected_before_the_output_folder_and_the_harness_s_index(tmp_path, monkeypatch):
    monkeypatch.setattr(task_files, "_shipped", None)  # the index takes many seconds
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/own.yaml").write_text("task: own_quiz\n")
    for name, near in (("helaswag", "hellaswag"), ("generatd", "generated"), ("own_quis", "own_quiz")):
        with pytest.raises(UserError, match=f"unknown task '{name}'; did you mean '{near}'"):
            lamina.evaluate(models="m", tasks=name, data_dir=str(tmp_path), output=str(tmp_path), overwrite=False)
    EvalSettings(models="m", tasks="own_quiz,glue,generated,mmlu@5", data_dir=str(tmp_path)).check_names()
    (tmp_path / "tasks/own.yaml").write_text("include: elsewhere.yaml\n")  # the harness decides
    EvalSettings(models="m", tasks="own_quis", data_dir=str(tmp_path)).check_names()


def test_every_name_in_the_harness_s_index_occurs_in_a_task_file(shipped):
    whole = b"\n".join(task_names._task_files([Path(inspect.getfile(lm_eval)).parent / "tasks"], ()))
    words = set(re.findall(rb"[\w-]+", whole))  # a search for each of 14,000 names takes minutes
    names = [name for name in task_files._shipped().task_index if name.encode() not in words]
    task_names.refuse_absent(names, None, [], [])


def test_examples_before_a_question_are_part_of_a_name():
    assert [column.unit for column in columns_of(["arc_easy@5", "piqa"])] == ["arc_easy@5", "piqa"]
    assert {column.num_fewshot for column in columns_of(["mix_ln"])} == {5}
    assert {column.num_fewshot for column in columns_of(["mix_ln", "arc_easy@3"], 2)} == {2}
    for name in ("mix_ln", "generated"):
        assert [replace(column, num_fewshot=1) for column in columns_of([name])] == columns_of([f"{name}@1"])
    with pytest.raises(UserError, match=r"'arc_easy@x': 'x' is not a number of examples"):
        columns_of(["arc_easy@x"])


@pytest.fixture
def own(data_dir):
    """A folder with the task file as the harness reads it without Lamina."""
    place = data_dir / "toy/quiz/default"
    files = {"data_files": {split: str(place / f"{split}.jsonl") for split in ("train", "test")}}
    folder = data_dir.parent / "own"
    folder.mkdir()
    (folder / "quiz.yaml").write_text(yaml.safe_dump({**QUIZ, "dataset_path": "json", "dataset_kwargs": files}))
    return folder


@pytest.mark.parametrize("shots", [None, 2])
def test_items_equal_the_harness_s_own(model, data_dir, own, shots):
    """Its own command's path: it loads the model by its name, and reads the task file without us."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    network, tokenizer = loaded(model)
    tasks = Tasks.find(str(data_dir), run_code=True)
    ours, notes = Runner(model=network, tokenizer=tokenizer, batch_size=4).run(tasks.build("quiz"), shots)
    arguments = {"pretrained": str(model), "backend": "causal", "dtype": "float32", "max_length": 256}
    manager = TaskManager(include_path=str(own), include_defaults=False)
    how = {"device": "cpu", "batch_size": 4, "num_fewshot": shots, "bootstrap_iters": 10}
    theirs = simple_evaluate(model="hf", model_args=arguments, tasks=["quiz"], task_manager=manager, **how)
    mine, other = item_table(ours["samples"]), item_table(theirs["samples"])
    assert len(mine) == 20
    assert list(mine["target"]) == list(other["target"])
    for one, two in zip(mine["log_likelihoods"], other["log_likelihoods"], strict=True):
        assert len(one) == 4
        assert one == pytest.approx(two, abs=1e-4)
    assert [score.value for score in scores_of(ours)] == [score.value for score in scores_of(theirs)]
    assert [score.num_fewshot for score in scores_of(ours)] == [shots or 0]
    assert notes == []


def test_a_question_longer_than_the_context_is_cut_and_said(model, data_dir):
    network, tokenizer = loaded(model)
    network.config.get_text_config().max_position_embeddings = 24
    tasks = Tasks.find(str(data_dir), run_code=True).build("quiz")
    _, notes = Runner(model=network, tokenizer=tokenizer).run(tasks, None)
    assert "longer than the model's context" in notes[0]
    network.config.get_text_config().max_position_embeddings = 3
    with pytest.raises(UserError, match="longer than the model's context of 3 tokens"):
        Runner(model=network, tokenizer=tokenizer).run(Tasks.find(str(data_dir), run_code=True).build("quiz"), None)


def test_data_that_the_folder_lacks_is_named(data_dir):
    with pytest.raises(UserError, match=r"no allenai/sciq/default/SPLIT\.jsonl\. .*make eval-data"):
        Tasks.find(str(data_dir), run_code=True).build("sciq")
    (data_dir / "toy/quiz/default/test.jsonl").unlink()
    with pytest.raises(UserError, match=r"toy/quiz/default holds train, but the task 'quiz' is scored on test"):
        Tasks.find(str(data_dir), run_code=True).build("quiz")


def test_data_without_a_network_say_how_to_get_them(monkeypatch):
    from lamina.core import hub_access

    monkeypatch.setattr(hub_access, "hub_resolves", lambda: False)
    with pytest.raises(UserError, match=r"'sciq': the task's data \(allenai/sciq\) is not on this machine.*--data-dir"):
        Tasks.find(None).build("sciq")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_data_that_are_damaged_are_not_called_absent(data_dir, monkeypatch, suffix):
    from lamina.core import hub_access

    monkeypatch.setattr(hub_access, "hub_resolves", lambda: False)
    for file in (data_dir / "toy/quiz/default").glob("*.jsonl"):
        file.write_text(file.read_text() + '{"question": \n')
        file.rename(file.with_suffix(suffix))
    with pytest.raises(
        UserError, match=r"'quiz': the task's data in '.*' can't be read: (?!DatasetGeneration)"
    ) as raised:
        Tasks.find(str(data_dir), run_code=True).build("quiz")
    assert "\n" not in str(raised.value)


def test_without_the_harness_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(task_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(install("eval"))):
        Tasks.find(None)


def test_items_hold_what_the_harness_logged():
    sample = {"doc_id": 3, "target": 1, "resps": [[(-1.5, False)], [(-0.5, True)]], "metrics": ["acc"], "acc": 1.0}
    (row,) = item_table({"quiz": [sample]}).to_dict("records")
    assert row["log_likelihoods"] == [-1.5, -0.5]
    assert row["greedy"] == [False, True]
    assert json.loads(row["metrics"]) == {"acc": 1.0}
    assert isinstance(item_table({}), pd.DataFrame)


@pytest.mark.slow
def test_the_harness_s_own_command_loads_our_checkpoints(model, data_dir, own, tmp_path):
    """In a process that never imports lamina: the code beside the weights is all it needs."""
    script = (
        "import sys, json; sys.modules['lamina'] = None\n"
        "import lm_eval.tasks; whole = lm_eval.tasks.TaskManager\n"
        # its command parses all 14,000 task files first, which takes minutes
        "lm_eval.tasks.TaskManager = lambda **given: whole(**{**given, 'include_defaults': False})\n"
        "from lm_eval.__main__ import cli_evaluate; cli_evaluate()\n"
    )
    argv = ["run", "--model", "hf", "--model_args", f"pretrained={model},trust_remote_code=True,dtype=float32"]
    argv += ["--tasks", "quiz", "--include_path", str(own), "--device", "cpu", "--batch_size", "4"]
    argv += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", script, *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "out").rglob("samples_quiz_*.jsonl")
    samples = [json.loads(line) for line in written.read_text().splitlines()]
    network, tokenizer = loaded(model)
    built = Tasks.find(str(data_dir), run_code=True).build("quiz")
    ours, _ = Runner(model=network, tokenizer=tokenizer, batch_size=4).run(built, None)
    theirs = {sample["doc_id"]: [float(part[0][0]) for part in sample["resps"]] for sample in samples}
    mine = item_table(ours["samples"])
    assert len(theirs) == len(mine) == 20
    for doc, numbers in zip(mine["doc_id"], mine["log_likelihoods"], strict=True):
        assert numbers == pytest.approx(theirs[doc], abs=1e-4)
