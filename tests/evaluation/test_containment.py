"""No task file runs code that `--run-code` does not allow: files written to break out, each in a way of its own."""

import json
import os
import pickle
import sys

import pytest
import yaml
from evaluation.conftest import QUIZ

from lamina.errors import UserError
from lamina.evaluation.containment import contained
from lamina.evaluation.harness import Runner
from lamina.evaluation.task_files import Tasks
from lamina.probes.layer_drop import HarnessTask

pytest.importorskip("lm_eval")
TOUCH = "open('{canary}', 'w').write('it ran')"
EVIL = f"import os\n{TOUCH}\ndef f(*given, **named):\n    return 'x'\nclass Own:\n    pass\n"
CYCLER = "{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}"
ROWS = "{folder}/toy/quiz/default/test.jsonl"

# Each: what replaces fields of a sound task (a mapping), or a whole file (text); other files may stand beside it.
TEMPLATES = {
    "doc_to_text": CYCLER,
    "doc_to_target": CYCLER,
    "description": CYCLER,
    "doc_to_choice": CYCLER,
    "gen_prefix": CYCLER,
    "lipsum": "{{{{ lipsum.__globals__['os'].popen('touch {canary}').read() }}}}",
    "attr": "{{{{ (cycler|attr('__init__')|attr('__globals__'))['os'].system('touch {canary}') }}}}",
    "escaped attr": r"{{{{ cycler|attr('\x5f\x5finit\x5f\x5f')|attr('\x5f\x5fglobals\x5f\x5f') }}}}",
    "subclasses": "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
    "item": "{{{{ question['__class__']['__mro__'] }}}}",
    "format": "{{{{ '{{0.__class__.__mro__}}'.format(question) }}}}",
    "format_map": "{{{{ '{{x.__class__.__mro__}}'.format_map({{'x': question}}) }}}}",
    "format passed on": "{{{{ 'x'|regex_replace('x', '{{0.__class__.__mro__}}'.format) }}}}",
    "map": "{{{{ [question]|map(attribute='__class__')|join }}}}",
    "self": "{{{{ self.__init__.__globals__.__builtins__.open('{canary}', 'w') }}}}",
    "namespace": "{{% set n = namespace() %}}{{{{ n.__init__.__globals__.os.system('touch {canary}') }}}}",
    "macro": "{{% macro m() %}}{{% endmacro %}}{{{{ m.__globals__ }}}}{{{{ m._func.__globals__ }}}}",
    "include": "{{% include '/etc/passwd' %}}",
    "import": "{{% import '{folder}/tasks/evil.py' as e %}}{{{{ e.f() }}}}",
    "range": "{{% for i in range(10**12) %}}{{% endfor %}}",
    "mutation": "{{{{ choices.append('x') }}}}",
    "generator": "{{{{ (x for x in [1]).gi_frame }}}}",
}
FIELDS = {
    "a function": "task: quiz\ninclude: base.inc\ndoc_to_text: !function evil.f\n",
    "a function, escaped": "task: quiz\ninclude: base.inc\ndoc_to_text: !%66unction evil.f\n",
    "a function, verbatim": "task: quiz\ninclude: base.inc\ndoc_to_text: !<!function> evil.f\n",
    "a function by a handle": "%TAG !e! !func\n---\ntask: quiz\ninclude: base.inc\ndoc_to_text: !e!tion evil.f\n",
    "a function in an anchor": "x: &a !function evil.f\ntask: quiz\ninclude: base.inc\nprocess_docs: *a\n",
    "a function in a merge key": "task: quiz\ninclude: base.inc\n<<: {{process_docs: !function evil.f}}\n",
    "a function in an included file": "task: quiz\ninclude: [base.inc, function.inc]\n",
    "a function in a list of choices": "task: quiz\ninclude: base.inc\ndoc_to_choice: [!function evil.f]\n",
    "a function as a key": "task: quiz\ninclude: base.inc\nmetadata: {{!function evil.f : 1}}\n",
    "a python tag": "task: quiz\ninclude: base.inc\ndescription: !!python/object/apply:os.system ['touch {canary}']\n",
    "a python name": "task: quiz\ninclude: base.inc\nprocess_docs: !!python/name:os.system\n",
    "a class": "task: quiz\nclass: !function evil.Own\n",
    "a class by name": "task: quiz\ninclude: base.inc\nclass: evil.Own\n",
    "a metric that is a file": {"metric_list": [{"metric": "{folder}/tasks/m/m.py", "aggregation": "mean"}]},
    "a metric of evaluate's": {"metric_list": [{"metric": "{folder}/tasks/m/m.py", "hf_evaluate": True}]},
    "a registered metric of evaluate's": {"metric_list": [{"metric": "acc", "hf_evaluate": True}]},
    "a metric that is a folder": {"metric_list": [{"metric": "m", "aggregation": "mean"}]},
    "a metric as a mapping": {"metric_list": {"metric": "{folder}/tasks/m/m.py"}},
    "a metric's function": "task: quiz\ninclude: base.inc\nmetric_list: [{{metric: !function evil.f}}]\n",
    "an aggregation": {"metric_list": [{"metric": "acc", "aggregation": "evil.f"}]},
    "a filter": {"filter_list": [{"name": "x", "filter": [{"function": "evil.f"}]}]},
    "a filter's function": "task: quiz\ninclude: base.inc\n"
    "filter_list: [{{name: x, filter: [{{function: custom, filter_fn: !function evil.f}}]}}]\n",
    "a sampler": "task: quiz\ninclude: base.inc\nfewshot_config: {{sampler: !function evil.Own}}\n",
    "a data set of code": {"custom_dataset": "evil.f"},
    "prompts in a file": {"use_prompt": "{folder}/tasks/prompts.yaml:one"},
    "a script as data": {"dataset_path": "{folder}/tasks/evil.py"},
    "a pickle": {"dataset_path": "pandas", "dataset_kwargs": {"data_files": "{folder}/rows.pkl"}},
    "a pickle as a split": {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "{folder}/rows.pkl"}}},
    "remote code": {"dataset_path": "json", "dataset_kwargs": {"data_files": ROWS, "trust_remote_code": True}},
    "a chain of file systems": {"dataset_path": "json", "dataset_kwargs": {"data_files": "reference::file:///x.json"}},
    "storage options": {"dataset_path": "json", "dataset_kwargs": {"data_files": ROWS, "storage_options": {}}},
    "generation by a folder's code": {
        "output_type": "generate_until",
        "generation_kwargs": {"custom_generate": "{folder}/tasks", "trust_remote_code": True},
    },
    "results by a name": {"process_results": "evil.f"},
    "a group with a task inside": "group: quiz\ntask: [{{task: inner, custom_dataset: !function evil.f}}]\n",
    "a group with a pickle inside": "group: quiz\n"
    "task: [{{task: inner, dataset_path: pandas, dataset_kwargs: {{data_files: '{folder}/rows.pkl'}}}}]\n",
    "a group that changes a shipped task": "group: quiz\ntask: [{{task: arc_easy, metric_list: [{{metric: m}}]}}]\n",
    "a group that says code is safe": "group: quiz\ntask: [{{task: humaneval, unsafe_code: false}}]\n",
    "a group with a shipped task's metadata": "group: quiz\n"
    "task: [{{task: niah_single_1, metadata: {{tokenizer: '{folder}/tasks'}}}}]\n",
    "a group that changes all its tasks": "group: quiz\nprocess_docs: evil.f\ntask: [arc_easy]\n",
    "a group of groups": "group: quiz\ntask: [{{group: one, task: [{{task: two, class: evil.Own}}]}}]\n",
    "code that a model writes": {"unsafe_code": True},
    "a name that YAML reads otherwise": 'task: quiz\n"task": arc_easy\ndoc_to_text: !function evil.f\n',
    "a link to a file elsewhere": "link",
    "aliases without an end": "task: quiz\nmetadata: &a [*a, *a]\n",
    "aliases by the million": "task: quiz\n"
    "a: &a [x, x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n"
    "c: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c]\nmetadata: [*d, *d, *d, *d, *d, *d, *d]\n",
    "a path as a name": "task: ../../evil\n",
}  # fmt: skip


