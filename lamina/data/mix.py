"""A mix of corpora in fixed shares: ``--corpus A:0.7,B:0.3``, as it is written."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from lamina.errors import UserError

_PART = re.compile(r"(.+?):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan))(?:,|$)")
_ALLOWED = "CORPUS:WEIGHT,CORPUS:WEIGHT, each weight a number above 0"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A corpus of a mix and its share; the shares of a mix add up to 1."""

    corpus: str
    share: Fraction


def parse_mix(corpus: str) -> tuple[Part, ...]:
    """The parts of a mix, or none where ``corpus`` is a single corpus.

    A mix is a comma-separated list of two or more corpora, each with a colon and a number behind it; what stands
    before its last colon is the corpus, so paths and hub names may hold colons (and commas). A file or folder of that
    very name is no mix. Weights are taken relative to their sum.

    Raises:
        UserError: a part without a weight, a weight that is not above 0, a corpus named twice.
    """
    if "," not in corpus or Path(corpus).expanduser().exists():
        return ()
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(corpus):
        match = _PART.match(corpus, position)
        if match is None:
            break
        found.append((match[1].strip(), match[2]))
        position = match.end()
    if not found:
        return ()
    where = f"--corpus {corpus!r}"
    if position < len(corpus) or corpus.endswith(","):
        raise UserError(f"{where}: the part {corpus[position:]!r} has no weight (allowed: {_ALLOWED})")
    if len(found) == 1:
        return ()
    for name, weight in found:
        if not math.isfinite(float(weight)) or float(weight) <= 0:
            raise UserError(f"{where}: the weight {weight} of {name!r} (allowed: {_ALLOWED})")
    names = [name for name, _ in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{where}: {twice!r} is named twice (allowed: each corpus once)")
    total = sum((Fraction(weight) for _, weight in found), Fraction(0))
    return tuple(Part(corpus=name, share=Fraction(weight) / total) for name, weight in found)
