"""Probes on a training model: they measure it at the steps asked for, and the training does not notice."""

import json
import random

import numpy as np
import pandas as pd
import pytest
import torch
from own_probes import write_probes
from training.tiny_runs import cut_at, layers, records

import lamina
from lamina import build
from lamina.probes.structure.hooks import undisturbed
from lamina.reports import report
from lamina.training.monitor import scheduled_probes as scheduled
from lamina.training.monitor.scheduled_probes import ScheduledProbes, forget

ENDED = ("finished", "short", "stuck")  # four steps of a tiny model teach it nothing


@pytest.fixture(autouse=True)
def own(tmp_path):
    return ",".join(write_probes(tmp_path))


def parts(folder, name="mean_square"):
    return {int(p.stem.split("-")[1]): pd.read_parquet(p) for p in sorted((folder / "probes" / name).glob("*.parquet"))}


def test_what_is_measured_every_few_steps_is_the_model_at_that_step_on_the_monitors_blocks(
    trained, tmp_path, own, trainers, monkeypatch
):
    naive = {}
    original = ScheduledProbes._probe

    def spy(self, state):
        original(self, state)
        with torch.no_grad():
            states = self.trainer.model(input_ids=self.inputs, output_hidden_states=True).hidden_states
        naive[state.global_step] = [float(x.double().square().mean()) for x in states[:2]]

    monkeypatch.setattr(ScheduledProbes, "_probe", spy)
    assert trained(probe_every=2, probes=own, batch_size=8, steps=5)["status"] in ENDED
    (probes,) = (c for c in trainers[0].callback_handler.callbacks if isinstance(c, ScheduledProbes))
    assert len(probes.inputs) == 2  # a quarter of the training batch
    assert list(parts(tmp_path / "run")) == [0, 2, 4, 5]  # the first and the last, too
    for step, frame in parts(tmp_path / "run").items():
        assert frame.columns[0] == "step"
        assert set(frame["step"]) == {step}
        assert frame["layer"].tolist() == [0, 1, 2]
        assert frame["value"].tolist()[:2] == pytest.approx(naive[step], rel=1e-5)


def test_training_is_bit_for_bit_the_same_with_and_without_probes(trained, tmp_path, own):
    trained("without")
    trained("with", probe_every=1, probes=own)
    assert records(tmp_path / "with") == records(tmp_path / "without")
    pd.testing.assert_frame_equal(layers(tmp_path / "with"), layers(tmp_path / "without"))
    one, two = ((tmp_path / n / "model" / "model.safetensors").read_bytes() for n in ("with", "without"))
    assert one == two


def test_parts_and_notes_behind_the_resumed_step_are_dropped(tmp_path):
    for step in (0, 2, 4, 6):
        scheduled.write_part(tmp_path / "a", step, pd.DataFrame({"layer": [0], "value": [1.0]}))
    lines = [json.dumps({"step": step, "note": "x"}) + "\n" for step in (2, 6)]
    (tmp_path / "a" / "notes.jsonl").write_text("".join(lines) + '{"step": 2', encoding="utf-8")
    forget(tmp_path, after=4)
    assert [p.name for p in sorted((tmp_path / "a").glob("part-*"))] == [f"part-{s:08d}.parquet" for s in (0, 2, 4)]
    assert (tmp_path / "a" / "notes.jsonl").read_text(encoding="utf-8") == lines[0]


def test_a_resumed_run_goes_on_and_drops_what_came_after_its_checkpoint(trained, tmp_path, own):
    trained("whole", probe_every=1, probes=own, steps=6)
    with cut_at(4):
        trained(probe_every=1, probes=own, steps=6, save_steps=2)
    assert list(parts(tmp_path / "run")) == [0, 1, 2, 3]
    assert trained(resume=True, probe_every=1, probes=own, steps=6, save_steps=2)["status"] in ENDED
    whole, resumed = parts(tmp_path / "whole"), parts(tmp_path / "run")
    assert list(resumed) == list(whole)
    for step in whole:
        pd.testing.assert_frame_equal(resumed[step], whole[step])


def test_the_clock_of_the_training_stands_still(trained, tmp_path, own, monkeypatch, trainers):
    from lamina.training.monitor import recorder as recording

    now = [0.0]
    monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
    original = ScheduledProbes._probe

    def slow(self, state):
        original(self, state)
        now[0] += 1000.0

    monkeypatch.setattr(ScheduledProbes, "_probe", slow)
    trained(probe_every=1, probes=own)
    recorder = next(c for c in trainers[0].callback_handler.callbacks if hasattr(c, "training_seconds"))
    assert recorder.training_seconds < 1000


