"""`lamina preflight`: whether a planned run will train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api import preflight
from lamina.commands.arguments import Parser
from lamina.preflights.settings import PreflightSettings

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = """
  lamina preflight --placement keel --num-layers 48 --learning-rate 5e-3
  lamina preflight --placements post_ln,peri_ln,keel --num-layers 32 --hidden-size 48 --num-heads 2
  lamina preflight --placement fusenorm --init normal --learning-rates 3e-3,2e-2 --warmup 0.3 --output runs/preflight
  lamina preflight --backbone llama-71m --placement my_placement.yaml --corpus books/ --tokenizer bpe:8192 --json
"""
DESCRIPTION = """\
Before a run: take its first steps at full depth, measure the layers, and say whether it will train, why, and what to
change. "fine" and "risky" runs learned in these steps; an "undecided" one did not yet, and its line "change" says
how many steps should decide; a "will not train" one is not expected to learn. The exit code is 0 whatever the
verdict; with --strict it is 1 if any verdict is "will not train"."""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser("preflight", DESCRIPTION, EXAMPLES)
    flags.add_settings(PreflightSettings)
    flags.add_argument("--json", action="store_true", help="print the table as JSON, with every measured number")
    flags.add_argument("--strict", action="store_true", help='exit with 1 if a verdict is "will not train"')
    flags.add_argument("--overwrite", action="store_true", help="first delete what the output folder holds")
    return flags


def run(argv: list[str]) -> int:
    """Parse, measure, print."""
    typed, others = parser().settings_from(argv)
    try:
        rows = preflight(**typed, overwrite=others.overwrite)
    except KeyboardInterrupt:
        print("lamina: interrupted; an unfinished preflight keeps nothing", file=sys.stderr)
        return 130
    from lamina.reports import terminal

    folder = Path(typed["output"]) if typed.get("output") else None
    print(as_json(rows) if others.json else terminal.preflight(folder, rows))
    return int(others.strict and bool((rows["verdict"] == "will not train").any()))


def as_json(rows: pd.DataFrame) -> str:
    """The table as a list of objects; NaN and infinities are null."""
    from lamina.jobs.files import finite

    return json.dumps(finite(rows.to_dict("records")), indent=2, ensure_ascii=False)
