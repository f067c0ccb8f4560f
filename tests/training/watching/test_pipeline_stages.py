"""Pipeline stages: layers keep the model's numbers, each stage has a folder."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from training.tiny_runs import layers, torchrun
from training.watching.loops import NanoGpt, Tokens, found, loop
from training.watching.stages_loop import Stage, loss_of

import lamina
from lamina.errors import UserError
from lamina.reports.diagnosis import gather
from lamina.reports.registry import follow
from lamina.reports.stages import joined
from lamina.training.monitor.alarms import read_alarms
from lamina.training.monitor.stages import first_number


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("gpipe", 2), ("1f1b", 2), ("fsdp2", 4)])
def test_two_stages_are_measured_as_the_whole_model(tmp_path, kind, processes):
    ended = torchrun(Path(__file__).with_name("stages_loop.py"), kind, tmp_path, processes=processes)
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


def train(folder, steps=30, spoil=None, ends=None):
    """Train a GPT as two watched stages in one process; ``ends``: the step after which the first one is not watched."""
    whole = NanoGpt(layers=4)
    stages = [Stage(whole, (0, 1)), Stage(whole, (2, 3))]
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=1e-3) for stage in stages]
    pairs = zip(stages, optimizers, strict=True)
    watches = [lamina.watch(*pair, output=str(folder / f"stage-{at}"), every=1) for at, pair in enumerate(pairs)]
    first, last = (watch.__enter__() for watch in watches)
    for step, batch in enumerate(Tokens(items=2 * steps).ids.split(2), 1):
        states = stages[0](batch[:, :-1])
        received = states.detach().requires_grad_()
        loss = loss_of(stages[1](received), batch[:, 1:])
        loss.backward()
        states.backward(received.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if spoil:
            spoil(step, whole)
        if ends is None or step <= ends:
            first.step()
        if step == ends:
            first.__exit__(None, None, None)
        last.step(loss)
    for watch in watches[ends is not None :]:
        watch.__exit__(None, None, None)


def test_the_folders_of_stages_are_read_as_one_run(tmp_path):
    def spoil(step, whole):
        if step == 20:
            with torch.no_grad():
                whole.h[2].attn.c_proj.weight.mul_(40.0)

    train(tmp_path / "mine", spoil=spoil)
    diagnosis = lamina.diagnose(tmp_path / "mine")
    told = " ".join(diagnosis.sentences)
    assert "step 21, layer 2 (attention)" in told or "step 20, layer 2 (attention)" in told, told
    assert "2 pipeline stages as one run: stage-0 (layers 0-1, steps 1 to 30), stage-1 (layers 2-3" in told
    whole = tmp_path / "mine-lamina"
    assert diagnosis.page == whole / "diagnosis.html"
    assert read_alarms(whole)[0].layer == 2
    parts = [alarm.step for stage in (0, 1) for alarm in read_alarms(tmp_path / "mine" / f"stage-{stage}")]
    assert {alarm.step for alarm in read_alarms(whole)} == set(parts)
    norms = [found(tmp_path / "mine" / f"stage-{at}", "step_gradient_norm", 7)[-1, "model", "all"] for at in (0, 1)]
    assert found(whole, "step_gradient_norm", 7)[-1, "model", "all"] == pytest.approx(math.hypot(*norms))
    assert found(whole, "step_loss", 7) == found(tmp_path / "mine" / "stage-1", "step_loss", 7)
    assert {layer for layer, *_ in found(whole, "gradient_norm", 7)} == {-1, 0, 1, 2, 3}
    pages = [page for page, _ in follow(tmp_path / "mine", every=1.0)]
    assert pages == [whole / "report.html"]
    text = pages[0].read_text()
    assert "4 layers of width 16" in text
    assert "layer 2 (attention)" in text


def test_stages_that_do_not_fit_are_refused_or_told(tmp_path):
    train(tmp_path, steps=6, ends=4)
    told = " ".join(lamina.diagnose(tmp_path).sentences)
    assert "stage-0 (layers 0-1, steps 1 to 4), stage-1 (layers 2-3, steps 1 to 6)" in told
    assert "last recorded steps of the stages differ" in told
    shutil.copytree(tmp_path / "stage-1", tmp_path / "another")
    for read in (lamina.diagnose, lamina.report):
        with pytest.raises(UserError, match=r"'another' and 'stage-1' in .* both have layer 2-3"):
            read(tmp_path)
    shutil.rmtree(tmp_path / "stage-0")
    shutil.rmtree(tmp_path / "another")
    with pytest.raises(UserError, match="no records by layer"):
        lamina.diagnose(tmp_path)


def test_two_whole_models_in_one_folder_are_no_stages(tmp_path):
    for name in ("one", "other"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        with lamina.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), output=tmp_path / name) as monitor:
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            monitor.step(loss)
    assert joined(tmp_path) == tmp_path
    assert not (tmp_path.parent / f"{tmp_path.name}-lamina").exists()
