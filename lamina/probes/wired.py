"""How one layer's call is wired: the stream through it, the branches that are added to it, and the norms' places."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lamina.probes.structure import Point
from lamina.probes.tracing import Call, Op, Trace


@dataclass(eq=False)
class Branch:
    """What one module computes for the stream."""

    source: Call  # its output, times factor, is what is added
    factor: Any = None
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
class Layer:
    call: Call
    additions: list[Addition]
    argument: int | str  # where the call's stream is among its arguments
    unnamed: int = 0  # additions of what no module hands over


@dataclass(frozen=True)
class _Part:
    source: Call
    factor: Any = None


@dataclass(frozen=True)
class _Tag:
    """What a tensor is: the stream, a norm of it, or a branch made of parts."""

    kind: str  # stream | normed | branch
    parts: tuple[_Part, ...] = ()
    norm: Call | None = None  # of "normed": the norm; of "branch": the out_norm behind it
    sum: int = -1  # of "stream" and "normed": the value of the sum that it is, or is a norm of


def read_layer(call: Call, record: Trace, *, describe: bool = True) -> Layer:
    """Follow the stream through a call; without ``describe`` only far enough to know what is added to it."""
    shape = record.shapes[call.output] if call.output >= 0 else ()
    argument, start = next(
        ((k, v) for k, v in call.inputs.items() if record.shapes[v] == shape and record.floating[v]), (0, -1)
    )
    return _Reader(call, record, shape, start).read(argument, describe)


class _Reader:
    def __init__(self, call: Call, record: Trace, shape: tuple[int, ...], start: int):
        self.call, self.record, self.shape = call, record, shape
        self.calls = _inside(call)
        self.ops = _ops_within(call, record)
        self.tags: dict[int, _Tag] = {start: _Tag("stream", sum=start)}
        self.post: set[int] = set()  # norms (by id) whose output goes on as the stream
        self.out: set[int] = set()
        self.additions: list[Addition] = []
        self.breaks: list[int] = []  # times at which something without a name was added
        self.reads: dict[int, int] = {}  # id(norm call) -> the sum that it norms
        self.carried = {start}  # sums that go on as they are

    def read(self, argument: int | str, describe: bool) -> Layer:
        events: list[tuple[int, Any]] = [(c.ended, c) for c in self.calls] + [(o.time, o) for o in self.ops]
        for _, event in sorted(events, key=lambda e: e[0]):
            if isinstance(event, Call):
                self._leave(event)
            elif event.call is None or not _in_norm(event.call, self.call):
                self._operate(event)
        self._carry(self.tags.get(self.call.output))
        # Whose sum goes on nowhere else is a norm of the stream, too: FuseNorm's skip is the block's input.
        self.post |= {norm for norm, value in self.reads.items() if value >= 0 and value not in self.carried}
        if describe:
            self._describe()
        return Layer(self.call, self.additions, argument, len(self.breaks))

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
            return  # a module that holds the addition, or the norm behind it
        inside = tag is not None and tag.parts and all(p.source.within(call) for p in tag.parts)
        if tag is None or inside:
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
        factor: Any = op.factor[index]
        if isinstance(factor, torch.Tensor):
            if factor.numel() not in (1, self.shape[-1]):
                return  # a gate: another tensor of the stream's shape
            factor = float(factor) if factor.numel() == 1 else factor.detach()
        parts = tuple(
            _Part(p.source, factor if p.factor is None else p.factor * factor if factor is not None else p.factor)
            for p in tag.parts
        )
        self.tags[op.outputs[0]] = replace(tag, parts=parts)

    def _fits(self, value: int) -> bool:
        """Whether a tensor can be the stream: as many numbers, as many channels (OPT flattens its tokens)."""
        shape = self.record.shapes[value]
        same = math.prod(shape) == math.prod(self.shape) and shape[-1:] == self.shape[-1:]
        return same and self.record.floating[value]

    def _carry(self, tag: _Tag | None) -> None:
        """The stream goes on as this tensor."""
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
                # the stream and something that no module hands over: what is added can't be watched
                self._carry(known)
                self.tags[out] = _Tag("stream", sum=out)
                if all(self._fits(v) for v in op.inputs):
                    self.breaks.append(op.time)
            return
        streams = [t for t in (a, b) if t.kind != "branch"]
        branches = [t for t in (a, b) if t.kind == "branch"]
        if not streams:
            self.tags[out] = _Tag("branch", a.parts + b.parts)
            return
        for t in streams:
            self._carry(t)
        if branches:
            for t in branches:
                if t.norm is not None:
                    self.out.add(id(t.norm))
            parts = sorted((p for t in branches for p in t.parts), key=lambda p: p.source.began)
            self.additions.append(Addition(op, [Branch(p.source, p.factor) for p in parts]))
        self.tags[out] = _Tag("stream", sum=out)

    def _describe(self) -> None:
        """Kinds, modules, norms and measuring points of what was found."""
        marks = sorted([a.op.time for a in self.additions] + self.breaks)
        units = [c for c in self.calls if not self._holds_sum(c, marks) and not c.is_norm]
        ids = {id(c) for c in units}
        units = [c for c in units if id(c.parent) not in ids]
        branches = [b for a in self.additions for b in a.branches]
        claimed = {id(c): b for b in branches for c in units if b.source.within(c)}
        for number, addition in enumerate(self.additions):
            end = addition.op.time
            begin = max((m for m in marks if m < end), default=self.call.began)
            for branch in addition.branches:
                mine = [c for c in units if claimed.get(id(c)) is branch]
                if len(addition.branches) == 1:  # what else ran before it, unless another branch's
                    mine = [c for c in units if c in mine or (id(c) not in claimed and begin < c.began < end)]
                mine = mine or [branch.source]
                others = [c for c in units if id(c) in claimed and claimed[id(c)] is not branch]
                self._fill(branch, mine, [o for o in self.ops if _mine(o, mine, others, begin, end)])
            addition.after = self._after(addition.op.outputs[0])
            self._give_norms(number, addition, begin)
        end = self.additions[-1].op.time if self.additions else 0
        for norm in (c for c in self.calls if c.is_norm and c.began > end and id(c) in self.post):
            self.additions[-1].branches[-1].norms.append(("post_norm", norm))

    @staticmethod
    def _holds_sum(call: Call, marks: list[int]) -> bool:
        return any(call.began < mark < call.ended for mark in marks)

    def _fill(self, branch: Branch, modules: list[Call], ops: list[Op]) -> None:
        branch.modules = [c for c in modules if any(True for _ in c.module.parameters())]
        leaves = [c for m in modules for c in [m, *_inside(m)] if c.is_leaf]
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
        """What goes into the nonlinearity: the input of a module of its own, or a projection's output."""
        for c in leaves:
            x = _first(c)
            is_activation = not _is_projection(c.module) and not any(True for _ in c.module.parameters())
            changes = x >= 0 and c.output >= 0 and c.output != x
            if c.ended < down.began and is_activation and changes and self.record.shapes[x][-1] == inner:
                return Point(c.module, c.path, "input", c.number, None, next(iter(c.inputs)))
        for op in ops:
            if op.kind == "activation" and op.time < down.began and self.record.shapes[op.inputs[0]][-1] == inner:
                made = next((c for c in leaves if c.output == op.inputs[0]), None)
                return Point(made.module, made.path, "output", made.number) if made is not None else None
        return None

    def _after(self, value: int) -> Point | None:
        """A place where the stream behind an addition can be watched: behind its post_norm where it has one."""
        norm = next((c for c in self.calls if id(c) in self.post and value in self._same(c)), None)
        if norm is not None:
            return Point(norm.module, norm.path, "output", norm.number)
        same = {op.outputs[0]: op.inputs[0] for op in self.ops if op.kind == "same"}
        if _origin(self.call.output, same) == value:
            return Point(self.call.module, self.call.path, "output", self.call.number)
        for c in self.calls:
            if c.output not in c.inputs.values() and _origin(c.output, same) == value:
                return Point(c.module, c.path, "output", c.number)
        for c in self.calls:
            for key, taken in c.inputs.items():
                if _origin(taken, same) == value:
                    return Point(c.module, c.path, "input", c.number, None, key)
        return None

    def _same(self, call: Call) -> set[int]:
        values = set(call.inputs.values())
        for op in reversed(self.ops):
            if op.kind == "same" and op.outputs[0] in values:
                values.add(op.inputs[0])
        return values

    def _give_norms(self, number: int, addition: Addition, begin: int) -> None:
        """The norms that ran since the sum before, to the branch that they belong to."""
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
            inside = [b for b in addition.branches if any(norm.within(m) for m in b.modules)]
            later = [b for a in self.additions[number:] for b in a.branches]
            reading = [b for b in later if any(norm.output in m.inputs.values() for m in b.modules)]
            for branch in inside or reading or addition.branches[:1]:
                branch.norms.append((role, norm))


def _inside(call: Call) -> list[Call]:
    found: list[Call] = []
    waiting = list(reversed(call.children))
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting.extend(reversed(one.children))
    return found


def _ops_within(call: Call, record: Trace) -> list[Op]:
    low = bisect.bisect_left(record.ops, call.began, key=lambda op: op.time)
    return record.ops[low : bisect.bisect_left(record.ops, call.ended, key=lambda op: op.time)]


def _in_norm(call: Call | None, until: Call) -> bool:
    while call is not None and call is not until:
        if call.is_norm:
            return True
        call = call.parent
    return False


def _mine(op: Op, modules: list[Call], others: list[Call], begin: int, end: int) -> bool:
    """Whether an operation belongs to a branch: it is in its modules, or between two sums and in no other branch's."""
    if any(m.began < op.time < m.ended for m in modules):
        return True
    return begin < op.time < end and not any(m.began < op.time < m.ended for m in others)


def _origin(value: int, same: dict[int, int]) -> int:
    while value in same:
        value = same[value]
    return value


def _first(call: Call) -> int:
    return next(iter(call.inputs.values()), -1)


def _is_projection(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
