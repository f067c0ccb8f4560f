"""Weights that changed between two records by far more than the updates that were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from lamina.reports.records import Frame

_TIMES = 3.0  # the largest recorded update at every step, all in one direction
_SHARE = 0.5  # of the weights' norm that must have come or gone


@dataclass(frozen=True, kw_only=True)
class Jump:
    """A sub-layer's weights before and behind a jump.

    Attributes:
        start, end: the steps of the two records; the jump lies between them.
        layer, sublayer: whose weights.
        before, after: the weights' norm.
    """

    start: int
    end: int
    layer: int
    sublayer: str
    before: float
    after: float

    @property
    def times(self) -> float:
        """How many times larger or smaller; infinite for weights that came from zero, or went to it."""
        low, high = sorted((self.before, self.after))
        return high / low if low > 0 else float("inf")


def jump_around(rows: Frame, step: int) -> Jump | None:
    """The largest jump between the records before ``step`` and at it or behind it; None if there is none."""
    inside = rows[(rows["layer"] >= 0) & (rows["sublayer"] != "block") & (rows["role"] == "all")]
    return max(_jumps(inside, step), key=lambda jump: jump.times, default=None)


def _jumps(rows: Frame, step: int) -> Iterator[Jump]:
    """Those of all sub-layers. A record's weights are those before its update."""
    tables = {metric: rows[rows["metric"] == metric] for metric in ("weight_norm", "update_norm")}
    moved = {place: group.groupby("step")["value"].last() for place, group in _by_place(tables["update_norm"])}
    for (layer, sublayer), group in _by_place(tables["weight_norm"]):
        norms = group.groupby("step")["value"].last()
        for start, end in pairwise(sorted(norms.index)):
            if not start < step <= end:
                continue
            before, after = float(norms[start]), float(norms[end])
            updates = moved.get((layer, sublayer))
            largest = 0.0 if updates is None else max(float(updates.get(at, 0.0)) for at in (start, end))
            change = abs(after - before)
            if change > _TIMES * (end - start) * largest and change > _SHARE * before:
                yield Jump(
                    start=int(start),
                    end=int(end),
                    layer=int(layer),
                    sublayer=str(sublayer),
                    before=before,
                    after=after,
                )


def _by_place(rows: Frame) -> Iterator[tuple[tuple[int, str], Frame]]:
    yield from rows.groupby(["layer", "sublayer"])
