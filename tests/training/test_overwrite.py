"""--overwrite: the old folder is NAME.old until the new run has a checkpoint or a result."""

import errno
import os
import shutil
import signal

import pytest
from training.test_damage import OPTIONS, runs  # noqa: F401 (a fixture)
from training.tiny_runs import SMALL, flags, settings

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.folder import REPLACES, hold, lock
from lamina.training import pretrain as pretraining
from lamina.training.checkpointing import checkpoints


@pytest.fixture
def old(runs, tmp_path):  # noqa: F811
    return shutil.copytree(runs / "whole", tmp_path / "run")


@pytest.fixture
def aside(old):
    return old.with_name("run.old")


def there(folder):
    return {
        p.relative_to(folder): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name not in (".lock", "report.html")
    }


def overwrite(corpus, old, **changed):
    return main(["pretrain", *flags(**{**SMALL, **changed}, corpus=corpus, output=old), "--overwrite"])


def failing(error):
    def build(*args, **kwargs):
        raise error

    return build


def in_a_child(work):
    """Do work in a child process that kills itself."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_a_run_that_fails_before_its_first_checkpoint_leaves_the_old_one(
    old, aside, corpus, monkeypatch, error, caplog
):
    before = there(old)
    for _ in range(2):  # a second try keeps the same old content
        with monkeypatch.context() as patch:
            patch.setattr(pretraining, "initial_model", failing(error))
            if isinstance(error, RuntimeError):
                with pytest.raises(RuntimeError):
                    pretraining.pretrain(settings(corpus, old), overwrite=True, bar=False)
            else:
                assert overwrite(corpus, old) in (2, 130)
        assert there(aside) == before
        assert f"what --overwrite replaced is in {aside}" in caplog.text
    assert overwrite(corpus, old) == 0
    assert not aside.exists()


def test_a_killed_run_leaves_the_old_one_until_a_resumed_one_has_a_result(old, aside, corpus, monkeypatch):
    before = there(old)
    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "initial_model", die)
        in_a_child(lambda: overwrite(corpus, old))
    assert there(aside) == before
    assert main(["pretrain", "--output", str(old), "--resume"]) == 0
    assert not aside.exists()
    assert not (old / REPLACES).exists()


def test_the_old_run_goes_with_the_first_checkpoint(old, aside, corpus, monkeypatch):
    seen = []
    drop = checkpoints.drop_old

    def look(folder):
        seen.append([aside.exists(), *(p.name for p in folder.glob("checkpoints/*"))])
        drop(folder)

    monkeypatch.setattr(checkpoints, "drop_old", look)
    assert overwrite(corpus, old, save_steps=2, placement="keel") == 0
    assert seen[:2] == [[True, "checkpoint-2"], [False, "checkpoint-2", "checkpoint-4"]]
    assert not aside.exists()
    assert "placement: keel" in (old / "config.yaml").read_text()


def test_a_kill_after_the_first_checkpoint_leaves_the_new_run(old, aside, corpus, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "drop_old", die)
        in_a_child(lambda: overwrite(corpus, old, save_steps=2, placement="keel"))
    assert aside.exists()
    assert overwrite(corpus, old) == 0  # the run with a checkpoint is now what is replaced
    assert not aside.exists()


def test_somebodys_folder_in_the_way_is_left_alone(old, aside):
    aside.mkdir()
    (aside / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"run\.old' is in the way"), hold(old, overwrite=True):
        pass
    assert (aside / "thesis.tex").exists()
    assert (old / "result.json").exists()


def test_the_current_folder_is_not_renamed(old, aside, monkeypatch):
    monkeypatch.chdir(old / "model")
    with pytest.raises(UserError, match="holds the current folder"), hold(old, overwrite=True):
        pass
    assert not aside.exists()


def test_a_process_that_waited_holds_the_new_folder(old, aside):
    with hold(old, overwrite=True), pytest.raises(UserError, match="another process"), lock(old):
        pass
    with hold(old, resume="auto"):
        assert not (aside / ".lock").exists()
