"""Find a model's layers and sub-layers by following the residual stream through one forward pass."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lamina.errors import UserError
from lamina.probes.structure.hooks import evaluating, takes_cache
from lamina.probes.structure.sites import FeedForward, LayerSite, NormSite, Point, Structure, SublayerSite, is_norm
from lamina.probes.structure.token_rows import text_config
from lamina.probes.structure.tracing import Call, Factor, Op, Trace, trace


@dataclass(eq=False)
class Branch:
    """The tensor that one module adds to the residual stream."""

    source: Call  # the module adds this call's output times ``factor``
    factor: Factor = None
    kind: str = "feed_forward"
    norms: list[tuple[str, Call]] = field(default_factory=list)
    modules: list[Call] = field(default_factory=list)
    up: list[Call] = field(default_factory=list)
    down: Call | None = None
    pre: Point | None = None


@dataclass(eq=False)
class Addition:
    """One sum on the residual stream. Parallel attention and feed-forward are two branches of one sum."""

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
    """The mark of a traced tensor: the residual stream, a normed copy of the stream, or the output of a branch."""

    kind: str  # stream | normed | branch
    parts: tuple[_Part, ...] = ()
    norm: Call | None = None  # the norm that made a "normed" tensor, or the out_norm of a "branch"
    sum: int = -1  # tensor number of the "stream", or of the stream before the norm of a "normed" tensor


@dataclass(frozen=True)
class _Sum:
    op: Op
    skips: tuple[_Tag, ...]
    branches: tuple[_Tag, ...] | None  # None if the added tensor is the stream or no module's output
    whole: bool = False  # whether a tensor that no module returns fills the stream's shape


class TracedLayer:
    """The residual stream inside one module call, and the tensors that the call adds to the stream."""

    def __init__(self, call: Call, record: Trace, *, describe: bool = True):
        self.call, self.record = call, record
        self.shape: tuple[int, ...] = record.shapes[call.output] if call.output >= 0 else ()
        # ``argument``: the position or keyword of the stream among the call's arguments
        self.argument, start = next(
            ((k, v) for k, v in call.inputs.items() if record.shapes[v] == self.shape and record.floating[v]), (0, -1)
        )
        low, high = (bisect.bisect_left(record.ops, t, key=lambda op: op.time) for t in (call.began, call.ended))
        self.calls, self.ops = inside(call), record.ops[low:high]
        self.additions: list[Addition] = []
        self.breaks: list[int] = []  # times of additions of a tensor that no module returns
        self.reads: dict[int, int] = {}  # by norm: number of the stream tensor that it reads, -1 after another norm
        self.carried = {start}  # stream tensors that the output or a later sum reads without a norm
        self.post: set[int] = set()  # norms whose output becomes the stream
        self.out: set[int] = set()  # norms on a branch's output
        self.tags: dict[int, _Tag] = {start: _Tag("stream", sum=start)}
        self.sums: dict[int, _Sum] = {}  # by the tensor number of the result
        events: list[tuple[int, Call | Op]] = [(c.ended, c) for c in self.calls]
        events += [(o.time, o) for o in self.ops]
        for _, event in sorted(events, key=lambda e: e[0]):
            if isinstance(event, Call):
                self._leave(event)
            elif event.call is None or not self._in_norm(event.call):
                self._operate(event)
        self._keep_sums_of_the_stream()
        self._carry(self.tags.get(call.output))
        # If only a norm reads a sum, the norm is a post-norm, too (FuseNorm, in which the skip is the block's input).
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
        """Drop the additions that reach neither the call's output nor a norm, such as RWKV's token shift."""
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
        if value in call.inputs.values():  # the module returns its input, as dropout does in evaluation mode
            return
        tag = self.tags.get(value)
        if call.is_norm:
            before = next((self.tags[v] for v in call.inputs.values() if v in self.tags), None)
            if before is not None and before.kind in ("stream", "normed"):
                self.tags[value] = _Tag("normed", norm=call, sum=before.sum)
                # A norm of a normed tensor belongs inside the next module, unless the norm's output becomes the stream.
                self.reads[id(call)] = before.sum if before.kind == "stream" else -1
            elif before is not None:
                self.tags[value] = _Tag("branch", (_Part(call),), norm=call)
            return
        if tag is not None and tag.kind != "branch":
            return  # the module contains the addition, or the addition and the norm after the addition
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
        assert op.factor is not None  # every scaling has a factor
        factor: Any = op.factor[index]
        if isinstance(factor, torch.Tensor):
            if factor.numel() not in (1, self.shape[-1]):
                return  # a gate, which has a factor for each token
            factor = float(factor.detach()) if factor.numel() == 1 else factor.detach()
        parts = tuple(
            _Part(p.source, factor if p.factor is None else p.factor * factor if factor is not None else p.factor)
            for p in tag.parts
        )
        self.tags[op.outputs[0]] = replace(tag, parts=parts)

    def _fits(self, value: int) -> bool:
        """Return whether a tensor is floating-point, with the stream's width and number of elements."""
        shape = self.record.shapes[value]  # OPT flattens sequences and tokens to one axis
        same = math.prod(shape) == math.prod(self.shape) and shape[-1:] == self.shape[-1:]
        return same and self.record.floating[value]

    def _carry(self, tag: _Tag | None) -> None:
        if tag is None or tag.kind == "branch":
            return
        if tag.kind == "normed" and tag.norm is not None:
            self.post.add(id(tag.norm))
        else:
            self.carried.add(tag.sum)

    def _add(self, op: Op, a: _Tag | None, b: _Tag | None) -> None:
        out = op.outputs[0]
        if a is None or b is None:
            group = a or b
            if group is not None and group.kind != "branch":
                # the stream plus a tensor that no module returns, so no hook can read the tensor
                self.sums[out] = _Sum(op, (group,), None, all(self._fits(v) for v in op.inputs))
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
                if len(addition.branches) == 1:  # also calls since the last addition, unless another branch has them
                    calls = [c for c in units if c in calls or (id(c) not in claimed and begin < c.began < end)]
                calls = calls or [branch.source]
                claimed_elsewhere = [c for c in units if id(c) in claimed and claimed[id(c)] is not branch]
                self.describe_branch(
                    branch, calls, [o for o in self.ops if _mine(o, calls, claimed_elsewhere, begin, end)]
                )
        for number, addition in enumerate(self.additions):  # when all modules are known (in Cohere, two read one norm)
            addition.after = self._after(addition.op.outputs[0])
            self._give_norms(number, addition, max((m for m in marks if m < addition.op.time), default=self.call.began))
        end = self.additions[-1].op.time if self.additions else 0
        for norm in (c for c in self.calls if c.is_norm and c.began > end and id(c) in self.post):
            self.additions[-1].branches[-1].norms.append(("post_norm", norm))

    def describe_branch(self, branch: Branch, modules: list[Call], ops: list[Op]) -> None:
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
        down = next((c for c in reversed(linears) if shape[c.output][-1] == width), None)
        if down is not None:
            ups = [c for c in linears if c.ended < down.began and shape[_first(c)][-1] == width]
            if ups:
                branch.up, branch.down = ups, down
                branch.pre = self._pre(leaves, ops, down, shape[_first(down)][-1])

    def _pre(self, leaves: list[Call], ops: list[Op], down: Call, inner: int) -> Point | None:
        """Return the point before the nonlinearity: the activation module's input, or a projection's output."""
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
        """Return the point where the residual stream, or a normed copy, enters the branch."""
        first = next(iter(branch.modules), branch.source)
        key = next((key for key, value in first.inputs.items() if self._fits(value)), None)
        return None if key is None else Point(first.module, first.path, "input", first.number, None, key)

    def _after(self, value: int) -> Point | None:
        """Return the point of the residual stream after an addition and any post-norm, or None if no module has it."""
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
        """Give a role and a branch to each norm between the previous addition and this addition."""
        for norm in (c for c in self.calls if c.is_norm and begin < c.began < addition.op.time):
            if id(norm) in self.out:
                role = "out_norm"
            elif id(norm) not in self.reads:
                role = "inner_norm"
            elif id(norm) in self.post and number > 0:  # the post-norm of the previous addition
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
    """Return whether an operation runs inside ``modules``, or between ``begin`` and ``end`` outside of ``others``."""
    if any(m.began < op.time < m.ended for m in modules):
        return True
    return begin < op.time < end and not any(m.began < op.time < m.ended for m in others)


