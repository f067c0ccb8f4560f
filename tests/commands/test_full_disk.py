"""A disk that fills up: one line, what was finished is kept."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys

import pytest
import torch
from studies.study_files import write_study
from training.tiny_runs import SMALL, flags, start

from lamina.cli import main
from lamina.jobs.files import disk_full
from lamina.training.monitor.writers import MetricsWriter


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")


def test_a_full_disk_is_one_line(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MetricsWriter, "write", full)
    assert main(["pretrain", *flags(**SMALL, corpus=corpus, output=tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "lamina:" in line]
    assert "No space left on device" in line
    assert "Traceback" not in err


@contextlib.contextmanager
def tmpfs(folder, size):
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root on Linux")
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


@pytest.fixture(params=["300k", "1500k"], ids=["model does not fit", "optimizer does not fit"])
def small_disk(tmp_path, request):
    """A file system that is full before the run is over."""
    with tmpfs(tmp_path / "disk", request.param) as folder:
        yield folder


@pytest.mark.parametrize("values", [76_700, 300_000], ids=["at its end", "in the middle"])
def test_a_disk_that_fills_up_within_torch_save_is_known_as_full(tmp_path, values):
    with tmpfs(tmp_path / "disk", "300k") as folder, pytest.raises(RuntimeError) as error:
        torch.save({"a": torch.zeros(values), "b": torch.zeros(40)}, folder / "optimizer.pt")
    assert disk_full(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["pretrain", "compare"])
def test_a_disk_that_fills_up_at_a_checkpoint_is_one_line(small_disk, corpus, command):
    given = {**SMALL, "hidden_size": 64, "steps": 20, "save_steps": 5, "keep": 9, "corpus": corpus}
    process = start(command, *flags(**given, output=small_disk / "out"))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if "lamina:" in line]
    assert "No space left on device" in line
    assert (small_disk / "out").is_dir()


@pytest.mark.slow
def test_a_study_on_a_disk_that_fills_up_keeps_its_trials_and_resumes(corpus, tmp_path):
    study = write_study(tmp_path / "studies", corpus=corpus, changed={"hidden_size": 64, "steps": 5}.items())
    with tmpfs(tmp_path / "disk", "1500k") as disk:
        command = ("study", "run", study, "--store", disk / "store", "--output", disk / "out", "--workers", "1")
        process = start(*command)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert "Traceback" not in err
        (line,) = [line for line in err.splitlines() if "lamina:" in line]
        assert "No space left on device" in line
        ended = {path: path.stat().st_mtime_ns for path in disk.glob("store/*/result.json")}
        assert 0 < len(ended) < 4
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        process = start(*command, "--resume")
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert len(list(disk.glob("store/*/result.json"))) == 4
        assert ended.items() <= {path: path.stat().st_mtime_ns for path in disk.glob("store/*/result.json")}.items()
