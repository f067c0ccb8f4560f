"""Where the layers' numbers stand in a tracker: in sections of eight layers, in the run that is open or a new one."""

import logging
import sys
import types

import pytest
import torch
from training.watching.loops import NanoGpt, Tokens, found, loop

from lamina.errors import UserError
from lamina.training.monitor import trackers
from lamina.training.monitor.stream_measures import TOP
from lamina.training.monitor.trackers import STEP, Trackers, tag_of
from lamina.training.monitor.writers import Row

ROWS = [
    Row(3, -1, "embedding", "all", 0, "gradient_norm", 0.5),
    Row(3, 0, "attention", "all", 0, "gradient_norm", 1.0),
    Row(3, 9, "feed_forward", "expert", 12, "load", 2.0),
    Row(3, 9, "attention", "all", 1, "hidden_top_abs", 3.0),
    Row(3, 9, "attention", "all", TOP - 1, "hidden_top_abs", 4.0),
    Row(2, 0, "attention", "all", 0, "gradient_norm", 9.0),
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

    def alert(self, **given):
        self.calls.append(("alert", given))

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
    assert [tag_of(row) for row in ROWS[:4]] == [
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


def test_an_alarm_goes_to_the_log_to_trackers_and_to_the_users_function(wandb, tmp_path, caplog, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: True)
    model, told = NanoGpt(), []

    def spoil(step, model):
        if step >= 31:
            for parameter in model.h[1].mlp.parameters():
                parameter.grad.mul_(1000.0)

    more = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "batches": [Tokens(items=4).ids] * 40}
    with caplog.at_level(logging.WARNING):
        loop(model, tmp_path, spoil=spoil, every=1, report_to="wandb,tensorboard", on_alarm=told.append, **more)
    assert [alarm.layer for alarm in told][:1] == [1]
    texts = [f"{alarm} (h.{alarm.layer})" if alarm.layer >= 0 else f"{alarm}" for alarm in told]
    assert all(text.startswith(f"step {alarm.step}, layer") for text, alarm in zip(texts, told, strict=True))
    logged = [line.partition("lamina.watch: ")[2] for line in caplog.messages if "lamina.watch: step" in line]
    assert logged == texts
    assert [given["text"] for kind, given in wandb.calls if kind == "alert"] == texts
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = {each.step: each.value for each in events.Scalars("update_norm.layers_000-007/001.attention.all")}
    assert shown == pytest.approx({step: found(tmp_path, "update_norm", step)[1, "attention", "all"] for step in shown})
    assert len(shown) == 40
    written = events.Tensors("alarms/text_summary")
    assert [each.tensor_proto.string_val[0].decode() for each in written] == texts
    assert [each.step for each in written] == [alarm.step for alarm in told]


def test_an_error_of_the_users_function_ends_the_training(tmp_path):
    def stop(alarm):
        raise RuntimeError(f"enough: {alarm.rule}")

    model = NanoGpt()

    def spoil(step, model):
        if step == 5:
            next(model.h[0].mlp.parameters()).grad.fill_(float("nan"))

    with pytest.raises(RuntimeError, match="enough"):
        loop(model, tmp_path / "run", spoil=spoil, batches=[Tokens(items=4).ids] * 9, every=1, on_alarm=stop)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_library_itself_gets_rows_and_alarms_offline(tmp_path, monkeypatch, name):
    for variable, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(variable, value)
    library = pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    tracked = Trackers(name, tmp_path / "mine")
    tracked.log(3, ROWS)
    tracked.alarm(3, "step 3, layer 0 (attention): a sentence")
    tracked.close()
    if name == "wandb":
        library.teardown()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".wandb", ".db", ".db-wal"))
    assert b"a sentence" in written
    assert b"gradient_norm.layers_000-007/000.attention.all" in written
