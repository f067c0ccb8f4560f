"""The jobs after pretraining, and runs that are no language model's, as the suite of kills needs them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamina.catalog import JOBS
from tests.lab.posttraining.tiny import preferences, sorting, write_model, write_rows

TUNED = {
    "from_model": "{base}", "template": "plain", "data": "{instructions}", "batch_size": 4, "steps": 12,
    "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 2, "eval_steps": 4, "keep": 2, "eval_fraction": 0.25,
    "threads": 1,
}  # fmt: skip
POLICY = {"job": "rlhf", "from_model": "{tuned}", "template": "auto", "max_answer": 6, "gradient_accumulation": 2}
IMAGES = {
    "backbone": "vit-tiny", "corpus": "{images}", "image_size": 8, "patch_size": 4, "sequence_length": None,
    "eval_fraction": 0.2, "crop_scale": 0.5, "flip": 0.5, "mixup": 0.8, "cutmix": 1.0, "drop_path": 0.2,
    "ema_decay": 0.9, "batch_size": 4, "eval_blocks": 0,
}  # fmt: skip
# By name: what differs from TUNED (of a job) or from a pretraining run, and in how many processes it trains.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "sft": ({"job": "sft"}, 1),
    "sft, LoRA, packed, the best": ({"job": "sft", "lora_rank": 2, "packing": True, "best_by": "loss"}, 1),
    "reward": ({"job": "reward", "data": "{pairs}"}, 1),
    "rlhf, ReMax": ({**POLICY, "reward_model": "{judge}"}, 1),
    "rlhf, GRPO": ({**POLICY, "algorithm": "grpo", "reward_function": "{function}"}, 1),
    "dpo": ({"job": "dpo", "data": "{pairs}", "from_model": "{tuned}"}, 1),
    "sft, 2 processes, DDP": ({"job": "sft", "best_by": "loss"}, 2),
    "reward, 2 processes, DDP": ({"job": "reward", "data": "{pairs}"}, 2),
    "dpo, 2 processes, DDP": ({"job": "dpo", "data": "{pairs}", "from_model": "{tuned}"}, 2),
    "rlhf, 2 processes, DDP": ({**POLICY, "reward_model": "{judge}"}, 2),
    "images": (IMAGES, 1),
}


def places_of(root: Path, *, tuned: bool) -> dict[str, str]:
    """The files and folders that the configurations name; with ``tuned``, also the models of earlier stages."""
    images, function = root / "digits.csv.gz", root / "function.py"
    draw = random.Random(3)
    pixels = [[draw.randrange(256) for _ in range(64)] + [number % 3] for number in range(60)]
    images.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in pixels).encode()))
    function.write_text("def count(prompt, answer, row):\n    return float(answer.count('a'))\n", encoding="utf-8")
    places = {"images": str(images), "function": f"{function}:count"}
    if not tuned:
        return places
    places["base"] = str(write_model(root / "base"))
    places["instructions"] = str(write_rows(root / "instructions.jsonl", sorting(48)))
    places["pairs"] = str(write_rows(root / "pairs.jsonl", preferences(32)))
    for name, job, data in (("tuned", "sft", "instructions"), ("judge", "reward", "pairs")):
        start = places["base"] if job == "sft" else places["tuned"]
        given = {**TUNED, "from_model": start, "data": places[data], "output": str(root / name), "steps": 2}
        job_named(job)(given, bar=False)
        places[name] = str(root / name)
    return places


def job_named(job: str) -> Callable[..., dict[str, Any]]:
    """The function of a job after pretraining."""
    return JOBS[job].run


def held_out_of(folder: Path) -> list[Any]:
    """What a policy's evaluations left."""
    file = folder / "held_out.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
