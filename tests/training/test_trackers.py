"""Where the layers' numbers stand in a tracker: in sections of eight layers, in the run that is open or a new one."""

import sys
import types

import pytest

from lamina.errors import UserError
from lamina.training.monitor import trackers
from lamina.training.monitor.stream_measures import TOP
from lamina.training.monitor.trackers import STEP, Trackers, series_of

ROWS = [
    (3, -1, "embedding", "all", 0, "gradient_norm", 0.5),
    (3, 0, "attention", "all", 0, "gradient_norm", 1.0),
    (3, 9, "feed_forward", "expert", 12, "load", 2.0),
    (3, 9, "attention", "all", 1, "hidden_top_abs", 3.0),
    (3, 9, "attention", "all", TOP - 1, "hidden_top_abs", 4.0),
    (2, 0, "attention", "all", 0, "gradient_norm", 9.0),
]


class Library(types.ModuleType):
    """A tracker with wandb's functions."""

    def __init__(self, name, run=None):
        super().__init__(name)
        self.run, self.calls = run, []

    def init(self, **given):
        self.run = given
        self.calls.append(("init", given))

    def log(self, values):
        self.calls.append(("log", values))

    def finish(self):
        self.calls.append(("finish", None))


@pytest.fixture
def wandb(monkeypatch):
    library = Library("wandb")
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name == "wandb" or None)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return library


def test_a_series_stands_in_the_section_of_its_metric_and_eight_layers():
    assert [series_of(row) for row in ROWS[:4]] == [
        "gradient_norm.outside/embedding.all",
        "gradient_norm.layers_000-007/000.attention.all",
        "load.layers_008-015/009.feed_forward.expert012",
        "hidden_top_abs.layers_008-015/009.attention.all001",
    ]


def test_a_run_of_its_own_is_opened_with_the_first_row_and_closed(wandb, tmp_path):
    tracked = Trackers("wandb", tmp_path / "mine")
    assert wandb.calls == []  # Trainer's callback may still open one
    tracked.log(3, ROWS)
    tracked.close()
    (kind, given), (_, values), (last, _) = wandb.calls
    assert (kind, given, last) == ("init", {"project": "lamina", "name": "mine"}, "finish")
    assert values[STEP] == 3
    assert set(values.values()) == {3, 0.5, 1.0, 2.0, 4.0}  # this step's; of the largest magnitudes the last alone


def test_an_open_run_is_used_and_left_open(wandb, tmp_path):
    wandb.run = "open"
    tracked = Trackers("wandb", tmp_path)
    tracked.log(3, ROWS)
    tracked.close()
    assert [kind for kind, _ in wandb.calls] == ["log"]


def test_a_tracker_that_is_not_installed_is_one_line(wandb, tmp_path):
    with pytest.raises(UserError, match="report_to: 'trackio' is not installed"):
        Trackers("wandb,trackio", tmp_path)
