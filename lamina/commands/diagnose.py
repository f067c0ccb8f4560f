"""`lamina diagnose RUN`: what left first in a run, and what to change."""

from __future__ import annotations

import textwrap
from pathlib import Path

from lamina.commands.arguments import Parser
from lamina.core.terminal import show
from lamina.core.values import path

EXAMPLES = """
  lamina diagnose runs/mine
  lamina diagnose runs/keel-64
"""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(
        "diagnose",
        "Say what left its usual range first in a run, in which layer and at which step, how early it could be seen, "
        "and what the papers and Lamina's studies say to change. RUN is a run of Lamina, of lamina.LayerMonitor or of "
        "lamina.watch.",
        EXAMPLES,
        "RUN ",
    )
    flags.add_argument("run", help="the run's folder")
    return flags


def run(argv: list[str]) -> int:
    """Print the sentences and write the page."""
    options = parser().parse(argv)
    path("run", options.run)
    from lamina.reports.diagnosis import diagnose

    texts, page = diagnose(Path(options.run))
    for text in texts:
        show("\n".join(textwrap.wrap(text, 110, subsequent_indent="  ")))
    show(f"\nthe page: {page}")
    return 0
