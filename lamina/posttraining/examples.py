"""Examples in TRL's forms (prompt and completion, messages, chosen and rejected), and their tokens and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from lamina.core.json_types import Json
from lamina.data.sources.file_documents import encodable_text
from lamina.errors import UserError, nearest, one_line, unknown
from lamina.posttraining.rows import Fields

IGNORED = -100
ROLES = ("system", "user", "assistant")
_SENDERS = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of the roles
Message = Mapping[str, str]
"""A turn: its ``role`` (system, user or assistant) and its ``content``."""
Messages = Sequence[Message]
Prompt: TypeAlias = str | Messages
"""A text, or the turns before the answer."""


def example_of(row: Fields) -> Json:
    """Return a row as ``prompt`` and ``completion``, two texts that are used unchanged, or as ``messages``.

    Raises ValueError for a row of no known form.
    """
    if "messages" in row or "conversations" in row:
        name = "messages" if "messages" in row else "conversations"
        return {"messages": _answered(name, _conversation(name, row))}
    if "instruction" in row:
        return {"messages": [*_instruction(row), {"role": "assistant", "content": _text(row, "output")}]}
    if "prompt" in row:
        prompt, completion = row["prompt"], _field(row, "completion")
        if isinstance(prompt, str) and not isinstance(completion, list):
            return {"prompt": encodable_text(prompt), "completion": _text(row, "completion")}
        turns = [*_turns("prompt", prompt), *_turns("completion", completion)]
        return {"messages": _answered("prompt + completion", turns)}
    raise _no_form(row, "prompt/completion or messages or instruction/output")


def preference_of(row: Fields) -> Json:
    """Return a row as a ``prompt`` and two answers, ``chosen`` and ``rejected``. Raises ValueError for another row."""
    if not ("chosen" in row and "rejected" in row):
        raise _no_form(row, "prompt/chosen/rejected or chosen/rejected")
    if isinstance(row["chosen"], str) and isinstance(row["rejected"], str):
        if "prompt" not in row:
            raise ValueError("no field 'prompt' beside 'chosen' and 'rejected' (needed where they are texts)")
        return {"prompt": _prompt(row), "chosen": _text(row, "chosen"), "rejected": _text(row, "rejected")}
    chosen, rejected = (_answered(name, _turns(name, row[name])) for name in ("chosen", "rejected"))
    if rejected[:-1] != chosen[:-1]:
        raise ValueError("'chosen' and 'rejected' differ before their last turn")
    prompt = chosen[:-1] or _prompt(row)
    return {"prompt": prompt, "chosen": chosen[-1]["content"], "rejected": rejected[-1]["content"]}


def prompt_of(row: Fields) -> Prompt:
    """Return the prompt of a row of any form, without its answer. Raises ValueError for another row."""
    if "prompt" in row:
        return _prompt(row)
    if "instruction" in row:
        return _instruction(row)
    if "messages" in row or "conversations" in row:
        turns = _conversation("messages" if "messages" in row else "conversations", row)
        last = max((index for index, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
        if last < 0:
            raise ValueError("no turn of the user's")
        return turns[: last + 1]
    if "chosen" in row and not isinstance(row["chosen"], str):
        turns = _answered("chosen", _turns("chosen", row["chosen"]))
        if len(turns) == 1:
            raise ValueError("no turn of 'chosen' before its answer, and no field 'prompt'")
        return turns[:-1]
    raise _no_form(row, "prompt or messages or instruction")


def _instruction(row: Fields) -> list[Message]:
    further = row.get("input") or ""
    if not isinstance(further, str):
        raise ValueError("the field 'input' must be a text")
    text = _text(row, "instruction") + (f"\n\n### Input:\n{encodable_text(further)}" if further.strip() else "")
    return [{"role": "user", "content": text}]


def _prompt(row: Fields) -> Prompt:
    if isinstance(_field(row, "prompt"), str):
        return _text(row, "prompt")
    turns = _turns("prompt", row["prompt"])
    if turns[-1]["role"] == "assistant":
        raise ValueError("the last turn of 'prompt' is the assistant's")
    return turns


def _conversation(name: str, row: Fields) -> list[Message]:
    """Return the turns of a field; plain texts (LIMA) alternate between user and assistant."""
    value = row[name]
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        value = [{"role": ROLES[1 + i % 2], "content": turn} for i, turn in enumerate(value)]
    return _turns(name, value)


def _turns(name: str, value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        text = "" if name in ("messages", "conversations") else "a text or "
        raise ValueError(f"the field {name!r} must be {text}a list of turns")
    turns: list[Message] = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number} of {name!r} is no object with role and content")
        sender = str(turn.get("from"))
        role = turn.get("role", _SENDERS.get(sender, sender))
        content = turn.get("content", turn.get("value"))
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"turn {number} of {name!r} has no role (allowed: {', '.join(ROLES)}) with a text")
        turns.append({"role": role, "content": encodable_text(content)})
    return turns


def _answered(name: str, turns: list[Message]) -> list[Message]:
    """Return the turns of a field up to the last answer. Raises ValueError for an empty or missing answer."""
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise ValueError("no turn of the assistant's")
    for index in answers:
        if not turns[index]["content"].strip():
            raise ValueError(f"turn {index + 1} of {name!r}, the assistant's, is empty")
    return turns[: answers[-1] + 1]


def _field(row: Fields, name: str) -> object:
    if name not in row:
        raise ValueError(f"no field {name!r}{nearest(name, row)} (the row has: {', '.join(row)})")
    return row[name]


def _text(row: Fields, name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise ValueError(f"the field {name!r} must be a text")
    if not value.strip():
        raise ValueError(f"the field {name!r} is empty")
    return encodable_text(value)


def _no_form(row: Fields, forms: str) -> ValueError:
    return ValueError(f"no known fields (needed: {forms}; the row has: {', '.join(map(str, row)) or 'none'})")


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


def _template(user: str, assistant: str) -> str:
    """Make a template of two texts in Jinja's syntax, each with ``message.content``."""
    return (
        "{%- for message in messages -%}" + _SYSTEM + "{%- elif message.role == 'user' -%}{{ " + user + " }}"
        "{%- else -%}{{ " + assistant + " }}{%- endif -%}{%- endfor -%}"
    )


