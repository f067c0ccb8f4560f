"""Parse lists of layers such as "3,5-7"."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.core.text import ranges
from lamina.errors import UserError, shortened

_MOST = 2**16  # layers


def layers_of(text: str) -> list[int]:
    """Return the layers, counted from 0, of a text such as "3,5-7". Raises UserError for any other text."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or not int(first) <= int(last or first) < _MOST:
            raise UserError(
                f"layers: {shortened(repr(text), 80)} is not a list of layers. Count layers from 0, as in 3,5-7."
            )
        layers += range(int(first), int(last or first) + 1)
    return refuse_twice(layers)


def refuse_twice(layers: Sequence[int]) -> list[int]:
    """Return the layers in order. Raises UserError for a repeated layer."""
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        raise UserError(f"layers: {ranges(twice)} is named twice. Name each layer once.")
    return sorted(layers)
