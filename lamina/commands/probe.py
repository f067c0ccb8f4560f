"""`lamina probe CHECKPOINT`: what each layer of a model does."""

from __future__ import annotations

import textwrap
from pathlib import Path

from lamina.commands.arguments import Parser
from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.probes.engine.probe_settings import ProbeSettings

EXAMPLES = """
  lamina probe runs/keel-64
  lamina probe models/smollm2 --probes hidden_states,angular_distance,layer_drop --output runs/smollm2
  lamina probe models/bert --corpus my_texts/ --sequences 256 --sequence-length 128
  lamina probe models/smollm2 --probes "angular_distance(tokens=all)" --output runs/smollm2 --resume
  lamina probe --list
"""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(
        "probe",
        "Measure what each layer of a checkpoint does: one table and one figure per probe, and OUTPUT/report.html.\n\n"
        f"probes:\n{listing()}",
        EXAMPLES,
        "CHECKPOINT ",
    )
    flags.add_settings(ProbeSettings, positional=("checkpoint",))
    flags.add_argument("--list", action="store_true", help="list the probes with their options and sources, and exit")
    flags.add_argument("--png", action="store_true", help="also draw each figure as a PNG (needs Chromium or Chrome)")
    flags.add_output_modes("measure only the probes that are not finished")
    return flags


def run(argv: list[str]) -> int:
    """Parse, measure, write the page, print each probe's sentences."""
    typed, others = parser().settings_from(argv)
    if others.list:
        print(listing(full=True))
        return 0
    if not typed.get("checkpoint"):
        typed.pop("checkpoint", None)
    folder = Path(typed.get("output", ProbeSettings.output))
    from lamina.api import probe_folder
    from lamina.reports import terminal

    result = probe_folder(**typed, png=others.png, resume=others.resume, overwrite=others.overwrite)
    print(terminal.probing(folder, result))
    return _refused(result) or int(result["status"] == "failed")


def listing(*, full: bool = False) -> str:
    """The probes, one sentence each; with ``full``, also their options and sources. Does not load torch."""
    from lamina.probes.engine.registry import listed

    lines = []
    for probe in listed().values():
        if not full:
            lines += textwrap.wrap(probe.summary, 94, initial_indent=f"  {probe.name:<18} ", subsequent_indent=" " * 21)
            continue
        options = ", ".join(f"{name}={default}" if default else name for name, default in probe.options.items())
        lines += [f"{probe.name}({options})" if options else probe.name]
        lines += textwrap.wrap(probe.summary, 100, initial_indent="    ", subsequent_indent="    ")
        lines += textwrap.wrap(f"source: {probe.source}", 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _refused(result: Json) -> int:
    """Return 0. Raises UserError for a named probe that could not measure this model; the rest is written."""
    if "all" in str(result["settings"]["probes"]).split(","):
        return 0
    for name, record in result["probes"].items():
        if record["status"] == "skipped":
            raise UserError(f"{record['reason']}" if name in record["reason"] else f"{name}: {record['reason']}")
    return 0
