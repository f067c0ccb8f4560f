"""`lamina compare`: the main job."""

from __future__ import annotations

import sys
from pathlib import Path

from lamina.api import compare
from lamina.commands.arguments import Parser
from lamina.errors import TrialsFailed
from lamina.studies.settings import CompareSettings

EXAMPLES = """
  lamina compare
  lamina compare --placements pre_ln,peri_ln,keel --num-layers 48 --hidden-size 64 --steps 200
  lamina compare --corpus books/ --tokenizer bpe:4096 --learning-rates 1e-3,3e-3,1e-2 --seeds 0,1,2 --output runs/books
  lamina compare --learning-rates 3e-3,1e-2 --learning-rates-of "keel=1e-2,3e-2; post_ln=1e-4,1e-3"
  lamina compare --placements "mix_ln(alpha=0.5),my_placement.yaml" --init same:normal
  lamina compare --output runs/books --resume
"""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(
        "compare",
        "Train placements side by side on your text; OUTPUT/report.html shows which is best, which failed, and why.",
        EXAMPLES,
    )
    flags.add_settings(CompareSettings)
    flags.add_output_modes("continue the study in the output folder")
    return flags


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print the ranking and the page's path."""
    typed, others = parser().settings_from(argv)
    folder = Path(typed.get("output", CompareSettings.output))
    try:
        results, failure = compare(**typed, resume=others.resume, overwrite=others.overwrite).results, None
    except TrialsFailed as error:
        results, failure = error.results, error
    from lamina.reports import terminal

    print(terminal.compare(folder, results))
    return 0 if failure is None else failed(failure)


def failed(failure: TrialsFailed) -> int:
    """Print that every trial failed; returns the exit code, which stops a script."""
    print(f"lamina: {' '.join(str(failure).split())}", file=sys.stderr)
    return 1
