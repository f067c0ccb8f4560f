"""A disk that fills up: one line, what was finished is kept."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys

import pytest
from training.tiny_runs import SMALL, flags, start

from lamina.cli import main
from lamina.training.writers import MetricsWriter


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")


def test_a_full_disk_is_one_line(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MetricsWriter, "write", full)
    assert main(["pretrain", *flags(**SMALL, corpus=corpus, output=tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "lamina:" in line]
    assert "No space left on device" in line
    assert "Traceback" not in err


@pytest.fixture(params=["300k", "1500k"], ids=["model does not fit", "optimizer does not fit"])
def small_disk(tmp_path, request):
    """A file system that is full before the run is over."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    with contextlib.suppress(OSError):
        subprocess.run(["umount", str(folder)], check=False, capture_output=True)


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
