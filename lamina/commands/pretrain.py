"""`lamina pretrain`: one model, from scratch or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from lamina.api import pretrain
from lamina.commands.arguments import Parser
from lamina.training.settings import PretrainSettings

EXAMPLES = """
  lamina pretrain --placement keel --num-layers 64 --steps 1000 --output runs/keel-64
  lamina pretrain --backbone llama-71m --placement peri_ln --corpus books/ --tokenizer bpe:8192 --save-steps 200
  lamina pretrain --placement keel --trainer.optim adafactor --report-to tensorboard --output runs/keel-af
  lamina pretrain --from runs/keel-64 --corpus web/:0.7,code/:0.3 --learning-rate 1e-3 --output runs/keel-64b
  lamina pretrain --streaming --corpus hf:roneneldan/TinyStories --save-steps 500 --output runs/streamed
  lamina pretrain --backbone vit-tiny --placement mix_ln --corpus photos/ --flip 0.5 --crop-scale 0.3 --output runs/vit
  lamina pretrain --output runs/keel-64 --resume
  torchrun --nproc_per_node 8 --no-python lamina pretrain --parallel fsdp2 --save-steps 500 --rollback 2 --output runs/x
"""


def parser() -> Parser:
    """The command's flags."""
    about = "Train one model on text or images; OUTPUT/model loads with transformers' Auto classes."
    flags = Parser("pretrain", about, EXAMPLES)
    flags.add_settings(PretrainSettings)
    flags.add_output_modes("resume from the last checkpoint in the output folder")
    return flags


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    typed, others = parser().settings_from(argv)
    result = pretrain(**typed, resume=others.resume, overwrite=others.overwrite)
    from lamina.training.execution.processes import launched

    if launched()[0] == 0:  # of several processes the first one prints
        from lamina.reports import terminal

        print(terminal.run(Path(typed.get("output", PretrainSettings.output)), result, "pretrain"))
    return 130 if result["status"] == "interrupted" else 0
