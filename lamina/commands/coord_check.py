"""`lamina coord-check`: whether any module's output grows with the width."""

from __future__ import annotations

from pathlib import Path

from lamina.api import coord_check
from lamina.commands.arguments import Parser
from lamina.studies.width_settings import CoordCheckSettings

EXAMPLES = """
  lamina coord-check
  lamina coord-check --placement keel --width-scaling none --output runs/keel-plain
  lamina coord-check --backbone llama-71m --num-layers 12 --widths 128,256,512,1024 --width-scaling mup
"""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(
        "coord-check",
        "Train several widths for a few steps on one batch and see whether any module's output grows with the width.\n"
        "Prints the exponent e of mean |x| ~ width^e: 0 is right; above 0, a wide model will blow up.",
        EXAMPLES,
    )
    flags.add_settings(CoordCheckSettings)
    flags.add_output_modes("skip the widths and seeds that the folder already holds")
    return flags


def run(argv: list[str]) -> int:
    """Parse, measure, write the page, print the exponents and the verdict."""
    typed, others = parser().settings_from(argv)
    slopes = coord_check(**typed, resume=others.resume, overwrite=others.overwrite).results
    folder = Path(typed.get("output", CoordCheckSettings.output))
    from lamina.reports import terminal

    print(terminal.coord_check(folder, slopes))
    return 0
