"""How one layer's call is wired: what is added to the stream, and how its branches differ."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.probes.structure.sites import Point
from lamina.probes.structure.tracing import Call, Factor, Op, Trace


@dataclass(eq=False)
class Branch:
    """What one module computes for the stream."""

    source: Call  # its output, times factor, is what is added
    factor: Factor = None
    kind: str = "feed_forward"
    norms: list[tuple[str, Call]] = field(default_factory=list)
    modules: list[Call] = field(default_factory=list)
    up: list[Call] = field(default_factory=list)
    down: Call | None = None
    pre: Point | None = None


@dataclass(eq=False)
class Addition:
    """Branches added to the stream at one moment (two where they run side by side)."""

    op: Op
    branches: list[Branch]
    after: Point | None = None


@dataclass(eq=False)
class TracedLayer:
    call: Call
    additions: list[Addition]
    argument: int | str  # where the call's stream is among its arguments
    unnamed: int = 0  # additions of something that no module returns


@dataclass(eq=False)
class StreamRecord:
    """The result of following the stream through a call; norms are keyed by the id of their call."""

    call: Call
    record: Trace
    shape: tuple[int, ...]  # of the stream
    calls: list[Call]  # inside the call
    ops: list[Op]
    additions: list[Addition] = field(default_factory=list)
    breaks: list[int] = field(default_factory=list)  # times at which something that no module returns was added
    reads: dict[int, int] = field(default_factory=dict)  # of a norm: the sum that it norms, -1 for another norm
    carried: set[int] = field(default_factory=set)  # sums that go on as they are
    post: set[int] = field(default_factory=set)  # norms whose output goes on as the stream
    out: set[int] = field(default_factory=set)  # norms behind a branch


def inside(call: Call) -> list[Call]:
    calls: list[Call] = []
    waiting = list(reversed(call.children))
    while waiting:
        inner = waiting.pop()
        calls.append(inner)
        waiting.extend(reversed(inner.children))
    return calls
