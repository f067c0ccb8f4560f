"""Lamina's Trainer: what it overrides, a plan that is resolved once, and first steps without a folder."""

import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
from training.tiny_runs import SMALL, flags, write_corpus
from transformers import Trainer

import lamina
from lamina.cli import main
from lamina.data.packed import prepare_blocks
from lamina.training.run import TrainingRun
from lamina.training.settings import PretrainSettings
from lamina.training.short_run import ShortRun
from lamina.training.trainer import LaminaTrainer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "dev" / "trainer.md").read_text(encoding="utf-8")
OVERRIDDEN, USED = PAGE.split("## Overridden")[1].split("## Used, not overridden")


def names(section: str) -> set[str]:
    first = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    return set(re.findall(r"`([\w.]+)`", first))


def overrides() -> set[str]:
    """The names that Trainer has and our classes define again."""
    own = {name for kind in LaminaTrainer.__mro__ for name in vars(kind) if kind.__module__.startswith("lamina.")}
    return {name for name in own if hasattr(Trainer, name) and not name.startswith("__")}


def test_the_page_lists_every_override():
    assert names(OVERRIDDEN) == overrides()


@pytest.mark.parametrize("name", sorted(names(OVERRIDDEN)))
def test_an_override_takes_what_trainer_passes(name):
    theirs = inspect.signature(getattr(Trainer, name)).parameters
    ours = inspect.signature(getattr(LaminaTrainer, name)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values()):
        return
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("name", sorted(names(USED)))
def test_what_we_use_of_trainer_is_there(name):
    assert hasattr(Trainer, name) or f"self.{name}" in inspect.getsource(Trainer)


def arguments(tmp_path, **changed):
    return flags(**{**SMALL, "corpus": write_corpus(tmp_path / "text.txt"), **changed})


def test_one_more_thing_to_resume_is_one_more_entry_of_states(tmp_path, monkeypatch):
    """What an object puts into the run state comes back to it, without another line anywhere."""

    class Counter:
        def __init__(self):
            self.resumed = None

        def state_dict(self):
            return {"counter": 7}

        def load_state_dict(self, state):
            self.resumed = state.get("counter")

    counters = []
    make_trainer = TrainingRun._make_trainer

    def with_counter(run):
        counters.append(Counter())
        run.states.append(counters[-1])
        return make_trainer(run)

    monkeypatch.setattr(TrainingRun, "_make_trainer", with_counter)
    words = arguments(tmp_path, steps=4, save_steps=2, keep=9, output=tmp_path / "run")
    assert main(["pretrain", *words]) == 0
    state = tmp_path / "run" / "checkpoints" / "checkpoint-2" / "run_state.json"
    assert json.loads(state.read_text())["counter"] == 7
    (tmp_path / "run" / "result.json").unlink()
    assert main(["pretrain", f"--output={tmp_path / 'run'}", "--resume"]) == 0
    assert [counter.resumed for counter in counters] == [None, 7]


@pytest.fixture
def short(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks, tokenizer = prepare_blocks(str(corpus), "bytes", 16, cache_dir=tmp_path / "cache", progress=False)

    def make(**changed):
        settings = PretrainSettings(**{**SMALL, "corpus": str(corpus), "steps": 12, **changed})
        torch.manual_seed(0)
        sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": len(tokenizer)}
        model = lamina.build("llama-nano", "pre_ln", **sizes)
        return ShortRun(settings, model, blocks.train, device="cpu")

    return make


def test_it_ends_when_its_caller_has_seen_enough_and_leaves_no_folder(short, tmp_path):
    run, steps = short(), []
    run.train(lambda step: steps.append(step) or step < 5)
    assert steps == [1, 2, 3, 4, 5]
    assert len(run.losses) == len(run.gradient_norms) == len(run.learning_rates) == 5
    assert run.stopped == ""
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


def test_a_gradient_that_is_not_finite_ends_it(short):
    run = short(max_grad_norm=0.0)
    weight = run.model.model.layers[0].attention.module.q_proj.weight
    weight.register_hook(lambda gradient: gradient * math.inf)
    run.train(lambda step: True)
    assert run.stopped == "the gradient was not finite at step 1"
    assert math.isfinite(run.losses[0])


def test_what_is_measured_in_mixed_precision_is_measured_in_full(short):
    run = short(precision="bf16")
    ids = torch.arange(32).view(2, 16)
    outputs = {}

    def after_step(step):
        with torch.no_grad():
            outputs["mixed"] = run.model(input_ids=ids).logits
            with run.full_precision():
                outputs["full"] = run.model(input_ids=ids).logits
            outputs["again"] = run.model(input_ids=ids).logits
        return False

    run.train(after_step)
    assert not torch.equal(outputs["mixed"], outputs["full"])
    assert torch.equal(outputs["mixed"], outputs["again"])
    assert torch.allclose(outputs["mixed"], outputs["full"], atol=0.1)
