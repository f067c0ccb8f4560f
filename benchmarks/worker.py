"""One contender in a process of its own: builds a model, warms up, then trains when told to (see common.Contender).

    python benchmarks/worker.py '{"name": "lamina:keel", "precision": "fp32", "compile": "on", "size": "8m", ...}'

Imports nothing but torch, transformers, accelerate, numpy, pandas and pyarrow, and what the contender itself is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BORN = time.perf_counter()
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from common import high_water_mark, llama_config, sizes_of, wait_for  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

WARM_UP = 3  # steps before the first turn; the first one compiles
FOREVER = 10**6


class RandomBlocks(Dataset):
    """Blocks of random token ids [tokens]: what is in them costs no model more or less."""

    def __init__(self, task: dict[str, Any]):
        shape = (max(64, 4 * task["batch_size"]), task["sequence_length"])
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, sizes_of(task["size"])["vocab_size"], shape, generator=generator)

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.ids[index % len(self.ids)]
        return {"input_ids": block, "labels": block}


class Baton(TrainerCallback):
    """Called where a step begins: times the turns, and waits for the next one between them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.built = time.perf_counter()
        self.done, self.left, self.began, self.stopped = 0, -1, 0.0, False
        self.first = self.parameters = 0.0

    def step_begins(self) -> bool:
        """False where the training is to end."""
        now = time.perf_counter
        if self.done <= WARM_UP:
            if self.done == 1:
                wait_for(self.device)
                self.first = now() - self.began
            elif self.done == 0:
                self.began = now()
            if self.done < WARM_UP:
                self.done += 1
                return True
            wait_for(self.device)
            say(seconds_to_build=self.built - BORN, first_step=self.first, parameters=self.parameters)
            self.done += 1
            return self._next_turn()
        self.left -= 1
        if self.left > 0:
            return True
        wait_for(self.device)
        say(seconds=now() - self.began)
        return self._next_turn()

    def _next_turn(self) -> bool:
        self.left = json.loads(sys.stdin.readline() or '{"steps": 0}')["steps"]
        self.stopped = self.left == 0
        self.began = time.perf_counter()
        return not self.stopped

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.stopped and not self.step_begins():
            # Trainer finishes the step that has begun; its end is not waited for.
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("no evaluation belongs in a turn")


def say(**what: Any) -> None:
    """One line for `common.Contender`."""
    print("@" + json.dumps(what), flush=True)


def train_loop(model: nn.Module, task: dict[str, Any], baton: Baton) -> None:
    """NanoGPT's loop: autocast, clipping, fused AdamW."""
    device, dtype = baton.device, torch.bfloat16
    model.to(device).train()
    run = torch.compile(model) if task["compile"] == "on" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    baton.built, baton.parameters = time.perf_counter(), sum(p.numel() for p in model.parameters())
    for ids in batches(RandomBlocks(task), task["batch_size"]):
        if not baton.step_begins():
            return
        ids = (ids.pin_memory() if device.type == "cuda" else ids).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype, enabled=task["precision"] == "bf16"):
            loss = run(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def batches(blocks: RandomBlocks, batch_size: int) -> Iterator[torch.Tensor]:
    """Endless batches [batch, tokens]."""
    while True:
        for start in range(0, len(blocks.ids) - batch_size + 1, batch_size):
            yield blocks.ids[start : start + batch_size]


def train_llama(task: dict[str, Any], baton: Baton, folder: str) -> None:
    """Transformers' Llama and Trainer, at their defaults but for precision and compilation."""
    from peers import transformers_llama

    model = transformers_llama(task["size"], task["sequence_length"])
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=FOREVER,
        per_device_train_batch_size=task["batch_size"],
        bf16=task["precision"] == "bf16",
        torch_compile=task["compile"] == "on",
        use_cpu=baton.device.type == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    baton.built, baton.parameters = time.perf_counter(), sum(p.numel() for p in model.parameters())
    Trainer(model=model, args=arguments, train_dataset=RandomBlocks(task), callbacks=[baton]).train()


def train_lamina(task: dict[str, Any], baton: Baton, folder: str) -> None:
    """Lamina's model and Trainer as `lamina pretrain` has them, the guard and the gradient norms included."""
    import lamina
    from lamina.training.arguments import training_arguments
    from lamina.training.execution import compiling
    from lamina.training.monitor.experts import ExpertBalance
    from lamina.training.monitor.guard import DivergenceGuard
    from lamina.training.settings import PretrainSettings
    from lamina.training.trainer import LaminaTrainer

    config = llama_config(task["size"], task["sequence_length"])
    settings = PretrainSettings(
        placement=task["name"].partition(":")[2],
        output=folder,
        steps=FOREVER,
        batch_size=task["batch_size"],
        sequence_length=task["sequence_length"],
        precision=task["precision"],
        compile=task["compile"],
        gradient_checkpointing=task.get("gradient_checkpointing", False),
        learning_rate=5e-5,
        logging_steps=500,
        eval_steps=FOREVER,
        threads=task.get("threads"),
    )
    model = lamina.build(config, settings.placement, init="normal")
    compiling.prepare(model, compiled=settings.compile == "on")
    baton.built, baton.parameters = time.perf_counter(), sum(p.numel() for p in model.parameters())
    LaminaTrainer(
        model=model,
        args=training_arguments(settings),
        train_dataset=RandomBlocks(task),
        eval_dataset=RandomBlocks(task),
        callbacks=[baton],
        guard=DivergenceGuard(margin=settings.divergence_margin, patience=settings.divergence_patience),
        experts=ExpertBalance(model, settings.expert_balance, settings.expert_balance_rate),
    ).train()


def main() -> None:
    """Train what the task in the first argument says."""
    task = json.loads(sys.argv[1])
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    baton = Baton(device)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if task["name"] == "transformers":
                train_llama(task, baton, folder)
            elif task["name"].startswith("lamina:"):
                train_lamina(task, baton, folder)
            else:
                from peers import LOOPS

                train_loop(LOOPS[task["name"]](task["size"], task["sequence_length"]), task, baton)
        except ImportError as error:
            say(absent=f"not installed: {error}")
            return
        except torch.OutOfMemoryError as error:
            say(absent=f"out of memory: {str(error).splitlines()[0]}")
            return
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else high_water_mark()
    say(peak_memory_mib=peak)


if __name__ == "__main__":
    main()