def seed(number):
    for library in (torch.manual_seed, random.seed, np.random.seed):
        library(number)


def test_gradients_modes_compiled_calls_and_random_states_are_as_they_were(tiny_llama):
    model = build(tiny_llama, "pre_ln")
    model.train()
    model.model.layers[0].eval()
    model.model.layers[1]._compiled_call_impl = compiled = lambda *args, **kwargs: None
    model.lm_head.weight.requires_grad_(False)
    ids = torch.randint(0, 61, (2, 8))
    model.model.layers[1]._compiled_call_impl = None
    model(input_ids=ids, labels=ids).loss.backward()
    model.model.layers[1]._compiled_call_impl = compiled
    gradients = {n: p.grad for n, p in model.named_parameters()}
    values = {n: None if g is None else g.clone() for n, g in gradients.items()}
    modes = {n: m.training for n, m in model.named_modules()}
    seed(3)
    expected = torch.rand(3), random.random(), np.random.rand()
    seed(3)
    with undisturbed(model):
        assert not any(m.training for m in model.modules())
        assert all(p.grad is None for p in model.parameters())
        assert model.model.layers[1]._compiled_call_impl is None
        seed(99)
        model.requires_grad_(True)
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is gradients[n] for n, p in model.named_parameters())
    assert all(values[n] is None or torch.equal(p.grad, values[n]) for n, p in model.named_parameters())
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert model.model.layers[1]._compiled_call_impl is compiled
    assert [p.requires_grad for p in model.lm_head.parameters()] == [False]
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_compiled_blocks_are_not_compiled_again(tiny_llama):
    model, graphs = build(tiny_llama, "keel").train(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in model.model.layers:
        block.compile(backend=backend)
    ids = torch.randint(0, 61, (2, 8))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    step()
    step()
    before = len(graphs)
    with undisturbed(model):
        frames = lamina.probe(model, "hidden_states,gradients", ids)
    step()
    assert set(frames["hidden_states"]["layer"]) >= {0, 1, 2}
    assert len(graphs) == before > 0


def test_an_error_inside_puts_everything_back(tiny_llama):
    model = build(tiny_llama, "pre_ln").train()
    with pytest.raises(RuntimeError), undisturbed(model):
        raise RuntimeError
    assert model.training


@pytest.mark.parametrize(
    ("variable", "said"), [("REFUSE", "no weights on Tuesdays"), ("BREAK", "RuntimeError: broken")]
)
def test_a_probe_that_cannot_measure_is_a_note_and_the_others_and_the_run_go_on(
    trained, tmp_path, own, monkeypatch, variable, said
):
    monkeypatch.setenv(variable, "1")
    assert trained(probe_every=2, probes=own)["status"] in ENDED
    assert list(parts(tmp_path / "run")) == [0, 2, 4]
    assert not parts(tmp_path / "run", "weight_norm")
    (note,) = (tmp_path / "run" / "probes" / "weight_norm" / "notes.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(note)["step"] == 0
    assert said in json.loads(note)["note"]
    page = report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Mean square during training" in page
    assert said in page


def test_the_change_of_the_weights_is_since_before_the_first_step(trained, tmp_path, monkeypatch):
    """FuseNorm's Eq 12 by layer and step."""
    seen = {}
    original = ScheduledProbes._probe

    def spy(self, state):
        original(self, state)
        model = self.trainer.bare_model()
        seen[state.global_step] = [p.detach().double().clone() for p in model.model.layers[1].parameters()]

    monkeypatch.setattr(ScheduledProbes, "_probe", spy)
    trained(probe_every=2, probes="weight_change")
    start = torch.cat([x.flatten() for x in seen[0]])
    assert list(parts(tmp_path / "run", "weight_change")) == [0, 2, 4]
    for step, frame in parts(tmp_path / "run", "weight_change").items():
        change = torch.cat([x.flatten() for x in seen[step]]) - start
        rows = frame[(frame.layer == 1) & (frame.sublayer == "block") & (frame.metric == "change_ratio")]
        ratio = float(change.norm() / start.norm())
        assert rows.value.item() == pytest.approx(ratio, rel=1e-6)
        assert (ratio > 0) == (step > 0)
