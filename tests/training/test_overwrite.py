"""--overwrite: the old content counts until the new run has a checkpoint or a result, whatever happens meanwhile."""

import errno
import os
import shutil
import signal

import pytest
from training.test_damage import OPTIONS, go_on, runs  # noqa: F401 (a fixture)
from training.tiny_runs import SMALL, flags, settings

from lamina.cli import main
from lamina.jobs import folder as run_folder
from lamina.jobs import replaced
from lamina.training import initial as line
from lamina.training import pretrain as pretraining


@pytest.fixture
def old(runs, tmp_path):  # noqa: F811
    return shutil.copytree(runs / "whole", tmp_path / "run")


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


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_a_new_run_that_fails_before_its_first_checkpoint_leaves_the_old_one(old, corpus, monkeypatch, error, caplog):
    before = there(old)
    monkeypatch.setattr(line, "build", failing(error))
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError):
            pretraining.pretrain(settings(corpus, old), overwrite=True, bar=False)
    else:
        assert overwrite(corpus, old) in (2, 130)
    assert there(old) == before
    assert "is back" in caplog.text


@pytest.mark.parametrize("moment", ["moving", "moved", "training"])
def test_a_kill_before_the_first_checkpoint_is_mended_by_the_next_command(old, corpus, monkeypatch, moment, caplog):
    before = there(old)
    calls = []

    def die(*args, **kwargs):
        calls.append(args)
        if moment != "moving" or len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    original = os.replace
    child = os.fork()
    if child == 0:
        place, name = {
            "moving": (replaced.os, "replace"),
            "moved": (run_folder.digests, "begin"),
            "training": (line, "build"),
        }[moment]
        monkeypatch.setattr(place, name, die)
        overwrite(corpus, old)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert there(old) != before
    assert go_on(old) == 0
    assert "is back" in caplog.text
    assert there(old) == before


def test_the_old_run_goes_with_the_new_ones_first_checkpoint(old, corpus, monkeypatch):
    seen = []
    drop = replaced.drop

    def look(folder):
        seen.append([(folder / ".replaced").exists(), *(p.name for p in folder.glob("checkpoints/*"))])
        drop(folder)

    monkeypatch.setattr(replaced, "drop", look)
    assert overwrite(corpus, old, save_steps=2, placement="keel") == 0
    assert seen[:2] == [[True, "checkpoint-2"], [False, "checkpoint-2", "checkpoint-4"]]
    assert not list(old.glob(".replac*"))
    assert "placement: keel" in (old / "config.yaml").read_text()


def test_a_kill_after_the_first_checkpoint_leaves_the_new_run(old, corpus, monkeypatch, caplog):
    monkeypatch.setattr(replaced, "drop", lambda folder: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if child == 0:
        overwrite(corpus, old, save_steps=2, placement="keel")
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    monkeypatch.undo()
    assert go_on(old) == 0
    assert "is back" not in caplog.text
    assert "placement: keel" in (old / "config.yaml").read_text()
    assert not list(old.glob(".replac*"))
