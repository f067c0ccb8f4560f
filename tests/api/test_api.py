"""The commands as functions: signatures that an editor completes, early refusals, what they return."""

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from scripts import loaded

import lamina
from lamina.api.job_functions import as_settings
from lamina.api.results import Comparison, Diagnosis, RunResult, StudyOutcome
from lamina.catalog import JOBS
from lamina.core.progress import ProgressLines
from lamina.errors import TrialsFailed, UserError
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json
from lamina.jobs.kinds import Kind
from lamina.lab.posttraining.settings import SftSettings
from lamina.placements import resolve

FUNCTIONS = [row.function_name for row in JOBS.values()]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_names_every_setting_with_its_default(name):
    job = getattr(lamina.api, name)
    parameters = inspect.signature(job).parameters
    record = job.record
    assert list(parameters)[: len(record.names())] == list(record.names())
    assert all(parameters[field].default == record.default(field) for field in record.names())
    assert {"overwrite", "bar"} <= set(parameters)
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())


def test_the_stub_is_current():
    stubs = loaded("docs/stubs.py")
    assert stubs.text() == stubs.STUB.read_text(encoding="utf-8"), "run python docs/stubs.py"


REFUSED = [
    (["pretrain", "--lrr", "3"], "--learning-rate"),
    (["compare", "--corpus", "no.txt"], "no.txt"),
    (["pretrain", "--output", "used"], "is not empty"),
    (["sft", "--data", "no.jsonl", "--from", "m"], "no.jsonl"),
    (["pretrain", "--init", "xavie"], "did you mean 'xavier'"),
    (["eval", "some/model"], "--tasks"),
    (["generate", "no/such"], "no/such"),
    (["pretrain", "--backbone", "llama-71"], "did you mean 'llama-71m'"),
    (["preflight", "--backbone", "nosuch"], "unknown backbone 'nosuch'"),
    (["probe", "gpt2", "--probes", "layer_drop,angular_distance(token=all)"], "did you mean 'tokens'"),
    (["compare", "--learning-rates-of", "keel=-1", "--placements", "keel"], "learning_rates_of: -1"),
    (["pretrain", "--tokenizer", "bpe:0"], "tokenizer"),
    (["pretrain", "--output", ""], "output: ''"),
    (["pretrain", "--pause-step", "9", "--steps", "3"], "pause_step: 9 is after the last step, 3. Give at most 3"),
    (
        ["pretrain", "--rollback-factor", "0.1"],
        "has no effect here. Use 'rollback_factor' only with --rollback, or leave 'rollback_factor' out.",
    ),
    (["placements", "keel", "--svg", "used"], "svg: 'used' is a folder"),
    (["probe", "run", "--output", "run", "--overwrite"], "output: 'run' holds the model that this job reads"),
    (["eval", "run", "--output", "run", "--overwrite", "--tasks", "arc_easy"], "holds the model that this job reads"),
    (["pretrain", "--output", "run", "--resume"], "'run' was written by lamina eval, so lamina pretrain can't"),
]


