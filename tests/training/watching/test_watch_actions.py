"""Bad input is one line and training goes on; divergences, outliers, resumption and pages."""

import json
import logging
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from training.tiny_runs import in_a_child, layers, records, result
from training.watching.loops import NanoGpt, Tokens, llama, loop
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainerCallback, TrainingArguments

import lamina
from lamina.errors import UserError
from lamina.reports import report
from lamina.training.monitor.listeners import listening
from lamina.training.monitor.writers import LayersWriter


class Flat(nn.Module):
    """A model without a stream of layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(61, 8), nn.Linear(8, 61)

    def forward(self, idx, targets=None):
        logits = self.out(self.embed(idx))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Wrapper(nn.Module):
    """A wrapper that nobody knows."""

    def __init__(self):
        super().__init__()
        self.anything = NanoGpt()

    def forward(self, *args):
        return self.anything(*args)


class Batched(Wrapper):
    """One that takes a batch by keywords, and has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, **batch):
        return self.anything(batch["idx"], batch["targets"])[1] * self.scale


def test_layers_that_cannot_be_followed_are_one_line_and_totals_are_recorded(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        loop(Flat(), tmp_path / "run", every=2)
    said = [r.message for r in caplog.records if "lamina.watch" in r.message]
    assert len(said) == 1
    assert "layers: Lamina found no layers in Flat" in said[0]
    assert ".." not in said[0]
    assert "layers=PATH" in said[0]
    assert "\n" not in said[0]
    rows = layers(tmp_path / "run")
    assert {"gradient_norm", "update_norm", "step_loss"} <= set(rows["metric"])
    assert result(tmp_path / "run")["status"] == "finished"


def test_layers_given_by_hand_and_a_wrong_path(tmp_path, caplog):
    loop(NanoGpt(), tmp_path / "run", steps=2, layers="h")
    assert json.loads((tmp_path / "run" / "watched.json").read_text())["num_layers"] == 2
    with caplog.at_level(logging.WARNING):
        loop(NanoGpt(), tmp_path / "wrong", steps=2, layers="blocks")
    assert "NanoGpt has no module 'blocks'" in caplog.text


@pytest.mark.parametrize(
    ("kind", "prefix", "loss_of"),
    [(Wrapper, "", None), (Batched, "anything.", lambda m, ids: m(idx=ids[:, :-1], targets=ids[:, 1:]))],
)
def test_an_unknown_wrapper_is_looked_through(tmp_path, kind, prefix, loss_of):
    loop(kind(), tmp_path / "run", steps=1, loss_of=loss_of)
    about = json.loads((tmp_path / "run" / "watched.json").read_text())
    assert [layer["path"] for layer in about["layers"]] == [f"{prefix}h.0", f"{prefix}h.1"]
    assert about["layers"][0]["sublayers"] == ["attention", "feed_forward"]


def test_an_optimizer_without_moments_has_updates_all_the_same(tmp_path):
    model = NanoGpt()
    loop(model, tmp_path / "run", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    metrics = set(layers(tmp_path / "run")["metric"])
    assert "update_ratio" in metrics
    assert not metrics & {"first_moment", "second_moment"}


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "says"),
    [
        ("no model", None, {}, "model: a str"),
        (None, "no optimizer", {}, "optimizer: a str"),
        (None, None, {"evry": 3}, "evry"),
        (None, None, {"step": "a"}, "step: 'a'"),
        (None, None, {"step": -3}, "step: -3"),
        (None, None, {"every": 0}, "every: 0"),
        (None, None, {"on_divergence": "explode"}, "on_divergence: 'explode'"),
        (None, None, {"report_to": "tensorbord"}, "report_to: 'tensorbord'"),
    ],
)
def test_what_is_no_model_no_optimizer_or_no_setting_is_refused(tmp_path, model, optimizer, options, says):
    net = NanoGpt()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else [optimizer]
    new = tmp_path / "new"
    with pytest.raises(UserError, match=says), lamina.watch(model or net, optimizer, output=str(new), **options):
        pass
    with pytest.raises(UserError, match="optimizer: an empty list"), lamina.watch(net, [], output=str(new)):
        pass
    assert not new.exists(), "the corrected call finds the folder free"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="output"):
        loop(NanoGpt(), tmp_path / "mine")


