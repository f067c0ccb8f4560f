"""`lamina transfer`: learning rates from a narrow proxy for a wide target."""

from __future__ import annotations

from pathlib import Path

from lamina.api import transfer
from lamina.commands.arguments import Parser
from lamina.commands.compare import failed
from lamina.errors import TrialsFailed
from lamina.studies.width_settings import TransferSettings

EXAMPLES = """
  lamina transfer
  lamina transfer --placement fusenorm --backbone llama-5b --untie-embeddings --proxy-width 640 --output runs/ws
  lamina transfer --learning-rates 1e-3,4e-3,1.6e-2,6.4e-2 --verify-rates 4e-3,6.4e-2 --verify-width 256
  lamina transfer --output runs/ws --resume
"""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(
        "transfer",
        "Try learning rates on a narrow proxy. Prints those that are stable and best there, and each role's rates at\n"
        "the target's width. A rate that fails on the proxy fails on the target (FuseNorm Figure 4).",
        EXAMPLES,
    )
    flags.add_settings(TransferSettings)
    flags.add_output_modes("continue the study in the output folder")
    return flags


def run(argv: list[str]) -> int:
    """Parse, train the proxy, write the page, print the interval, the target's rates and the risk."""
    typed, others = parser().settings_from(argv)
    folder = Path(typed.get("output", TransferSettings.output))
    failure = None
    try:
        transfer(**typed, resume=others.resume, overwrite=others.overwrite)
    except TrialsFailed as error:
        failure = error
    from lamina.reports import terminal

    print(terminal.transfer(folder))
    return 0 if failure is None else failed(failure)
