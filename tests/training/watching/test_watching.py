"""The monitor in other people's training, by one process and by two: its numbers are those of a naive computation."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training.tiny_runs import layers, result, torchrun
from training.watching.loops import Naive, NanoGpt, Tokens, found, llama, llama_parts, loop, nano_parts
from transformers import Trainer, TrainerCallback, TrainingArguments

import lamina
from lamina.training.monitor.stream_measures import STATE_METRICS, PassNumbers, state_statistics
from lamina.training.monitor.stream_measures import rows_of as pooled_rows

EXACT = {"rel": 1e-6, "abs": 1e-12}
MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


def arguments(folder, **changed):
    given = {"max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_grad_norm": 0.05}
    given |= {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    return TrainingArguments(str(folder / "trainer"), **{**given, **changed})


class Naively(TrainerCallback):
    """Reads Trainer's own training, from the parameters alone."""

    def __init__(self, step):
        self.step, self.values = step, {}

    def attach(self, model):
        self.naive = Naive(model, llama_parts())

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.naive.keep()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step + 1 == self.step:
            naive = self.naive
            self.values = {"update_norm": naive.updates(), "weight_norm": naive.norms(naive.before)}
            self.values |= {f"{n}_moment": naive.moments(optimizer.optimizer, key) for n, key in MOMENTS.items()}
            self.clipped = naive.norms(naive.gradients)


def test_a_llama_under_trainer_is_measured_as_by_hand(tmp_path):
    model, naive = llama(), Naively(step=4)
    naive.attach(model)
    streams = {}
    for layer, block in enumerate(model.model.layers):
        block.register_forward_hook(
            lambda module, args, output, layer=layer: streams.setdefault(layer, []).append(output.detach().clone())
        )
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=4)
    args = arguments(tmp_path, gradient_accumulation_steps=2)
    trainer = Trainer(model, args, train_dataset=Tokens(), callbacks=[monitor, naive])
    before = []
    inner = trainer._clip_grad_norm
    trainer._clip_grad_norm = lambda m: (
        naive.naive.keep(),
        before.append(naive.naive.norms(naive.naive.gradients)),
        inner(m),
    )[2]
    trainer.train()
    for metric, expected in naive.values.items():
        assert found(tmp_path / "run", metric, 4) == pytest.approx(expected, **EXACT), metric
    ratios = {k: naive.values["update_norm"][k] / w for k, w in naive.values["weight_norm"].items()}
    assert found(tmp_path / "run", "update_ratio", 4) == pytest.approx(ratios, **EXACT)
    assert found(tmp_path / "run", "gradient_norm", 4) == pytest.approx(before[3], **EXACT)
    assert before[3] != pytest.approx(naive.clipped, rel=0.1)  # clipping did something
    shown = found(tmp_path / "run", "hidden_variance", 4)
    whole = {layer: [x for x in xs if x.shape[:2] == (2, 12)] for layer, xs in streams.items()}
    for layer in (0, 1):
        stream = whole[layer][6].double()  # the first micro-batch of the fourth step
        assert shown[layer, "feed_forward", "all"] == pytest.approx(float(stream.var(correction=0)), rel=1e-5)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    rows = layers(tmp_path / "run")
    series = rows[rows["metric"] == "step_loss"].sort_values("step")["value"].tolist()
    assert series == pytest.approx(losses, rel=1e-6)
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    recorded = rows[rows["metric"] == "step_gradient_norm"].sort_values("step")["value"].tolist()
    assert recorded == pytest.approx(norms, rel=1e-6)


def test_a_loop_of_ones_own_is_measured_as_by_hand(tmp_path):
    model = NanoGpt()
    naive, before, logits = Naive(model, nano_parts()), {}, []
    inner = model.h[1].attn.c_attn.forward

    def see(x):
        out = inner(x)
        q, k, _ = (t.view(*x.shape[:2], 2, -1).transpose(1, 2).double() for t in out.split(16, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(8)
        logits.append(float(scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -math.inf).max()))
        return out

    model.h[1].attn.c_attn.forward = see
    optimizer, seen = torch.optim.Adam(model.parameters(), lr=1e-2), {}

    def clip(step, model):
        naive.keep()
        before[step] = naive.norms(naive.gradients)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def after(step):
        moments = {f"{name}_moment": naive.moments(optimizer, key) for name, key in MOMENTS.items()}
        seen[step] = {"update_norm": naive.updates(), **moments}

    loop(model, tmp_path / "run", steps=3, optimizer=optimizer, spoil=clip, after=after, every=3)
    for step in (1, 3):
        assert found(tmp_path / "run", "gradient_norm", step) == pytest.approx(before[step], **EXACT)
    for metric, expected in seen[3].items():
        assert found(tmp_path / "run", metric, 3) == pytest.approx(expected, **EXACT), metric
    assert found(tmp_path / "run", "attention_logit", 3)[1, "attention", "all"] == pytest.approx(logits[-1], rel=1e-5)
    ended = result(tmp_path / "run")
    assert (ended["status"], ended["steps"], ended["tokens"]) == ("finished", 3, 3 * 2 * 11)
    gains = found(tmp_path / "run", "gain_mean", 3)
    assert gains[0, "attention", "pre_norm"] == pytest.approx(float(model.h[0].ln_1.weight.mean()), rel=1e-6)
    assert gains[-1, "block", "final_norm"] == pytest.approx(float(model.ln_f.weight.mean()), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"every": 1, "on_divergence": "stop", "skip_outliers": 6.0}])
