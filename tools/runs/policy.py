"""A policy that moves: 500 examples of sorting five letters, then GRPO with a reward that a program computes.

    pip install -e '.[posttrain]'
    python -m tools.runs.policy

A model of random weights learns from the examples until it is right sometimes, then from its own answers to 5,000 other
questions: an answer is worth 1 if it is right, else 0. Ends with 1 unless the reward on 128 held-out questions has
risen by 0.2 within half an hour.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from benchmarks import common

from lamina import api

REWARD = common.ROOT / "studies" / "rewards" / "sorted_letters.py"
HELD_OUT, QUESTIONS, EXAMPLES = 128, 5000, 500


def rows() -> list[dict[str, str]]:
    """Different words of five letters, and each one's letters in order."""
    draw = random.Random(0)
    words = dict.fromkeys("".join(draw.sample("abcdefghijklmnopqrstuvwxyz", 5)) for _ in range(6000))
    return [{"prompt": f"{word}=", "completion": "".join(sorted(word))} for word in words]


def write(path: Path, part: list[dict[str, str]]) -> str:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return str(path)


def main() -> int:
    """Train the three stages and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/policy"))
    parser.add_argument("--output", type=Path, default=common.ROOT / "benchmarks" / "results" / "policy.json")
    given = parser.parse_args()
    folder, every = given.folder, rows()
    held_out = write(folder / "held_out.jsonl", every[:HELD_OUT])
    questions = write(folder / "questions.jsonl", every[HELD_OUT : HELD_OUT + QUESTIONS])
    examples = write(folder / "examples.jsonl", every[-EXAMPLES:])
    usual = {"precision": "fp32", "threads": 1, "overwrite": True}
    began, used = time.monotonic(), time.process_time()
    api.pretrain(
        placement="pre_ln", num_layers=3, hidden_size=64, num_heads=4, sequence_length=16, batch_size=8, steps=4,
        output=str(folder / "base"), **usual,
    )  # fmt: skip
    api.sft(
        from_model=str(folder / "base"), data=examples, eval_data=held_out, steps=140, batch_size=32,
        learning_rate=3e-3, warmup=0.1, output=str(folder / "sft"), **usual,
    )  # fmt: skip
    started, used_before = time.monotonic(), time.process_time()
    result = api.rlhf(
        from_model=str(folder / "sft"), data=questions, eval_data=held_out, algorithm="grpo", num_generations=8,
        batch_size=32, steps=160, learning_rate=5e-4, warmup=0.05, beta=0.0, max_answer=7, eval_steps=20,
        reward_function=f"{REWARD}:in_place", output=str(folder / "grpo"), **usual,
    )  # fmt: skip
    minutes = (time.monotonic() - began) / 60
    lines = map(json.loads, (folder / "grpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    curve = [
        {name: line[name] for name in ("step", "eval_reward", "eval_kl")} for line in lines if "eval_reward" in line
    ]
    record = {
        **common.settings_of_machine(),
        "minutes": minutes,
        "minutes_of_the_policy": (time.monotonic() - started) / 60,
        "cpu_minutes": (time.process_time() - used) / 60,
        "cpu_minutes_of_the_policy": (time.process_time() - used_before) / 60,
        **{name: result[name] for name in ("reward_gain", "reward_gain_low", "reward_gain_high")},
        "curve": curve,
    }
    common.write_record(given.output, record)
    print(json.dumps(record, indent=2))
    return 0 if result["reward_gain"] >= 0.2 and minutes <= 30 else 1


if __name__ == "__main__":
    raise SystemExit(main())
