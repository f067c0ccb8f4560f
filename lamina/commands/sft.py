"""`lamina sft`: fine-tune a model."""

from __future__ import annotations

from lamina.api import sft
from lamina.commands.tuning import run_command

EXAMPLES = """
  lamina sft --from runs/keel-64 --data instructions.jsonl --output runs/keel-64-sft
  lamina sft --from runs/keel-64 --data chats.jsonl --template chat --packing --sequence-length 512 --epochs 2
  lamina sft --from HuggingFaceTB/SmolLM2-135M --data questions.jsonl --lora-rank 16 --learning-rate 2e-4
  lamina sft --from runs/keel-64 --preset lima --output runs/keel-64-lima
  lamina sft --output runs/keel-64-sft --resume
"""


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    from lamina.posttraining.settings import SftSettings

    return run_command(
        argv, "Fine-tune a model; OUTPUT/model chats with `lamina generate`.", EXAMPLES, SftSettings, sft
    )
