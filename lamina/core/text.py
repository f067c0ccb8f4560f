"""Format a list of numbers in short form, such as 3, 5-7."""

from __future__ import annotations

from collections.abc import Iterable


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
