"""Checkpoints written while training goes on: the same files, and what a kill, a full disk or a stop leaves of them."""

import errno
import json
import os
import signal

import pytest
from training.tiny_runs import assert_same_weights, layers, records, settings, wait_for

from lamina.training import pretrain as pretraining
from lamina.training.checkpointing import checkpoints
from lamina.training.checkpointing.checkpoints import Background, what_is_broken
from lamina.training.trainer import LaminaTrainer

LONG = {"steps": 12, "logging_steps": 2, "save_steps": 2, "eval_steps": 4, "ema_decay": 0.9}
ASYNC = {**LONG, "async_checkpoints": True}


@pytest.fixture(scope="module")
def whole(corpus, session_cache, tmp_path_factory):
    """The folder of a run that waits for its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE", str(session_cache))
        pretraining.pretrain(settings(corpus, folder, **LONG), bar=False)
    return folder


@pytest.fixture
def held(monkeypatch):
    """Holds each checkpoint until training is two steps on; gives the steps held for good, and those that were let go
    then.
    """
    chosen, overtaken, begun = set(), [], [0]
    step, begin = LaminaTrainer.training_step, Background.begin

    def training_step(self, *args, **kwargs):
        begun[0] = self.state.global_step + 1
        return step(self, *args, **kwargs)

    def begin_late(self, act):
        saved = begun[0]

        def later():
            wait_for(lambda: saved not in chosen and (begun[0] > saved + 1 or saved >= LONG["steps"]))
            overtaken.append(saved)
            act()

        begin(self, later)

    monkeypatch.setattr(LaminaTrainer, "training_step", training_step)
    monkeypatch.setattr(Background, "begin", begin_late)
    return chosen, overtaken


def named(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_files_are_those_of_a_run_that_waits(trained, whole, tmp_path, held):
    trained(**ASYNC)
    assert held[1] == [2, 4, 6, 8, 10, 12]
    assert named(tmp_path / "run") == named(whole) == ["checkpoint-10", "checkpoint-12"]
    for name in named(whole):
        one, other = (folder / "checkpoints" / name for folder in (whole, tmp_path / "run"))
        assert what_is_broken(other) is None
        files = [sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file()) for path in (one, other)]
        assert files[0] == files[1]
        for file in (file for file in files[0] if file.name not in ("run_state.json", "manifest.json")):
            assert (one / file).read_bytes() == (other / file).read_bytes(), file
        states = [json.loads((path / "run_state.json").read_text()) for path in (one, other)]
        assert [state.pop("settings")["async_checkpoints"] for state in states] == [False, True]
        assert states[0] == states[1]
    assert records(tmp_path / "run") == records(whole)
    assert_same_weights(tmp_path / "run", whole)


def test_a_kill_before_it_is_whole_leaves_the_one_before(trained, whole, tmp_path, held, before_step):
    held[0].add(6)
    child = os.fork()
    if child == 0:  # a kill must not take pytest with it
        before_step(8, lambda trainer, model: os.kill(os.getpid(), signal.SIGKILL))
        trained(**ASYNC)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert named(tmp_path / "run") == [".draft-6", "checkpoint-2", "checkpoint-4"]
    held[0].clear()
    trained(resume=True, **ASYNC)
    assert named(tmp_path / "run") == named(whole)
    assert records(tmp_path / "run") == records(whole)
    assert layers(tmp_path / "run").equals(layers(whole))


def test_a_full_disk_ends_the_run_between_two_steps(trained, whole, tmp_path, monkeypatch):
    hashed = checkpoints.sync_and_hash

    def full(path):
        if (tmp_path / "run" / "checkpoints" / "checkpoint-4").is_dir():  # so this is the third checkpoint
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return hashed(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "sync_and_hash", full)
        with pytest.raises(OSError, match="No space left"):
            trained(**ASYNC)
    assert named(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]
    trained(resume=True, **ASYNC)
    assert records(tmp_path / "run") == records(whole)
    assert layers(tmp_path / "run").equals(layers(whole))


def test_a_run_that_is_stopped_ends_with_a_whole_one(trained, whole, tmp_path, before_step):
    left = [signal.SIGTERM]
    before_step(7, lambda trainer, model: os.kill(os.getpid(), left.pop()) if left else None)
    assert trained(**ASYNC)["status"] == "interrupted"
    assert named(tmp_path / "run") == ["checkpoint-6", "checkpoint-7"]
    trained(resume=True, **LONG)  # whether training waits decides nothing
    assert records(tmp_path / "run") == records(whole)
    assert layers(tmp_path / "run").equals(layers(whole))
    assert_same_weights(tmp_path / "run", whole)
