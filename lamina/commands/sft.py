"""`lamina sft`: fine-tune a model."""

from __future__ import annotations

from lamina.api import sft
from lamina.commands.arguments import Parser
from lamina.commands.tuning import run_command, tuning_parser
from lamina.posttraining.settings import SftSettings

EXAMPLES = """
  lamina sft --from runs/keel-64 --data instructions.jsonl --output runs/keel-64-sft
  lamina sft --from runs/keel-64 --data chats.jsonl --template chat --packing --sequence-length 512 --epochs 2 \\
      --output runs/keel-64-chat
  lamina sft --from HuggingFaceTB/SmolLM2-135M --data questions.jsonl --lora-rank 16 --learning-rate 2e-4 \\
      --output runs/smollm2-lora
  lamina sft --from runs/keel-64 --preset lima --output runs/keel-64-lima
  lamina sft --output runs/keel-64-sft --resume
"""


def parser() -> Parser:
    """The command's flags."""
    about = "Fine-tune a model; OUTPUT/model chats with `lamina generate`."
    return tuning_parser(about, EXAMPLES, SftSettings)


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    return run_command(argv, parser(), SftSettings, sft)
