"""Follows the stream through one layer's call: which tensor is the stream, a norm of it, or a branch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

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


def inside(call: Call) -> list[Call]:
    calls: list[Call] = []
    waiting = list(reversed(call.children))
    while waiting:
        inner = waiting.pop()
        calls.append(inner)
        waiting.extend(reversed(inner.children))
    return calls


@dataclass(frozen=True)
class _Part:
    source: Call
    factor: Factor = None


@dataclass(frozen=True)
class _Tag:
    """What a tensor is: the stream, a norm of it, or a branch of several parts."""

    kind: str  # stream | normed | branch
    parts: tuple[_Part, ...] = ()
    norm: Call | None = None  # of "normed": the norm; of "branch": the out_norm after it
    sum: int = -1  # of "stream" and "normed": the value of the sum that it is, or is a norm of


@dataclass(frozen=True)
class _Sum:
    """An addition to the stream: ``branches``, None if no module returns it or it is the stream itself."""

    op: Op
    skips: tuple[_Tag, ...]
    branches: tuple[_Tag, ...] | None
    whole: bool = False  # whether a tensor that no module returns has the stream's shape


class TracedLayer:
    """The stream followed through one call: what is added to it, and where; norms are kept by the id of their call.

    Without ``describe`` only far enough to know what is added.
    """

    def __init__(self, call: Call, record: Trace, *, describe: bool = True):
        self.call, self.record = call, record
        self.shape: tuple[int, ...] = record.shapes[call.output] if call.output >= 0 else ()
        # ``argument``: where the stream is among the call's arguments
        self.argument, start = next(
            ((k, v) for k, v in call.inputs.items() if record.shapes[v] == self.shape and record.floating[v]), (0, -1)
        )
        low, high = (bisect.bisect_left(record.ops, t, key=lambda op: op.time) for t in (call.began, call.ended))
        self.calls, self.ops = inside(call), record.ops[low:high]
        self.additions: list[Addition] = []
        self.breaks: list[int] = []  # times at which something that no module returns was added
        self.reads: dict[int, int] = {}  # of a norm: the sum that it norms, -1 for another norm
        self.carried = {start}  # sums that go on as they are
        self.post: set[int] = set()  # norms whose output goes on as the stream
        self.out: set[int] = set()  # norms after a branch
        self.tags: dict[int, _Tag] = {start: _Tag("stream", sum=start)}
        self.sums: dict[int, _Sum] = {}  # by their values
        events: list[tuple[int, Call | Op]] = [(c.ended, c) for c in self.calls]
        events += [(o.time, o) for o in self.ops]
        for _, event in sorted(events, key=lambda e: e[0]):
            if isinstance(event, Call):
                self._leave(event)
            elif event.call is None or not self._in_norm(event.call):
                self._operate(event)
        self._keep_sums_of_the_stream()
        self._carry(self.tags.get(call.output))
        # Whose sum goes on nowhere else is a norm of the stream, too: FuseNorm's skip is the block's input.
        self.post |= {norm for norm, value in self.reads.items() if value >= 0 and value not in self.carried}
        if describe:
            self.same = {op.outputs[0]: op.inputs[0] for op in self.ops if op.kind == "same"}
            self._describe()

    def _in_norm(self, call: Call | None) -> bool:
        while call is not None and call is not self.call:
            if call.is_norm:
                return True
            call = call.parent
        return False

    def _keep_sums_of_the_stream(self) -> None:
        """Keep the additions to the stream that reach the call's output, or that a norm reads (FuseNorm's).

        RWKV adds the stream of the token before and passes the sum to its projections only: that is no addition.
        """
        last = self.tags.get(self.call.output)
        waiting = [last.sum] if last is not None and last.kind != "branch" else []
        waiting += [value for value in self.reads.values() if value in self.sums]
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
                    self.breaks.append(addition.op.time)
                continue
            self.out |= {id(tag.norm) for tag in addition.branches if tag.norm is not None}
            parts = sorted((p for tag in addition.branches for p in tag.parts), key=lambda p: p.source.began)
            self.additions.append(Addition(addition.op, [Branch(p.source, p.factor) for p in parts]))

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
                self.reads[id(call)] = before.sum if before.kind == "stream" else -1
            elif before is not None:
                self.tags[value] = _Tag("branch", (_Part(call),), norm=call)
            return
        if tag is not None and tag.kind != "branch":
            return  # a module that holds the addition, or the norm after it
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
            if factor.numel() not in (1, self.shape[-1]):
                return  # a gate: another tensor of the stream's shape
            factor = float(factor.detach()) if factor.numel() == 1 else factor.detach()
        parts = tuple(
            _Part(p.source, factor if p.factor is None else p.factor * factor if factor is not None else p.factor)
            for p in tag.parts
        )
        self.tags[op.outputs[0]] = replace(tag, parts=parts)

    def _fits(self, value: int) -> bool:
        """Tell whether a tensor can be the stream: as many elements and channels (OPT flattens its tokens)."""
        shape = self.record.shapes[value]
        same = math.prod(shape) == math.prod(self.shape) and shape[-1:] == self.shape[-1:]
        return same and self.record.floating[value]

    def _carry(self, tag: _Tag | None) -> None:
        """Mark this tensor as the stream."""
        if tag is None or tag.kind == "branch":
            return
        if tag.kind == "normed" and tag.norm is not None:
            self.post.add(id(tag.norm))
        else:
            self.carried.add(tag.sum)

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

    def _describe(self) -> None:
        marks = sorted([a.op.time for a in self.additions] + self.breaks)
        units = [c for c in self.calls if not c.is_norm and not any(c.began < m < c.ended for m in marks)]
        ids = {id(c) for c in units}
        units = [c for c in units if id(c.parent) not in ids]
        branches = [b for a in self.additions for b in a.branches]
        claimed = {id(c): b for b in branches for c in units if b.source.within(c)}
        for addition in self.additions:
            end = addition.op.time
            begin = max((m for m in marks if m < end), default=self.call.began)
            for branch in addition.branches:
                calls = [c for c in units if claimed.get(id(c)) is branch]
                if len(addition.branches) == 1:  # other calls before it, unless they are another branch's
                    calls = [c for c in units if c in calls or (id(c) not in claimed and begin < c.began < end)]
                calls = calls or [branch.source]
                others = [c for c in units if id(c) in claimed and claimed[id(c)] is not branch]
                self._fill(branch, calls, [o for o in self.ops if _mine(o, calls, others, begin, end)])
        for number, addition in enumerate(self.additions):  # once all modules are known: two may read one norm (Cohere)
            addition.after = self._after(addition.op.outputs[0])
            self._give_norms(number, addition, max((m for m in marks if m < addition.op.time), default=self.call.began))
        end = self.additions[-1].op.time if self.additions else 0
        for norm in (c for c in self.calls if c.is_norm and c.began > end and id(c) in self.post):
            self.additions[-1].branches[-1].norms.append(("post_norm", norm))

    def _fill(self, branch: Branch, modules: list[Call], ops: list[Op]) -> None:
        branch.modules = [c for c in modules if _has_parameters(c)]
        leaves = [c for m in modules for c in [m, *inside(m)] if c.is_leaf]
        linears = [c for c in leaves if _is_projection(c.module) and c.output >= 0]
        width = self.shape[-1]
        if any(o.kind == "attention" for o in ops):
            branch.kind = "attention"
            return
        if any(o.kind == "choice" for o in ops):  # experts
            return
        convolves = any(isinstance(part, nn.Conv1d) for m in modules for part in m.module.modules())
        if convolves or not any(_is_projection(c.module) for c in leaves):
            branch.kind = "mixer"
            return
        shape = self.record.shapes
        downs = [c for c in linears if shape[c.output][-1] == width]
        down = downs[-1] if downs else None
        if down is not None:
            ups = [c for c in linears if c.ended < down.began and shape[_first(c)][-1] == width]
            if ups:
                branch.up, branch.down = ups, down
                branch.pre = self._pre(leaves, ops, down, shape[_first(down)][-1])
                return

    def _pre(self, leaves: list[Call], ops: list[Op], down: Call, inner: int) -> Point | None:
        """Return what goes into the nonlinearity: the input of a module of its own, or a projection's output."""
        for c in leaves:
            x = _first(c)
            is_activation = not _is_projection(c.module) and not _has_parameters(c)
            changes = x >= 0 and c.output >= 0 and c.output != x
            if c.ended < down.began and is_activation and changes and self.record.shapes[x][-1] == inner:
                return Point(c.module, c.path, "input", c.number, None, next(iter(c.inputs)))
        for op in ops:
            if op.kind == "activation" and op.time < down.began and self.record.shapes[op.inputs[0]][-1] == inner:
                source = next((c for c in leaves if c.output == op.inputs[0]), None)
                return Point(source.module, source.path, "output", source.number) if source is not None else None
        return None

    def entry_of(self, branch: Branch) -> Point | None:
        """Return what goes into the branch's first module: its first input of the stream's shape."""
        first = next(iter(branch.modules), branch.source)
        key = next((key for key, value in first.inputs.items() if self._fits(value)), None)
        return None if key is None else Point(first.module, first.path, "input", first.number, None, key)

    def _after(self, value: int) -> Point | None:
        """Return where the stream after an addition can be watched: after its post_norm if it has one."""
        norm = next((c for c in self.calls if id(c) in self.post and value in self._same(c)), None)
        if norm is not None:
            return Point(norm.module, norm.path, "output", norm.number)
        if origin(self.call.output, self.same) == value:
            return Point(self.call.module, self.call.path, "output", self.call.number)
        for c in self.calls:
            if c.output not in c.inputs.values() and origin(c.output, self.same) == value:
                return Point(c.module, c.path, "output", c.number)
        for c in self.calls:
            for key, argument in c.inputs.items():
                if origin(argument, self.same) == value:
                    return Point(c.module, c.path, "input", c.number, None, key)
        return None

    def _same(self, call: Call) -> set[int]:
        values = set(call.inputs.values())
        for op in reversed(self.ops):
            if op.kind == "same" and op.outputs[0] in values:
                values.add(op.inputs[0])
        return values

    def _give_norms(self, number: int, addition: Addition, begin: int) -> None:
        """Add the norms since the last sum to the branches that they belong to."""
        for norm in (c for c in self.calls if c.is_norm and begin < c.began < addition.op.time):
            if id(norm) in self.out:
                role = "out_norm"
            elif id(norm) not in self.reads:
                role = "inner_norm"
            elif id(norm) in self.post and number > 0:  # of the sum before
                self.additions[number - 1].branches[-1].norms.append(("post_norm", norm))
                continue
            else:
                role = "pre_norm"
            around = [b for b in addition.branches if any(norm.within(m) for m in b.modules)]
            later = [b for a in self.additions[number:] for b in a.branches]
            reading = [b for b in later if any(norm.output in m.inputs.values() for m in b.modules)]
            for branch in around or reading or addition.branches[:1]:
                branch.norms.append((role, norm))


def _mine(op: Op, modules: list[Call], others: list[Call], begin: int, end: int) -> bool:
    """Tell whether an operation is in a branch: in its modules, or between two sums and in no other branch."""
    if any(m.began < op.time < m.ended for m in modules):
        return True
    return begin < op.time < end and not any(m.began < op.time < m.ended for m in others)


def origin(value: int | None, same: Mapping[int, int]) -> int | None:
    """Follow a value to the one that it is a copy of."""
    while value is not None and value in same:
        value = same[value]
    return value


def _first(call: Call) -> int:
    return next(iter(call.inputs.values()), -1)


def _is_projection(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _has_parameters(call: Call) -> bool:
    return any(True for _ in call.module.parameters())
