"""Parse lists of layers such as "3,5-7", and names of measures, such as "layer_drop". This module loads no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lamina.core.specs import split
from lamina.core.text import ranges
from lamina.errors import UserError, shortened
from lamina.probes.engine.registry import check_probes

ANGLE, HARM = "angular_distance", "layer_drop"
_MEASURES = {ANGLE: (ANGLE, ANGLE), HARM: (f"{HARM}(meaning=remove, metric=loss)", "loss_increase")}  # probe, metric
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


def measure_of(by: str) -> tuple[str, str]:
    """Return the probe and the metric of a measure such as ``layer_drop`` or ``hidden_states.variance``."""
    if by in _MEASURES:
        return _MEASURES[by]
    parts = re.fullmatch(r"(.+?)(?:\.([a-zA-Z_]\w*))?", by)
    spec, metric = (by, None) if parts is None else parts.groups()
    check_probes(spec)
    if spec == "all" or len(split(spec, "probe")) > 1:
        raise UserError(f"by: {by!r} names more than one probe. Give {HARM}, {ANGLE}, or PROBE.METRIC.")
    if metric is None:
        raise UserError(
            f"by: {by!r} names a probe without a metric. Give {HARM}, {ANGLE}, or PROBE.METRIC with a metric that has "
            "one value for each layer, such as hidden_states.variance."
        )
    return spec, metric
