"""A job's folder: locked, claimed, of a kind; resumed under one policy."""

import json

import pytest

from lamina.errors import UserError
from lamina.jobs.files import write_yaml, writing
from lamina.jobs.folder import lock
from lamina.jobs.job import ResumePolicy, open_job
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.settings import Settings, at_least, setting

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
    with pytest.raises(UserError, match="is in use"):
        opened({"output": str(begun)})


def test_two_jobs_do_not_hold_one_folder(begun):
    job = opened({"output": str(begun)}, resume=True)
    with lock(begun), pytest.raises(UserError, match="another process"), job:
        pass


def test_a_job_is_resumed_with_what_it_had_and_what_may_change(begun):
    job = opened({"output": str(begun), "threads": 3}, resume=True)
    assert (job.settings.steps, job.settings.threads, job.resumes) == (5, 3, True)


def test_what_a_job_computes_may_not_change(begun):
    with pytest.raises(UserError, match=r"steps: 6 differs from the job's 5 .*another of threads; else"):
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
