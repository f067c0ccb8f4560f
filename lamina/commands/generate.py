"""`lamina generate MODEL`: a trained model continues a text."""

from __future__ import annotations

from lamina.commands.arguments import make_parser
from lamina.core.values import number, path, seed_number, whole_number

EXAMPLES = """
  lamina generate runs/keel-64/model --prompt "It was a truth"
  lamina generate runs/keel-64/model --prompt "Call me" --temperature 0 --max-new-tokens 200
"""


def run(argv: list[str]) -> int:
    """Load, generate, print."""
    parser = make_parser("generate", "Continue a text with a trained model.", EXAMPLES, "MODEL ")
    parser.add_argument("model", help="a folder with a saved model, or a run's folder")
    parser.add_argument("--prompt", type=str, default="The", help="the text to continue")
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
    from lamina.modeling.generation import continuation

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