class Boom:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return (os.system, (f"touch {self.canary}",))


@pytest.fixture
def canary(tmp_path):
    """What each way out would write; it must not be there in the end."""
    path = tmp_path / "PWNED"
    yield path
    assert not path.exists()


@pytest.fixture
def folder(data_dir, canary, tmp_path, monkeypatch):
    """A folder of data beside whose tasks lies code."""
    tasks = data_dir / "tasks"
    evil = EVIL.format(canary=canary)
    (tasks / "evil.py").write_text(evil)
    for place in (tasks / "m", data_dir / "m", tasks / "custom_generate"):
        place.mkdir()
    for file in (tasks / "m/m.py", data_dir / "m/m.py", tasks / "custom_generate/generate.py"):
        file.write_text(evil)
    (tasks / "prompts.yaml").write_text("prompts: {one: !!python/name:os.system }\n")
    (tasks / "base.inc").write_text(yaml.safe_dump({key: value for key, value in QUIZ.items() if key != "task"}))
    (tasks / "function.inc").write_text("process_docs: !function evil.f\n")
    (data_dir / "rows.pkl").write_bytes(pickle.dumps(Boom(str(canary))))
    monkeypatch.chdir(data_dir)  # a metric `m` is looked for in the working folder
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return data_dir


def filled(value, **places):
    if isinstance(value, str):
        return value.format(**places)
    if isinstance(value, dict):
        return {key: filled(inner, **places) for key, inner in value.items()}
    return [filled(inner, **places) for inner in value] if isinstance(value, list) else value


