"""A run is worked out once: its plan is resolved once, from the command to the trained model, resumed or not."""

import json

from training.tiny_runs import SMALL, flags, write_corpus

from lamina.cli import main
from lamina.training.run import TrainingRun


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