def origin(value: int | None, same: Mapping[int, int]) -> int | None:
    """Follow copies back to the original tensor, and return the original's number in the trace."""
    while value is not None and value in same:
        value = same[value]
    return value


def _first(call: Call) -> int:
    return next(iter(call.inputs.values()), -1)


def _is_projection(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    # FSDP1 and ZeRO 3 keep a part of the weight, as a vector.
    flat = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return isinstance(weight, torch.Tensor) and (weight.ndim == 2 or flat) and not isinstance(module, nn.Embedding)


def _has_parameters(call: Call) -> bool:
    inner = call.module.modules()  # FSDP1 replaces a parameter with a view, which parameters() omits
    return any(True for _ in call.module.parameters()) or any("weight" in vars(module) for module in inner)


def find_structure(model: nn.Module, inputs: Mapping[str, torch.Tensor], *, layers: str | None = None) -> Structure:
    """Find a model's layers in one forward pass.

    Args:
        inputs: a tiny batch, because Lamina keeps every tensor of the pass in memory
        layers: the module path of the list of layers, such as ``encoder.block``. By default, Lamina finds the list.

    Raises:
        UserError: if Lamina finds no layers. The message explains how to name the layers.
    """
    more = {"use_cache": False} if takes_cache(type(model)) else {}
    with evaluating(model):
        record = trace(model, {**inputs, **more})
    if (declared := declared_structure(model, record)) is not None:
        return declared
    chains = _chains(record)
    calls = _named(model, record, layers) if layers else _choose(model, record, chains)
    resolved = [TracedLayer(call, record) for call in calls]
    width = record.shapes[calls[0].output][-1]
    notes = []
    strange = [i for i, layer in enumerate(resolved) if layer.breaks or not layer.additions]
    if strange:
        some = ", ".join(map(str, strange[:5])) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
        notes.append(
            f"layer {some} adds something other than a module's output to the residual stream. Lamina measures "
            "such a layer only as a whole, without its sub-layers"
        )
        for index in strange:
            resolved[index].additions.clear()
    first, last = calls[0], calls[-1]
    others = _outside_chains(chains, calls)
    if others and not layers:
        notes.append(
            f"Lamina measures the list of layers at {first.path}. The model has {sum(map(len, others))} more layers "
            f"({others[0][0].path}, ...). To measure another list of layers, give its path with --layers PATH"
        )
    outside = [("other", call.module) for chain in others for call in chain]
    for call in record.calls:  # without modules that contain layers
        if call.ended < first.began or call.began > last.ended:
            outside.append(("embedding" if call.ended < first.began else "readout", call.module))
    return Structure(
        layers=tuple(_site(i, layer) for i, layer in enumerate(resolved)),
        hidden_size=width,
        embedding=_asked(model, "get_input_embeddings"),
        embedding_norm=_outer_norm("embedding_norm", record, before=first),
        final_norm=_outer_norm("final_norm", record, after=last),
        head=_asked(model, "get_output_embeddings"),
        notes=notes,
        outside=tuple(outside),
        others=() if layers else tuple(dict.fromkeys(chain[0].path.rpartition(".")[0] for chain in others)),
    )


def declared_structure(model: nn.Module, record: Trace) -> Structure | None:
    """Return the structure of a Lamina model whose blocks return several hidden states, or None for other models."""
    # A checkpoint may contain its own copy of Lamina's code, so Lamina compares the names of the classes.
    named = list(model.named_modules())
    mixers = {type(getattr(part, "mixer", None)).__name__ for _, part in named}  # Mamba's blocks have a mixer, too
    blocks = [(path, part) for path, part in named if isinstance(getattr(part, "has_memory", None), bool)]
    if not blocks or not ("StreamMixer" in mixers or any(block.has_memory for _, block in blocks)):
        return None
    first = next((site for site in named if site[0].endswith("embedding_norm") and is_norm(site[1])), None)
    path, last = next((path, part) for path, part in named if type(part).__name__ == "Collapse")
    parts = dict(last.named_children())
    norm, reader = parts["norm"], parts.get("reader")
    end = None if reader is None else Point(reader, f"{path}.reader", "output")
    if end is not None and getattr(reader, "spec", {}).get("normed"):  # the reader norms some of the streams
        end = Point(last, path, "output")
    return Structure(
        layers=tuple(_declared_layer(i, path, block, record) for i, (path, block) in enumerate(blocks)),
        hidden_size=int(getattr(getattr(model, "config", None), "hidden_size", None) or 0),
        embedding=_asked(model, "get_input_embeddings"),
        embedding_norm=None if first is None else NormSite("embedding_norm", first[1], first[0]),
        final_norm=NormSite("final_norm", norm, f"{path}.norm") if is_norm(norm) else None,
        head=_asked(model, "get_output_embeddings"),
        notes=["The hidden states are the mean of the model's streams." if "StreamMixer" in mixers else _ONE_OF_MEMORY],
        end=end,
    )


def _declared_layer(index: int, path: str, block: nn.Module, record: Trace) -> LayerSite:
    halves = {kind: block.get_submodule(kind) for kind in ("attention", "feed_forward")}
    sublayers: list[SublayerSite] = []
    for kind, half in halves.items():
        path_of_kind = f"{path}.{kind}"
        last = "module" if half.out_norm is None else "out_norm"
        norms = [(name, part) for name, part in half.named_modules() if is_norm(part)]
        inner = next((call for call in record.calls if call.module is half.get_submodule("module")), None)
        sublayers.append(
            SublayerSite(
                kind,
                contribution=Point(half.get_submodule(last), f"{path_of_kind}.{last}", "output"),
                after=Point(half, path_of_kind, "output", collapse=True),
                norms=tuple(
                    NormSite("inner_norm" if "." in n else n, norm, f"{path_of_kind}.{n}") for n, norm in norms
                ),
                modules=((path_of_kind, half),),
                feed_forward=None if kind == "attention" or inner is None else _feed_forward_within(inner, record),
            )
        )
    parts = {**dict(block.named_children()), **dict(halves["attention"].named_children())}
    reads = parts.get("mixer") or parts.get("depth") or parts.get("sources")
    point = None if reads is None else Point(reads, f"{path}.reads", "output")
    return LayerSite(index, block, path, 0, tuple(sublayers), carries_more=True, reads=point)


_ONE_OF_MEMORY = (
    "The hidden states are the residual stream, without the earlier hidden states that the model also stores."
)


def _chains(record: Trace) -> list[list[Call]]:
    """Find chains of module calls in which each call adds to the output of the previous call."""
    chains: list[list[Call]] = []
    same = _sources(record.ops)
    for family in _families(record):
        run: list[Call] = []
        for call in family:
            if run and origin(_stream_input(call, record), same) != origin(run[-1].output, same):
                chains.append(run)
                run = []
            run.append(call)
        chains.append(run)
    return chains


def _families(record: Trace) -> list[list[Call]]:
    """Find the calls that add to a residual stream, and group these calls by parent module."""
    families: dict[int, list[Call]] = {}
    for call in record.calls:
        if call.parent is not None and _carries_stream(call, record):
            families.setdefault(id(call.parent), []).append(call)
    return list(families.values())


def _choose(model: nn.Module, record: Trace, chains: list[list[Call]]) -> list[Call]:
    expected_count = _num_layers(model)
    exact = [chain for chain in chains if len(chain) == expected_count]
    if not exact:  # other code changes the stream between the layers (YOLOS adds position embeddings)
        exact = [f for f in _families(record) if len(f) == expected_count and len({type(c.module) for c in f}) == 1]
    # If two chains have this length, take the outer chain, which contains the other chain.
    best = min(exact, key=lambda c: c[0].began) if exact else None
    if best is None and chains and expected_count is None:
        best = max(chains, key=lambda c: (len(c), -c[0].began))
    if best is None:
        lengths = ", ".join(str(len(c)) for c in chains[:6])
        found = f"chains of {lengths} modules" if lengths else "none"
        expected = "modules" if expected_count is None else f"{expected_count} modules (the config's number of layers)"
        raise UserError(
            f"layers: Lamina found no layers in {type(model).__name__}. Lamina looked for a chain of {expected} that "
            f"add to the residual stream, and found {found}. Name the list of layers with --layers "
            f"PATH{_suggest(model)}."
        )
    return best


def _outside_chains(chains: list[list[Call]], calls: list[Call]) -> list[list[Call]]:
    """Return the outermost chains before or after the model's layers, such as the chains of a vision tower."""
    began, ended = calls[0].began, calls[-1].ended
    outside = [c for c in chains if len(c) > 1 and (c[-1].ended < began or c[0].began > ended)]
    calls_outside = [call for chain in outside for call in chain]
    return [c for c in outside if not any(o.began < c[0].began and c[-1].ended < o.ended for o in calls_outside)]


def _named(model: nn.Module, record: Trace, path: str) -> list[Call]:
    try:
        holder = model.get_submodule(path)
    except AttributeError:
        raise UserError(
            f"layers: {type(model).__name__} has no module {path!r}{_suggest(model, allowed=True)}"
        ) from None
    members = {id(m) for m in holder.children()} if isinstance(holder, nn.ModuleList) else {id(holder)}
    calls = [call for call in record.calls if id(call.module) in members]
    calls = [call for call in calls if _stream_input(call, record) is not None and call.output >= 0]
    if not calls:
        raise UserError(f"layers: the modules of {path!r} read no residual stream{_suggest(model, allowed=True)}")
    widths = {record.shapes[call.output][-1] for call in calls}
    if len(widths) > 1:
        raise UserError(
            f"layers: the layers of {path!r} have several widths {sorted(widths)}. Choose layers of one width."
        )
    return calls


def _suggest(model: nn.Module, allowed: bool = False) -> str:
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0 and n]
    first = ", ".join(sorted(lists, key=lambda n: (n.count("."), n))[:6])
    if allowed:
        return f". Give the path of a list of layers{f', such as {first}' if first else ''}."
    return f" (the model's lists of modules: {first})" if first else ""


