"""A job's folder: locked, claimed, of a kind, resumed under one policy; links stay as they are; the code's revision."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs import environment
from lamina.jobs.files import write_json, write_text, write_yaml, writing
from lamina.jobs.folder import LOCK, REPLACES, hold, in_use, lock
from lamina.jobs.job import ResumePolicy, open_job
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.settings import Settings, at_least, setting
from lamina.reports.page import write_page

POLICY = ResumePolicy(what="job", free={"output", "threads"})


class JobSettings(Settings):
    output: str = setting("unused", "the folder")
    steps: int = setting(10, "steps", at_least(1))
    threads: int = setting(1, "threads", at_least(1))
    mode: str = setting("auto", "decided when the job begins")


def stored(folder):
    return json.loads((folder / "settings.json").read_text())


def opened(given, **modes):
    return open_job(Kind.COMPARE, JobSettings, given, policy=POLICY, stored=stored, **modes)


@pytest.fixture
def begun(tmp_path):
    with opened({"output": str(tmp_path / "job"), "steps": 5}) as job:
        job.write_json("settings.json", job.settings.to_dict())
    return tmp_path / "job"


def test_a_folder_says_its_kind(begun):
    assert json.loads((begun / "environment.json").read_text())["kind"] == "study"
    assert kind_of(begun) == Kind.COMPARE


def test_nothing_is_touched_before_the_job_is_entered(tmp_path):
    opened({"output": str(tmp_path / "job")})
    assert not (tmp_path / "job").exists()


def test_a_folder_in_use_is_refused(begun):
    with pytest.raises(UserError, match="is not empty"):
        opened({"output": str(begun)})


def fail(folder, error, *files, **modes):
    with opened({"output": str(folder)}, **modes) as job:
        for file in files:
            job.write_json(file, {})
        raise error


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_job_that_fails_before_its_first_record_does_not_block_the_next_one(tmp_path, begun, overwrite):
    folder = begun if overwrite else tmp_path / "new"
    for error in (RuntimeError, UserError):
        with pytest.raises(error):
            fail(folder, error, "result.json", overwrite=overwrite)
        assert folder.exists() == overwrite
    assert (tmp_path / "job.old" / "settings.json").exists() == overwrite
    with opened({"output": str(folder)}) as job:
        assert not job.resumes


@pytest.mark.parametrize(
    ("name", "error"), [("metrics.jsonl", UserError), ("study.yaml", UserError), ("log.txt", KeyboardInterrupt)]
)
def test_a_job_that_has_records_or_is_interrupted_stays_and_resumes(tmp_path, name, error):
    folder = tmp_path / "job"
    with pytest.raises(error):
        fail(folder, error, "settings.json", name)
    with pytest.raises(UserError, match="is not empty"):
        opened({"output": str(folder)})
    with pytest.raises(RuntimeError):
        fail(folder, RuntimeError, "more.json", resume=True)
    assert (folder / name).exists()


def test_two_jobs_do_not_hold_one_folder(begun):
    job = opened({"output": str(begun)}, resume=True)
    with lock(begun), pytest.raises(UserError, match="another process"), job:
        pass


def test_a_job_is_resumed_with_what_it_had_and_what_may_change(begun):
    job = opened({"output": str(begun), "threads": 3}, resume=True)
    assert (job.settings.steps, job.settings.threads, job.resumes) == (5, 3, True)


def test_what_a_job_computes_may_not_change(begun):
    with pytest.raises(UserError, match=r"steps: 6 differs from the job's 5.*you may change only threads"):
        opened({"output": str(begun), "steps": 6}, resume=True)


def test_auto_stands_for_what_the_job_decided():
    assert POLICY.merge({"mode": "old"}, {"mode": "auto"}, {"mode": "auto"}) == {"mode": "old"}
    with pytest.raises(UserError, match="mode: 'new' differs from the job's 'old'"):
        POLICY.merge({"mode": "old"}, {"mode": "new"}, {"mode": "auto"})
    with pytest.raises(UserError, match="steps: 6 differs from the job's 10"):
        POLICY.merge({}, {"steps": 6}, {"steps": 10})


def test_nothing_to_resume_is_said(tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        opened({"output": str(tmp_path / "job")}, resume=True)
    assert not opened({"output": str(tmp_path / "job")}, resume="auto").resumes


@pytest.mark.parametrize("content", [None, "{", "[]", '{"kind": 3}', '{"versions": {}}'])
def test_a_folder_whose_environment_does_not_say_its_kind_is_of_none(tmp_path, content):
    (tmp_path / "result.json").write_text("{}")
    if content is not None:
        (tmp_path / "environment.json").write_text(content)
    assert kind_of(tmp_path) is None


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_yaml(tmp_path / "a.yaml", {"a": 1})

    def fail():
        with writing(tmp_path / "a.yaml") as temporary:
            temporary.write_text("half")
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "a.yaml").read_text() == "a: 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


@pytest.mark.parametrize("output", [5, None, ["a"]])
def test_an_output_that_is_no_text_is_refused_by_name(output):
    with pytest.raises(UserError, match="output: "):
        opened({"output": output})


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("mine")
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.mark.parametrize("name", [LOCK, REPLACES])
def test_a_folder_with_a_link_in_the_locks_place_is_refused(folder, precious, name):
    (folder / name).symlink_to(precious)
    with pytest.raises(UserError, match=f"{name}' is a link"), lock(folder):
        pass
    assert precious.read_text() == "mine"
    assert (folder / name).is_symlink()
    assert len(list(folder.iterdir())) == 1


def test_a_lock_that_leads_nowhere_makes_no_file(folder, tmp_path):
    (folder / ".lock").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a link"), lock(folder):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_that_is_a_hard_link_is_not_emptied(folder, precious):
    os.link(precious, folder / ".lock")
    with lock(folder):
        pass
    assert precious.read_text() == "mine"


def test_a_lock_that_is_a_folder_is_refused(folder):
    (folder / ".lock").mkdir()
    with pytest.raises(UserError, match="is a folder"), lock(folder):
        pass


def test_a_file_is_not_written_through_a_link_in_its_temporary_place(folder, precious):
    (folder / f".result.json.{os.getpid()}").symlink_to(precious)
    write_text(folder / "result.json", "{}")
    assert precious.read_text() == "mine"
    assert not (folder / "result.json").is_symlink()


def test_a_page_is_not_written_through_a_link_in_its_temporary_place(folder, precious):
    (folder / f".report.html.{os.getpid()}").symlink_to(precious)
    write_page(folder, title="A page", facts=[], sections=[], command="")
    assert precious.read_text() == "mine"


def test_holding_a_folder_deletes_a_linked_draft_but_not_what_it_leads_to(folder, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("mine")
    (folder / ".model-draft").symlink_to(tmp_path / "home")
    write_text(folder / "environment.json", '{"versions": {"lamina": "0.1.0"}}')
    with hold(folder, resume=True):
        pass
    assert not (folder / ".model-draft").is_symlink()
    assert (tmp_path / "home" / "letter").read_text() == "mine"


def test_a_checkout_that_is_not_installed_knows_its_own_folders(tmp_path, monkeypatch):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(environment.metadata, "version", missing)
    write_json(tmp_path / "environment.json", environment.environment(0))
    (tmp_path / "config.yaml").write_text("steps: 4\n")
    with hold(tmp_path, resume=True) as resumes:
        assert resumes


def test_a_folder_whose_job_was_killed_before_its_first_record_is_free(tmp_path):
    write_json(tmp_path / "environment.json", environment.environment(0))
    (tmp_path / ".study.yaml.4711").write_text("kind")
    assert not in_use(tmp_path)
    for resume in ("auto", False):
        with hold(tmp_path, resume=resume) as resumes:
            assert not resumes
    write_json(tmp_path / "environment.json", {"versions": {"python": "3"}})  # another program's
    with pytest.raises(UserError, match="holds files that Lamina did not write"), hold(tmp_path, resume="auto"):
        pass
    assert (tmp_path / "environment.json").is_file()


def test_the_machines_gpus_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_DRIVER", tmp_path)
    assert "gpus" not in environment.environment(0)["machine"]
    (tmp_path / "0000:06").mkdir()
    (tmp_path / "0000:06" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 0\n")
    assert environment.environment(0)["machine"]["gpus"] == ["NVIDIA H200"]


@pytest.fixture(autouse=True)
def forgotten():
    """git is asked once per process."""
    environment.git_revision.cache_clear()
    yield
    environment.git_revision.cache_clear()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, in which the package would lie."""

    def git(*words):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True)

    for name in ("lamina/jobs/environment.py", "studies/records/a/study.yaml", "studies/a.yaml", "docs/results/a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "lamina" / "jobs" / "environment.py"))
    return tmp_path, git("rev-parse", "HEAD").stdout[:12]


@pytest.mark.parametrize("name", ["studies/records/a/study.yaml", "docs/results/a.md", "studies/records/b/new"])
def test_what_studies_write_is_no_change_of_the_code(checkout, name):
    folder, revision = checkout
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("second\n")
    assert environment.git_revision() == revision


@pytest.mark.parametrize("name", ["lamina/jobs/environment.py", "studies/a.yaml"])
def test_a_changed_file_is_said(checkout, name):
    folder, revision = checkout
    (folder / name).write_text("second\n")
    assert environment.git_revision() == f"{revision}-dirty"


def test_there_is_no_revision_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "lamina" / "jobs" / "environment.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.git_revision() is None


def test_a_resumed_job_keeps_the_command_that_made_its_folder(begun, monkeypatch):
    first = json.loads((begun / "environment.json").read_text())["command"]
    monkeypatch.setattr(sys, "argv", ["lamina", "compare", "--output", str(begun), "--resume"])
    with opened({"output": str(begun)}, resume=True):
        assert json.loads((begun / "environment.json").read_text())["command"] == first
    with opened({"output": str(begun)}, overwrite=True):
        assert "--resume" in json.loads((begun / "environment.json").read_text())["command"]


@pytest.mark.parametrize("program", ["bin/lamina", "site-packages/lamina/__main__.py"])
def test_a_page_shows_a_command_that_can_be_typed(monkeypatch, program):
    monkeypatch.setattr(sys, "argv", [program, "compare", "--output", "runs/mine"])
    assert environment.environment(0)["command"] == "lamina compare --output runs/mine"


def test_links_that_lead_in_a_circle_are_one_line(tmp_path, capsys):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "model").mkdir()
    model, place = str(tmp_path / "model"), str(tmp_path / "loop" / "out")
    outputs = (["probe", model], ["eval", model], ["prune", model, "--layers", "1"], ["pretrain"], ["compare"])
    given = (["convert", model, place], ["diagnose", place], ["diagnose", model, place])
    data = ["eval", model, "--tasks", "generated", "--data-dir", place, "--output", str(tmp_path / "scores")]
    for words in (*([*each, "--output", place] for each in outputs), *given, data):
        assert main(words) == 2, words
        assert len(capsys.readouterr().err.splitlines()) == 1, words
