r"""Compare a training step of each placement with transformers' LlamaForCausalLM of the same configuration.

Speed: the models' steps alternate in one process (A B C A B C ...). The result is the median of the ratios of each
round, so a drift of the machine's speed does not matter. On one thread, the time is the CPU time of the process.
Memory: the peak resident size of a new process. With --kept, the memory is the sum of the weights, gradients, moments
and the tensors that wait for the backward pass.

    python benchmarks/train_step.py --output benchmarks/results/train_step.json
    python benchmarks/train_step.py --peer pre_ln --threads 1 --kept --compile --size 30m \
        --placements "pre_ln(wiring=x0),pre_ln(wiring=mhc)" --output benchmarks/results/wirings-compiled.json
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from common import SIZES, high_water_mark, llama_config, settings_of_machine, sizes_of, write_record  # noqa: E402

PEER = "transformers LlamaForCausalLM"
Shape = tuple[str, int, int, bool]  # size, batch, tokens, compiled
Step = Callable[[], float]


def make_step(name: str, size: str, batch: int, length: int, compiled: bool) -> Step:
    """Return a function that trains for one step, and returns the MiB of weights, gradients, moments and kept data."""
    import torch
    from transformers import LlamaForCausalLM

    import lamina
    from lamina.training.execution import compiling

    torch.manual_seed(0)
    config = llama_config(size, length)
    model = LlamaForCausalLM(config) if name == PEER else lamina.build(config, name)
    model.train()
    if compiled:
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 999  # for all models
        compiling.compile_blocks(model)
    ids = torch.randint(0, config.vocab_size, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}

    def step() -> float:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return (4 * sum(weights.values()) + sum(n for at, n in kept.items() if at not in weights)) / 2**20

    return step


def times(names: list[str], shape: Shape, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return a list for each model: the MiB of a step, then the seconds of the step in each round."""
    steps = {name: make_step(name, *shape) for name in names}
    seconds: dict[str, list[float]] = {}
    for name, step in steps.items():
        step()
        seconds[name] = [step()]
        print(name, file=sys.stderr, flush=True)
    for round_number in range(rounds):
        order = names if round_number % 2 == 0 else names[::-1]
        for name in order:
            start = clock()
            steps[name]()
            seconds[name].append(clock() - start)
        print(f"round {round_number + 1}/{rounds}", file=sys.stderr, flush=True)
    return seconds


def peak_memory(name: str, shape: Shape) -> float:
    size, batch, length, compiled = shape
    command = [sys.executable, __file__, "--memory-of", name, "--size", size]
    command += ["--batch-size", str(batch), "--sequence-length", str(length), *(["--compile"] if compiled else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8m")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--placements", default="pre_ln,post_ln,peri_ln,mix_ln,fusenorm,keel,deepnorm")
    parser.add_argument("--peer", default=PEER)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = (arguments.size, arguments.batch_size, arguments.sequence_length, arguments.compile)
    import torch

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        step = make_step(arguments.memory_of, *shape)
        for _ in range(3):
            step()
        print(high_water_mark())
        return
    peer, names = arguments.peer, re.findall(r"[^,(]+(?:\([^)]*\))?", arguments.placements)
    names = [peer, *names]
    one = torch.get_num_threads() == 1
    measured = times(names, shape, arguments.rounds, time.process_time if one else time.perf_counter)
    memory = {name: first for name, (first, *_) in measured.items()}
    seconds = {name: rest for name, (_, *rest) in measured.items()}
    if not arguments.kept:
        memory = {name: peak_memory(name, shape) for name in names}
    tokens = arguments.batch_size * arguments.sequence_length
    rows = [
        {
            "model": name,
            "tokens_per_second": round(tokens / statistics.median(seconds[name])),
            "speed_ratio": round(
                statistics.median(p / s for p, s in zip(seconds[peer], seconds[name], strict=True)), 3
            ),
            "kept_mib" if arguments.kept else "peak_memory_mib": round(memory[name]),
            "memory_ratio": round(memory[name] / memory[peer], 3),
        }
        for name in names
    ]
    record = {
        "benchmark": "train_step",
        "what": "one fp32 training step; ratios against the first row in the same run (speed above 1 is faster)",
        "settings": {**sizes_of(arguments.size), "batch_size": arguments.batch_size, "rounds": arguments.rounds}
        | {"sequence_length": arguments.sequence_length, "threads": torch.get_num_threads()}
        | {"compiled": arguments.compile, "clock": "seconds of the core" if one else "seconds on the wall"},
        **settings_of_machine(),
        "results": rows,
    }
    for row in rows:
        speed = f"{row['tokens_per_second']:>8} tokens/s  x{row['speed_ratio']:<6}"
        print(f"{row['model']:<32} {speed} {round(memory[row['model']]):>6} MiB  x{row['memory_ratio']}")
    if arguments.output:
        write_record(arguments.output, record)


if __name__ == "__main__":
    main()
