"""Compare training speed and memory on a CPU with transformers, litgpt, x-transformers, and a plain loop.

For a GPU, see gpu.py. Each contender is a process that waits while another contender trains. The contenders take turns.
The results are medians over the rounds, and ratios come from each round, so a drift of the machine's speed does not
matter. Matrix products between the turns give the reference speed for the utilization.

    python benchmarks/training.py --suite cpu --output benchmarks/results/training-cpu.json
    python benchmarks/training.py --suite placements --sizes 71m
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from common import Absent, Contender, Products, flops_per_token, settings_of_machine, sizes_of, write_record  # noqa: E402

PEERS = ("transformers", "litgpt", "x-transformers", "nanogpt-style")
OURS = "lamina:pre_ln"
WAYS = (("fp32", "off"), ("fp32", "on"), ("bf16", "off"), ("bf16", "on"))
PLACEMENTS = ("peri_ln", "keel", "fusenorm", "post_ln", "mix_ln", "deepnorm", "layernorm_scaling", "hybridnorm")
SHAPES = {  # batch and sequence length
    "smoke": (2, 16),
    "nano": (16, 64),
    "8m": (8, 256),
    "71m": (8, 256),
    "130m": (8, 256),
}
Way = tuple[str, str, str]


def compare(
    baseline: Way,
    others: list[Way],
    shape: dict[str, Any],
    *,
    rounds: int,
    steps: int,
    together: int,
    products: Products,
    threads: int | None,
) -> list[dict[str, Any]]:
    """Return a record for each contender, the baseline first. At most ``together`` contenders hold memory at a time."""
    found: dict[str, dict[str, Any]] = {}
    span = max(1, together - 1)
    for start in range(0, max(1, len(others)), span):
        group: list[Contender] = []
        made = Made(shape, threads)
        try:
            starting = map(made.start, [baseline, *others[start : start + span]])
            for contender in starting:
                way = (contender.name, contender.precision, contender.compile)
                try:
                    say(f"  {contender.label}: first step {contender.ready['first_step']:.1f} s")
                    group.append(contender)
                except Absent as reason:
                    say(f"  {contender.label}: left out, {reason}")
                    found[f"{way}"] = {"name": way[0], "precision": way[1], "compile": way[2], "absent": str(reason)}
                    if way == baseline:
                        return list(found.values())
            for turn in range(rounds):
                products.turn()
                for contender in group if turn % 2 == 0 else group[::-1]:
                    contender.turn(steps)
            for contender in group:
                key = f"{(contender.name, contender.precision, contender.compile)}"
                record = measured(contender, group[0], shape, products, contender.stop())
                found.setdefault(key, record)
                say(f"  {contender.label}: {record['tokens_per_second']} tokens/s, x{record['speed_ratio']}")
        finally:
            made.kill()
    return list(found.values())


class Made:
    def __init__(self, shape: dict[str, Any], threads: int | None):
        self.shape, self.threads, self.all = shape, threads, list[Contender]()

    def start(self, way: Way) -> Contender:
        self.all.append(Contender(*way, self.shape, self.threads))
        return self.all[-1]

    def kill(self) -> None:
        for contender in self.all:
            contender.kill()


def measured(
    contender: Contender, baseline: Contender, shape: dict[str, Any], products: Products, last: dict[str, Any]
) -> dict[str, Any]:
    tokens = shape["batch_size"] * shape["sequence_length"]
    seconds = statistics.median(contender.seconds)
    ratio = statistics.median(b / c for b, c in zip(baseline.seconds, contender.seconds, strict=True))
    gflops = flops_per_token(shape["size"], shape["sequence_length"]) * tokens / seconds / 1e9
    return {
        "name": contender.name,
        "precision": contender.precision,
        "compile": contender.compile,
        "parameters": int(contender.ready["parameters"]),
        "step_seconds": round(seconds, 5),
        "tokens_per_second": round(tokens / seconds),
        "speed_ratio": round(ratio, 3),
        "gflops_per_second": round(gflops, 1),
        "utilisation_of_bf16": round(gflops / products.rates["bf16"], 3),
        "utilisation_of_own": round(gflops / products.rates[contender.precision], 3),
        "first_step_seconds": round(contender.ready["first_step"], 2),
        "build_seconds": round(contender.ready["seconds_to_build"], 2),
        "peak_memory_mib": round(last["peak_memory_mib"]),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ways(name: str, left_out: dict[str, str]) -> list[Way]:
    """Return all combinations of precision and compilation that are useful on this machine."""
    return [(name, precision, compile) for precision, compile in WAYS if precision not in left_out]


def run_suite(arguments: argparse.Namespace) -> dict[str, Any]:
    products = Products("cpu")
    products.turn()
    rates = products.rates
    left_out = {}
    if rates["bf16"] < rates["fp32"]:
        left_out["bf16"] = f"bf16 products at {rates['bf16']:.0f} GFLOP/s, fp32 at {rates['fp32']:.0f}"
        say(f"bf16 left out: {left_out['bf16']}")
    parts = []
    for size in arguments.sizes:
        batch, length = arguments.batch_size, arguments.sequence_length
        batch, length = batch or SHAPES[size][0], length or SHAPES[size][1]
        shape = {"size": size, "batch_size": batch, "sequence_length": length}
        baseline: Way
        if arguments.suite == "placements":
            way = ("fp32" if left_out else "bf16", "on")
            baseline = (OURS, *way)
            others = [(f"lamina:{placement}", *way) for placement in arguments.placements]
        else:
            baseline = ("transformers", "fp32", "off")  # what users have now
            others = [w for name in (OURS, *PEERS) for w in ways(name, left_out) if w != baseline]
        say(f"{arguments.suite} {size}: batch {batch} x {length}")
        results = compare(
            baseline,
            others,
            shape,
            rounds=arguments.rounds,
            steps=arguments.steps,
            together=arguments.together,
            products=products,
            threads=arguments.threads,
        )
        parts.append({"size": size, **sizes_of(size), **shape, "results": results})
    return {
        "benchmark": f"training, {arguments.suite}",
        "what": "whole training steps; speed_ratio against the first row of the same size, above 1 is faster",
        "rounds": arguments.rounds,
        "steps_in_a_round": arguments.steps,
        "threads": arguments.threads or torch.get_num_threads(),
        "products_gflops_per_second": {name: round(rate, 1) for name, rate in products.rates.items()},
        "left_out": left_out,
        **settings_of_machine(),
        "parts": parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("cpu", "placements"), default="cpu")
    parser.add_argument("--sizes", type=lambda text: text.split(","), help="sizes of models (default: 8m,71m)")
    parser.add_argument("--placements", type=lambda text: text.split(","), default=list(PLACEMENTS))
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="number of steps in a turn")
    parser.add_argument("--together", type=int, default=4, help="maximum number of contenders that hold memory")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        parser.error("hide the GPU first (CUDA_VISIBLE_DEVICES=), or run: python benchmarks/gpu.py")
    arguments.sizes = arguments.sizes or ["8m", "71m"]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    record = run_suite(arguments)
    for part in record["parts"]:
        print(f"{part['size']}: batch {part['batch_size']} x {part['sequence_length']}")
        for row in part["results"]:
            label = f"{row['name']}, {row['precision']}, {'compiled' if row['compile'] == 'on' else 'eager'}"
            if "absent" in row:
                print(f"  {label:<40} left out: {row['absent']}")
                continue
            print(
                f"  {label:<40} {row['tokens_per_second']:>9} tokens/s  x{row['speed_ratio']:<6} "
                f"{row['utilisation_of_own']:>6.1%} {row['peak_memory_mib']:>7} MiB  "
                f"first step {row['first_step_seconds']} s"
            )
    if arguments.output:
        write_record(arguments.output, record)


if __name__ == "__main__":
    main()
