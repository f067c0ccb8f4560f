"""`lamina generate MODEL`: continue a text with a trained model."""

from __future__ import annotations

from typing import Any

from lamina.api.models import generate, speaker_of
from lamina.commands.arguments import Parser
from lamina.core.terminal import show
from lamina.errors import UserError
from lamina.jobs.setting_groups import TextSettings

EXAMPLES = """
  lamina generate runs/keel-64/model --prompt "It was a truth"
  lamina generate runs/keel-64/model --prompt "Call me" --temperature 0 --max-new-tokens 200
  lamina generate runs/keel-64-sft --chat --prompt "Sort the letters: d, b, a" --top-p 0.9
  lamina generate runs/keel-64-sft --chat            a conversation; an empty line or Ctrl-D ends the conversation
"""


def parser() -> Parser:
    flags = Parser("generate", "Continue a text with a trained model.", EXAMPLES, "MODEL ")
    flags.add_word("model", "a folder with a saved model, or a run's folder")
    flags.add_flag("--prompt", 'the text to continue (default: "The")')
    flags.add_flag("--chat", "answer the prompt as a user message; without a prompt, start a conversation", False)
    flags.add_flag("--max-new-tokens", "maximum number of new tokens", 120)
    flags.add_flag("--temperature", "sampling temperature; 0 always takes the likeliest token", 0.8)
    flags.add_flag(
        "--top-p",
        "sample only from the likeliest tokens, up to this total probability (above 0, at most 1)",
        kind=float,
    )
    flags.add_flag("--stop", "end the answer at this text (repeat the flag for more texts)", [])
    flags.add_flag("--system", "with --chat, the system message")
    flags.add_flag("--seed", "seed of the sampling", 0)
    flags.add_flag("--tokenizer", TextSettings.help("tokenizer"), metavar="TEXT")
    flags.add_flag("--trust-remote-code", "run the model's own Python code, if the model has any", False)
    return flags


def run(argv: list[str]) -> int:
    options = parser().parse(argv)
    names = ("max_new_tokens", "temperature", "top_p", "stop", "seed", "tokenizer", "trust_remote_code")
    sampling = {name: getattr(options, name) for name in names}
    if options.system is not None and not options.chat:
        raise UserError(f"system: {options.system!r} has no effect here. Add --chat, or leave --system out.")
    turns = [] if options.system is None else [{"role": "system", "content": options.system}]
    if options.chat:
        _converse(options.model, turns, options.prompt, **sampling)
    else:
        show(generate(options.model, "The" if options.prompt is None else options.prompt, **sampling))
    return 0


def _converse(model: str, turns: list[dict[str, str]], prompt: str | None, **sampling: Any) -> None:
    """Answer the prompt. Without a prompt, answer each line of standard input until an empty line."""
    speaker = speaker_of(model, **sampling)
    speaker.check_chat()
    while True:
        try:
            said = input("> ").strip() if prompt is None else prompt
        except EOFError:
            return
        if prompt is None and not said:
            return
        turns.append({"role": "user", "content": said})
        turns.append({"role": "assistant", "content": speaker.answer(turns, lambda part: show(part, end=""))})
        show()
        if prompt is not None:
            return
