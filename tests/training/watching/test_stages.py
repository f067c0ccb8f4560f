"""Pipeline stages: layers keep the model's numbers, each stage has a folder."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from training.tiny_runs import layers
from training.watching.loops import NanoGpt, found, loop
from training.watching.stages_loop import Stage

from lamina.reports.diagnosis import gather
from lamina.training.monitor.stages import first_number

SCRIPT = Path(__file__).with_name("stages_loop.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_two_stages_are_measured_as_the_whole_model(tmp_path, kind):
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
    stages = [tmp_path / "stage-0", tmp_path / "stage-1"]
    expected = {tuple(place): value for *place, value in said["gradients"]}
    recorded = [found(each, "gradient_norm", 3) for each in stages]
    assert {layer for layer, *_ in recorded[0]} == {-1, 0, 1}
    assert {layer for layer, *_ in recorded[1]} == {-1, 2, 3}
    both = {at: value for at, value in {**recorded[0], **recorded[1]}.items() if at[1:] != ("block", "all")}
    assert both == pytest.approx(expected, rel=1e-5)
    assert [*layers(stages[1]).query("metric == 'step_loss'")["value"]] == pytest.approx(said["losses"], rel=1e-5)
    assert layers(stages[0]).query("metric == 'step_loss'").empty
    norms = [float(found(each, "step_gradient_norm", 3)[-1, "model", "all"]) for each in stages]
    assert math.hypot(*norms) == pytest.approx(said["norm"], rel=1e-5)
    assert not any((each / "alarms.jsonl").exists() for each in stages)  # of the pass over uninitialized memory
    assert "Give each pipeline stage its own folder" in said["refused"]


def number_in(holder, path):
    model = nn.Module()
    model.h = holder
    return first_number(model, path)


def test_the_first_layers_number_is_that_of_the_whole_model():
    layer, cut = nn.Linear(2, 2), nn.Identity
    assert number_in(nn.ModuleDict({"8": layer, "9": layer}), "h.8") == 8
    assert number_in(nn.ModuleList([cut(), None, layer, layer]), "h.2") == 2
    assert number_in(nn.ModuleList([layer, layer]), "h.0") == 0
    assert number_in(nn.ModuleDict({"a": layer}), "h.a") == 0
    assert number_in(nn.Sequential(nn.Embedding(3, 2), layer, layer), "h.1") == 0  # a whole model


class LastStage(Stage):
    """The second half of a GPT behind fixed states, with a loss."""

    def forward(self, idx, targets):
        states = torch.randn(61, 16, generator=torch.Generator().manual_seed(2))[idx]
        logits = super().forward(states)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(("numbers", "named", "first"), [((2, 3), {}, 2), ((2, 3), {"first_layer": 10}, 10)])
def test_layers_of_a_stage_keep_their_numbers(tmp_path, numbers, named, first):
    model = LastStage(NanoGpt(layers=4), numbers)
    loop(model, tmp_path, steps=2, every=1, **named)
    numbers = {layer for layer, *_ in found(tmp_path, "gradient_norm", 2)}
    assert numbers == {-1, first, first + 1}
    assert {layer for layer, *_ in found(tmp_path, "hidden_variance", 2)} == numbers
    assert json.loads((tmp_path / "watched.json").read_text())["first_layer"] == first
    assert gather(tmp_path).names == {first: "layers.2", first + 1: "layers.3"}
