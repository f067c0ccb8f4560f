"""Read numbers in all forms: 1,000, a decimal comma, 12k, or a histogram."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

Bins: TypeAlias = Any
"""A part of a histogram in W&B's form."""

NUMBER = r"[-+]?(?:\d+(?:[.,]\d+)+|\d+\.?|\.\d+)(?:[eE][-+]?\d+)?(?:[kKMB](?![\w/]))?|[-+]?(?:nan|inf(?:inity)?)\b"
WHOLE = r"\d+(?:,\d{3})*(?:\.(?:0+|\d+(?=[eEkM])))?(?:[eE]\+?\d+)?(?:[kKM](?=it|\b))?(?!\.?\d)"
"""A regular expression for steps, such as 1,000, 1.0e+02 and 12k, but not for times such as 0.17."""

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_SURE_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+\.\d*|(?:,\d{3}){2,})(?:[eE][-+]?\d+)?")
_COMMA = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:\.\d{3})+),\d+(?:[eE][-+]?\d+)?")
_MAYBE = re.compile(r"[-+]?[1-9]\d{0,2},\d{3}")  # 2,310 is 2310 or 2.31; 2,31 and 0,231 have a decimal comma


def number_of(value: object) -> float | None:
    """Return a value as a number, or None for any other value. A histogram becomes the norm of its values."""
    if isinstance(value, float):
        return value
    if value is None or isinstance(value, bool):
        return None
    try:
        return _norm_of_bins(value) if isinstance(value, Mapping) else float(str(value))
    except (ValueError, TypeError, LookupError, OverflowError):  # bins that are none
        return _written(value.strip()) if isinstance(value, str) else None


def _written(text: str) -> float | None:
    """Return the number in a text that Python's ``float`` rejects, such as 1,000 or 12k."""
    if text[-1:].lower() in _SUFFIXES and (number := number_of(text[:-1])) is not None:
        return number * _SUFFIXES[text[-1].lower()]
    return float(text.replace(",", "")) if _THOUSANDS.fullmatch(text) else None


def is_numeric(text: str) -> bool:
    """Return whether a text is a number, with a decimal comma or a decimal point."""
    return number_of(text) is not None or has_comma(text)


def has_comma(value: str) -> bool:
    """Return whether a text is a number with a comma. ``with_commas`` reads such numbers."""
    text = value.strip()
    return _COMMA.fullmatch(text) is not None or _SURE_THOUSANDS.fullmatch(text) is not None


def with_commas(
    texts: Mapping[str, Sequence[str]], *, whole: Collection[str], points: bool
) -> Mapping[str, list[float] | None]:
    """Convert numbers that are written with commas to floats. A column whose commas Lamina cannot read becomes None.

    A comma is a decimal comma (2,31) or a thousands separator (1,000.5). In 2,310, the comma may be either. Lamina then
    decides from the column's other numbers, or from other columns.

    Args:
        texts: the texts with a comma in each column
        whole: the columns that hold whole numbers
        points: whether other numbers in the file have a decimal point
    """
    signs = {name: {sign for text in column if (sign := _sign(text))} for name, column in texts.items()}
    others = {"."} if points else set[str]().union(*(of for name, of in signs.items() if name not in whole))
    numbers: dict[str, list[float] | None] = {}
    for name, column in texts.items():
        own = signs[name] or ({"."} if name in whole else others)
        sign = next(iter(own)) if len(own) == 1 else ""
        every = [_read(text.strip(), _sign(text) or sign) for text in column]
        numbers[name] = None if None in every else [number for number in every if number is not None]
    return numbers


def _sign(text: str) -> str:
    """Return a number's decimal sign (comma or point), or "" if Lamina cannot tell."""
    text = text.strip()
    return "." if _SURE_THOUSANDS.fullmatch(text) else "" if _MAYBE.fullmatch(text) else ","


def _read(text: str, sign: str) -> float | None:
    if not sign:
        return None
    return float(text.replace(",", "") if sign == "." else text.replace(".", "").replace(",", "."))


def _norm_of_bins(histogram: Mapping[str, Bins]) -> float | None:
    """Return the norm of the values in a histogram, as if values were uniform within each bin."""
    counts, edges, packed = histogram.get("values"), histogram.get("bins"), histogram.get("packedBins")
    if not isinstance(counts, list):
        return None
    if isinstance(packed, Mapping):
        low, size, count = (float(packed[name]) for name in ("min", "size", "count"))
        edges = [low + size * index for index in range(len(counts) + 1)] if count == len(counts) else None
    if not isinstance(edges, list) or len(edges) != len(counts) + 1:
        return None
    bins = zip(counts, edges, edges[1:], strict=False)
    return math.sqrt(sum(n * (((low + high) / 2) ** 2 + (high - low) ** 2 / 12) for n, low, high in bins))
