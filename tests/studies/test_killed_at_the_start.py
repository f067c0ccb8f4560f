"""A kill between a job's first files: `--resume=auto` begins or goes on, whichever file was the last."""

import os
import signal

import pytest
from training.tiny_runs import SMALL, flags

from lamina.cli import main

SIZES = {name: value for name, value in SMALL.items() if name != "steps"}
COMMANDS = {
    "compare": {**SMALL, "placements": "pre_ln", "learning_rates": "3e-3"},
    "max-lr": {**SIZES, "placements": "pre_ln", "steps": 4},
    "transfer": {"num_layers": 2, "hidden_size": 64, "proxy_width": 16, "steps": 4, "learning_rates": "1e-3"},
    "coord-check": {"placement": "pre_ln", "widths": "16,32", "steps": 1, "sequence_length": 16, "batch_size": 2},
    "pretrain": SMALL,
}


def killed_after(count, argv, folder):
    """Run a command in a process that dies once it has written ``count`` files into a folder; return how it ended."""
    if (pid := os.fork()) == 0:
        replace, seen = os.replace, []

        def counted(source, target):
            replace(source, target)
            seen.append(target)
            if len([name for name in seen if str(name).startswith(f"{folder}/")]) == count:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = counted
        try:
            os._exit(main(argv))
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_killed_between_its_first_files_can_begin(corpus, tmp_path, command):
    argv = [command, *flags(corpus=corpus, output=tmp_path / "out", **COMMANDS[command])]
    assert killed_after(1, argv, tmp_path / "out") == signal.SIGKILL
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != ".lock"] == ["environment.json"]
    for count in (1, 2, 3):
        assert killed_after(count, [*argv, "--resume=auto"], tmp_path / "out") == signal.SIGKILL
