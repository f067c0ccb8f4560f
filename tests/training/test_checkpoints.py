"""Checkpoints are whole or not there: what a kill, a full disk or a flipped bit leaves is never gone on from."""

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from training.test_damage import cut
from training.tiny_runs import layers, records, settings

from lamina.cli import main
from lamina.training import pretrain as pretraining
from lamina.training.checkpointing import checkpoints, sharding
from lamina.training.checkpointing import state as saving
from lamina.training.checkpointing.checkpoints import Checkpoints, what_is_broken

LONG = {"steps": 12, "logging_steps": 2, "save_steps": 2, "eval_steps": 4}


@pytest.fixture(scope="module")
def whole(corpus, session_cache, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE", str(session_cache))
        pretraining.pretrain(settings(corpus, folder, **LONG), bar=False)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")


FILES = (
    "config.json", "model.safetensors", "optimizer/states.safetensors", "optimizer.pt", "scheduler.pt",
    "rng_state.pth", "trainer_state.json", "run_state.json", "manifest.json",
)  # fmt: skip


def flip(path):
    """One bit in the middle: the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def once(number):
    """For ``before_step``: a signal, at the first run that gets there."""
    left = [number]
    return lambda trainer, model: os.kill(os.getpid(), left.pop()) if left else None


@pytest.mark.parametrize("harm", [cut, flip, lambda path: path.unlink()], ids=["cut", "flipped", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_harmed_file_is_named_and_the_checkpoint_before_is_used(copied, caplog, name, harm):
    assert Checkpoints(copied).newest().name == "checkpoint-12"
    harm(copied / "checkpoint-12" / name)
    assert Checkpoints(copied).newest().name == "checkpoint-10"
    assert name in caplog.text
    assert "checkpoint-12" in caplog.text


def test_only_the_newest_are_kept_and_the_manifest_lists_every_file(whole):
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["checkpoint-10", "checkpoint-12"]
    newest = whole / "checkpoints" / "checkpoint-12"
    listed = json.loads((newest / "manifest.json").read_text())["files"]
    there = {str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()}
    assert set(listed) == there - {"manifest.json"}


def test_the_old_ones_go_only_when_the_new_one_is_whole(trained, tmp_path, monkeypatch):
    seen = []
    publish = checkpoints._publish

    def look(path, final, listed):
        seen.append(sorted(p.name for p in final.parent.glob("checkpoint-*")))
        publish(path, final, listed)
        assert what_is_broken(final) is None

    monkeypatch.setattr(checkpoints, "_publish", look)
    trained(**{**LONG, "steps": 6}, keep=1)
    assert seen == [[], ["checkpoint-2"], ["checkpoint-4"]]


@pytest.mark.parametrize("where", [(sharding, "save_file"), (torch, "save"), (checkpoints, "sync_and_hash")])
def test_a_disk_that_fills_during_a_save_leaves_the_last_good_checkpoint(trained, whole, tmp_path, monkeypatch, where):
    module, name = where
    original = getattr(module, name)

    def full(*args, **kwargs):
        if (tmp_path / "run" / "checkpoints" / "checkpoint-4").is_dir():  # so this is the third save
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, full)
        with pytest.raises(OSError, match="No space left"):
            trained(**LONG)
    left = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in left.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert Checkpoints(left).newest().name == "checkpoint-4"
    trained(resume=True, **LONG)
    assert records(tmp_path / "run") == records(whole)


def test_a_kill_while_a_checkpoint_is_written_leaves_a_draft_that_is_cleared(trained, whole, tmp_path, monkeypatch):
    write = saving.write

    def die(trainer, processes, folder, state):
        write(trainer, processes, folder, state)
        if state["step"] == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:  # a kill must not take pytest with it
        monkeypatch.setattr(saving, "write", die)
        trained(**LONG)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    left = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in left.iterdir()) == [".draft-6", "checkpoint-2", "checkpoint-4"]
    trained(resume=True, **LONG)
    assert not list(left.glob(".*"))
    assert records(tmp_path / "run") == records(whole)
    assert layers(tmp_path / "run").equals(layers(whole))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_warning_of_the_cluster_saves_between_two_records_and_changes_no_record(
    trained, whole, tmp_path, before_step, number
):
    """At step 7, where records are of two steps: the loss of the one before the checkpoint is kept in it."""
    before_step(7, once(number))
    found = trained(**LONG)
    assert found["status"] == "interrupted"
    assert signal.Signals(number).name in found["reason"]
    assert found["steps"] == 7
    trained(resume=True, **LONG)
    assert records(tmp_path / "run") == records(whole)


def test_the_guard_goes_on_with_what_it_saw(trained, tmp_path, trainers, before_step):
    before_step(7, once(signal.SIGTERM))
    trained(**LONG)
    trained(resume=True, **LONG)
    trained("whole", **LONG)
    resumed, straight = trainers[1].guard, trainers[2].guard
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.alarms.state_dict() == straight.alarms.state_dict()


def test_a_device_that_is_not_there_is_refused(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["pretrain", "--device", "cuda", "--output", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "lamina: device: 'cuda' is not on this machine (allowed here: auto, cpu)"
