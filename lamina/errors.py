"""The error for mistakes that the user can fix, and helpers for error messages."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_JOINERS = "\u200c\u200d"  # formatting characters that scripts and emoji need


def printable(text: str) -> str:
    r"""Replace control, bidirectional and surrogate characters, which can garble a terminal's text, with ``\uXXXX``."""
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    unsafe = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if not unsafe or character in "\n\t" or character in _JOINERS:
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()  # as JSON writes it, so that JSON stays JSON
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


class OneLine(Exception):
    """An error that a notebook shows without a traceback, because the message is enough."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UserError(OneLine, ValueError):
    """A user's mistake. The message names the field and the value, and tells the user what to do.

    The command line prints the message as one line and exits with code 2. In Python, the error is also a ValueError.

    Args:
        problem: the message. Lamina escapes control characters in the message.
        fix: a sentence that tells the user what to do. Lamina adds this sentence to the message.

    Attributes:
        problem: the message without ``fix``.
    """

    def __init__(self, problem: object = "", fix: str = ""):
        self.problem = printable(str(problem))
        super().__init__(f"{self.problem}. {fix}" if fix else self.problem)


@contextmanager
def renamed_setting(old: str, new: str = "") -> Iterator[None]:
    """In UserErrors, replace a setting's internal name ``old`` with the user's name ``new``, or with nothing."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{new}{new and ': '}{str(error).removeprefix(f'{old}: ')}") from error


class TrialsFailed(UserError):
    """The error if every run of a study failed. The message gives the reason of the first failed run.

    The command line exits with code 1.

    Attributes:
        results: the table of results.csv.
    """

    def __init__(self, results: Any):
        count, first = len(results), results.iloc[0]
        which = "the only trial" if count == 1 else f"all {count} trials"
        super().__init__(f"{which} failed; {first['trial']}: {first['reason']} (see the trial's log.txt)")
        self.results = results


def nearest_name(name: str, allowed: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the allowed name most similar to a misspelled name, or None if no similarity reaches ``cutoff``."""
    if len(name) > 100:
        return None  # too long for a misspelled name. The search time grows with the length's square
    names, plain = list(allowed), name.lower().replace("-", "_")  # Peri-LN
    return next((near for each in (name, plain) for near in difflib.get_close_matches(each, names, 1, cutoff)), None)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'keel'?``, or "" if no allowed name is similar."""
    return did_you_mean(nearest_name(name, allowed))


def nearest_file(name: str, files: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'a.csv'?``, or "" if no file has a similar name without suffix."""
    whole = {file.partition(".")[0]: file for file in files}
    return did_you_mean(whole.get(nearest_name(name.partition(".")[0], whole) or ""))


def did_you_mean(name: str | None) -> str:
    """Return the hint ``; did you mean 'keel'?`` for the name "keel", or "" for an empty name."""
    return f"; did you mean {name!r}?" if name else ""


def unknown(field: str, value: str, allowed: Iterable[str], owner: str = "") -> UserError:
    """Return the error for an unknown name. The message lists the allowed names and suggests the most similar name.

    Args:
        field: the noun for the name, such as "placement".
        owner: a text at the beginning of the message.
    """
    names = sorted(allowed)
    listed = ", ".join(names) if len(names) <= 40 else f"one of {len(names)} names, {names[0]} to {names[-1]}"
    shown = shortened(repr(value), 200)
    begin = f"{owner}: " if owner else ""
    return UserError(f"{begin}unknown {field} {shown}{nearest(str(value), names)} (allowed: {listed})")


def shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head = longest * 2 // 3
    tail = longest - head
    return f"{text[:head]} ... ({len(text) - longest} characters left out) ... {text[-tail:]}"


def out_of_memory(error: BaseException | None) -> str | None:
    """Return a phrase such as "out of memory" if a lack of memory caused the exception, or None for any other cause."""
    while error is not None:
        text = f"{type(error).__name__}: {error}"
        if "CUDA out of memory" in text or "MPS backend out of memory" in text:
            return "out of memory on the GPU"
        if isinstance(error, MemoryError) or re.search(
            r"can't allocate memory|[Cc]annot allocate memory|not enough memory|OutOfMemoryError", text
        ):
            return "out of memory"
        error = error.__cause__ or error.__context__
    return None


def mark_reported(error: BaseException) -> None:
    """Mark an exception that another process prints, so that the user sees the message only once."""
    error.__dict__["already_reported"] = True


def is_reported(error: BaseException) -> bool:
    return bool(getattr(error, "already_reported", False))


def one_line(error: object) -> str:
    """Return an error as one line of at most 300 characters, with control characters escaped."""
    text = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    name = type(error).__name__ if isinstance(error, BaseException) else ""
    text = text if len(text) <= 300 else text[:299] + "…"
    return (f"{name}: {text}" if text else name) if name else text
