"""Chat templates: how the turns of a conversation become text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lamina.errors import UserError, one_line, unknown

Message = Mapping[str, str]
"""A turn: its ``role`` (system, user or assistant) and its ``content``."""
Messages = Sequence[Message]

_SYSTEM = "{%- if message.role == 'system' -%}{{ message.content + '\n\n' }}"
_ALPACA = (
    """
{%- for message in messages -%}
"""
    + _SYSTEM
    + """
{%- elif message.role == 'user' -%}
{%- if not loop.first and messages[loop.index0 - 1].role == 'assistant' -%}{{ '\n\n' }}{%- endif -%}
{%- if '\n\n### Input:\n' in message.content -%}
{{ 'Below is an instruction that describes a task, paired with an input that provides further context. ' }}
{%- else -%}
{{ 'Below is an instruction that describes a task. ' }}
{%- endif -%}
{{ 'Write a response that appropriately completes the request.\n\n### Instruction:\n' }}
{{- message.content + '\n\n### Response:\n' }}
{%- else -%}{{ message.content + eos_token }}{%- endif -%}
{%- endfor -%}"""
)


def _turns(user: str, assistant: str) -> str:
    """A template of two texts in Jinja's syntax, each with ``message.content``."""
    return (
        "{%- for message in messages -%}" + _SYSTEM + "{%- elif message.role == 'user' -%}{{ " + user + " }}"
        "{%- else -%}{{ " + assistant + " }}{%- endif -%}{%- endfor -%}"
    )


TEMPLATES = {
    "alpaca": _ALPACA,  # Taori et al. 2023; LLM-Adapters' as well
    "human": _turns("' Human: ' + message.content + ' Assistant:'", "' ' + message.content + eos_token"),  # Adam-mini
    "chat": _turns(
        "('\\n\\n' if not loop.first and messages[loop.index0 - 1].role == 'assistant' else '') + 'User: ' "
        "+ message.content + '\\n\\nAssistant:'",
        "' ' + message.content + eos_token",
    ),
    "plain": _turns("message.content + '\n'", "message.content + eos_token"),
}
"""Jinja templates by name. The text up to an answer is the same with the answer and without."""
CHOICES = ("auto", "none", "tokenizer", *TEMPLATES)


def read_template(choice: str, tokenizer: PreTrainedTokenizerBase, *, default: str | None) -> str | None:
    """The Jinja template of a choice; None for text that is used as it is.

    ``default``: the name of the template that ``auto`` stands for where the tokenizer has none. Raises UserError for
    an unknown name, a file that can't be read, and a tokenizer without a template.
    """
    known: object = tokenizer.chat_template  # a text, or several by name
    own = known.get("default") if isinstance(known, dict) else known
    own = own if isinstance(own, str) else None
    if choice == "auto":
        return own or (None if default is None else TEMPLATES[default])
    if choice == "none":
        return None
    if choice == "tokenizer":
        if own is None:
            raise UserError(
                f"template: 'tokenizer', but the model's tokenizer has no chat template (allowed: {', '.join(CHOICES)})"
            )
        return own
    if choice in TEMPLATES:
        return TEMPLATES[choice]
    path = Path(choice)
    if path.suffix not in (".jinja", ".j2"):
        raise unknown("template", choice, (*CHOICES, "FILE.jinja"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"template: {choice!r} can't be read ({one_line(error)})") from None


def render(tokenizer: PreTrainedTokenizerBase, template: str, messages: Messages, *, answers: bool) -> str:
    """The text of a conversation; with ``answers``, up to where the model answers.

    Raises ValueError for turns that the template does not take, UserError for a template that is no Jinja.
    """
    from jinja2 import TemplateSyntaxError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=answers,
        )
    except TemplateSyntaxError as error:
        raise UserError(f"template: no Jinja in its line {error.lineno} ({one_line(error)})") from None
    except Exception as error:  # Jinja's own, and whatever a template raises by its raise_exception
        raise ValueError(f"the template does not take it: {one_line(error)}") from None
    return str(text)
