"""The branches of a layer: their kinds, modules, norms and measuring points."""

from __future__ import annotations

import torch
from torch import nn

from lamina.probes.structure.sites import Point
from lamina.probes.structure.traced import Addition, Branch, StreamRecord, inside
from lamina.probes.structure.tracing import Call, Op


def describe_branches(record: StreamRecord) -> None:
    """Fill in the branches of the record's additions."""
    _Describer(record).describe()


class _Describer:
    def __init__(self, record: StreamRecord):
        self.traced = record
        self.same = {op.outputs[0]: op.inputs[0] for op in record.ops if op.kind == "same"}

    def describe(self) -> None:
        marks = sorted([a.op.time for a in self.traced.additions] + self.traced.breaks)
        units = [c for c in self.traced.calls if not self._holds_sum(c, marks) and not c.is_norm]
        ids = {id(c) for c in units}
        units = [c for c in units if id(c.parent) not in ids]
        branches = [b for a in self.traced.additions for b in a.branches]
        claimed = {id(c): b for b in branches for c in units if b.source.within(c)}
        for number, addition in enumerate(self.traced.additions):
            end = addition.op.time
            begin = max((m for m in marks if m < end), default=self.traced.call.began)
            for branch in addition.branches:
                calls = [c for c in units if claimed.get(id(c)) is branch]
                if len(addition.branches) == 1:  # other calls before it, unless they are another branch's
                    calls = [c for c in units if c in calls or (id(c) not in claimed and begin < c.began < end)]
                calls = calls or [branch.source]
                others = [c for c in units if id(c) in claimed and claimed[id(c)] is not branch]
                self._fill(branch, calls, [o for o in self.traced.ops if _mine(o, calls, others, begin, end)])
            addition.after = self._after(addition.op.outputs[0])
            self._give_norms(number, addition, begin)
        end = self.traced.additions[-1].op.time if self.traced.additions else 0
        for norm in (c for c in self.traced.calls if c.is_norm and c.began > end and id(c) in self.traced.post):
            self.traced.additions[-1].branches[-1].norms.append(("post_norm", norm))

    @staticmethod
    def _holds_sum(call: Call, marks: list[int]) -> bool:
        return any(call.began < mark < call.ended for mark in marks)

    def _fill(self, branch: Branch, modules: list[Call], ops: list[Op]) -> None:
        branch.modules = [c for c in modules if _has_parameters(c)]
        leaves = [c for m in modules for c in [m, *inside(m)] if c.is_leaf]
        linears = [c for c in leaves if _is_projection(c.module) and c.output >= 0]
        width = self.traced.shape[-1]
        if any(o.kind == "attention" for o in ops):
            branch.kind = "attention"
            return
        if any(o.kind == "choice" for o in ops):  # experts
            return
        convolves = any(isinstance(part, nn.Conv1d) for m in modules for part in m.module.modules())
        if convolves or not any(_is_projection(c.module) for c in leaves):
            branch.kind = "mixer"
            return
        shape = self.traced.record.shapes
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
            is_activation = not _is_projection(c.module) and not _has_parameters(c)
            changes = x >= 0 and c.output >= 0 and c.output != x
            if c.ended < down.began and is_activation and changes and self.traced.record.shapes[x][-1] == inner:
                return Point(c.module, c.path, "input", c.number, None, next(iter(c.inputs)))
        for op in ops:
            if (
                op.kind == "activation"
                and op.time < down.began
                and self.traced.record.shapes[op.inputs[0]][-1] == inner
            ):
                source = next((c for c in leaves if c.output == op.inputs[0]), None)
                return Point(source.module, source.path, "output", source.number) if source is not None else None
        return None

    def _after(self, value: int) -> Point | None:
        """A place where the stream behind an addition can be watched: behind its post_norm where it has one."""
        norm = next((c for c in self.traced.calls if id(c) in self.traced.post and value in self._same(c)), None)
        if norm is not None:
            return Point(norm.module, norm.path, "output", norm.number)
        if _origin(self.traced.call.output, self.same) == value:
            return Point(self.traced.call.module, self.traced.call.path, "output", self.traced.call.number)
        for c in self.traced.calls:
            if c.output not in c.inputs.values() and _origin(c.output, self.same) == value:
                return Point(c.module, c.path, "output", c.number)
        for c in self.traced.calls:
            for key, argument in c.inputs.items():
                if _origin(argument, self.same) == value:
                    return Point(c.module, c.path, "input", c.number, None, key)
        return None

    def _same(self, call: Call) -> set[int]:
        values = set(call.inputs.values())
        for op in reversed(self.traced.ops):
            if op.kind == "same" and op.outputs[0] in values:
                values.add(op.inputs[0])
        return values

    def _give_norms(self, number: int, addition: Addition, begin: int) -> None:
        """Add the norms since the last sum to the branches that they belong to."""
        for norm in (c for c in self.traced.calls if c.is_norm and begin < c.began < addition.op.time):
            if id(norm) in self.traced.out:
                role = "out_norm"
            elif id(norm) not in self.traced.reads:
                role = "inner_norm"
            elif id(norm) in self.traced.post and number > 0:  # of the sum before
                self.traced.additions[number - 1].branches[-1].norms.append(("post_norm", norm))
                continue
            else:
                role = "pre_norm"
            around = [b for b in addition.branches if any(norm.within(m) for m in b.modules)]
            later = [b for a in self.traced.additions[number:] for b in a.branches]
            reading = [b for b in later if any(norm.output in m.inputs.values() for m in b.modules)]
            for branch in around or reading or addition.branches[:1]:
                branch.norms.append((role, norm))


def _mine(op: Op, modules: list[Call], others: list[Call], begin: int, end: int) -> bool:
    """Whether an operation belongs to a branch: in its modules, or between two sums and outside other branches."""
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


def _has_parameters(call: Call) -> bool:
    return any(True for _ in call.module.parameters())
