"""Two processes, DDP and FSDP2 over gloo, by hand and by accelerate.

The numbers are those of one process, and training's bits stay.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training.watching.loops import found, rows_of

SCRIPT = Path(__file__).with_name("sharded_loop.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "accelerate-ddp", "accelerate-fsdp2"])
def test_two_processes_are_measured_as_one(tmp_path, kind):
    roots = [str(SCRIPT.parents[2]), str(SCRIPT.parents[3])]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    ended = subprocess.run(
        [*command, kind, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = json.loads((tmp_path / "by_hand.json").read_text())
    assert all(said["same"])
    for metric, values in said["hand"].items():
        expected = {tuple(place): value for *place, value in values}
        # the processes add their halves of a batch in another order than one process adds the whole
        recorded = found(tmp_path / "run", metric, 3)
        if metric.startswith("hidden_"):
            recorded = {place: recorded[place] for place in expected}  # the others are within layers
        assert recorded == pytest.approx(expected, rel=1e-4 if metric == "update_norm" else 1e-5)
    layers = rows_of(tmp_path / "run").query("metric == 'hidden_abs_max' and step == 3")["layer"]
    assert set(layers) == {-1, 0, 1}
