"""The notation for a mix of corpora in fixed shares: ``A:0.7,B:0.3``."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path

from lamina.errors import UserError

_PART = re.compile(r"(.+?):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan))(?:,|$)")
_ALLOWED = "CORPUS:WEIGHT,CORPUS:WEIGHT, each weight a number above 0"


def parse_mix(corpus: str) -> dict[str, Fraction]:
    """The corpora of a mix and their shares, which add up to 1; empty where ``corpus`` is a single corpus.

    A mix is a comma-separated list of two or more corpora, each followed by a colon and its weight. The text before the
    last colon is the corpus, so paths and hub names may contain colons and commas. An existing file or folder with the
    whole name is no mix. The share of a corpus is its weight divided by the sum of all weights.

    Raises:
        UserError: a part has no weight, a weight is not above 0, or a corpus is named twice.
    """
    if "," not in corpus or Path(corpus).expanduser().exists():
        return {}
    weights: list[tuple[str, str]] = []
    position = 0
    while position < len(corpus):
        match = _PART.match(corpus, position)
        if match is None:
            break
        weights.append((match[1].strip(), match[2]))
        position = match.end()
    if not weights:
        return {}
    where = f"corpus: {corpus!r}"
    if position < len(corpus) or corpus.endswith(","):
        raise UserError(f"{where}: the part {corpus[position:]!r} has no weight (allowed: {_ALLOWED})")
    if len(weights) == 1:
        return {}
    for name, weight in weights:
        if not math.isfinite(float(weight)) or float(weight) <= 0:
            raise UserError(f"{where}: the weight {weight} of {name!r} (allowed: {_ALLOWED})")
    names = [name for name, _ in weights]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{where}: {twice!r} is named twice (allowed: each corpus once)")
    total = sum((Fraction(weight) for _, weight in weights), Fraction(0))
    return {name: Fraction(weight) / total for name, weight in weights}
