"""`lamina reward`: train a reward model."""

from __future__ import annotations

from lamina.api import reward
from lamina.commands.arguments import Parser
from lamina.commands.tuning import run_command, tuning_parser
from lamina.posttraining.settings import RewardSettings

EXAMPLES = """
  lamina reward --from runs/keel-64-sft --data preferences.jsonl --output runs/keel-64-reward
  lamina reward --from runs/keel-64-sft --data hf:trl-lib/ultrafeedback_binarized --batch-size 16 --epochs 1
  lamina reward --output runs/keel-64-reward --resume
"""


def parser() -> Parser:
    """The command's flags."""
    about = "Train a reward model on preferences (prompt, chosen, rejected), from a fine-tuned model."
    return tuning_parser(about, EXAMPLES, RewardSettings)


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    return run_command(argv, parser(), RewardSettings, reward)
