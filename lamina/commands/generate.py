"""`lamina generate MODEL`: what a trained model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamina.commands.arguments import make_parser
from lamina.digests import refuse_damaged
from lamina.errors import UserError

EXAMPLES = """
  lamina generate runs/keel-64/model --prompt "It was a truth"
  lamina generate runs/keel-64/model --prompt "Call me" --temperature 0 --max-new-tokens 200
"""


def run(argv: list[str]) -> int:
    """Load, generate, print."""
    parser = make_parser("generate", "Continue a text with a trained model.", EXAMPLES, "MODEL ")
    parser.add_argument("model", help="a folder with a saved model, or a run's folder")
    parser.add_argument("--prompt", type=str, default="The", help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=120, help="tokens to add at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    options = parser.parse_args(argv)
    for name in ("max_new_tokens", "temperature"):
        if options[name] < 0 or (name == "max_new_tokens" and options[name] < 1):
            raise UserError(
                f"{name}: {options[name]!r} (allowed: {'at least 1' if name != 'temperature' else '0 or more'})"
            )
    folder = Path(options.model)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if not (folder / "config.json").is_file():
        raise UserError(f"model: {options.model!r} holds no saved model (config.json is missing)")
    refuse_damaged(folder)
    print(continuation(folder, options.prompt, options.max_new_tokens, options.temperature, options.seed))
    return 0


def continuation(folder: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """The prompt with what the model adds to it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import lamina.modeling  # noqa: F401 (registers the models)

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling)
    return tokenizer.decode(ids[0], skip_special_tokens=True)
