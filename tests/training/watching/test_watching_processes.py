"""Two processes, DDP and FSDP2 over gloo, by hand and by accelerate: the numbers are those of one process.

Training's bits stay, and what the processes saw of a batch is put together as if one had seen the whole.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training.watching.loops import found, rows_of

from lamina.training.monitor.stream_measures import STATE_METRICS, PassNumbers, state_statistics
from lamina.training.monitor.stream_measures import rows_of as pooled_rows

SCRIPT = Path(__file__).with_name("sharded_loop.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "ddp-one-line", "fsdp2", "accelerate-ddp", "accelerate-fsdp2"])
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


def seen(x, logit, load):
    spot = (0, "attention", 0)
    return PassNumbers(
        states={spot: (x.numel(), state_statistics(x).tolist())}, logits={0: logit}, loads={0: (len(x), load)}
    )


def test_the_parts_of_a_batch_have_the_statistics_of_the_whole():
    x = torch.randn(6, 5, 8) * 3 + torch.arange(6.0)[:, None, None]
    parts = [seen(x[:2], 1.0, [0.5, 0.5]), seen(x[2:], 4.0, [0.0, 1.0])]
    found = {(row[2], row[5], row[4]): row[6] for row in pooled_rows(7, parts)}
    whole = [x.var(correction=0), x.mean(), x.abs().mean(), x.abs().max()]
    for metric, value in zip(STATE_METRICS, whole, strict=True):
        assert found["attention", metric, 0] == pytest.approx(float(value), rel=1e-6)
    assert found["attention", "attention_logit", 0] == 4.0
    assert found["feed_forward", "expert_load", 0] == pytest.approx(2 * 0.5 / 6)
    assert found["feed_forward", "expert_load", 1] == pytest.approx((2 * 0.5 + 4 * 1.0) / 6)


def test_a_process_that_saw_nothing_adds_nothing():
    part = seen(torch.randn(2, 3, 4), 2.0, [1.0])
    assert pooled_rows(1, [PassNumbers(), part]) == pooled_rows(1, [part])