def test_a_record_of_another_version_is_refused_but_does_not_end_a_training_that_goes_on(tmp_path, caplog):
    loop(NanoGpt(), tmp_path / "run", steps=2)
    record = json.loads((tmp_path / "run" / "watched.json").read_text())
    (tmp_path / "run" / "watched.json").write_text(json.dumps({**record, "record": 99}))
    with pytest.raises(UserError, match=r"record: .* holds records of version 99, but this version"):
        loop(NanoGpt(), tmp_path / "run", steps=2, resume=True)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        monitor = loop(NanoGpt(), tmp_path / "run", steps=2, resume="auto", step=2)
    (said,) = [r.getMessage() for r in caplog.records if "lamina.watch" in r.getMessage()]
    assert "records of version 99" in said
    assert "another folder. Training continues without records" in said
    assert monitor.diverged is None
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def poison(at):
    def spoil(step, model):
        if step == at:
            model.h[1].mlp.c_fc.weight.grad.fill_(float("nan"))

    return spoil


def test_a_divergence_stops_the_block_and_names_step_and_layer(tmp_path, caplog):
    monitor = loop(NanoGpt(), tmp_path / "run", spoil=poison(4), on_divergence="stop", every=2)
    assert monitor.diverged is not None
    assert monitor.diverged.step == 4
    assert "h.1" in monitor.diverged.reason
    assert result(tmp_path / "run")["status"] == "diverged"
    assert result(tmp_path / "run")["steps"] == 4
    alarms = [json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    assert {"step": 4, "rule": "not_finite", "layer": 1, "sublayer": "feed_forward"}.items() <= alarms[0].items()


def test_an_outliers_step_changes_neither_weights_nor_moments(tmp_path):
    model, seen = NanoGpt(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def spoil(step, model):
        if step == 71:
            for parameter in model.parameters():
                parameter.grad.mul_(100.0)
        if step in (71, 72):
            state = optimizer.state[model.lm_head.weight]
            seen[step] = [p.detach().clone() for p in model.parameters()] + [state["exp_avg"].clone()]

    loop(model, tmp_path / "run", steps=73, optimizer=optimizer, spoil=spoil, skip_outliers=6.0)
    assert all(torch.equal(a, b) for a, b in zip(seen[71], seen[72], strict=True))
    assert result(tmp_path / "run")["skipped"] == 1
    assert json.loads((tmp_path / "run" / "watched.json").read_text())["settings"]["weight_decay"] == 0.1


@pytest.mark.parametrize(("last", "status"), [(4, "finished"), (20, "diverged")])
def test_a_skipped_step_is_no_divergence_unless_it_goes_on(tmp_path, last, status):
    def loss_of(model, batch):
        nonlocal step
        step += 1
        return model(batch[:, :-1], batch[:, 1:])[1] * (math.nan if 4 <= step <= last else 1.0)

    step = 0
    loop(NanoGpt(), tmp_path / "run", steps=20, loss_of=loss_of, skip_outliers=6.0)
    assert result(tmp_path / "run")["status"] == status
    assert result(tmp_path / "run")["skipped"] == last - 3


def test_a_second_training_writes_to_the_next_free_folder_and_a_resumed_one_to_the_last(tmp_path, caplog, capfd):
    folders = [tmp_path / name for name in ("run", "run-3", "run-4")]
    (tmp_path / "run-2").mkdir()  # the user's own
    for steps, folder in enumerate(folders, start=2):
        loop(NanoGpt(), tmp_path / "run", steps=steps, every=1)
        assert result(folder)["steps"] == steps
        assert f"To read the records, run: lamina diagnose {folder}" in caplog.text + capfd.readouterr().out
    assert f"{folders[0]} holds the records of an earlier training, so Lamina writes to {folders[1]}" in caplog.text
    loop(NanoGpt(), tmp_path / "run-5", steps=1, every=1)  # another run, which has such a name by chance
    loop(NanoGpt(), tmp_path / "run", steps=2, every=1, resume="auto", step=4)
    assert [result(folder)["steps"] for folder in [*folders, tmp_path / "run-5"]] == [2, 3, 6, 1]
    for folder in folders:
        last = [text for text in lamina.diagnose(folder).sentences if "last training" in text]
        assert last == [f"The last training with this output wrote to {folders[-1]}."] * (folder != folders[-1])
    loop(NanoGpt(), tmp_path / "run", steps=1, every=1, overwrite=True)
    loop(NanoGpt(), tmp_path / "run", steps=1, every=1, resume=True, step=1)
    assert [result(folder)["steps"] for folder in folders] == [2, 3, 6]


def test_files_that_watch_did_not_write_are_never_mixed_with_records(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        loop(NanoGpt(), tmp_path)


def test_records_are_continued_and_the_page_is_drawn(tmp_path):
    loop(NanoGpt(), tmp_path / "run", steps=4, every=2)
    first = result(tmp_path / "run")["tokens"]
    loop(NanoGpt(), tmp_path / "run", steps=4, every=2, resume=True, step=4)
    assert result(tmp_path / "run")["tokens"] == 2 * first
    tokens = [line["tokens"] for line in records(tmp_path / "run")]
    assert tokens == sorted(tokens)
    rows = layers(tmp_path / "run")
    updates = rows[rows["metric"] == "update_norm"]["step"].unique()
    assert sorted(updates) == [1, 2, 4, 5, 6, 8]  # 1, 5: the first of each
    page = report(tmp_path / "run").read_text(encoding="utf-8")
    assert "NanoGpt" in page
    for heading in ("Gradient norm by layer", "Update-to-weight ratio by layer", "Largest attention logit"):
        assert heading in page
    loop(NanoGpt(), tmp_path / "run", steps=2, overwrite=True)
    assert result(tmp_path / "run")["steps"] == 2


def test_an_error_in_the_loop_leaves_readable_records(tmp_path):
    def spoil(step, model):
        if step == 5:
            raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        loop(NanoGpt(), tmp_path / "run", spoil=spoil, every=2)
    assert result(tmp_path / "run")["status"] == "failed"
    assert layers(tmp_path / "run")["step"].max() == 4


def test_an_error_before_the_first_step_blocks_no_other_run_and_deletes_no_earlier_one(tmp_path):
    model, run = NanoGpt(), tmp_path / "run"
    for again in ({}, {"overwrite": True}):
        with pytest.raises(RuntimeError), lamina.watch(model, torch.optim.SGD(model.parameters()), output=run, **again):
            raise RuntimeError
        assert run.exists() == (tmp_path / "run.old").exists() == bool(again)
        loop(model, run, steps=1)
    assert not (tmp_path / "run.old").exists()


def test_experts_loads_add_up(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=61, num_hidden_layers=2, **sizes, **experts))
    loop(model, tmp_path / "run", steps=2, loss_of=lambda m, ids: m(input_ids=ids, labels=ids).loss)
    rows = layers(tmp_path / "run")
    loads = rows[(rows["metric"] == "expert_load") & (rows["step"] == 1)]
    assert loads.groupby("layer")["value"].sum().tolist() == pytest.approx([2.0, 2.0])
    assert len(loads) == 8


def test_a_record_has_the_mean_loss_of_the_steps_since_the_last(tmp_path):
    seen = []

    def loss_of(model, batch):
        loss = model(batch[:, :-1], batch[:, 1:])[1]
        seen.append(loss.item())
        return loss

    loop(NanoGpt(), tmp_path / "run", steps=6, every=3, loss_of=loss_of)
    means = {1: seen[0], 3: sum(seen[1:3]) / 2, 6: sum(seen[3:]) / 3}
    assert {line["step"]: line["loss"] for line in records(tmp_path / "run")} == pytest.approx(means)


def test_a_model_that_is_trained_in_evaluation_mode_is_measured_and_evaluations_are_not(tmp_path):
    model = NanoGpt().eval()

    def spoil(step, model):
        with torch.no_grad():
            model(torch.zeros(3, 12, dtype=torch.long))

    loop(model, tmp_path / "run", steps=2, every=1, spoil=spoil)
    assert result(tmp_path / "run")["tokens"] == 2 * 2 * 11
    assert "hidden_variance" in set(layers(tmp_path / "run")["metric"])
    assert not model.training


def test_torchs_clipping_is_its_own_again_once_the_last_monitor_has_left():
    from torch.nn.utils import clip_grad

    class Listener:
        def __init__(self, number):
            self.number = number

        def clips(self, parameters, limit):
            told.append(self.number)

        def differentiates(self, loss):
            told.append(self.number)

        def scales(self, loss, scaled):
            told.append(self.number)

    def functions():
        return clip_grad._clip_grads_with_norm_, torch.autograd.backward, torch.amp.GradScaler.scale

    own, told = functions(), []
    first, second = (listening(Listener(number)) for number in (1, 2))
    first.__enter__()
    second.__enter__()
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    first.__exit__(None, None, None)  # in the order of Trainer's callbacks
    nn.utils.clip_grad_norm_([parameter], 0.5)
    parameter.sum().backward()
    assert told.count(2) == len(told) >= 2
    second.__exit__(None, None, None)
    assert functions() == own


def test_a_failed_trainers_folder_is_free_for_the_next_in_the_same_process(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("my own mistake")

    def train(*callbacks, **options):
        given = {"max_steps": 2, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        args = TrainingArguments(str(tmp_path / "trainer"), **given)
        monitor = lamina.LayerMonitor(str(tmp_path / "run"), **options)
        Trainer(llama(), args, train_dataset=Tokens(), callbacks=[monitor, *callbacks]).train()

    with pytest.raises(RuntimeError, match="my own mistake"):
        train(Fails())
    train()
    assert result(tmp_path / "run")["status"] == "interrupted"
    assert result(tmp_path / "run-2")["status"] == "finished"
    train(overwrite=True)
    assert result(tmp_path / "run")["status"] == "finished"


def killed(model, folder, steps, **more):
    """Watch a loop whose process is killed: what was not written is gone."""

    def train():
        with lamina.watch(model, optimizer := torch.optim.SGD(model.parameters()), output=str(folder), **more) as w:
            for _ in range(steps):
                model(Tokens().ids, Tokens().ids)[1].backward()
                optimizer.step()
                w.step()
            os.kill(os.getpid(), signal.SIGKILL)

    in_a_child(train)


def test_a_killed_loop_loses_seconds_and_its_resumption_names_the_steps(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(LayersWriter, "seconds_per_part", 0.0)
    killed(NanoGpt(), tmp_path / "run", steps=4, every=1)
    assert set(layers(tmp_path / "run")["step"]) == {1, 2, 3, 4}
    loop(NanoGpt(), tmp_path / "run", steps=1, resume=True, step=4)
    assert "missing" not in caplog.text
    monkeypatch.setattr(LayersWriter, "seconds_per_part", 100.0)
    killed(NanoGpt(), tmp_path / "run", steps=4, every=1, resume=True, step=5)
    loop(NanoGpt(), tmp_path / "run", steps=1, resume="auto", step=8)
    assert caplog.text.count("steps 6 to 8 are missing") == 1
    assert set(layers(tmp_path / "run")["step"]) == {1, 2, 3, 4, 5, 9}


def trainer_of(tmp_path, *callbacks, every=4, **options):
    given = {"max_steps": 6, "use_cpu": True, "report_to": "none", "save_steps": 2, "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path / "trainer"), **given)
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=every, **options)
    return Trainer(llama(), args, train_dataset=Tokens(), callbacks=[monitor, *callbacks])


class Killed(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_killed_before_its_first_checkpoint_begins_again_in_the_same_folder(tmp_path, caplog):
    in_a_child(trainer_of(tmp_path, Killed(1)).train)
    trainer_of(tmp_path, every=3).train()  # another experiment
    assert result(tmp_path / "run-2")["status"] == "finished"
    shutil.rmtree(tmp_path / "run-2")
    shutil.rmtree(tmp_path / "trainer")
    caplog.clear()
    trainer_of(tmp_path).train()
    assert "was killed before its first checkpoint, so the records begin again" in caplog.text
    assert result(tmp_path / "run")["status"] == "finished"
    assert not (tmp_path / "run.old").exists()


def test_the_records_by_layer_of_a_killed_trainer_reach_to_its_checkpoint(tmp_path, caplog):
    in_a_child(trainer_of(tmp_path, Killed(3)).train)
    assert set(layers(tmp_path / "run").query("metric == 'step_loss'")["step"]) == {1, 2}
    trainer_of(tmp_path).train(resume_from_checkpoint=True)
    assert "missing" not in caplog.text
    assert set(layers(tmp_path / "run").query("metric == 'step_loss'")["step"]) == {1, 2, 3, 4, 5, 6}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    def mkdir(self, *args, **kwargs):
        raise FileNotFoundError(2, "No such file or directory", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)  # as under /proc
    with pytest.raises(UserError, match=r"output: .*No such file or directory"):
        loop(NanoGpt(), tmp_path / "run", steps=1)


def test_a_frozen_layer_is_not_dead(tmp_path):
    model = NanoGpt(layers=3)
    for parameter in [*model.wte.parameters(), *model.wpe.parameters(), *model.h[0].parameters()]:
        parameter.requires_grad = False
    loop(model, tmp_path / "run", steps=2, every=1)
    assert not (tmp_path / "run" / "alarms.jsonl").exists()
    rows = layers(tmp_path / "run").query("metric == 'gradient_norm'")
    assert set(rows["layer"]) == {-1, 1, 2}


@pytest.mark.parametrize(("accumulation", "sets"), [(2, False), (2, True), (1, False)])
def test_a_model_that_ignores_the_number_of_labels_is_named(tmp_path, accumulation, sets):
    """T5's forward takes num_items_in_batch but averages its own labels, so that Trainer sums the micro-batches."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes))
    if sets:
        model.accepts_loss_kwargs = False
    data = [{"input_ids": row, "labels": row.flip(0)} for row in torch.randint(1, 64, (8, 12))]
    options = {"output_dir": str(tmp_path / "out"), "max_steps": 2, "use_cpu": True, "report_to": "none"}
    options |= {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 2, "save_strategy": "no"}
    callback = lamina.LayerMonitor(str(tmp_path / "run"))
    Trainer(model, TrainingArguments(**options), train_dataset=data, callbacks=[callback]).train()
    notes = json.loads((tmp_path / "run" / "watched.json").read_text())["notes"]
    assert any("ignores num_items_in_batch" in note for note in notes) == (accumulation > 1 and not sets)
