"""A training step of each placement against transformers' LlamaForCausalLM of the same configuration.

Speed: all models in one process, their steps alternating (A B C A B C ...), medians; the ratio is taken round by
round, so that it holds when the machine's speed drifts. Memory: the largest resident size of a process of its own.

    python benchmarks/train_step.py --output benchmarks/results/train_step.json
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from common import SIZES, high_water_mark, llama_config, settings_of_machine, sizes_of, write_record  # noqa: E402

PEER = "transformers LlamaForCausalLM"


def make_step(name: str, size: str, batch: int, length: int) -> Callable[[], None]:
    """A function that does one whole training step of a model: forward, backward, clipping, AdamW."""
    import torch
    from transformers import LlamaForCausalLM

    import lamina

    torch.manual_seed(0)
    config = llama_config(size, length)
    model = LlamaForCausalLM(config) if name == PEER else lamina.build(config, name)
    model.train()
    ids = torch.randint(0, config.vocab_size, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def times(names: list[str], size: str, batch: int, length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each model's step in each round."""
    steps = {name: make_step(name, size, batch, length) for name in names}
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(rounds):
        order = names if round_number % 2 == 0 else names[::-1]
        for name in order:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
        print(f"round {round_number + 1}/{rounds}", file=sys.stderr)
    return seconds


def peak_memory(name: str, size: str, batch: int, length: int) -> float:
    """MiB of a process that does three steps of the model and nothing else."""
    command = [sys.executable, __file__, "--memory-of", name, "--size", size]
    command += ["--batch-size", str(batch), "--sequence-length", str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Measure and print, or write, one JSON record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8m")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--placements", default="pre_ln,post_ln,peri_ln,mix_ln,fusenorm,keel,deepnorm")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = (arguments.size, arguments.batch_size, arguments.sequence_length)
    if arguments.memory_of:
        step = make_step(arguments.memory_of, *shape)
        for _ in range(3):
            step()
        print(high_water_mark())
        return
    import torch

    names = [PEER, *arguments.placements.split(",")]
    seconds = times(names, *shape, rounds=arguments.rounds)
    memory = {name: peak_memory(name, *shape) for name in names}
    tokens = arguments.batch_size * arguments.sequence_length
    rows = [
        {
            "model": name,
            "tokens_per_second": round(tokens / statistics.median(seconds[name])),
            "speed_ratio": round(
                statistics.median(p / s for p, s in zip(seconds[PEER], seconds[name], strict=True)), 3
            ),
            "peak_memory_mib": round(memory[name]),
            "memory_ratio": round(memory[name] / memory[PEER], 3),
        }
        for name in names
    ]
    record = {
        "benchmark": "train_step",
        "what": "one fp32 eager training step; ratios against the peer in the same run (speed above 1 is faster)",
        "settings": {**sizes_of(arguments.size), "batch_size": arguments.batch_size, "rounds": arguments.rounds}
        | {"sequence_length": arguments.sequence_length, "threads": torch.get_num_threads()},
        **settings_of_machine(),
        "results": rows,
    }
    for row in rows:
        speed = f"{row['tokens_per_second']:>8} tokens/s  x{row['speed_ratio']:<6}"
        print(f"{row['model']:<32} {speed} {row['peak_memory_mib']:>6} MiB  x{row['memory_ratio']}")
    if arguments.output:
        write_record(arguments.output, record)


if __name__ == "__main__":
    main()
