"""`lamina diagnose RUN`: says what left its range first in a run, and what to change."""

from __future__ import annotations

import textwrap

from lamina.api.models import diagnose
from lamina.commands.arguments import Parser
from lamina.core.terminal import show

EXAMPLES = """
  lamina diagnose runs/mine
  lamina diagnose runs/keel-64
  lamina diagnose gradients.csv
"""


def parser() -> Parser:
    flags = Parser(
        "diagnose",
        "Say what left its usual range first in a run, in which layer and at which step, how early it could be seen,\n"
        "and what the papers and Lamina's studies say to change. RUN is a run of Lamina, of lamina.LayerMonitor or of\n"
        "lamina.watch; or gradient norms by parameter that another tool recorded: TensorBoard's event files, W&B's\n"
        "offline run, or a history as .csv, .json or .jsonl.",
        EXAMPLES,
        "RUN ",
    )
    flags.add_argument("run", help="the run's folder, or another tool's history")
    return flags


def run(argv: list[str]) -> int:
    options = parser().parse(argv)
    diagnosis = diagnose(options.run)
    for text in diagnosis.sentences:
        show("\n".join(textwrap.wrap(text, 110, subsequent_indent="  ")))
    if diagnosis.page is not None:
        show(f"\nthe page: {diagnosis.page}")
    return 0
