"""Train one contender in a new process: build the model, warm up, then train on request (see common.Contender).

    python benchmarks/worker.py '{"name": "lamina:keel", "precision": "fp32", "compile": "on", "size": "8m", ...}'

A parked contender of gpu.py compiles first, and then waits for its turn to build the model. So all contenders can
compile at the same time on a GPU that cannot hold all models. Between turns, a parked contender holds only weights and
moments.

This file imports only torch, transformers, accelerate, numpy, scipy, pandas, pyarrow, and the contender's package.
"""

from __future__ import annotations

import gc
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
from common import high_water_mark, sizes_of, wait_for  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

WARM_UP = 3  # steps before the first turn; the first one compiles
FOREVER = 10**6


class RandomBlocks(Dataset):
    """Blocks of random token ids [tokens]. The content of the blocks does not affect the speed."""

    def __init__(self, task: dict[str, Any]):
        shape = (max(64, 4 * task["batch_size"]), task["sequence_length"])
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, sizes_of(task["size"])["vocab_size"], shape, generator=generator)

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.ids[index % len(self.ids)]
        return {"input_ids": block, "labels": block}


class Done(BaseException):
    """Leave a Trainer at once, without the last evaluation."""


class Baton(TrainerCallback):
    """Time the turns at the beginning of each step, and wait for the next turn.

    ``parked`` frees cached memory between turns, and begins each turn with a step that is not timed. ``only_compiles``
    stops after one step.
    """

    def __init__(self, device: torch.device, *, parked: bool = False, only_compiles: bool = False):
        self.device, self.parked, self.only_compiles = device, parked, only_compiles
        self.built = time.perf_counter()
        self.done, self.left, self.began, self.stopped, self.untimed = 0, -1, 0.0, False, False
        self.first = self.parameters = 0.0

    def step_begins(self) -> bool:
        """Return whether to continue. False ends the training."""
        now = time.perf_counter
        if self.done <= WARM_UP:
            if self.done == 1:
                wait_for(self.device)
                self.first = now() - self.began
                if self.only_compiles:
                    return False
                self.began = now()
            elif self.done == 0:
                self.began = now()
            if self.done < WARM_UP:
                self.done += 1
                return True
            wait_for(self.device)
            warm = (now() - self.began) / (WARM_UP - 1)
            ready = {"seconds_to_build": self.built - BORN, "first_step": self.first, "step_seconds": warm}
            say(**ready, parameters=self.parameters)
            self.done += 1
            return self._next_turn()
        if self.untimed:
            wait_for(self.device)
            self.untimed, self.began = False, now()
            return True
        self.left -= 1
        if self.left > 0:
            return True
        wait_for(self.device)
        say(seconds=now() - self.began)
        return self._next_turn()

    def _next_turn(self) -> bool:
        if self.parked and self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.left = heard()["steps"]
        self.stopped, self.untimed = self.left == 0, self.parked
        if self.parked and self.device.type == "cuda" and not self.stopped:
            torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()
        return not self.stopped

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.stopped and not self.step_begins():
            raise Done

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("an evaluation ran during a turn")


def say(**what: Any) -> None:
    print("@" + json.dumps(what), flush=True)


def heard() -> dict[str, Any]:
    """Read the next line from the parent process. If the parent process has ended, return 0 steps."""
    return json.loads(sys.stdin.readline() or '{"steps": 0}')


def train_loop(model: nn.Module, task: dict[str, Any], baton: Baton) -> None:
    """Train as nanoGPT does: autocast, clipping, fused AdamW. The next batch moves to the GPU in the background."""
    device, dtype = baton.device, torch.bfloat16
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = task["precision"] == "bf16"
    model.to(device).train()
    run = torch.compile(model) if task["compile"] == "on" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    baton.built, baton.parameters = time.perf_counter(), sum(p.numel() for p in model.parameters())
    accumulation = task.get("accumulation", 1)
    fetched = (sent(ids, device) for ids in batches(RandomBlocks(task), task["batch_size"]))
    ids = next(fetched)
    while baton.step_begins():
        for _ in range(accumulation):
            with torch.autocast(device.type, dtype=dtype, enabled=task["precision"] == "bf16"):
                loss = run(ids)
            ids = next(fetched)
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def sent(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    return (ids.pin_memory() if device.type == "cuda" else ids).to(device, non_blocking=True)


def batches(blocks: RandomBlocks, batch_size: int) -> Iterator[torch.Tensor]:
    while True:
        for start in range(0, len(blocks.ids) - batch_size + 1, batch_size):
            yield blocks.ids[start : start + batch_size]


def train_llama(task: dict[str, Any], baton: Baton, folder: str) -> None:
    """Train transformers' Llama with the Trainer. Only precision and compilation differ from the defaults."""
    from peers import transformers_llama

    model = transformers_llama(task["size"], task["sequence_length"])
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=FOREVER,
        per_device_train_batch_size=task["batch_size"],
        gradient_accumulation_steps=task.get("accumulation", 1),
        bf16=task["precision"] == "bf16",
        torch_compile=task["compile"] == "on",
        use_cpu=baton.device.type == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    baton.built, baton.parameters = time.perf_counter(), sum(p.numel() for p in model.parameters())
    Trainer(model=model, args=arguments, train_dataset=RandomBlocks(task), callbacks=[baton]).train()


def train_lamina(task: dict[str, Any], baton: Baton, folder: str, layers: int | None = None) -> None:
    from pretraining import pretrain

    pretrain(task, baton, Path(folder), layers)


def compiled_first(task: dict[str, Any], device: torch.device, folder: str) -> None:
    """Compile the blocks of a parked contender in a model with fewer layers."""
    train_lamina(task, Baton(device, only_compiles=True), folder + "/compiled", task["compiled_layers"])
    raise AssertionError("the baton ends it")


def choose_attention(name: str | None) -> None:
    """Let PyTorch use only this attention kernel."""
    if name is not None:
        torch.backends.cuda.enable_flash_sdp(name == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(name == "efficient")
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")


def contend(task: dict[str, Any], device: torch.device, folder: str) -> None:
    parked = bool(task.get("parked"))
    if parked and task.get("compiled_layers"):
        try:
            compiled_first(task, device, folder)
        except Done:
            pass
        except torch.OutOfMemoryError:  # other contenders use the memory, but the cache keeps what was compiled
            pass
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        say(compiled=time.perf_counter() - BORN)
        heard()
    elif parked:
        say(compiled=0.0)  # the first step compiles
        heard()
    baton = Baton(device, parked=parked)
    try:
        if task["name"] == "transformers":
            train_llama(task, baton, folder)
        elif task["name"].startswith("lamina:"):
            train_lamina(task, baton, folder + "/run")
        else:
            from peers import LOOPS

            train_loop(LOOPS[task["name"]](task["size"], task["sequence_length"]), task, baton)
    except Done:
        pass


def main() -> None:
    task = json.loads(sys.argv[1])
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choose_attention(task.get("attention"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            contend(task, device, folder)
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
