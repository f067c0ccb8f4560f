"""The whole path at a tiny size: pretrain two placements, then SFT, a reward model, and a policy for each.

    pip install '.[posttrain]'
    python -m tools.runs.whole_path [--folder runs/after-pretraining] [--data commonsense170k.jsonl] [--scale 1]

Each stage is a job with a folder. Run the same command again after a kill: stages that have ended are left as they are,
and the one that was killed resumes from its last checkpoint. ``make commonsense-data`` makes Commonsense170K's data.
Without --data, the script makes instructions of its own (sorting letters), which even a tiny model learns.

What to expect at --scale 1: half an hour for each placement on one core. At the end, the held-out reward of both
policies has risen, with its 95 % interval above zero. --scale 0.05 is a trial run, too short to learn anything.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from lamina import api

PLACEMENTS = ("pre_ln", "mix_ln")
LETTERS = "abcdefgh"


def sorting(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Instructions to sort four letters."""
    draw = random.Random(seed)
    for _ in range(count):
        word = "".join(draw.sample(LETTERS, 4))
        yield {"instruction": f"Sort the letters {word}.", "input": "", "output": "".join(sorted(word))}


def read(path: Path, count: int, longest: int) -> Iterator[dict[str, str]]:
    """The first rows of a file that a model of bytes has room for."""
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if len(row["instruction"].encode()) + len(row["output"].encode()) < longest - 8 and count > 0:
                count -= 1
                yield row


def preferences(rows: list[dict[str, str]], seed: int = 0) -> Iterator[dict[str, str]]:
    """The right answer against another row's, for the same question."""
    draw = random.Random(seed)
    for row in rows:
        others = [other["output"] for other in draw.sample(rows, 20) if other["output"] != row["output"]]
        if others:
            yield {"prompt": row["instruction"], "chosen": row["output"], "rejected": others[0]}


def write(path: Path, rows: Iterator[dict[str, str]]) -> Path:
    """A file of JSON lines, written once: a resumed job would refuse another."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        draft.replace(path)
    return path


def path_of(folder: Path, placement: str, files: dict[str, Path], scale: float, max_answer: int) -> dict[str, object]:
    """Take one placement through the four stages; returns the last one's result."""
    at = {stage: str(folder / placement / stage) for stage in ("pretrain", "sft", "reward", "rlhf")}
    steps = {stage: max(4, round(count * scale)) for stage, count in STEPS.items()}
    common = {"resume": "auto", "save_steps": 25}
    api.pretrain(
        placement=placement,
        num_layers=6,
        hidden_size=128,
        num_heads=4,
        sequence_length=256,
        batch_size=16,
        steps=steps["pretrain"],
        learning_rate=3e-3,
        precision="fp32",
        compile="off",
        output=at["pretrain"],
        **common,
    )
    tuned = {"template": "plain", "batch_size": 16, **common}
    api.sft(
        from_model=at["pretrain"], data=str(files["sft"]), output=at["sft"], steps=steps["sft"],
        learning_rate=1e-3, **tuned,
    )  # fmt: skip
    tuned["template"] = "tokenizer"  # saved with the fine-tuned model; "auto" would leave texts as they are
    api.reward(
        from_model=at["sft"], data=str(files["preferences"]), output=at["reward"], steps=steps["reward"],
        learning_rate=3e-4, **tuned,
    )  # fmt: skip
    return api.rlhf(
        from_model=at["sft"], data=str(files["sft"]), reward_model=at["reward"], output=at["rlhf"],
        steps=steps["rlhf"], learning_rate=1e-4, max_answer=max_answer, eval_examples=64, **tuned,
    )  # fmt: skip


STEPS = {"pretrain": 600, "sft": 300, "reward": 200, "rlhf": 150}


def main() -> None:
    """Make the data, run the stages, and print what became of the held-out reward."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/after-pretraining"))
    parser.add_argument("--data", type=Path, help="instructions as JSON lines, such as Commonsense170K")
    parser.add_argument("--rows", type=int, default=2000, help="how many of them")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps of every stage")
    options = parser.parse_args()
    rows = list(sorting(options.rows) if options.data is None else read(options.data, options.rows, 256 - 16))
    files = {
        "sft": write(options.folder / "data" / "sft.jsonl", iter(rows)),
        "preferences": write(options.folder / "data" / "preferences.jsonl", preferences(rows)),
    }
    max_answer = 8 + max(len(row["output"].encode()) for row in rows)  # tokens: the model reads bytes
    for placement in PLACEMENTS:
        result = path_of(options.folder, placement, files, options.scale, max_answer)
        print(
            f"{placement}: {result['status']}, held-out reward {result['eval_reward']:.3f}, gained "
            f"{result['reward_gain']:+.3f} (95 % interval {result['reward_gain_low']:+.3f} to "
            f"{result['reward_gain_high']:+.3f}) at {result['eval_kl']:.2f} nats of KL"
        )


if __name__ == "__main__":
    main()
