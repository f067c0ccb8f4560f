"""A run is worked out once: its plan is resolved once, from the command to the trained model, resumed or not."""

import dataclasses
import json

import pytest
from training.tiny_runs import SMALL, flags, result, write_corpus

from lamina.cli import main
from lamina.modeling import building
from lamina.training import source
from lamina.training.resolve import resolve_run
from lamina.training.run import TrainingRun
from lamina.training.settings import PretrainSettings


@pytest.fixture
def plans(monkeypatch):
    """The placements that were resolved by name, and the calls of make_plan."""
    calls = {"make_plan": 0, "resolve": 0}
    make_plan, resolve = building.make_plan, building.resolve

    def counted(name, act):
        def call(*args, **options):
            calls[name] += 1
            return act(*args, **options)

        return call

    monkeypatch.setattr(building, "resolve", counted("resolve", resolve))
    monkeypatch.setattr(source, "make_plan", counted("make_plan", make_plan))
    return calls


def arguments(tmp_path, **changed):
    return flags(**{**SMALL, "corpus": write_corpus(tmp_path / "text.txt"), **changed})


def test_a_run_resolves_its_placement_once(plans, tmp_path):
    words = arguments(tmp_path, placement="keel(alpha=3)", steps=4, output=tmp_path / "run")
    assert main(["pretrain", *words]) == 0
    assert plans == {"make_plan": 1, "resolve": 1}


def test_a_resumed_run_resolves_its_placement_once(plans, tmp_path, monkeypatch):
    words = arguments(tmp_path, steps=4, save_steps=2, output=tmp_path / "run")
    train = TrainingRun.train

    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingRun, "train", interrupted)
    main(["pretrain", *words])
    assert result(tmp_path / "run")["status"] == "interrupted"
    plans.update(make_plan=0, resolve=0)
    monkeypatch.setattr(TrainingRun, "train", train)
    assert main(["pretrain", f"--output={tmp_path / 'run'}", "--resume"]) == 0
    assert plans == {"make_plan": 1, "resolve": 1}


def test_a_resolved_run_cannot_be_changed():
    resolved = resolve_run(PretrainSettings(num_layers=2, hidden_size=16, num_heads=2, steps=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.plan = None


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
