"""environment.json's revision: of the code, and whether the code was changed."""

import subprocess

import pytest

from lamina.jobs import environment


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
