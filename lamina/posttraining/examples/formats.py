"""The formats of rows: instructions, prompts with completions, conversations, preferences, prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lamina.errors import nearest
from lamina.posttraining.examples.rows import Fields
from lamina.posttraining.examples.templates import Message, Messages

ROLES = ("system", "user", "assistant")
# the sender's names in ShareGPT's format
_SENDERS = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """A conversation, which a template makes a text; the model learns the assistant's turns."""

    messages: Messages


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A text and its continuation, used as they are; the model learns the continuation."""

    prompt: str
    completion: str


Example: TypeAlias = Dialogue | Completion
Prompt: TypeAlias = str | Messages
"""A text, or the turns before the answer."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A prompt and two answers of which the first is the better one."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt to answer, and the row's other fields, which a reward function may read."""

    prompt: Prompt
    row: Fields


def example_of(row: Fields) -> Example:
    """The example of a row of any format. Raises ValueError for another row."""
    if "messages" in row or "conversations" in row:
        name = "messages" if "messages" in row else "conversations"
        return Dialogue(messages=_answered(name, _conversation(row)))
    if "instruction" in row:
        answer = next((name for name in ("output", "response", "answer") if name in row), "output")
        return Dialogue(messages=(*_instruction(row), {"role": "assistant", "content": _text(row, answer)}))
    if "prompt" in row:
        answer = next((name for name in ("completion", "response") if name in row), "completion")
        given = _field(row, answer)
        if isinstance(row["prompt"], str) and not isinstance(given, list):
            return Completion(prompt=row["prompt"], completion=_text(row, answer))
        turns = [*_turns("prompt", row["prompt"]), *_turns(answer, given)]
        return Dialogue(messages=_answered(f"prompt + {answer}", turns))
    raise _no_format(row, ("instruction", "output"), ("prompt", "completion"), ("messages",))


def preference_of(row: Fields) -> Preference:
    """The preference of a row: prompt, chosen, rejected, as texts or as turns. Raises ValueError for another row."""
    if not ("chosen" in row and "rejected" in row):
        raise _no_format(row, ("prompt", "chosen", "rejected"), ("chosen", "rejected"))
    if isinstance(row["chosen"], str) and isinstance(row["rejected"], str):
        if "prompt" in row:
            return Preference(prompt=_prompt(row), chosen=_text(row, "chosen"), rejected=_text(row, "rejected"))
        raise ValueError("no field 'prompt' beside 'chosen' and 'rejected' (needed where they are texts)")
    chosen, rejected = (_answered(name, _turns(name, row[name])) for name in ("chosen", "rejected"))
    before = chosen[:-1]
    if rejected[:-1] != before:
        raise ValueError("'chosen' and 'rejected' differ before their last turn")
    if not before:  # only the answers
        return Preference(prompt=_prompt(row), chosen=chosen[-1]["content"], rejected=rejected[-1]["content"])
    return Preference(prompt=before, chosen=chosen[-1]["content"], rejected=rejected[-1]["content"])


def question_of(row: Fields) -> Question:
    """The prompt of a row of any format, without its answer. Raises ValueError for another row."""
    if "prompt" in row:
        return Question(prompt=_prompt(row), row=row)
    if "instruction" in row:
        return Question(prompt=_instruction(row), row=row)
    if "messages" in row or "conversations" in row:
        turns = _conversation(row)
        last = max((index for index, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
        if last < 0:
            raise ValueError("no turn of the user's")
        return Question(prompt=turns[: last + 1], row=row)
    if "chosen" in row and not isinstance(row["chosen"], str):
        turns = _answered("chosen", _turns("chosen", row["chosen"]))
        if len(turns) == 1:
            raise ValueError("no turn of 'chosen' before its answer, and no field 'prompt'")
        return Question(prompt=turns[:-1], row=row)
    raise _no_format(row, ("prompt",), ("instruction",), ("messages",))


def _instruction(row: Fields) -> tuple[Message, ...]:
    given = row.get("input") or ""
    if not isinstance(given, str):
        raise ValueError("the field 'input' must be a text")
    text = _text(row, "instruction") + (f"\n\n### Input:\n{given}" if given.strip() else "")
    return ({"role": "user", "content": text},)


def _prompt(row: Fields) -> Prompt:
    value = _field(row, "prompt")
    if isinstance(value, str):
        return _text(row, "prompt")
    turns = _turns("prompt", value)
    if turns[-1]["role"] == "assistant":
        raise ValueError("the last turn of 'prompt' is the assistant's")
    return turns


def _conversation(row: Fields) -> list[Message]:
    """The turns of ``messages`` or ``conversations``; texts alone, as in LIMA, are the user's and the assistant's."""
    name = "messages" if "messages" in row else "conversations"
    if isinstance(row[name], list) and row[name] and all(isinstance(turn, str) for turn in row[name]):
        return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(row[name])]
    return _turns(name, row[name])


def _turns(name: str, value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        text = "" if name in ("messages", "conversations") else "a text or "
        raise ValueError(f"the field {name!r} must be {text}a list of turns")
    turns: list[Message] = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number} of {name!r} is no object with role and content")
        role = turn.get("role", _SENDERS.get(str(turn.get("from"))))
        content = turn.get("content", turn.get("value"))
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"turn {number} of {name!r} has no role (allowed: {', '.join(ROLES)}) with a text")
        turns.append({"role": role, "content": content})
    return turns


def _answered(name: str, turns: Messages) -> Messages:
    """The turns of a field up to the last answer. Raises ValueError where an answer is empty or there is none."""
    last = max((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
    if last < 0:
        raise ValueError("no turn of the assistant's")
    for number, turn in enumerate(turns, start=1):
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise ValueError(f"turn {number} of {name!r}, the assistant's, is empty")
    return tuple(turns[: last + 1])


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
    return value


def _no_format(row: Fields, *formats: tuple[str, ...]) -> ValueError:
    known = " or ".join("/".join(names) for names in formats)
    return ValueError(f"no known fields (needed: {known}; the row has: {', '.join(map(str, row)) or 'none'})")
