"""`lamina pretrain`: one model, from scratch or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from lamina.api import pretrain
from lamina.commands.arguments import add_output_modes, add_settings, given_settings, make_parser

EXAMPLES = """
  lamina pretrain --placement keel --num-layers 64 --steps 1000 --output runs/keel-64
  lamina pretrain --backbone llama-71m --placement peri_ln --corpus books/ --tokenizer bpe:8192 --save-steps 200
  lamina pretrain --placement keel --trainer.optim adafactor --report-to tensorboard --output runs/keel-af
  lamina pretrain --from runs/keel-64 --corpus web/:0.7,code/:0.3 --learning-rate 1e-3 --output runs/keel-64b
  lamina pretrain --streaming --corpus hf:roneneldan/TinyStories --save-steps 500 --output runs/streamed
  lamina pretrain --output runs/keel-64 --resume
  torchrun --nproc_per_node 8 --no-python lamina pretrain --parallel fsdp2 --save-steps 500 --rollback 2 --output runs/x
"""


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print how the run ended."""
    from lamina.training.settings import PretrainSettings

    parser = make_parser("pretrain", "Train one model; OUTPUT/model loads with AutoModelForCausalLM.", EXAMPLES)
    add_settings(parser, PretrainSettings)
    add_output_modes(parser, "resume from the last checkpoint in the output folder")
    typed, others = given_settings(parser, argv, "resume", "overwrite")
    from lamina.training.execution.processes import launched

    result = pretrain(**typed, resume=others.resume, overwrite=others.overwrite)
    if launched()[0] > 0:  # of several processes the first one prints
        return 130 if result["status"] == "interrupted" else 0
    folder = Path(typed.get("output", PretrainSettings.output))
    loss = result.get("eval_loss")
    numbers = ""
    if loss is not None and loss == loss:
        numbers = f": eval loss {loss:.4f}, perplexity {result['perplexity']:.2f}"
        numbers += f", {result['bits_per_byte']:.3f} bits per byte"
    print(f"{result['status']}{numbers}" + (f" ({result['reason']})" if result["reason"] else ""))
    if result["status"] == "interrupted":
        print(f"to resume: lamina pretrain --output {folder} --resume")
        return 130
    print(f"the page:  {folder / 'report.html'}")
    if (folder / "model").is_dir():
        print(f"the model: {folder / 'model'}")
    return 0
