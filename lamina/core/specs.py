"""Read a name or file with options, such as ``name(layers=[0, 3], text='a, b')``, and comma-separated lists.

Values are in YAML. A comma inside brackets or quotes belongs to the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lamina.errors import UserError, shortened

_SPEC = re.compile(r"\s*([^()]+?)\s*(?:\((.*)\))?\s*", re.S)
_EXPONENT = re.compile(r"[-+]?[\d.]*\d[\d.]*[eE][-+]?\d+")  # a number such as 1e-3, which is text in YAML 1.1
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_QUOTES = "'\""


def parse(spec: str, kind: str) -> tuple[str, dict[str, object]]:
    """Split ``"name(option=value, ...)"`` into the name or path, and a mapping of the options.

    Raises UserError for any other text. ``kind`` is the noun for the text in messages, such as "placement".
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UserError(f"{kind} {spec!r} is not readable. Write a name, a file, or name(option=value, ...).")
    options: dict[str, object] = {}
    for part in _parts(match[2] or "", whole=True):
        if part is None:
            raise UserError(f"{kind} {spec!r}: a parenthesis or quote is not closed. Close it.")
        option, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"{kind} {spec!r}: {part!r} has no value. Write option=value.")
        if option.strip() in options:
            raise UserError(f"{kind} {spec!r}: {option.strip()!r} is given twice. Give it once.")
        options[option.strip()] = read_value(value.strip())
    return match[1], options


def split(text: str, kind: str) -> list[str]:
    """Split a comma-separated list of names with options. ``kind`` is the noun for an entry in error messages."""
    if not isinstance(text, str):
        raise UserError(f"{kind}s: {shortened(repr(text), 200)}. Give a text with commas between the names.")
    return [part for part in _parts(text, whole=False) if part is not None]


def _parts(text: str, *, whole: bool) -> Iterator[str | None]:
    """Split at commas outside brackets and quotes. If ``whole``, yield None after an unclosed bracket or quote."""
    expected: list[str] = []  # the closing characters of the open brackets, or of the open quote
    start, before = 0, "," if whole else ""
    for position, character in enumerate(text):
        # a list of options, or (if not whole) a list of names with options in parentheses
        inside = whole or expected
        if expected and character == expected[-1]:
            expected.pop()
        elif expected and expected[-1] in _QUOTES:
            pass
        elif character == "(" or (inside and character in _CLOSING):
            expected.append(_CLOSING[character])
        elif inside and character in _QUOTES and before in ",=:([{":  # an apostrophe inside a word is no quote
            expected.append(character)
        elif character == "," and not expected:
            if part := text[start:position].strip():
                yield part
            start = position + 1
        before = before if character.isspace() else character
    if part := text[start:].strip():
        yield part
    if whole and expected:
        yield None


def read_value(text: str) -> object:
    """Read a value as YAML does, but read 1e-3 as a number."""
    import yaml  # only where a spec has options

    try:
        return float(text) if _EXPONENT.fullmatch(text) else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
