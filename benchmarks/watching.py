"""Measure the cost of `lamina.watch`: a watched training loop against the same loop without Lamina.

Two Llamas of transformers with the same weights train on the same batches in one process. The loops alternate after
each step, and take turns in going first, so a drift of the machine's speed affects both. A turn has as many steps as
the interval between two records, so each turn has one record. A GPU works asynchronously, so there each loop runs for
a whole interval, in bf16. The result is the time of the watched steps divided by the time of the other steps.

    python benchmarks/watching.py --output benchmarks/results/watching.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import SIZES, llama_config, settings_of_machine, wait_for, write_record

TARGET = 1.03


class Loop:
    """A training loop with or without `lamina.watch`."""

    def __init__(self, arguments: argparse.Namespace, watched: Path | None, held: ExitStack):
        import torch
        from transformers import LlamaForCausalLM

        import lamina

        torch.manual_seed(0)
        self.device = torch.device(arguments.device)
        self.model = LlamaForCausalLM(llama_config(arguments.size, arguments.sequence_length)).to(self.device).train()
        if arguments.compile == "model":
            self.model.compile()
        elif arguments.compile == "layers":
            for layer in self.model.model.layers:
                layer.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (arguments.batch_size, arguments.sequence_length)
        ids = torch.randint(0, self.model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
        self.ids = ids.to(self.device)
        self.monitor: Any = None
        if watched is not None:
            settings: dict[str, Any] = {} if arguments.every is None else {"every": arguments.every}
            self.monitor = held.enter_context(lamina.watch(self.model, self.optimizer, output=str(watched), **settings))

    def step(self) -> tuple[float, float]:
        """Train for one step, and return the wall seconds and CPU seconds."""
        import torch

        wall, cpu = time.perf_counter(), time.process_time()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step(loss)
        return time.perf_counter() - wall, time.process_time() - cpu


def turn(bare: Loop, watched: Loop, steps: int) -> list[tuple[float, float]]:
    """Return the wall and CPU seconds of ``steps`` steps, first for the bare loop, then for the watched loop."""
    if bare.device.type == "cuda":
        return [behind(loop, steps) for loop in (bare, watched)]
    taken = {bare: [0.0, 0.0], watched: [0.0, 0.0]}
    for number in range(steps):
        for loop in (bare, watched) if number % 2 == 0 else (watched, bare):
            for which, seconds in enumerate(loop.step()):
                taken[loop][which] += seconds
    return [(wall, cpu) for wall, cpu in taken.values()]


def behind(loop: Loop, steps: int) -> tuple[float, float]:
    """Return the wall and CPU seconds of ``steps`` steps on a device that works asynchronously."""
    wait_for(loop.device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loop.step()
    wait_for(loop.device)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from lamina.training.monitor.writers import WatchSettings

    interval = arguments.every or WatchSettings.from_dict({"output": "unused"}).every
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        bare, watched = (Loop(arguments, place, held) for place in (None, Path(folder) / "watched"))
        turn(bare, watched, interval + 1)  # the layers are found in the first step
        turns = [turn(bare, watched, interval) for _ in range(arguments.turns)]
        same = all(
            mine.equal(other) for mine, other in zip(bare.model.parameters(), watched.model.parameters(), strict=True)
        )
    ratios = [[seen[which] / alone[which] for alone, seen in turns] for which in (0, 1)]
    return {
        "every": interval,
        "step_seconds": round(statistics.median(alone[0] for alone, _ in turns) / interval, 4),
        "time_ratio": round(statistics.median(ratios[0]), 4),
        "time_ratios": [round(ratio, 4) for ratio in ratios[0]],
        "cpu_time_ratio": round(statistics.median(ratios[1]), 4),
        "weights_equal": same,  # two compiled loops differ by rounding on several threads, watched or not
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--compile", choices=("off", "model", "layers"), default="off", help="part to compile")
    parser.add_argument("--every", type=int, default=None, help="steps between records (default: as in lamina.watch)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    import torch

    names = ("device", "size", "batch_size", "sequence_length", "turns", "compile")
    settings = {name: getattr(arguments, name) for name in names}
    record = {
        "benchmark": "watching",
        "what": "a watched training loop against the same loop left alone",
        "targets": {"time_ratio": TARGET},
        **measure(arguments),
        "settings": {"threads": torch.get_num_threads(), **settings},
        **settings_of_machine(),
    }
    print(json.dumps(record, indent=2))
    if arguments.output:
        write_record(arguments.output, record)


if __name__ == "__main__":
    main()
