"""`lamina diagnose RUN`: says what left its range first in a run, and what to change."""

from __future__ import annotations

import textwrap

from lamina.api.models import diagnose
from lamina.commands.arguments import Parser
from lamina.core.terminal import show

EXAMPLES = """
  lamina diagnose runs/mine
  lamina diagnose runs/keel-64
  lamina diagnose out/checkpoint-200
  lamina diagnose train.log
  lamina diagnose runs/port runs/original
  kubectl logs trainer | lamina diagnose -
"""


def parser() -> Parser:
    flags = Parser(
        "diagnose",
        "Say what left its usual range first in a run, in which layer and at which step, how early it could be seen,\n"
        "and what the papers and Lamina's studies say to change. RUN is a run of Lamina, of lamina.LayerMonitor or of\n"
        "lamina.watch; or what another tool recorded: the log that a trainer printed, trainer_state.json or the\n"
        "folder that holds it, a history as CSV or JSON, files of TensorBoard, W&B or trackio. A loss is enough.\n"
        "With AGAINST, say at which step and layer both part: for ports, kernels, precisions and resumed runs.",
        EXAMPLES,
        "RUN [AGAINST] ",
    )
    flags.add_argument("run", help="the run's folder; or another tool's history: a file, a folder, or - for a pipe")
    flags.add_argument("against", nargs="?", default=None, help="another run, to compare with")
    flags.add_argument(
        "--run", dest="which", default="", metavar="NAME", help="the run's name, where a history holds several"
    )
    return flags


def run(argv: list[str]) -> int:
    options = parser().parse(argv)
    diagnosis = diagnose(options.run, against=options.against, which=options.which)
    for text in diagnosis.sentences:
        show("\n".join(textwrap.wrap(text, 110, subsequent_indent="  ")))
    if diagnosis.page is not None:
        show(f"\nthe page: {diagnosis.page}")
    return 0
