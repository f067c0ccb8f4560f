"""`lamina rlhf`: train a policy by reinforcement learning."""

from __future__ import annotations

from lamina.api import rlhf
from lamina.commands.tuning import run_command

EXAMPLES = """
  lamina rlhf --from runs/keel-64-sft --reward-model runs/keel-64-reward --data prompts.jsonl --output runs/keel-64-rlhf
  lamina rlhf --from runs/keel-64-sft --reward-function sums.py:is_right --data sums.jsonl --algorithm grpo \\
      --num-generations 8
  lamina rlhf --output runs/keel-64-rlhf --resume
"""


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    from lamina.posttraining.settings import RlhfSettings

    about = "Train a policy by reinforcement learning, with a reward model or a function: ReMax, RLOO or GRPO."
    return run_command(argv, about, EXAMPLES, RlhfSettings, rlhf)
