"""`lamina dpo`: train a policy on preferences directly."""

from __future__ import annotations

from lamina.api import dpo
from lamina.commands.tuning import run_command

EXAMPLES = """
  lamina dpo --from runs/keel-64-sft --data preferences.jsonl --output runs/keel-64-dpo
  lamina dpo --from runs/keel-64-sft --data preferences.jsonl --beta 0.3 --learning-rate 5e-7 --lora-rank 16
  lamina dpo --output runs/keel-64-dpo --resume
"""


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    from lamina.posttraining.settings import DpoSettings

    about = "Train a policy on preferences (prompt, chosen, rejected) directly, without a reward model."
    return run_command(argv, about, EXAMPLES, DpoSettings, dpo)
