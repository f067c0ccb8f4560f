"""The one line that docs/watch.md gives for each kind of loop, in that loop, with every step's loss and gradient."""

import atexit
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from training.tiny_runs import layers
from training.watching.loops import NanoGpt, Tokens, llama, loop

import lamina

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
LINES = {row[0].partition(",")[0]: row[1] for row in re.findall(r"^\| ([^|]+) \| `(.+)` \|$", PAGE, re.MULTILINE)}
IDS = Tokens(items=24).ids


def run_line(loop, names):
    """Run the line of a loop; the process ends where ``end`` is called."""
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atexit, "register", ends.append)
        exec(LINES[loop], {"lamina": lamina, **names})
    (end,) = ends
    return end


def gradient(model):
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()


def check(folder, losses, norms):
    """Every step has its loss and its gradient's norm before clipping, and the last one its update."""
    rows = layers(folder)
    for metric, values in (("step_loss", losses), ("step_gradient_norm", norms)):
        seen = rows[rows["metric"] == metric].sort_values("step")
        assert seen["step"].tolist() == list(range(1, len(values) + 1))
        assert seen["value"].tolist() == pytest.approx(values, rel=1e-5)
    assert set(rows.query("metric == 'update_norm' and layer >= 0")["layer"]) == {0, 1}
    assert set(rows.query("metric == 'hidden_variance'")["step"]) == {1, 20}


@pytest.mark.parametrize("scales", [False, True])
def test_nanogpt(tmp_path, monkeypatch, scales):
    """Micro-batches whose loss is divided, evaluations in between, and a scaler, as in nanoGPT's train.py."""
    monkeypatch.chdir(tmp_path)
    model = NanoGpt()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", enabled=scales)
    end = run_line("nanoGPT", {"model": model, "optimizer": optimizer})
    losses, norms, step = [], [], 0
    while True:
        if step % 8 == 0:
            model.eval()
            with torch.no_grad():
                model(IDS[:2, :-1], IDS[:2, 1:])
            model.train()
        shares = []
        for micro in range(2):
            batch = IDS[4 * (step % 5) + 2 * micro :][:2]
            _, loss = model(batch[:, :-1], batch[:, 1:])
            loss = loss / 2
            shares.append(loss.item())
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(gradient(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(sum(shares))
        step += 1
        if step == 22:
            break
    end()
    check(Path("runs/nanogpt"), losses, norms)


class Titan:
    """torchtitan's trainer: model parts, a container of optimizers, a loss function outside the model, clipping."""

    class Optimizers(torch.optim.Optimizer):
        def __init__(self, parts):
            self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
            super().__init__([p for part in parts for p in part.parameters()], {})

        def __iter__(self):
            return iter(self.optimizers)

        def step(self, *args, **kwargs):
            for optimizer in self.optimizers:
                optimizer.step(*args, **kwargs)

        def zero_grad(self, *args, **kwargs):
            super().zero_grad(*args, **kwargs)
            for optimizer in self.optimizers:
                optimizer.zero_grad(*args, **kwargs)

    class Model(NanoGpt):
        def forward(self, tokens, eos_id=None):
            return super().forward(tokens)[0]

    def __init__(self):
        self.model_parts = [self.Model()]
        self.optimizers = self.Optimizers(self.model_parts)
        self.losses, self.norms = [], []

    def train_step(self, step):
        self.optimizers.zero_grad()
        accumulated = []
        for micro in range(2):
            batch = IDS[4 * (step % 5) + 2 * micro :][:2]
            predicted = self.model_parts[0](batch[:, :-1], 0)
            loss = functional.cross_entropy(predicted.flatten(0, 1).float(), batch[:, 1:].flatten()) / 2
            del predicted
            loss.backward()
            accumulated.append(loss.detach())
        self.norms.append(gradient(self.model_parts[0]))
        parameters = [p for part in self.model_parts for p in part.parameters()]
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters], 2.0, False, True)
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, total, True)
        self.optimizers.step()
        self.losses.append(torch.stack(accumulated).sum().item())

    def train(self):
        for step in range(22):
            self.train_step(step)


