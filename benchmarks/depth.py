"""Measure the compile time of 64 and 1024 layers, and training steps of models with a thousand sub-layers.

Each case runs in a new process without Inductor's caches, so torch compiles everything again. The compile time is the
time of the first step minus the median time of the later steps.

    python benchmarks/depth.py --output benchmarks/results/depth.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from common import high_water_mark, settings_of_machine, write_record  # noqa: E402

# Keel with 512 blocks has 1024 sub-layers, as in the paper.
COMPILING = {"num_layers": (64, 1024), "hidden_size": 64, "batch_size": 2, "sequence_length": 64}
TRAINING = {
    "keel": {"num_layers": 512, "hidden_size": 256, "batch_size": 4, "sequence_length": 128},
    "fusenorm": {"num_layers": 512, "hidden_size": 256, "batch_size": 4, "sequence_length": 128},
}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train one model for some steps on repeating text. Return the seconds, losses, graphs and peak memory."""
    import torch
    from torch._dynamo.utils import counters
    from transformers import LlamaConfig

    import lamina
    from lamina.training.execution import compiling

    if case.get("threads"):
        torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width = case["hidden_size"]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3 // 16 * 16,
        num_hidden_layers=case["num_layers"],
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        vocab_size=257,
        tie_word_embeddings=False,
    )
    born = time.perf_counter()
    model = lamina.build(config, case["placement"]).to(device).train()
    compiling.prepare(model, compiled=case["compiled"])
    if case["gradient_checkpointing"]:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    built = time.perf_counter() - born
    # A model can learn this text in a few steps, because each token determines the next.
    ids = torch.arange(case["batch_size"] * case["sequence_length"], device=device).view(case["batch_size"], -1) % 16
    seconds, losses = [], []
    for step in range(case["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 5)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
        seconds.append(time.perf_counter() - start)
    later = statistics.median(seconds[1:])
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else high_water_mark()
    return {
        **case,
        "parameters": sum(p.numel() for p in model.parameters()),
        "build_seconds": round(built, 2),
        "first_step_seconds": round(seconds[0], 2),
        "step_seconds": round(later, 3),
        "compile_seconds": round(seconds[0] - later, 2),
        "graphs": counters["stats"]["unique_graphs"],
        "losses": losses,
        "peak_memory_mib": round(peak),
    }


def in_a_process(case: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    print(json.dumps(case), file=sys.stderr, flush=True)
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(text.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", type=lambda text: text.split(","), default=["pre_ln", "keel"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="number of steps for the deep models")
    parser.add_argument("--only", choices=("compiling", "training"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run(arguments.case)))
        return
    common = {"threads": arguments.threads}
    compiling, training = [], []
    if arguments.only != "training":
        few, many = COMPILING["num_layers"]
        for placement in arguments.placements:
            case = {**COMPILING, **common, "placement": placement, "compiled": True, "gradient_checkpointing": False}
            pairs = []
            for _ in range(arguments.rounds):
                pairs.append([in_a_process({**case, "num_layers": n, "steps": 4}) for n in (few, many)])
            ratio = statistics.median(b["compile_seconds"] / a["compile_seconds"] for a, b in pairs)
            compiling.append({"placement": placement, "compile_ratio": round(ratio, 3), "runs": pairs})
            print(f"{placement}: {many} layers compile in {ratio:.2f} x the time of {few}; graphs", end=" ")
            print([row["graphs"] for row in pairs[0]])
    if arguments.only != "compiling":
        for placement, sizes in TRAINING.items():
            case = {**sizes, **common, "placement": placement, "compiled": True, "gradient_checkpointing": True}
            row = in_a_process({**case, "steps": arguments.steps})
            training.append(row)
            print(
                f"{placement}, {row['num_layers']} blocks, {row['parameters']:,} parameters: "
                f"{row['step_seconds']} s per step, {row['peak_memory_mib']} MiB, losses {row['losses']}"
            )
    if arguments.output:
        record = {"benchmark": "depth", **settings_of_machine(), "compiling": compiling, "training": training}
        write_record(arguments.output, record)


if __name__ == "__main__":
    main()
