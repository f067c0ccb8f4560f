"""Compare placements at several learning rates, then pretrain the best placement for longer.

    python examples/choose_and_pretrain.py [--corpus my_texts/] [--folder runs/chosen] [--scale 1]

At --scale 1, the comparison and the pretraining take about ten minutes each on two cores. You can stop the script and
run it again: finished models are kept. --scale 0.02 only tries the script, and cannot rank placements.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from lamina import api

PLACEMENTS = ["pre_ln", "peri_ln", "fusenorm"]
RATES = [2.5e-3, 5e-3, 1e-2]
SIZE = {"num_layers": 16, "hidden_size": 48, "num_heads": 2, "sequence_length": 64}


def best(results: pd.DataFrame) -> tuple[str, float]:
    """Return the placement and learning rate with the lowest mean loss. Every seed must have trained."""
    trained = results["status"].isin(("finished", "short"))
    arms = results.assign(trained=trained).groupby(["placement", "learning_rate"])
    means = arms.agg(loss=("eval_loss", "mean"), all=("trained", "all"))
    if not means["all"].any():
        raise SystemExit("no placement trained with every seed at any learning rate. Raise --scale, or lower RATES")
    placement, rate = means[means["all"]]["loss"].idxmin()
    return str(placement), float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", default="embedded")
    parser.add_argument("--folder", type=Path, default=Path("runs/chosen"))
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number of steps")
    options = parser.parse_args()
    study = options.folder / "study"
    api.compare(
        placements=PLACEMENTS, learning_rates=RATES, seeds=[0, 1], corpus=options.corpus, resume="auto",
        steps=max(4, round(200 * options.scale)), output=str(study), **SIZE,
    )  # fmt: skip
    placement, rate = best(pd.read_csv(study / "results.csv"))
    print(f"{placement} at {rate:g} has the lowest loss")
    result = api.pretrain(
        placement=placement, learning_rate=rate, corpus=options.corpus, resume="auto", save_steps=100,
        steps=max(4, round(2000 * options.scale)), output=str(options.folder / "run"), **SIZE,
    )  # fmt: skip
    print(f"{result['status']}: eval loss {result['eval_loss']:.3f}; the model is {options.folder / 'run' / 'model'}")


if __name__ == "__main__":
    main()
