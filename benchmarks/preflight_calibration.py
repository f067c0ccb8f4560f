"""The real runs that `lamina preflight`'s verdict is calibrated on, and the other ones that it is judged on.

    python benchmarks/preflight_calibration.py runs      # train them all, about two hours of one core; goes on where it was

`runs` trains each case with lamina's own pretraining and appends a line to runs.jsonl; a case that is there is skipped.
The sets: `grid` (all placements x {12, 24, 48} layers x {normal, scaled} x two rates) and `more` (drawn at random, wider
in rates, initialisers and shapes) are fitted on; `held_out` and `default` (another draw, another seed, other depths, and
the recipe of `lamina compare`) are only judged on.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results" / "preflight"
SETS = ("grid", "more", "default", "held_out")
GRID_LAYERS, GRID_INITS, GRID_RATES = (12, 24, 48), ("normal", "scaled"), (3e-3, 1.5e-2)
SHAPE = {"hidden_size": 32, "num_heads": 2, "sequence_length": 32, "batch_size": 16, "steps": 80, "warmup": 0.1}
DEFAULT = {"hidden_size": 48, "num_heads": 2, "sequence_length": 64, "batch_size": 16, "steps": 100, "warmup": 0.1}
RATES = (3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 3e-2, 6e-2, 0.2)


def cases(which: str) -> Iterator[dict[str, Any]]:
    """The settings of a set's runs, in an order that is useful when it is cut short."""
    from lamina.placements import names

    if which == "grid":
        grid = [
            {**SHAPE, "placement": p, "num_layers": n, "init": i, "learning_rate": r, "seed": 0}
            for n in GRID_LAYERS
            for i in GRID_INITS
            for r in GRID_RATES
            for p in names()
        ]
        random.Random(1).shuffle(grid)
        yield from grid
    elif which == "default":
        for layers, rate in ((32, 5e-3), (20, 1.2e-2)):
            for p in names():
                yield {
                    **DEFAULT,
                    "placement": p,
                    "num_layers": layers,
                    "init": "recommended",
                    "learning_rate": rate,
                    "seed": 0,
                }
    else:
        yield from _drawn(which)


def _drawn(which: str) -> Iterator[dict[str, Any]]:
    from lamina.placements import names

    draw = random.Random(f"preflight {which}")
    depths = (8, 16, 24, 32, 48) if which == "more" else (10, 18, 30, 36, 40, 64)
    for number in range(200):
        placements = names()
        yield {
            "placement": placements[number % len(placements)] if which == "held_out" else draw.choice(placements),
            "num_layers": draw.choice(depths),
            "init": draw.choice(("recommended", "recommended", "normal", "scaled", "xavier", "small")),
            "learning_rate": draw.choice(RATES) if which == "more" else float(f"{10 ** draw.uniform(-3.3, -0.9):.2g}"),
            "seed": 1 if which == "more" else 2,
            "hidden_size": draw.choice((32, 32, 48)),
            "num_heads": 2,
            "sequence_length": draw.choice((32, 32, 64)),
            "batch_size": draw.choice((8, 16)),
            "steps": draw.choice((60, 80, 120)),
            "warmup": draw.choice((0.02, 0.1, 0.1, 0.3)),
        }


def key_of(case: dict[str, Any]) -> str:
    """A case's identity: its settings, sorted."""
    return json.dumps(case, sort_keys=True)


def read(name: str) -> list[dict[str, Any]]:
    """The lines of a results file; none where it isn't there yet."""
    path = FOLDER / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def append(name: str, record: dict[str, Any]) -> None:
    """Write a line through at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(record) + "\n")


def train(case: dict[str, Any]) -> dict[str, Any]:
    """A real run: its status, losses and the records that a label is made of."""
    from lamina.training.folder import finite
    from lamina.training.pretrain import pretrain
    from lamina.training.settings import PretrainSettings

    folder = Path(tempfile.mkdtemp(prefix="preflight-"))
    try:
        settings = PretrainSettings(
            **case, eval_blocks=64, eval_steps=40, logging_steps=4, threads=1, output=str(folder / "run")
        )
        result = pretrain(settings, bar=False)
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kept = ("status", "reason", "eval_loss", "unigram_entropy", "steps", "seconds")
    logged = [r for r in records if r.get("loss") is not None]
    return finite(
        {name: result.get(name) for name in kept}
        | {
            "losses": [[r["step"], round(r["loss"], 4)] for r in logged],
            "gradient_norms": [round(r["grad_norm"], 4) for r in logged if r["grad_norm"] is not None],
            "eval_losses": [[r["step"], round(r["eval_loss"], 4)] for r in records if r.get("eval_loss") is not None],
        }
    )


def run_all(which: list[str], limit: int | None) -> None:
    """Train what is not there yet."""
    done = {key_of(r["case"]) for r in read("runs.jsonl")}
    for name in which:
        for number, case in enumerate(cases(name)):
            if key_of(case) in done or (limit is not None and number >= limit):
                continue
            result = train(case)
            append("runs.jsonl", {"set": name, "case": case, "result": result})
            shown = f"{case['placement']} {case['num_layers']} {case['init']} {case['learning_rate']:g}"
            print(name, number, shown, result["status"], result["eval_loss"], result["seconds"], flush=True)


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("runs",))
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--limit", type=int, help="cases of each set at most")
    arguments = parser.parse_args()
    run_all(arguments.sets.split(","), arguments.limit)


if __name__ == "__main__":
    main()