def test_torchtitan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Titan()
    end = run_line("torchtitan", {"trainer": trainer})
    trainer.train()
    end()
    check(Path("runs/titan"), trainer.losses, trainer.norms)


@pytest.mark.slow
@pytest.mark.skipif("LAMINA_TRAINERS" not in os.environ, reason="LAMINA_TRAINERS names no folder with torchtitan")
@pytest.mark.parametrize("kind", ["chunked", "whole", "compiled"])
def test_torchtitan_itself(tmp_path, kind):
    """Its trainer, with FSDP2 in one process, against its log and an unwatched run."""
    said = []
    for name, line in (("watched", LINES["torchtitan"]), ("alone", "")):
        (tmp_path / name).mkdir()
        words = [sys.executable, str(Path(__file__).with_name("titan_loop.py")), "files", kind, line]
        how = {"env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, "cwd": tmp_path / name}
        ended = subprocess.run(words, capture_output=True, text=True, **how)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert "atexit" not in ended.stderr
        said.append(re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout + ended.stderr))
    assert (tmp_path / "watched" / "weights").read_text() == (tmp_path / "alone" / "weights").read_text()
    rows = layers(tmp_path / "watched" / "runs" / "titan")
    for metric, name, close in (("step_loss", "loss", 1e-5), ("step_gradient_norm", "grad_norm", 3e-4)):
        seen = rows[rows["metric"] == metric].sort_values("step")["value"]
        logged = re.findall(rf"step: .* {name}: +([\d.]+)", said[0])  # its norm adds the squares in float32
        assert seen.tolist() == pytest.approx(list(map(float, logged)), rel=close)
    for metric in ("hidden_variance", "update_norm", "gradient_norm"):
        assert set(rows[(rows["metric"] == metric) & (rows["layer"] >= 0)]["layer"]) == set(range(6))
    assert json.loads((tmp_path / "watched" / "runs" / "titan" / "result.json").read_text())["steps"] == 4


