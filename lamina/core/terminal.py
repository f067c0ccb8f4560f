"""Output of text on a terminal, cleaned so that files and models can neither control nor flood it."""

from __future__ import annotations

import sys
import unicodedata

from lamina.errors import shortened

LONGEST_LINE = 2000  # of an error: the field stands at its beginning, what is allowed at its end
_JOINERS = "\u200c\u200d"  # formatting characters that scripts and emoji need


def printable(text: str) -> str:
    r"""Replace control, bidirectional and unpaired surrogate characters by ``\uXXXX``.

    A terminal obeys some of these: colors, cleared lines, a window's title, text that reads backwards.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    unsafe = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if not unsafe or character in "\n\t" or character in _JOINERS:
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()  # as JSON writes it, so that JSON stays JSON
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def show(text: object = "", end: str = "\n") -> None:
    """Print a text on standard output."""
    sys.stdout.write(printable(str(text)) + end)
    sys.stdout.flush()


def show_error(message: str) -> None:
    """Print a message on standard error as one line, shortened in the middle if very long."""
    line = f"lamina: {shortened(printable(' '.join(message.split())), LONGEST_LINE)}"
    if "tqdm" in sys.modules:  # a library's progress bar may be open: the line does not go on with it
        sys.modules["tqdm"].tqdm.write(line, file=sys.stderr)
    else:
        sys.stderr.write(f"{line}\n")
