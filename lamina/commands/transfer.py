"""`lamina transfer`: learning rates from a narrow proxy for a wide target."""

from __future__ import annotations

import json
from pathlib import Path

from lamina.api import transfer
from lamina.commands.arguments import Parser, add_output_modes, add_settings, given_settings, make_parser
from lamina.commands.compare import failed
from lamina.core.json_types import Json
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
    flags = make_parser(
        "transfer",
        "Try learning rates on a narrow proxy. Prints those that are stable and best there, and each role's rates at\n"
        "the target's width. A rate that fails on the proxy fails on the target (FuseNorm Figure 4).",
        EXAMPLES,
    )
    add_settings(flags, TransferSettings)
    add_output_modes(flags, "continue the study in the output folder")
    return flags


def run(argv: list[str]) -> int:
    """Parse, train the proxy, write the page, print the interval, the target's rates and the risk."""
    typed, others = given_settings(parser(), argv, "resume", "overwrite")
    folder = Path(typed.get("output", TransferSettings.output))
    failure = None
    try:
        transfer(**typed, resume=others.resume, overwrite=others.overwrite)
    except TrialsFailed as error:
        failure = error
    print(printed(json.loads((folder / "transfer.json").read_text(encoding="utf-8"))))
    print(f"\nthe page:    {folder / 'report.html'}\nthe numbers: {folder / 'results.csv'}, {folder / 'transfer.json'}")
    return 0 if failure is None else failed(failure)


def printed(summary: Json) -> str:
    """The content of transfer.json as lines for the terminal."""
    from lamina.reports.pages.transfer import sentences

    lines = [f"{'learning rate':>13} {'on the proxy':<13} {'eval loss':>9}  at another width"]
    for rate in summary["rates"]:
        loss = "-" if rate["eval_loss"] is None else f"{rate['eval_loss']:.4f}"
        mark = "*" if rate["best"] else " "
        lines.append(f"{rate['learning_rate']:>13g} {rate['status']:<13} {loss:>9}{mark} {rate['risk']}")
    lines.append("")
    lines += sentences(summary)
    if summary["learning_rate"] is not None:
        width = summary["target_width"]
        heading = f"at width {width}"
        lines += ["", f"{heading:<26} {'learning rate':>13} {'weight decay':>13} {'factor':>8}"]
        for kind, row in summary["roles"].items():
            lines.append(f"{kind:<26} {row['learning_rate']:>13.4g} {row['weight_decay']:>13.4g} {row['factor']:>8.4g}")
    return "\n".join(lines)
