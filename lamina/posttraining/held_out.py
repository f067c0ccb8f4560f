"""held_out.jsonl: reward, KL and length of a policy's answer to each held-out prompt, by evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from lamina.core.json_types import Json
from lamina.jobs.files import write_text

FILE = "held_out.jsonl"


def write(path: Path, step: int, numbers: list[Json]) -> None:
    """Write the evaluation's numbers in place of those of this step and of later ones, which a resumed run repeats."""
    earlier = [line for line in read(path) if line["step"] < step]
    lines = [*earlier, *({"step": step, **number} for number in numbers)]
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> list[Json]:
    """The lines of held_out.jsonl; none if there is no such file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def gain(path: Path) -> Json:
    """How the held-out reward changed from the first evaluation to the last, with a 95 % interval over the prompts.

    The interval is Student's for paired differences. Empty for fewer than two evaluations or two prompts.
    """
    from scipy import stats

    by_step: dict[int, dict[int, float]] = {}
    for line in read(path):
        by_step.setdefault(line["step"], {})[line["prompt"]] = line["reward"]
    if len(by_step) < 2:
        return {}
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    differences = np.array([last[prompt] - first[prompt] for prompt in sorted(first.keys() & last.keys())])
    if len(differences) < 2:
        return {}
    half = float(stats.t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / math.sqrt(len(differences)))
    mean = float(differences.mean())
    return {"reward_gain": mean, "reward_gain_low": mean - half, "reward_gain_high": mean + half}