def test_accelerate(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    end = run_line("accelerate", {"model": model, "optimizer": optimizer})
    losses, norms, shares = [], [], []
    for micro in range(44):
        batch = IDS[2 * (micro % 10) :][:2]
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            shares.append(loss.item() / 2)
            if accelerator.sync_gradients:
                norms.append(gradient(model))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(sum(shares))
                shares = []
            optimizer.step()
            optimizer.zero_grad()
    end()
    check(Path("runs/accelerate"), losses, norms)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning(tmp_path, monkeypatch, accumulated):
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    losses, norms = [], []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = NanoGpt()

        def training_step(self, batch, index):
            loss = self.model(batch[:, :-1], batch[:, 1:])[1]
            losses.append(loss.item() / accumulated)
            return loss

        def on_before_optimizer_step(self, optimizer):
            norms.append(gradient(self.model))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    how = {"accelerator": "cpu", "accumulate_grad_batches": accumulated, "gradient_clip_val": 0.5, "logger": False}
    how |= dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(max_steps=22, **how, **eval(f"dict({LINES['Lightning']})"))
    trainer.fit(Module(), torch.utils.data.DataLoader(IDS, batch_size=2))
    sums = [sum(losses[i : i + accumulated]) for i in range(0, len(losses), accumulated)]
    check(Path("runs/lightning"), sums, norms)


def test_two_models_in_turn_have_a_loss_each(tmp_path):
    models, losses = [NanoGpt(), NanoGpt(layers=3)], ([], [])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with ExitStack() as watched:
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            watched.enter_context(lamina.watch(model, optimizer, output=str(tmp_path / str(place))))
        for step in range(4):
            for model, optimizer, kept in zip(models, optimizers, losses, strict=True):
                loss = model(IDS[step : step + 2, :-1], IDS[step : step + 2, 1:])[1]
                kept.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    for place, kept in enumerate(losses):
        seen = layers(tmp_path / str(place)).query("metric == 'step_loss'")["value"].tolist()
        assert seen == pytest.approx(kept, rel=1e-6)


@pytest.mark.parametrize("says", [True, False])
def test_the_passes_of_a_closure_are_one_step(tmp_path, says):
    model, first = NanoGpt(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(IDS[:2, :-1], IDS[:2, 1:])[1]
        loss.backward()
        return loss

    with lamina.watch(model, optimizer, output=str(tmp_path / "run")) as monitor:
        for _ in range(3):
            first.append(optimizer.step(closure).item())
            if says:
                monitor.step(first[-1])
    seen = layers(tmp_path / "run").query("metric == 'step_loss'")
    assert seen["step"].tolist() == [1, 2, 3]
    assert seen["value"].tolist() == pytest.approx(first, rel=1e-6)


STOPPED = """
import sys
from training.watching.loops import NanoGpt, Tokens
import lamina, torch

model, ids = NanoGpt(), Tokens(items=8).ids
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lamina.watch(model, optimizer, output="a run", on_divergence="stop").start()
try:
    for step in range(8):
        loss = model(ids[step : step + 1, :-1], ids[step : step + 1, 1:])[1]
        loss = loss * (float("nan") if step == 3 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
except lamina.Diverged as diverged:
    if sys.argv[1] == "raise":
        raise
    print("caught", diverged.step)
"""


@pytest.mark.parametrize("act", ["raise", "catch"])
def test_a_divergence_that_stops_an_added_line_is_one_line_and_has_a_name(tmp_path, act):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", STOPPED, act], cwd=tmp_path, env=env, capture_output=True, text=True)
    started, alarm, *last = ended.stderr.splitlines()
    assert started == (
        "lamina.watch: recording NanoGpt (2 layers, 9,056 parameters) in 'a run'. "
        "To read the records, run: lamina diagnose 'a run'"
    )
    assert alarm.startswith("lamina.watch: step 4")
    if act == "raise":
        (line,) = last
        assert line.startswith("lamina: the loss is nan at step 4; the first anomaly is at step 4")
        assert line.endswith("stopped the training (on_divergence=\"stop\"). Run: lamina diagnose 'a run'")
    assert (ended.returncode, ended.stdout) == ((1, "") if act == "raise" else (0, "caught 4\n"))
    assert json.loads((tmp_path / "a run" / "result.json").read_text())["status"] == "diverged"


@pytest.mark.parametrize(("logger", "shown"), [("", True), ("lamina", False)])
def test_the_first_line_comes_unless_lamina_is_told_to_be_quiet(tmp_path, caplog, logger, shown):
    level = logging.getLogger(logger).level
    try:
        logging.getLogger(logger).setLevel(logging.WARNING)
        loop(NanoGpt(), tmp_path / "run", steps=2)
    finally:
        logging.getLogger(logger).setLevel(level)
    said = [record.getMessage() for record in caplog.records if "lamina.watch" in record.getMessage()]
    assert ["recording NanoGpt" in text for text in said] == [True] * shown


def test_without_lightning_it_is_one_line():
    try:
        import lightning  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(lamina.errors.UserError, match="pip install lightning"):
            lamina.LightningMonitor  # noqa: B018


def test_the_page_has_no_other_lines():
    assert LINES.keys() == {"Trainer", "Lightning", "accelerate", "torchtitan", "nanoGPT"}  # Trainer: test_watching.py


def test_a_head_that_returns_its_loss_alone_is_seen_too(tmp_path):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = NanoGpt()

        def forward(self, idx):
            return self.gpt(idx[:, :-1], idx[:, 1:])[1]

    losses = []

    def loss_of(model, batch):
        loss = model(batch)
        losses.append(loss.item())
        return loss

    loop(Loss(), tmp_path / "run", loss_of=loss_of, says=False)
    rows = layers(tmp_path / "run")
    assert rows.query("metric == 'step_loss'")["value"].tolist() == pytest.approx(losses, rel=1e-6)