def test_trainings_bits_are_the_same_with_and_without_it(tmp_path, options):
    plain, watched = NanoGpt(), NanoGpt()
    for model in (plain, watched):
        model.h[0].mlp.add_module("drop", torch.nn.Dropout(0.1))  # no part of it draws a random number
    torch.manual_seed(3)
    loop(plain, None)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    loop(watched, tmp_path / "run", **options)
    assert torch.equal(drawn, torch.rand(1))
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_trainer_computes_the_same_bits_and_its_dropout_draws_the_same_numbers(tmp_path):
    weights = []
    for callbacks in ([], [lamina.LayerMonitor(str(tmp_path / "run"), every=1)]):
        model = llama(attention_dropout=0.2)
        Trainer(model, arguments(tmp_path), train_dataset=Tokens(), callbacks=callbacks).train()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


SCRIPT = Path(__file__).with_name("sharded_loop.py")
WITH_DEEPSPEED = pytest.mark.skipif(
    "LAMINA_DEEPSPEED" not in os.environ, reason="LAMINA_DEEPSPEED names no folder with DeepSpeed"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("ddp", "ddp-one-line", "fsdp1", "fsdp1-flat", "fsdp2", "accelerate-ddp", "accelerate-fsdp2"),
        *("fsdp1-one-line", "fsdp2-one-line"),  # whose last step ends with the processes' group
        *("ddp-compiled", "ddp-compiled-layers", "fsdp2-compiled-layers"),
        *(pytest.param(f"zero{stage}", marks=WITH_DEEPSPEED) for stage in (1, 2, 3)),
    ],
)
def test_two_processes_are_measured_as_one(tmp_path, kind):
    """DeepSpeed itself comes from the folder that LAMINA_DEEPSPEED names; without it, ZeRO is skipped.

    pip install --no-deps --target FOLDER deepspeed==0.19.8 einops msgpack hjson py-cpuinfo
    LAMINA_DEEPSPEED=FOLDER pytest -m slow tests/training/watching -k zero
    """
    ended = torchrun(SCRIPT, kind, tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "atexit" not in ended.stderr
    said = json.loads((tmp_path / "by_hand.json").read_text())
    assert all(said["same"])
    assert "not checked: " not in (tmp_path / "run" / "watched.json").read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 3
    for metric, values in said["hand"].items():
        expected = {tuple(place): value for *place, value in values}
        # the processes add their halves of a batch in another order than one process adds the whole
        recorded = found(tmp_path / "run", metric, 3)
        if metric.startswith("hidden_"):
            recorded = {place: recorded[place] for place in expected}  # the others are within layers
        assert recorded == pytest.approx(expected, rel=1e-4 if metric == "update_norm" else 1e-5)
    rows = layers(tmp_path / "run").query("metric == 'hidden_abs_max' and step == 3")
    assert set(rows["layer"]) == {-1, 0, 1}


ALONE = """
import sys, torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from training.watching.loops import NanoGpt, Tokens
import lamina

init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = NanoGpt()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lamina.watch(model, optimizer, output="run").start()
for ids in Tokens(items=6).ids.split(2):
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    optimizer.step()
    optimizer.zero_grad()
(destroy_process_group if sys.argv[1] == "by name" else torch.distributed.destroy_process_group)()
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["by name", "of the module"])
def test_a_loop_that_ends_its_group_before_its_process_ends_its_last_step(tmp_path, call):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", ALONE, call], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "atexit" not in ended.stderr
    assert result(tmp_path / "run")["steps"] == 3
    assert len(layers(tmp_path / "run").query("metric == 'step_loss'")) == 3


def seen(x, logit, load):
    spot = (0, "attention", 0)
    states = {spot: (x.numel(), state_statistics(x).tolist())}
    return PassNumbers(states=states, logits={0: logit}, loads={0: (len(x), load)})


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