def _num_layers(model: nn.Module) -> int | None:
    text = text_config(model)
    depths = getattr(text, "depths", None)  # the layers of each stage (num_hidden_layers then counts stages)
    if isinstance(depths, list | tuple) and depths and all(isinstance(depth, int) for depth in depths):
        return sum(depths)
    value = getattr(text, "num_hidden_layers", None)
    return value if isinstance(value, int) else None


def _carries_stream(call: Call, record: Trace) -> bool:
    """Return whether a call adds to one of its input tensors and returns the sum in the same shape."""
    x = _stream_input(call, record)
    if x is None or call.output < 0 or call.is_norm or call.output == x:
        return False
    if not record.floating[call.output] or record.shapes[call.output] != record.shapes[x]:
        return False
    return bool(TracedLayer(call, record, describe=False).additions)


def _stream_input(call: Call, record: Trace) -> int | None:
    """Return the tensor number of the first input with the output's shape, or None if no input has this shape."""
    if call.output < 0:
        return None
    shape = record.shapes[call.output]
    fits = (v for v in call.inputs.values() if record.floating[v] and record.shapes[v] == shape and len(shape) >= 2)
    return next(fits, None)


def _sources(ops: Iterable[Op]) -> dict[int, int]:
    return {op.outputs[0]: op.inputs[0] for op in ops if op.kind in ("same", "scale") and op.inputs and op.outputs}


