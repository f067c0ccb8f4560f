"""A user's task file is code: it runs with `--run-code`, and nothing of it runs without."""

import json

import pytest
import yaml
from evaluation.conftest import QUIZ

from lamina.cli import main
from lamina.errors import UserError
from lamina.evaluation.job import TaskMeasure
from lamina.evaluation.task_files import Tasks
from lamina.probes.engine import registry

pytest.importorskip("lm_eval")
MODULE = """
open({canary!r}, "w").write("it ran")
def question(row): return row["question"]
def rows(data): return data
from lm_eval.api.task import ConfigurableTask
class Own(ConfigurableTask):
    def __init__(self, config):
        super().__init__(config={{key: value for key, value in config.items() if key != "class"}})
"""
RUNS = "{{% if cycler.__init__.__globals__.os.system('touch {canary}') %}}{{% endif %}}"
# Each way by which a task file runs code: the text of the file, or fields of a sound task.
FORMATS = {
    "a function": "task: quiz\ninclude: base.inc\ndoc_to_text: !function code.question\n",
    "a function in an included file": "task: quiz\ninclude: [base.inc, function.inc]\n",
    "a class": "task: quiz\ninclude: base.inc\nclass: !function code.Own\n",
    "a template": {"doc_to_text": RUNS + "{{{{question}}}}"},
    "a template of choices": {"doc_to_choice": "{{{{choices}}}}" + RUNS},
    "a group": "group: quiz\ntask: [inner]\n",
    "a group with its task inside": {},
}


@pytest.fixture
def canary(tmp_path):
    """The file that the code of a task writes."""
    return tmp_path / "it-ran"


