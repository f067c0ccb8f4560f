"""Measure the cost of probes relative to bare forward passes, and of the layer monitor relative to a training step.

Speed: the two sides alternate in one process (A B A B ...). The result is the median of the ratios of each round, so
a drift of the machine's speed does not matter. Memory: the peak resident size of a new process, with the weights.

    python benchmarks/probes.py --output benchmarks/results/probes.json
    python benchmarks/probes.py --checkpoint models/smollm2

Without a checkpoint, the model is a Llama of SmolLM2-135M's shape with random weights, which needs the same work.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import SIZES, high_water_mark, sizes_of

PROBES = "hidden_states,angular_distance,similarity"
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def make_context(arguments: argparse.Namespace) -> Any:
    """Return the model and batches of random tokens, which are the same in each call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lamina.modeling.checkpoint import load
    from lamina.probes.engine.measure import make_context
    from lamina.probes.engine.probe_settings import ProbeSettings

    torch.manual_seed(0)
    if arguments.checkpoint:
        model = load(arguments.checkpoint).model
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**SMOLLM2, "num_hidden_layers": arguments.layers}))
    shape = (arguments.sequences, arguments.sequence_length)
    blocks = torch.randint(0, model.config.vocab_size, shape)  # type: ignore[union-attr]
    settings = ProbeSettings(sequences=arguments.sequences, batch_size=arguments.batch_size)
    return make_context(model.eval(), settings, blocks)


def bare(context: Any) -> None:
    """Run only the forward passes. Like the probes, the passes leave out the output head."""
    import torch

    from lamina.probes.structure.hooks import forward

    with torch.no_grad():
        for inputs in context.batches:
            forward(context.base, inputs)


def probed(context: Any, probes: str) -> None:
    from lamina.probes.engine.measure import run
    from lamina.probes.engine.registry import make_all

    run(context, make_all(probes), tolerance=0.0)


def timed(call: Any, *words: Any) -> float:
    began = time.perf_counter()
    call(*words)
    return time.perf_counter() - began


def streaming(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of the bare forward passes and of the probes, which alternate."""
    context = make_context(arguments)
    small = [context.batches[0]]
    everything, context.batches = context.batches, small
    probed(context, arguments.probes)  # warm
    bare(context)
    context.batches = everything
    plain, measured = [], []
    for number in range(arguments.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            seconds = timed(probed, context, arguments.probes) if which else timed(bare, context)
            (measured if which else plain).append(seconds)
        print(f"round {number + 1}/{arguments.rounds}: {measured[-1] / plain[-1]:.3f}", file=sys.stderr)
    return {
        "forward_seconds": round(statistics.median(plain), 3),
        "probed_seconds": round(statistics.median(measured), 3),
        "time_ratio": round(statistics.median(m / p for m, p in zip(measured, plain, strict=True)), 4),
        "time_ratios": [round(m / p, 4) for m, p in zip(measured, plain, strict=True)],
    }


def monitor(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a training step, and the additional cost of the layer monitor at every tenth step."""
    import torch
    from transformers import LlamaConfig

    import lamina
    from lamina.training.monitor.gain_measures import gain_rows
    from lamina.training.monitor.parameter_measures import GradientNorms
    from lamina.training.monitor.stream_measures import hidden_state_rows

    torch.manual_seed(0)
    sizes = sizes_of(arguments.size)
    heads = sizes.pop("num_heads")
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=False)
    model = lamina.build(config, "peri_ln").train()
    ids = torch.randint(0, sizes["vocab_size"], (arguments.train_batch, arguments.sequence_length))
    few = ids[: max(1, arguments.train_batch // 4)]
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), GradientNorms(model)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def look() -> None:
        hidden_state_rows(model, few, 1)
        gain_rows(model, 1)

    def gradient_norms() -> float:
        model(input_ids=few, labels=few, use_cache=False).loss.backward()
        seconds = timed(norms.squares)
        optimizer.zero_grad()
        return seconds

    for _ in range(2):
        step()
        look()
    steps, looks, squares = [], [], []
    for number in range(arguments.monitor_rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            (looks if which else steps).append(timed(look if which else step))
        squares.append(gradient_norms())
    every_step = statistics.median(s / t for s, t in zip(squares, steps, strict=True))
    at_tenth = statistics.median(look / t for look, t in zip(looks, steps, strict=True)) / 10
    return {
        "step_seconds": round(statistics.median(steps), 4),
        "monitor_seconds": round(statistics.median(looks), 4),
        "monitor_blocks": len(few),
        "cost_at_every_tenth_step": round(at_tenth, 4),
        "cost_of_gradient_norms_at_every_step": round(every_step, 4),
    }


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the peak memory of the bare forward passes and of the probes, each in a new process."""
    found = {}
    for what in ("bare", "probed"):
        command = [sys.executable, __file__, "--memory-of", what]
        for name in ("probes", "sequences", "sequence_length", "batch_size", "layers", "checkpoint"):
            if (value := getattr(arguments, name)) is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        found[what] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return {
        "forward_mib": round(found["bare"]),
        "probed_mib": round(found["probed"]),
        "memory_ratio": round(found["probed"] / found["bare"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="checkpoint to probe (default: random weights of SmolLM2's shape)")
    parser.add_argument("--layers", type=int, default=SMOLLM2["num_hidden_layers"])
    parser.add_argument("--probes", default=PROBES)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=SIZES, default="8m", help="size of the model for the layer monitor")
    parser.add_argument("--train-batch", type=int, default=8)
    parser.add_argument("--monitor-rounds", type=int, default=21)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--memory-of", choices=("bare", "probed"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        context = make_context(arguments)
        bare(context) if arguments.memory_of == "bare" else probed(context, arguments.probes)
        print(high_water_mark())
        return
    import torch

    from lamina.jobs.environment import environment

    where = environment(0)
    record = {
        "benchmark": "probes",
        "what": "streaming probes against the bare forward passes; the monitor against a training step",
        "targets": {"time_ratio": 1.15, "cost_at_every_tenth_step": 0.03, "memory_ratio": 1.2},
        "streaming": streaming(arguments),
        "memory": memory(arguments),
        "monitor": monitor(arguments),
        "settings": {
            "model": "SmolLM2-135M" if arguments.checkpoint else f"random Llama, {arguments.layers} layers, d 576",
            "threads": torch.get_num_threads(),
            **{k: getattr(arguments, k) for k in ("probes", "sequences", "sequence_length", "batch_size", "rounds")},
            **{k: getattr(arguments, k) for k in ("size", "train_batch", "monitor_rounds")},
        },
        "date": datetime.date.today().isoformat(),
        "versions": where["versions"],
        "machine": where["machine"],
        "git_revision": where["git_revision"],
    }
    text = json.dumps(record, indent=2)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
