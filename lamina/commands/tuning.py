"""What the commands after pretraining share: parse, run, print how it ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.commands.arguments import Parser
from lamina.core.json_types import Json

if TYPE_CHECKING:
    from lamina.posttraining.settings import TuningSettings


def tuning_parser(description: str, examples: str, settings: type[TuningSettings]) -> Parser:
    """The flags of a command whose settings are ``settings``."""
    flags = Parser(settings.command_name, description, examples)
    flags.add_settings(settings)
    flags.add_output_modes("resume from the last checkpoint in the output folder")
    return flags


def run_command(argv: list[str], flags: Parser, settings: type[TuningSettings], act: Callable[..., Json]) -> int:
    """Run a command whose settings are ``settings``; returns the exit code."""
    typed, others = flags.settings_from(argv)
    result = act(**typed, resume=others.resume, overwrite=others.overwrite)
    from lamina.training.execution.processes import launched

    if launched()[0] == 0:  # of several processes the first one prints
        from lamina.reports import terminal

        print(terminal.run(Path(typed.get("output", settings.default("output"))), result, settings.command_name))
    return 130 if result["status"] == "interrupted" else 0
