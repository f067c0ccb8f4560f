"""`lamina preflight`: whether a planned run will train."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lamina.api import preflight
from lamina.commands.arguments import Parser, add_settings, given_settings, make_parser
from lamina.core.json_types import Json
from lamina.preflights.settings import PreflightSettings

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = """
  lamina preflight --placement keel --num-layers 48 --learning-rate 5e-3
  lamina preflight --placements post_ln,peri_ln,keel --num-layers 32 --hidden-size 48 --num-heads 2
  lamina preflight --placement fusenorm --init normal --learning-rates 3e-3,2e-2 --warmup 0.3 --output runs/preflight
  lamina preflight --backbone llama-71m --placement my_placement.yaml --corpus books/ --tokenizer bpe:8192 --json
"""
ABOUT_ONE = 2.0
DESCRIPTION = """\
Before a run: take its first steps at full depth, measure the layers, and say whether it will train, why, and what to
change. "fine" and "risky" runs learned in these steps; an "undecided" one did not yet, and its line "change" says
how many steps should decide; a "will not train" one is not expected to learn. The exit code is 0 whatever the
verdict; with --strict it is 1 if any verdict is "will not train"."""


def parser() -> Parser:
    """The command's flags."""
    flags = make_parser("preflight", DESCRIPTION, EXAMPLES)
    add_settings(flags, PreflightSettings)
    flags.add_argument("--json", action="store_true", help="print the table as JSON, with every measured number")
    flags.add_argument("--strict", action="store_true", help='exit with 1 if a verdict is "will not train"')
    flags.add_argument("--overwrite", action="store_true", help="first delete what the output folder holds")
    return flags


def run(argv: list[str]) -> int:
    """Parse, measure, print."""
    typed, others = given_settings(parser(), argv, "json", "strict", "overwrite")
    try:
        rows = preflight(**typed, overwrite=others.overwrite)
    except KeyboardInterrupt:
        print("lamina: interrupted; an unfinished preflight keeps nothing", file=sys.stderr)
        return 130
    print(as_json(rows) if others.json else summary(rows))
    if typed.get("output") and not others.json:
        print(f"\nthe page:    {Path(typed['output']) / 'report.html'}")
    return int(others.strict and bool((rows["verdict"] == "will not train").any()))


def as_json(rows: pd.DataFrame) -> str:
    """The table as a list of objects; NaN and infinities are null."""
    from lamina.jobs.files import finite

    return json.dumps(finite(rows.to_dict("records")), indent=2, ensure_ascii=False)


def summary(rows: pd.DataFrame) -> str:
    """A table with one line per run, then each run's reason and what to change."""
    records = cast("list[Json]", rows.to_dict("records"))
    width = max(9, *(len(row["placement"]) for row in records))
    lines = [
        f"{'placement':<{width}} {'rate':>8}  {'verdict':<14} {'gain x0→xN':>11} {'context':>8} {'FP16 headroom':>22}"
    ]
    for row in records:
        headroom = f"{row['fp16_headroom']:.3g} × ({row['fp16_headroom_bits']:.1f} bits)"
        lines.append(
            f"{row['placement']:<{width}} {row['learning_rate']:>8g}  {row['verdict']:<14} "
            f"{10 ** row['jacobian']:>11.2g} {round(row['context'], 3) + 0.0:>8.3f} {headroom:>22}"
        )
    for row in records:
        lines.append(f"\n{row['placement']} at {row['learning_rate']:g}: {row['verdict']}")
        parts = {"reason": row["reason"], "change": row["change"], "layers": _layers(row), "papers": row["advice"]}
        for label, text in {**parts, "note": row["note"]}.items():
            if text:
                lines.append(textwrap.fill(f"  {label}: {text}", 110, subsequent_indent="    "))
    return "\n".join(lines)


def _layers(row: Json) -> str:
    share = row["ffn_variance_share"]
    theorem = "as O(1/L) per layer keeps it" if share <= ABOUT_ONE else "O(1/L) per layer would keep it near 1"
    return (
        f"Var(x^N) is {10 ** row['growth']:.2g} × Var(x^0); the weights' gradients lie within a factor of "
        f"{10 ** -row['weight_gradient']:.2g}, the smallest in block {row['weight_gradient_layer']}; before the first "
        f"step the feed-forwards add {share:.2g} × their skips' variance in sum ({theorem})"
    )
