"""Follows the stream through one layer's call: which tensor is the stream, a norm of it, or a branch."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from lamina.probes.structure.branches import describe_branches
from lamina.probes.structure.traced import Addition, Branch, StreamRecord, TracedLayer, inside
from lamina.probes.structure.tracing import Call, Factor, Op, Trace


@dataclass(frozen=True)
class _Part:
    source: Call
    factor: Factor = None


@dataclass(frozen=True)
class _Tag:
    """What a tensor is: the stream, a norm of it, or a branch made of parts."""

    kind: str  # stream | normed | branch
    parts: tuple[_Part, ...] = ()
    norm: Call | None = None  # of "normed": the norm; of "branch": the out_norm behind it
    sum: int = -1  # of "stream" and "normed": the value of the sum that it is, or is a norm of


@dataclass(frozen=True)
class _Sum:
    """Something added to the stream: ``branches``, None if no module returns it or it is the stream itself."""

    op: Op
    skips: tuple[_Tag, ...]
    branches: tuple[_Tag, ...] | None
    whole: bool = False  # whether a tensor that no module returns has the stream's shape


def read_layer(call: Call, record: Trace, *, describe: bool = True) -> TracedLayer:
    """Follow the stream through a call; without ``describe`` only far enough to know what is added."""
    shape = record.shapes[call.output] if call.output >= 0 else ()
    argument, start = next(
        ((k, v) for k, v in call.inputs.items() if record.shapes[v] == shape and record.floating[v]), (0, -1)
    )
    return _Reader(call, record, shape, start).read(argument, describe)


class _Reader:
    def __init__(self, call: Call, record: Trace, shape: tuple[int, ...], start: int):
        self.traced = StreamRecord(call, record, shape, inside(call), _ops_within(call, record), carried={start})
        self.tags: dict[int, _Tag] = {start: _Tag("stream", sum=start)}
        self.sums: dict[int, _Sum] = {}  # by their values

    def read(self, argument: int | str, describe: bool) -> TracedLayer:
        events: list[tuple[int, Call | Op]] = [(c.ended, c) for c in self.traced.calls]
        events += [(o.time, o) for o in self.traced.ops]
        for _, event in sorted(events, key=lambda e: e[0]):
            if isinstance(event, Call):
                self._leave(event)
            elif event.call is None or not _in_norm(event.call, self.traced.call):
                self._operate(event)
        self._keep_sums_of_the_stream()
        self._carry(self.tags.get(self.traced.call.output))
        # Whose sum goes on nowhere else is a norm of the stream, too: FuseNorm's skip is the block's input.
        self.traced.post |= {
            norm for norm, value in self.traced.reads.items() if value >= 0 and value not in self.traced.carried
        }
        if describe:
            describe_branches(self.traced)
        return TracedLayer(self.traced.call, self.traced.additions, argument, len(self.traced.breaks))

    def _keep_sums_of_the_stream(self) -> None:
        """Keep the additions to the stream that reach the call's output, or that a norm reads (FuseNorm's).

        RWKV adds the stream of the token before and passes the sum to its projections only: that is no addition.
        """
        last = self.tags.get(self.traced.call.output)
        waiting = [last.sum] if last is not None and last.kind != "branch" else []
        waiting += [value for value in self.traced.reads.values() if value in self.sums]
        carried: set[int] = set()
        while waiting:
            value = waiting.pop()
            if value in carried or value not in self.sums:
                continue
            carried.add(value)
            waiting += [tag.sum for tag in self.sums[value].skips]
        for value in sorted(carried, key=lambda value: self.sums[value].op.time):
            addition = self.sums[value]
            for tag in addition.skips:
                self._carry(tag)
            if addition.branches is None:
                if addition.whole:
                    self.traced.breaks.append(addition.op.time)
                continue
            self.traced.out |= {id(tag.norm) for tag in addition.branches if tag.norm is not None}
            parts = sorted((p for tag in addition.branches for p in tag.parts), key=lambda p: p.source.began)
            self.traced.additions.append(Addition(addition.op, [Branch(p.source, p.factor) for p in parts]))

    def _leave(self, call: Call) -> None:
        value = call.output
        if value < 0 or not self._fits(value):
            return
        if value in call.inputs.values():  # dropout in evaluation mode, an identity
            return
        tag = self.tags.get(value)
        if call.is_norm:
            before = next((self.tags[v] for v in call.inputs.values() if v in self.tags), None)
            if before is not None and before.kind in ("stream", "normed"):
                self.tags[value] = _Tag("normed", norm=call, sum=before.sum)
                # The norm of a norm is the next module's own, unless its output goes on.
                self.traced.reads[id(call)] = before.sum if before.kind == "stream" else -1
            elif before is not None:
                self.tags[value] = _Tag("branch", (_Part(call),), norm=call)
            return
        if tag is not None and tag.kind != "branch":
            return  # a module that holds the addition, or the norm behind it
        within = tag is not None and tag.parts and all(p.source.within(call) for p in tag.parts)
        if tag is None or within:
            keeps = tag is not None and tag.norm is not None and tag.norm.output == value
            self.tags[value] = replace(tag, parts=(_Part(call),)) if tag and keeps else _Tag("branch", (_Part(call),))

    def _operate(self, op: Op) -> None:
        if not op.outputs or not self._fits(op.outputs[0]):
            return
        tags = [self.tags.get(v) for v in op.inputs]
        if op.kind == "same" and tags and tags[0] is not None:
            self.tags[op.outputs[0]] = tags[0]
        elif op.kind == "scale":
            self._scale(op, tags)
        elif op.kind == "add" and len(tags) == 2:
            self._add(op, tags[0], tags[1])

    def _scale(self, op: Op, tags: list[_Tag | None]) -> None:
        index = next((i for i, t in enumerate(tags) if t is not None), None)
        if index is None:
            return
        tag = tags[index]
        assert tag is not None
        assert op.factor is not None  # of a scaling
        factor: Any = op.factor[index]
        if isinstance(factor, torch.Tensor):
            if factor.numel() not in (1, self.traced.shape[-1]):
                return  # a gate: another tensor of the stream's shape
            factor = float(factor) if factor.numel() == 1 else factor.detach()
        parts = tuple(
            _Part(p.source, factor if p.factor is None else p.factor * factor if factor is not None else p.factor)
            for p in tag.parts
        )
        self.tags[op.outputs[0]] = replace(tag, parts=parts)

    def _fits(self, value: int) -> bool:
        """Whether a tensor can be the stream: the same number of elements and channels (OPT flattens its tokens)."""
        shape = self.traced.record.shapes[value]
        same = math.prod(shape) == math.prod(self.traced.shape) and shape[-1:] == self.traced.shape[-1:]
        return same and self.traced.record.floating[value]

    def _carry(self, tag: _Tag | None) -> None:
        """Mark this tensor as the stream."""
        if tag is None or tag.kind == "branch":
            return
        if tag.kind == "normed" and tag.norm is not None:
            self.traced.post.add(id(tag.norm))
        else:
            self.traced.carried.add(tag.sum)

    def _add(self, op: Op, a: _Tag | None, b: _Tag | None) -> None:
        out = op.outputs[0]
        if a is None or b is None:
            known = a or b
            if known is not None and known.kind != "branch":
                # the stream plus something that no module returns: it cannot be watched
                self.sums[out] = _Sum(op, (known,), None, all(self._fits(v) for v in op.inputs))
                self.tags[out] = _Tag("stream", sum=out)
            return
        streams = tuple(t for t in (a, b) if t.kind != "branch")
        branches = tuple(t for t in (a, b) if t.kind == "branch")
        if not streams:
            self.tags[out] = _Tag("branch", a.parts + b.parts)
            return
        self.sums[out] = _Sum(op, streams, branches or None)
        self.tags[out] = _Tag("stream", sum=out)


def _ops_within(call: Call, record: Trace) -> list[Op]:
    low = bisect.bisect_left(record.ops, call.began, key=lambda op: op.time)
    return record.ops[low : bisect.bisect_left(record.ops, call.ended, key=lambda op: op.time)]


def _in_norm(call: Call | None, until: Call) -> bool:
    while call is not None and call is not until:
        if call.is_norm:
            return True
        call = call.parent
    return False
