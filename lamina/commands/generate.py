"""`lamina generate MODEL`: what a trained model says."""

from __future__ import annotations

from typing import Any

from lamina.commands.arguments import make_parser
from lamina.core.values import number, path, seed_number, whole_number
from lamina.errors import UserError
from lamina.jobs.digests import refuse_damaged

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
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that the model asks for, if it does"
    )
    options = parser.parse_args(argv)
    path("model", options.model)
    whole_number("max_new_tokens", options.max_new_tokens)
    number("temperature", options.temperature, 0.0)
    seed_number("seed", options.seed)
    print(
        continuation(
            options.model,
            options.prompt,
            options.max_new_tokens,
            options.temperature,
            options.seed,
            trust_remote_code=options.trust_remote_code,
        )
    )
    return 0


def continuation(
    path: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    *,
    trust_remote_code: bool = False,
) -> str:
    """The prompt with what the model in a folder adds to it. Raises UserError where the folder holds no such model."""
    import torch
    from transformers import AutoModelForCausalLM

    from lamina.modeling.backbones import loading

    folder = loading.folder_of_run(path)
    if not folder.exists():
        raise UserError(f"model: {path!r} holds no saved model (config.json is missing)")
    refuse_damaged(folder)
    config = loading.read_config(folder, "model", trust_remote_code=trust_remote_code)
    if type(config) not in AutoModelForCausalLM._model_mapping and not trust_remote_code:  # type: ignore[attr-defined]
        raise UserError(f"model: {path!r} is a {config.model_type}, which continues no text")
    model, info = loading.load_weights(
        folder, config, AutoModelForCausalLM, "model", trust_remote_code=trust_remote_code
    )
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"model {path!r}: {len(missing)} of its tensors are missing, {missing[0]!r} the first")
    tokenizer = loading.load_tokenizer(folder, config, "model", trust_remote_code=trust_remote_code)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not inputs["input_ids"].numel():
        raise UserError(f"prompt: {prompt!r} has no tokens (allowed: a text to continue)")
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    try:
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling)
    except Exception as error:  # it is the files' doing: whatever they ask for, transformers has tried it
        raise UserError(f"model {path!r}: it loads, but does not run: {loading.one_line(error)}") from error
    return tokenizer.decode(ids[0], skip_special_tokens=True)