TEMPLATES = {
    "alpaca": _ALPACA,  # Taori et al. 2023; LLM-Adapters' as well
    "human": _template(
        "' Human: ' + message.content + ' Assistant:'", "' ' + message.content + eos_token"
    ),  # Adam-mini
    "chat": _template(
        "('\\n\\n' if not loop.first and messages[loop.index0 - 1].role == 'assistant' else '') + 'User: ' "
        "+ message.content + '\\n\\nAssistant:'",
        "' ' + message.content + eos_token",
    ),
    "plain": _template("message.content + '\n'", "message.content + eos_token"),
}
"""Jinja templates by name. The text up to an answer is the same with the answer and without."""
CHOICES = ("auto", "none", "tokenizer", *TEMPLATES)


def read_template(choice: str, tokenizer: PreTrainedTokenizerBase, *, default: str | None) -> str | None:
    """Read the Jinja template of a choice; None for text that is used unchanged.

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
    """Render a conversation; with ``answers``, up to where the model answers.

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


@dataclass(kw_only=True)
class ExampleEncoder:
    """Encodes examples for one model.

    Attributes:
        tokenizer: the model's.
        template: Jinja, for conversations; None for text that is used unchanged.
        longest: tokens of the longest sequence.
        loss_on_all: whether the prompt's tokens are labels, too.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    longest: int
    loss_on_all: bool = False

    def example(self, example: Fields) -> Json:
        """Encode an example of ``example_of`` as ``input_ids`` and ``labels``, cut to ``longest``.

        Raises ValueError if no token to train on is left.
        """
        text, answers = self._spans(example)
        ids, ends = self._tokens(text, special="completion" in example)
        # A token that reaches into an answer belongs to it, even if it begins in the prompt.
        inside = [any(start < end <= stop for start, stop in answers) for end in ends]
        labels = [i if self.loss_on_all or answer else IGNORED for i, answer in zip(ids, inside, strict=True)]
        if all(label == IGNORED for label in labels[: self.longest]):
            if True not in inside:
                raise ValueError("the answer has no tokens")
            raise ValueError(
                f"the prompt has {inside.index(True)} tokens, which leaves none of {self.longest} for the answer"
            )
        cut = slice(self.longest)
        return {"input_ids": ids[cut], "labels": labels[cut], "truncated": len(ids) > self.longest}

    def prompt(self, prompt: Prompt, *, room: int = 1) -> list[int]:
        """Encode a prompt. Raises ValueError if it leaves less than ``room`` tokens for the answer."""
        plain = self.template is None and isinstance(prompt, str)
        ids = self._tokens(self.prompt_text(prompt), special=plain)[0]
        if len(ids) + room > self.longest:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the answer up to {room}, the context {self.longest}"
            )
        return ids

    def prompt_text(self, prompt: Prompt) -> str:
        """Return a prompt as the text that the model continues."""
        if self.template is None:
            if isinstance(prompt, str):
                return prompt
            raise ValueError("turns need a chat template (allowed: a --template, or prompts that are texts)")
        return render(self.tokenizer, self.template, as_turns(prompt), answers=True)

    def preference(self, preference: Fields) -> tuple[Json, Json]:
        """Encode the better and the worse answer of ``preference_of``, each with the prompt. Raises ValueError."""
        prompt = preference["prompt"]
        if self.template is None and isinstance(prompt, str):
            both = [{"prompt": prompt, "completion": preference[name]} for name in ("chosen", "rejected")]
        else:
            both = [
                {"messages": [*as_turns(prompt), {"role": "assistant", "content": preference[name]}]}
                for name in ("chosen", "rejected")
            ]
        better, worse = map(self.example, both)
        if better["input_ids"] == worse["input_ids"]:
            cut = f" in their first {self.longest} tokens" if better["truncated"] else ""
            raise ValueError(f"the two answers are the same{cut}")
        return better, worse

    def _spans(self, example: Fields) -> tuple[str, list[tuple[int, int]]]:
        """Return an example's text, and the first and last character of each answer in it."""
        if "completion" in example:
            end = str(self.tokenizer.eos_token)
            completion = example["completion"]
            text = example["prompt"] + completion + ("" if completion.endswith(end) else end)
            return text, [(len(example["prompt"]), len(text))]
        if self.template is None:
            raise ValueError("turns need a chat template (allowed: a --template, or prompts and completions)")
        messages = example["messages"]
        text = render(self.tokenizer, self.template, messages, answers=False)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                # transformers refuses to render no turns
                before = render(self.tokenizer, self.template, messages[:index], answers=True) if index else ""
                through = render(self.tokenizer, self.template, messages[: index + 1], answers=False)
                if not (through.startswith(before) and text.startswith(through)):
                    raise ValueError(
                        "the template renders the turns before an answer differently without it (another --template)"
                    )
                spans.append((len(before), len(through)))
        return text, spans

    def _tokens(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        """A text's token ids, and the character at which each ends."""
        encoded: Any = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [int(end) for _, end in encoded["offset_mapping"]]


def as_turns(prompt: Prompt) -> Messages:
    """Return a prompt as turns: a text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