def test_the_command_line_refuses_without_torch(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("x")
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    write_json(tmp_path / "run" / "environment.json", environment(0, Kind.EVALUATION))
    commands = f"for words in {[words for words, _ in REFUSED]!r}: print(main(words), 'torch' in sys.modules)"
    script = f"import sys\nfrom lamina.cli import main\n{commands}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["2 False"] * len(REFUSED)
    lines = done.stderr.splitlines()
    assert [words for (words, said), line in zip(REFUSED, lines, strict=True) if said not in line] == []


def test_a_notebook_shows_one_line_for_a_mistake():
    with pytest.raises(UserError) as caught:
        lamina.compare(lr=1.0, learning_rates=[2.0])
    assert caught.value._render_traceback_() == [f"UserError: {caught.value}"]
    table = pd.DataFrame({"trial": ["a"], "reason": ["because"]})
    assert TrialsFailed(table)._render_traceback_()[0].startswith("TrialsFailed: the only trial failed")


class Rows:
    """What a datasets.Dataset has."""

    column_names = ("text", "n")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_corpus_may_be_texts_paths_or_a_data_set(tmp_path):
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(f"text of {name}")
    assert as_settings({"corpus": Path("a.txt"), "output": Path("out")}) == {"corpus": "a.txt", "output": "out"}
    assert as_settings({"corpus": ["a.txt"]}) == {"corpus": "a.txt"}
    texts = as_settings({"corpus": ["one/two texts", "another"]})["corpus"]
    assert read(texts) == [{"text": "one/two texts"}, {"text": "another"}]
    assert as_settings({"corpus": ("one/two texts", "another")})["corpus"] == texts  # the same rows, the same file
    assert read(as_settings({"corpus": [Path("a.txt"), Path("b.txt")]})["corpus"]) == [
        {"text": "text of a.txt"}, {"text": "text of b.txt"}
    ]  # fmt: skip
    rows = Rows([{"text": "é", "n": 1}])
    assert read(as_settings({"corpus": rows})["corpus"]) == [{"text": "é"}]
    assert read(as_settings({"data": rows})["data"]) == [{"text": "é", "n": 1}]
    rows = [{"prompt": "p", "completion": "c"}]
    assert read(as_settings({"data": rows})["data"]) == rows


def test_a_real_data_set_is_taken():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    assert read(as_settings({"corpus": rows})["corpus"]) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(UserError, match="no column 'body'"):
        as_settings({"corpus": rows, "text_field": "body"})
    with pytest.raises(UserError, match="IterableDataset"):
        as_settings({"corpus": rows.to_iterable_dataset()})


@pytest.mark.parametrize("corpus", [3, [], [3], {"a": 1}])
def test_a_corpus_of_no_kind_is_refused(corpus):
    with pytest.raises(UserError, match=r"corpus: .*Give a path, a list"):
        lamina.pretrain(corpus=corpus)


def test_a_comparison_is_read_like_its_table(tmp_path):
    table = pd.DataFrame({"placement": ["<keel>", "pre_ln"], "status": ["finished", "stuck"], "eval_loss": [2.0, 3.0]})
    found = Comparison(table, tmp_path)
    assert found.results is table
    assert list(found[["placement"]].columns) == ["placement"]
    assert (len(found), list(found)) == (2, list(table))
    assert found.eval_loss.min() == 2.0
    assert found.report() == tmp_path / "report.html"
    assert "&lt;keel&gt;" in found._repr_html_()
    assert 'href="file://' in found._repr_html_()
    assert "report.html" in repr(found)
    with pytest.raises(AttributeError):
        _ = found.no_such_column
    import copy
    import pickle

    assert len(pickle.loads(pickle.dumps(found))) == len(copy.copy(found)) == 2


def test_results_are_shown_as_html_with_the_text_escaped(tmp_path):
    run = RunResult({"status": "<b>", "scores": {"a": 1}}, tmp_path)
    assert run["status"] == "<b>"
    assert run == {"status": "<b>", "scores": {"a": 1}}
    assert run.model is None
    assert "&lt;b&gt;" in run._repr_html_()
    claim = {"verdict": "holds", "claim": "<c>", "says": "x"}
    study = StudyOutcome(results=pd.DataFrame(), claims=[claim], folder=tmp_path)
    assert "&lt;c&gt;" in study._repr_html_()
    assert "holds" in repr(study)
    told = Diagnosis(sentences=["<it> left"], page=tmp_path / "diagnosis.html")
    assert "&lt;it&gt;" in told._repr_html_()
    assert told.report() == tmp_path / "diagnosis.html"


def test_the_time_left_is_that_of_the_latest_steps(capsys, monkeypatch):
    """The first steps are slow: they compile, fill caches, start processes."""
    now = [0.0]
    monkeypatch.setattr("lamina.core.progress.time.monotonic", lambda: now[0])
    lines = ProgressLines(100, every=0.0)
    lines.see(0)
    for step in range(1, 100):
        now[0] += 60.0 if step == 1 else 1.0
        lines.see(step)
    told = capsys.readouterr().err.splitlines()
    assert not any("left" in line for line in told[:4])  # before the fourth step
    assert told[4].endswith("1 min 36 s left")
    assert told[50].endswith("50 s left")
    slow = ProgressLines(100, every=0.0)
    for step in range(1, 81):
        now[0] += 1.0 if step <= 20 else 10.0
        slow.see(step)
    assert capsys.readouterr().err.splitlines()[-1].endswith("3 min 20 s left"), "twenty steps at the latest pace"


def test_the_examples_in_the_docstrings_are_true():
    import doctest

    done = doctest.testmod(importlib.import_module("lamina.api.models"), optionflags=doctest.ELLIPSIS)
    assert (done.failed, done.attempted) == (0, 2)


def test_what_a_preset_says_may_need_what_the_user_says_and_the_other_way_round(tmp_path):
    """The preset has the rank without which an alpha has no effect."""
    given = {"preset": "commonsense170k-adapters", "lora_alpha": 32.0, "output": str(tmp_path / "run")}
    assert SftSettings.from_dict(given).lora_rank == 8
    with pytest.raises(UserError, match=r"lora_alpha: 32\.0 has no effect without LoRA"):
        SftSettings.from_dict({**given, "preset": "lima"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"corpus": [f"my_texts/part-{n}.txt" for n in range(3)]}, "corpus: 'my_texts/part-0.txt': no such file"),
        ({"corpus": ["hf:some/name"]}, "corpus: 'hf:some/name': no such file"),
        ({"corpus": ["a.txt", "b.txt"]}, r"'b\.txt' is not a file"),
        ({"corpus": SimpleNamespace(column_names={"train": ["text"]})}, r"as in data\['train'\]"),
        ({"placements": 3.5}, "unknown placement '3.5'"),
        ({"placements": [resolve("keel", 2)]}, "placements: Plan .*For a Plan, call lamina.build"),
        ({"placements": [None]}, "placements: NoneType"),
    ],
)
def test_objects_that_mean_something_else_are_refused(given, message):
    Path("a.txt").write_text("x")
    with pytest.raises(UserError, match=message):
        lamina.compare(**given)


def test_wrong_kinds_of_arguments_are_told_by_name():
    with pytest.raises(UserError, match="prompt: 3"):
        lamina.generate("run", 3)
    with pytest.raises(UserError, match="folder: None"):
        lamina.report(None)
