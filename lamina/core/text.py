"""Format lists of numbers in short form, such as 3, 5-7, and steps in other units."""

from __future__ import annotations

import re
from collections.abc import Iterable

_STEP = re.compile(r"\bstep(?=s? \d)")  # the word before a step's number


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each consecutive series: ``[0, 1, 2, 5]`` gives ``[(0, 2), (5, 5)]``."""
    ends: list[tuple[int, int]] = []
    for number in sorted({int(n) for n in numbers}):
        if ends and number == ends[-1][1] + 1:
            ends[-1] = (ends[-1][0], number)
        else:
            ends.append((number, number))
    return ends


def ranges(numbers: Iterable[int]) -> str:
    """Format ``[0, 1, 2, 5]`` as ``0-2, 5``."""
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs(numbers))


def in_units(text: str, unit: str, *, lags: bool) -> str:
    """Replace "step 3" in a text by "record 3" for the unit "record", and put "about" before it if the steps lag."""
    return _STEP.sub(f"about {unit}" if lags else unit, text)
