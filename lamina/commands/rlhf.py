"""`lamina rlhf`: train a policy by reinforcement learning."""

from __future__ import annotations

from lamina.api import rlhf
from lamina.commands.arguments import Parser
from lamina.commands.tuning import run_command, tuning_parser
from lamina.posttraining.settings import RlhfSettings

EXAMPLES = """
  lamina rlhf --from runs/keel-64-sft --reward-model runs/keel-64-reward --data prompts.jsonl --output runs/keel-64-rlhf
  lamina rlhf --from runs/keel-64-sft --reward-function sums.py:is_right --data sums.jsonl --algorithm grpo \\
      --num-generations 8
  lamina rlhf --output runs/keel-64-rlhf --resume
"""


def parser() -> Parser:
    """The command's flags."""
    about = "Train a policy by reinforcement learning, with a reward model or a function: ReMax, RLOO or GRPO."
    return tuning_parser(about, EXAMPLES, RlhfSettings)


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    return run_command(argv, parser(), RlhfSettings, rlhf)