def _outer_norm(role: str, record: Trace, *, before: Call | None = None, after: Call | None = None) -> NormSite | None:
    same = _sources(record.ops)  # DeBERTa multiplies the normed embedding by the padding's mask
    for call in record.calls:
        if not call.is_norm:
            continue
        reads = {origin(v, same) for v in call.inputs.values()}
        adjacent = (
            before is not None
            and call.ended < before.began
            and origin(call.output, same) == origin(_stream_input(before, record), same)
        ) or (after is not None and call.began > after.ended and origin(after.output, same) in reads)
        if adjacent:
            return NormSite(role, call.module, call.path, call.number)
    return None


def _asked(model: nn.Module, method: str) -> nn.Module | None:
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _site(index: int, layer: TracedLayer) -> LayerSite:
    sublayers: list[SublayerSite] = []
    for addition in layer.additions:
        for branch in addition.branches:
            source = branch.source
            sublayers.append(
                SublayerSite(
                    kind=branch.kind,
                    contribution=Point(source.module, source.path, "output", source.number, branch.factor),
                    after=addition.after,
                    norms=tuple(NormSite(role, norm.module, norm.path, norm.number) for role, norm in branch.norms),
                    feed_forward=_feed_forward(branch),
                    modules=tuple((c.path, c.module) for c in branch.modules),
                    entry=layer.entry_of(branch),
                )
            )
    call = layer.call
    return LayerSite(index, call.module, call.path, call.number, tuple(sublayers), layer.argument)


def _feed_forward(branch: Branch) -> FeedForward | None:
    if branch.kind != "feed_forward" or branch.down is None or not branch.up:
        return None
    down = branch.down
    post = Point(down.module, down.path, "input", down.number, None, next(iter(down.inputs)))
    return FeedForward(tuple((c.path, c.module) for c in branch.up), (down.path, down.module), branch.pre, post)


def _feed_forward_within(call: Call, record: Trace) -> FeedForward | None:
    """Return the feed-forward inside one module call, or None."""
    layer, branch = TracedLayer(call, record, describe=False), Branch(call)
    layer.describe_branch(branch, [call], layer.ops)
    return _feed_forward(branch)
