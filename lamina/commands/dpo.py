"""`lamina dpo`: train a policy on preferences directly."""

from __future__ import annotations

from lamina.api import dpo
from lamina.commands.arguments import Parser
from lamina.commands.tuning import run_command, tuning_parser
from lamina.posttraining.settings import DpoSettings

EXAMPLES = """
  lamina dpo --from runs/keel-64-sft --data preferences.jsonl --output runs/keel-64-dpo
  lamina dpo --from runs/keel-64-sft --data preferences.jsonl --beta 0.3 --learning-rate 5e-7 --lora-rank 16
  lamina dpo --output runs/keel-64-dpo --resume
"""


def parser() -> Parser:
    """The command's flags."""
    about = "Train a policy on preferences (prompt, chosen, rejected) directly, without a reward model."
    return tuning_parser(about, EXAMPLES, DpoSettings)


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    return run_command(argv, parser(), DpoSettings, dpo)
