"""What the commands after pretraining share: parse, run, print how it ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.commands.arguments import Parser, add_output_modes, add_settings, given_settings, make_parser
from lamina.core.json_types import Json

if TYPE_CHECKING:
    from lamina.posttraining.settings import TuningSettings

SHOWN = {
    "eval_loss": "held-out loss {:.4f}",
    "eval_accuracy": "accuracy {:.3f}",
    "eval_reward": "held-out reward {:.4f}",
    "eval_kl": "KL {:.3f} nats",
}


def tuning_parser(description: str, examples: str, settings: type[TuningSettings]) -> Parser:
    """The flags of a command whose settings are ``settings``."""
    flags = make_parser(settings.command_name, description, examples)
    add_settings(flags, settings)
    add_output_modes(flags, "resume from the last checkpoint in the output folder")
    return flags


def run_command(argv: list[str], flags: Parser, settings: type[TuningSettings], act: Callable[..., Json]) -> int:
    """Run a command whose settings are ``settings``; returns the exit code."""
    name = settings.command_name
    typed, others = given_settings(flags, argv, "resume", "overwrite")
    result = act(**typed, resume=others.resume, overwrite=others.overwrite)
    from lamina.training.execution.processes import launched

    interrupted = result["status"] == "interrupted"
    if launched()[0] > 0:  # of several processes the first one prints
        return 130 if interrupted else 0
    folder = Path(typed.get("output", settings.default("output")))
    numbers = ", ".join(text.format(result[key]) for key, text in SHOWN.items() if _known(result.get(key)))
    reason = f" ({result['reason']})" if result.get("reason") else ""
    print(f"{result['status']}{': ' * bool(numbers)}{numbers}{reason}")
    if interrupted:
        print(f"to resume: lamina {name} --output {folder} --resume")
        return 130
    print(f"the page:  {folder / 'report.html'}")
    if (folder / "model").is_dir():
        print(f"the model: {folder / 'model'}")
    return 0


def _known(number: object) -> bool:
    return isinstance(number, int | float) and number == number
