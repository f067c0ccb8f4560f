"""Measure the placement of every decoder of the installed transformers, on tiny models with random weights.

The script writes benchmarks/results/census.json. From this file, docs/tables.py makes the table of docs/inspect.md.

    python -m tools.calibration.census --output benchmarks/results/census.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import lamina
from benchmarks.common import ROOT, settings_of_machine, write_record
from lamina.errors import one_line, shortened
from tools.reliability import tiny_families
from tools.reliability.tiny_families import MORE, SIZES, families, tiny_model

tiny_families.MOST_PARAMETERS = 40_000_000
# Factors with a default of 1. Other values show where a model applies these factors.
FACTORS = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0}
FACTORS |= {f"{kind}_alpha_factor": 3.5 for kind in ("full_attn", "linear_attn", "mlp")}
# Some families need other sizes than usual. The script tries these in turn.
TRIES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "head_dim": None},
    {"num_key_value_heads": 4, "head_dim": 4},
    {"hidden_size": 512, "head_dim": 128, "num_key_value_heads": 4},
    {"num_hidden_layers": 4},
)


def decoders() -> list[str]:
    """Return the model types that continue a text, and the text parts of larger models."""
    causal = transformers.AutoModelForCausalLM._model_mapping
    names = [name for name in families() if transformers.CONFIG_MAPPING[name] in causal or name.endswith("_text")]
    return sorted(names)


def measured(family: str) -> dict[str, Any]:
    """Return one model type's row: the placement and how it differs, or why the placement is unknown."""
    more, why = MORE.get(family, {}), ""
    for sizes in TRIES:
        MORE[family] = {**more, **sizes}
        try:
            torch.manual_seed(0)
            model = tiny_model(family)
        except Exception as error:
            why = why or f"can't be built small: {shortened(one_line(error), 120)}"
            continue
        found = lamina.placement_of(model)
        if found.match is not None or "streams" in found.unknown:
            row = found.to_dict()
            return {"family": family, **{key: row[key] for key in ("placement", "match", "unknown", "ends", "error")}}
        why = shortened(found.unknown, 200)
    return {"family": family, "placement": None, "match": None, "unknown": why, "ends": {}, "error": None}


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    for number, family in enumerate(names):
        row = measured(family)
        print(f"{number + 1}/{len(names)} {family}: {row['placement'] or row['unknown'] or row['match']}", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/census.json")
    parser.add_argument("families", nargs="*")
    options = parser.parse_args()
    SIZES.update(FACTORS)
    found = list(rows(options.families or decoders()))
    write_record(options.output, {**settings_of_machine(), "families": found})


if __name__ == "__main__":
    main()