def write(folder, canary, said):
    """The task `quiz` as ``said``: fields that replace its own, or a whole file."""
    said = filled(said, folder=folder, canary=canary)
    file = folder / "tasks/quiz.yaml"
    if said == "link":
        (folder / "elsewhere.yaml").write_text("task: quiz\ndoc_to_text: !function tasks.evil.f\n")
        file.unlink()
        file.symlink_to(folder / "elsewhere.yaml")
    elif isinstance(said, dict):
        file.write_text(yaml.safe_dump({**QUIZ, **said}))
    else:
        file.write_text(said)


def attempt(folder, model=None):
    """Read the task, and score it where it can be read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tasks = Tasks.find(str(folder))
    tasks.require(["quiz"], source="")
    built = tasks.build("quiz")
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    Runner(model=network, tokenizer=tokenizer, limit=2).run(built, 1)


@pytest.mark.parametrize("way", TEMPLATES)
def test_a_template_runs_nothing(folder, canary, model, way):
    field = way if way in QUIZ or way in ("description", "gen_prefix") else "doc_to_text"
    write(folder, canary, {field: TEMPLATES[way]})
    with pytest.raises(UserError, match=r"tasks: '?quiz'?: "):
        attempt(folder, model)


@pytest.mark.parametrize("way", FIELDS)
def test_a_task_file_runs_nothing(folder, canary, model, way):
    write(folder, canary, FIELDS[way])
    with pytest.raises(UserError, match=r"^(tasks|data_dir): "):
        attempt(folder, model)


def test_a_generated_task_s_name_is_no_way_in(folder, canary, tmp_path):
    made = tmp_path / "generated"
    made.mkdir()
    (made / "lamina_sorting.yaml").write_text("task: lamina_sorting\n")
    write(folder, canary, "task: lamina_sorting\ninclude: base.inc\ndoc_to_text: !function evil.f\n")
    with pytest.raises(UserError, match=r"runs Python code: 'evil.f' \(allowed with --run-code\)"):
        Tasks.find(str(folder), made).build("lamina_sorting")


def test_a_metric_s_script_in_the_working_folder_is_not_loaded_for_a_shipped_task(canary, folder):
    with contained(False):
        import evaluate

        with pytest.raises(UserError, match="the metric 'm' is a Python script"):
            evaluate.load("m")
    assert getattr(sys.modules.get("evaluate"), "load", None) is not evaluate.load


def test_what_runs_while_a_model_trains_or_is_probed_runs_nothing_either(folder, canary):
    from lamina.evaluation.job import TaskMeasure

    write(folder, canary, {"doc_to_text": CYCLER})
    with pytest.raises(UserError, match="eval_tasks: 'quiz': its template can't be filled in: SecurityError"):
        TaskMeasure.find("quiz", str(folder), 2, 2, 0)
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": ROWS}}, "training_split": None}
    write(folder, canary, {"doc_to_text": CYCLER, **files})
    with pytest.raises(UserError, match="task: 'quiz': its template can't be filled in: SecurityError"):
        HarnessTask("quiz", include_path=str(folder / "tasks"))
    write(folder, canary, "task: quiz\ninclude: base.inc\ndoc_to_text: !function evil.f\n")
    with pytest.raises(UserError, match=r"task: .*runs Python code"):
        HarnessTask("quiz", include_path=str(folder / "tasks"))
    write(folder, canary, {"dataset_path": "pandas", "dataset_kwargs": {"data_files": "{folder}/rows.pkl"}})
    with pytest.raises(UserError, match=r"task: .*the reader 'pandas'"):
        HarnessTask("quiz", include_path=str(folder / "tasks"))


def test_code_runs_where_it_is_asked_for(folder, tmp_path, model):
    """And so the files above do break out where nothing holds them."""
    ran = tmp_path / "ran"
    (folder / "tasks/evil.py").write_text(EVIL.format(canary=ran))
    write(folder, ran, "task: quiz\ninclude: base.inc\ndoc_to_text: !function evil.f\n")
    Tasks.find(str(folder), run_code=True).build("quiz")
    assert ran.read_text() == "it ran"
    ran.unlink()
    write(folder, ran, {"doc_to_text": CYCLER})
    Tasks.find(str(folder), run_code=True).build("quiz")
    assert ran.exists()


def test_a_task_of_plain_fields_needs_no_permission(folder, canary, model):
    said = {
        "doc_to_text": "{% for i in range(2) %}{{ choices[i]|upper }} {% endfor %}{{ question.split()[0] }}",
        "doc_to_choice": "{{ choices }}",
        "description": "{{ '{} of {}'.format(1, question) }}\n",
        "fewshot_config": {"sampler": "first_n"},
        "metadata": {"version": 1.0, "author": "me"},
        "tag": "mine",
        "filter_list": [{"name": "one", "filter": [{"function": "take_first"}]}],
    }
    (folder / "tasks/quiz.yaml").write_text(yaml.safe_dump({**QUIZ, **said}))
    attempt(folder, model)
    generates = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}}
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True}
    (folder / "tasks/quiz.yaml").write_text(yaml.safe_dump({**QUIZ, **generates, "metric_list": [metric]}))
    attempt(folder, model)


def test_code_that_a_model_writes_needs_permission():
    with pytest.raises(UserError, match=r"'humaneval' runs the code that a model writes \(allowed with --run-code\)"):
        Tasks.find(None).build("humaneval")


def test_a_refusal_comes_before_the_output_folder(folder, canary, model, tmp_path, capsys):
    from lamina.cli import main

    write(folder, canary, {"doc_to_text": CYCLER})
    out = tmp_path / "out"
    assert main(["eval", str(model), "--tasks", "quiz", "--data-dir", str(folder), "--output", str(out)]) == 2
    assert "SecurityError: access to attribute '__init__'" in capsys.readouterr().err
    assert not out.exists()
    assert json.loads((folder / "toy/quiz/default/test.jsonl").read_text().splitlines()[0])  # nothing is lost
