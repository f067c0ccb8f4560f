"""`lamina generate MODEL`: a trained model continues a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.commands.arguments import make_parser
from lamina.core.values import number, path, seed_number, whole_number

if TYPE_CHECKING:
    from lamina.modeling.generation import Speaker

EXAMPLES = """
  lamina generate runs/keel-64/model --prompt "It was a truth"
  lamina generate runs/keel-64/model --prompt "Call me" --temperature 0 --max-new-tokens 200
  lamina generate runs/keel-64-sft --chat --prompt "Sort the letters: d, b, a"
  lamina generate runs/keel-64-sft --chat            a conversation; an empty line or Ctrl-D ends it
"""


def run(argv: list[str]) -> int:
    """Load, generate, print."""
    parser = make_parser("generate", "Continue a text with a trained model.", EXAMPLES, "MODEL ")
    parser.add_argument("model", help="a folder with a saved model, or a run's folder")
    parser.add_argument("--prompt", type=str, default=None, help='the text to continue (default: "The")')
    parser.add_argument(
        "--chat", action="store_true", help="take the prompt as a turn, and answer it; without a prompt, converse"
    )
    parser.add_argument("--max-new-tokens", type=int, default=120, help="maximum number of new tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the model's own Python code, if it has any"
    )
    options = parser.parse_args(argv)
    path("model", options.model)
    whole_number("max_new_tokens", options.max_new_tokens)
    number("temperature", options.temperature, 0.0)
    seed_number("seed", options.seed)
    import torch

    from lamina.modeling.generation import Speaker

    speaker = Speaker(
        options.model, options.max_new_tokens, options.temperature, trust_remote_code=options.trust_remote_code
    )
    torch.manual_seed(options.seed)
    if not options.chat:
        print(speaker.continuation("The" if options.prompt is None else options.prompt))
    elif options.prompt is not None:
        print(speaker.answer([{"role": "user", "content": options.prompt}]))
    else:
        _converse(speaker)
    return 0


def _converse(speaker: Speaker) -> None:
    """Answer the lines of the standard input, one turn each, until an empty line or its end."""
    speaker.check_chat()
    turns: list[dict[str, str]] = []
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            return
        if not said:
            return
        turns.append({"role": "user", "content": said})
        turns.append({"role": "assistant", "content": speaker.answer(turns)})
        print(turns[-1]["content"])