@pytest.fixture
def folder(data_dir, canary, tmp_path, monkeypatch):
    """A folder of data whose tasks have code beside them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = data_dir / "tasks"
    (tasks / "code.py").write_text(MODULE.format(canary=str(canary)))
    (tasks / "base.inc").write_text(yaml.safe_dump({key: value for key, value in QUIZ.items() if key != "task"}))
    (tasks / "function.inc").write_text("process_docs: !function code.rows\n")
    return data_dir


def write(folder, canary, form):
    tasks, said = folder / "tasks", FORMATS[form]
    if form == "a group":
        (tasks / "inner.yaml").write_text("task: inner\ninclude: base.inc\ndoc_to_text: !function code.question\n")
    if form == "a group with its task inside":
        files = {"data_files": {"test": str(folder / "toy/quiz/default/test.jsonl")}}
        member = {**QUIZ, "task": "inner"}
        member |= {"doc_to_text": f"{RUNS.format(canary=canary)}{{{{question}}}}", "training_split": None}
        member |= {"dataset_path": "json", "dataset_kwargs": files}
        said = yaml.safe_dump({"group": "quiz", "task": [member]})
    elif isinstance(said, dict):
        said = yaml.safe_dump({**QUIZ, **{key: text.format(canary=canary) for key, text in said.items()}})
    (tasks / "quiz.yaml").write_text(said)


@pytest.mark.parametrize("form", FORMATS)
def test_a_task_file_runs_with_the_switch_alone(folder, canary, form):
    write(folder, canary, form)
    plain = Tasks.find(str(folder))
    plain.require(["quiz"], source="")
    with pytest.raises(UserError) as raised:
        plain.build("quiz")
    assert str(raised.value).startswith("tasks: '")
    assert f"{folder / 'tasks'}" in str(raised.value)
    assert "Add --run-code if you trust the file" in str(raised.value)
    assert not canary.exists()
    assert Tasks.find(str(folder), run_code=True).build("quiz")["tasks"]
    assert canary.exists()


def test_the_command_says_so_in_a_line_before_it_touches_a_folder(folder, canary, model, tmp_path, refused, capsys):
    write(folder, canary, "a template")
    out = tmp_path / "out"
    argv = ["eval", str(model), "--tasks", "quiz", "--data-dir", str(folder), "--limit", "2", "--output", str(out)]
    line = refused(*argv)
    assert all(part in line for part in ("'quiz'", str(folder / "tasks/quiz.yaml"), "--run-code"))
    assert not out.exists()
    assert not canary.exists()
    assert main([*argv, "--run-code"]) == 0
    assert canary.exists()
    assert json.loads((out / "result.json").read_text())["status"] == "finished"


def test_what_a_training_and_a_probe_score_needs_the_switch_too(folder, canary):
    write(folder, canary, "a function")
    with pytest.raises(UserError, match=r"^eval_tasks: 'quiz' is in .*quiz.yaml.*--run-code"):
        TaskMeasure.find("quiz", str(folder), 2, 2, 0)
    tasks = folder / "tasks"
    with pytest.raises(UserError, match=r"task: 'quiz' is in .*quiz.yaml.*Add run_code=true"):
        registry.make(f"layer_drop(task=quiz, include_path={tasks})")
    assert not canary.exists()
    TaskMeasure.find("quiz", str(folder), 2, 2, 0, run_code=True)
    assert canary.exists()
    canary.unlink()
    files = {"data_files": {"test": str(folder / "toy/quiz/default/test.jsonl")}}
    files = {"dataset_path": "json", "dataset_kwargs": files}
    inner = {**QUIZ, **files, "training_split": None, "doc_to_text": f"{RUNS.format(canary=canary)}{{{{question}}}}"}
    (tasks / "quiz.yaml").write_text(yaml.safe_dump(inner))
    registry.make(f"layer_drop(task=quiz, include_path={tasks}, run_code=true)")
    assert canary.exists()


def test_a_file_that_takes_a_shipped_or_generated_name_needs_the_switch(folder, canary, tmp_path):
    generated = tmp_path / "generated"
    generated.mkdir()
    (generated / "lamina_sorting.yaml").write_text(yaml.safe_dump({**QUIZ, "task": "lamina_sorting"}))
    Tasks.find(None, generated=generated).entry("lamina_sorting")
    for name in ("lamina_sorting", "arc_easy"):
        (folder / "tasks/quiz.yaml").write_text(
            f"task: {name}\ninclude: base.inc\ndoc_to_text: !function code.question\n"
        )
        with pytest.raises(UserError, match=rf"'{name}' is in .*quiz.yaml.*--run-code"):
            Tasks.find(str(folder), generated=generated).build(name)
    (folder / "tasks/quiz.yaml").write_text("task: mmlu_anatomy\ninclude: base.inc\n")
    with pytest.raises(UserError, match=r"'mmlu_anatomy' is in .*quiz.yaml"):  # a member of the group
        Tasks.find(str(folder), generated=generated).build("mmlu")
    assert not canary.exists()


def test_the_harness_s_tasks_need_no_switch_but_for_code_that_a_model_writes(tmp_path):
    place = tmp_path / "allenai/sciq/default"
    place.mkdir(parents=True)
    row = {"question": "q", "support": "s", "distractor1": "a", "distractor2": "b", "distractor3": "c"}
    for split in ("train", "validation", "test"):
        (place / f"{split}.jsonl").write_text(json.dumps({**row, "correct_answer": "d"}) + "\n")
    assert set(Tasks.find(str(tmp_path)).build("sciq")["tasks"]) == {"sciq"}
    with pytest.raises(UserError, match=r"'humaneval' runs the code that a model writes\. Add --run-code"):
        Tasks.find(None).build("humaneval")


def test_a_file_that_ends_the_process_is_an_error(folder, canary):
    write(folder, canary, "a function")
    (folder / "tasks/code.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(UserError, match=r"tasks: 'quiz' can't be read: "):
        Tasks.find(str(folder), run_code=True).build("quiz")


def test_a_file_that_is_not_yaml_is_named(folder):
    (folder / "tasks/other.yaml").write_text("task: [")
    with pytest.raises(UserError, match=r"other.yaml' is not a task file: "):
        Tasks.find(str(folder)).require(["other"], source="")
