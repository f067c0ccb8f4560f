"""Markdown from texts and numbers. Every text of a claim is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

NONE = "–"
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "[": "&#91;", "]": "&#93;", "`": "&#96;"}


def plain(text: object) -> str:
    """A text as Markdown that shows it as it is, on one line."""
    line = " ".join(str(text).split())
    line = re.sub(r"[&<>|\[\]`]", lambda found: _ENTITIES[found[0]], line)
    return re.sub(r"\*|(?<!\w)_|_(?!\w)|^[#+-](?= )|^\d+(?=\. )", lambda found: _escaped(found[0]), line)


def code(text: object) -> str:
    """A text as code."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39))}`"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells in Markdown. A heading that ends in ``:`` has its column set to the right."""
    rule = ["---:" if heading.endswith(":") else "---" for heading in headings]
    lines = [[heading.removesuffix(":") for heading in headings], rule, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: object, form: str) -> str:
    """A number in a format; a dash where there is none."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return format(value, form).replace("-", "−") if known else NONE


def _escaped(mark: str) -> str:
    return f"{mark}\\" if mark.isdigit() else f"\\{mark}"
