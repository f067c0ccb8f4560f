"""`lamina diagnose RUN`: find the likely cause of a run's failure, its step and layer, and what to change."""

from __future__ import annotations

import textwrap

from lamina.api.models import diagnose
from lamina.commands.arguments import Parser
from lamina.core.terminal import show
from lamina.errors import renamed_setting

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
        "Find out why a run went wrong: the likely cause, its step and layer, and what to change. Lamina writes a\n"
        "page with charts beside the record.\n\n"
        "RUN is a folder that Lamina, lamina.watch or lamina.LayerMonitor wrote. RUN can also be another tool's\n"
        "record: a trainer's log, trainer_state.json or its folder, a CSV or JSON history, or files of TensorBoard,\n"
        "W&B or trackio. The record needs only the loss. If you add AGAINST, Lamina compares two runs and names the\n"
        "first step and layer that differ. Compare two runs when you port a model, change a kernel or the precision,\n"
        "or resume a run.",
        EXAMPLES,
        "RUN [AGAINST] ",
    )
    flags.add_word("run", "folder of the run, or another tool's record: a file, a folder, or - for a pipe")
    flags.add_word("against", "second run, which Lamina compares with the first", needed=False)
    flags.add_flag("--run", "name of the run, if the record holds several runs", "", "NAME", name="which")
    return flags


@renamed_setting("run")
@renamed_setting("against")
def run(argv: list[str]) -> int:
    options = parser().parse(argv)
    diagnosis = diagnose(options.run, against=options.against, which=options.which)
    for text in diagnosis.sentences:
        show("\n".join(textwrap.wrap(text, 110, subsequent_indent="  ")))
    if diagnosis.page is not None:
        show(f"\nthe page: {diagnosis.page}")
    return 0
