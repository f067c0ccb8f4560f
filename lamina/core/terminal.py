"""What reaches a terminal: text from files and models can neither steer it nor flood it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

from lamina.errors import shortened

LONGEST_LINE = 2000  # of an error: the field stands at its beginning, what is allowed at its end
_JOINERS = "\u200c\u200d"  # formatting characters that scripts and emoji need
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_UP = "\x1b[A"


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""The text with control, formatting (bidirectional overrides) and unpaired surrogate characters as ``\uXXXX``.

    A terminal obeys some of them: colors, cleared lines, a window's title, text that reads backwards.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if _is_unsafe(c) and c not in keep else c for c in text)


def one_line(text: str) -> str:
    """The text as one printable line, its middle left out where it is very long."""
    return shortened(printable(" ".join(text.split())), LONGEST_LINE)


def _is_unsafe(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS


def _escaped(character: str) -> str:
    # as JSON writes it, so that JSON on standard output stays JSON
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


class Printing:
    """A text stream in front of another that gets only ``printable`` text, in the characters that it can write.

    ``progress``: the stream shows progress bars, which go back in a line and up a line.
    """

    def __init__(self, stream: TextIO, *, progress: bool = False) -> None:
        self._stream, self._progress = stream, progress

    def write(self, text: str) -> int:
        """Write the text; returns its length, as any stream does."""
        if not self._progress:
            safe = printable(text.replace("\r\n", "\n"))
        elif text.replace(_UP, "").strip("\r\n "):
            safe = printable(_COLORS.sub("", text), keep="\n\t\r")
        else:
            safe = text
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
