"""Fit the weights with which sub-layers read, mix and write several residual streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from lamina.placements.matching import UNSEEN, resolved, with_options
from lamina.placements.plan import SUBLAYERS, Sublayer
from lamina.placements.wirings import WIRINGS
from lamina.probes.census.equations import (
    BLOCK_INPUT,
    ROUNDING,
    STREAM,
    Factor,
    as_factor,
    changed,
    norm_kind,
    ratio,
)
from lamina.probes.structure.hooks import Output, forwards, takes_cache, with_argument
from lamina.probes.structure.proof import combination
from lamina.probes.structure.sites import LayerSite, NormSite, Point, Structure
from lamina.probes.structure.tracing import Call, trace

CONSTANT, LEARNED, BY_TOKEN, BY_CHANNEL = "constant", "learned", "by token", "by channel"
_OF_PLANS = {"constant": CONSTANT, "learned": LEARNED, "tanh": BY_TOKEN, "sigmoid": BY_TOKEN, "gate": BY_CHANNEL}
_SAME = 1e-4  # relative tolerance of weights, and of the smallest singular value of equal streams
_MOVED = 1e-3  # relative change above which weights differ between tokens, or are learned
_BALANCED = 2e-2  # relative tolerance of row and column sums, because Sinkhorn's iterations stop early
Weights: TypeAlias = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]  # r, w and M of each token
Pair: TypeAlias = tuple[Call, torch.Tensor, torch.Tensor]  # a call, an input and the output


@dataclass(frozen=True, kw_only=True)
class StreamSum:
    """The equation of one sub-layer on several residual streams.

    The streams S become ``post_norm(skip_scale * M S + w b)``. M mixes the streams, and w holds the write weights. The
    sub-layer's output is ``b = out_norm(module(pre_scale * pre_norm(r S)))``, with the read weights r.
    """

    path: str
    norms: Mapping[str, str]
    pre_scale: Factor
    skip: str
    mix: str  # identity, sinkhorn (equal sums of rows and columns), free, or "" (unknown: the streams are equal)
    own: tuple[str, ...]  # each stream's norm: stream (on the stream), read (on the read values only) or "" (none)
    normed: tuple[bool, ...]  # the streams with a post_norm (empty: all)
    error: float  # largest difference from the measured sum, divided by the largest value
    skip_scale: Factor = field(default_factory=Factor)
    kind: str = ""
    read: str = BY_CHANNEL  # constant, learned, by token, or by channel (not a weighted sum of streams)
    write: str = CONSTANT
    writes: tuple[float, ...] = ()

    def text(self) -> str:
        a, b, c = (self.norms.get(name) for name in ("pre_norm", "out_norm", "post_norm"))
        made = f"{self.kind}({self.pre_scale}{f'{a}(r S)' if a else 'r S'})"
        total = f"{self.skip_scale}{'' if self.mix == 'identity' else 'M '}S + w {f'{b}({made})' if b else made}"
        of = f" on {' and '.join(str(i + 1) for i, on in enumerate(self.normed) if on)}" if self.normed else ""
        more = f", norms of the streams: {', '.join(own or 'none' for own in self.own)}" if any(self.own) else ""
        more += f", skip: {self.skip}" if self.skip not in (STREAM, UNSEEN) else ""
        mix = self.mix or "unknown (the streams are equal)"
        return (
            f"the streams S become {f'{c}{of}({total})' if c else total}. Read weights r: {self.read}, write weights "
            f"w: {self.write}, mixing matrix M: {mix}{more}"
        )

    def form(self) -> tuple[object, ...]:
        return self.own if any(self.own) else (), self.normed, self.read, self.write, self.mix


def wirings_of(spec: str, layers: Sequence[Sequence[StreamSum]], n: int) -> list[str]:
    """Return the placement with each ``wiring`` option that fits the measured equations of the streams."""
    specs: dict[str, str] = {}
    for name, more in product(WIRINGS.names(), ({}, {"size": n})):
        plan = resolved(spec, len(layers), wiring=name, **more)
        if name in specs or plan is None or plan.streams != n or any(len(sums) != len(SUBLAYERS) for sums in layers):
            continue
        forms = [_form(getattr(layer, half)) for layer in plan.layers for half in SUBLAYERS]
        measured = [total.form() for sums in layers for total in sums]
        written = all(
            _writes(getattr(plan.layers[index], half), total)
            for index, sums in enumerate(layers)
            for half, total in zip(SUBLAYERS, sums, strict=True)
        )
        if written and all(a == b if a[-1] else a[:2] == b[:2] for a, b in zip(measured, forms, strict=True)):
            specs[name] = with_options(spec, [f"{key}={value}" for key, value in {"wiring": name, **more}.items()])
    return [*specs.values()]


def _form(sublayer: Sublayer) -> tuple[object, ...]:
    streams = sublayer.streams
    assert streams is not None
    read, normed = _OF_PLANS[streams.weights], () if all(streams.normed) else streams.normed
    write = BY_TOKEN if read == BY_CHANNEL else read
    if write == CONSTANT and sublayer.out_scale_learned != "no":
        write = LEARNED
    return streams.norms, normed, read, write, streams.mix


def _writes(sublayer: Sublayer, one: StreamSum) -> bool:
    """Return whether constant write weights equal the plan's weights. Weights that are not constant always match."""
    if one.write != CONSTANT or sublayer.streams is None:
        return True
    expected = [sublayer.out_scale * write for write in sublayer.streams.write]
    return all(abs(a - b) <= _SAME * abs(b) for a, b in zip(one.writes, expected, strict=True))


class StreamLayers:
    """The layers of a model with n residual streams, [batch, tokens, n, width] or [batch, tokens, n * width]."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, torch.Tensor], width: int):
        more = {"use_cache": False} if takes_cache(type(model)) else {}
        self.model, self.run = model, partial(trace, model, {**inputs, **more})
        self.size, self.width = next(iter(inputs.values())).shape[:2], width
        self.n, self.layers, self.record = 1, list[nn.Module](), self.run()
        self.scalars = list[bool]()  # by layer: whether the layer has a learned scalar
        self.entries: dict[str, Point] = {}  # the inputs of the sub-layers' modules, by path
        holders = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        members = {id(layer): list(holder) for holder in holders for layer in holder}
        for call in self.record.calls:
            most = max(map(self._widths, call.inputs.values()), default=0) if id(call.module) in members else 0
            if most > 1 and self._widths(call.output) == most:  # not a layer that reads several streams and returns one
                self.n, self.layers = most, members[id(call.module)]
                break

    def sums(self) -> list[list[StreamSum]]:
        """Fit the equation of every sub-layer. A layer that does not fit has an empty list."""
        with self._stirred() as stirred:
            self.record = self.run()
            before = [self._layer(call, stirred) for call in self._calls()]
            parts = [point.module for point in self.entries.values()]
            parts += [call.module for call in self.record.calls if call.is_norm]
            others = {id(parameter) for part in parts for parameter in part.parameters()}
            parameters_by_layer = [
                [one for one in layer.parameters() if id(one) not in others] for layer in self.layers
            ]
            self.scalars = [
                any(parameter.numel() == 1 for parameter in parameters) for parameters in parameters_by_layer
            ]
            # A second pass with changed parameters shows which weights are learned.
            with changed([parameter for parameters in parameters_by_layer for parameter in parameters]):
                self.record = self.run()
                after = [self._layer(call, stirred) for call in self._calls()]
        pairs = zip(before, after, strict=True)
        return [[_judged(*one) for one in zip(a, b, strict=True)] if len(a) == len(b) else [] for a, b in pairs]

    def structure(self) -> Structure:
        """Return the layers (without sub-layers), and the norms before and after the layers."""
        calls = self._calls()
        layers = []
        for index, call in enumerate(calls):
            key = next(key for key, value in call.inputs.items() if self._widths(value))
            layers.append(LayerSite(index, call.module, call.path, call.number, (), key, carries_more=True))
        norms = [call for call in self.record.calls if call.is_norm and self._widths(call.output)]
        ends = {
            "embedding_norm": [call for call in norms if call.ended < calls[0].began],
            "final_norm": [call for call in norms if call.began > calls[-1].ended],
        }
        sites = {r: NormSite(r, f[-1].module, f[-1].path, f[-1].number) for r, f in ends.items() if f}
        embedding = self.model.get_input_embeddings() if isinstance(self.model, PreTrainedModel) else None
        before, behind = sites.get("embedding_norm"), sites.get("final_norm")
        return Structure(tuple(layers), self.width, embedding, before, behind, head=None)

    def _widths(self, value: int) -> int:
        """Return a tensor's channels per token divided by the hidden size, or 0 if the result is no whole number."""
        shape = torch.Size(self.record.shapes[value]) if value >= 0 and self.record.floating[value] else torch.Size()
        fits = len(shape) > 2 and shape[:2] == self.size and shape[-1] % self.width == 0
        return shape.numel() // (self.size.numel() * self.width) if fits else 0

    def _of(self, values: Iterable[int], widths: int) -> list[torch.Tensor]:
        tensors = [self.record.tensors[value] for value in values if self._widths(value) == widths]
        return [t.detach().double().cpu().reshape(self.size.numel(), widths, self.width) for t in tensors]

    def _pairs(self, calls: Sequence[Call], widths: int) -> list[Pair]:
        gave = [(call, self._of(call.inputs.values(), widths), self._of([call.output], widths)) for call in calls]
        return [(call, given[0], made[0]) for call, given, made in gave if given and made]

    def _calls(self) -> list[Call]:
        layers = {id(layer) for layer in self.layers}
        return [call for call in self.record.calls if id(call.module) in layers]

    @contextmanager
    def _stirred(self) -> Iterator[dict[int, torch.Tensor]]:
        """Add noise to each layer's streams, so that no two streams are equal. Yield the new streams by layer."""
        stirred: dict[int, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(0)

        def replaced(layer: nn.Module, original: Callable[..., Output], *args: object, **kwargs: object) -> Output:
            places = [*enumerate(args), *kwargs.items()]
            place, x = next((p, x) for p, x in places if isinstance(x, torch.Tensor) and x.is_floating_point())
            if x.numel() > self.size.numel() * self.width:
                noise = torch.randn(x.shape, generator=generator).to(x)
                x = x + noise * x.square().mean().sqrt()
            stirred[id(layer)] = x
            args, kwargs = with_argument(args, kwargs, place, x)
            return original(*args, **kwargs)

        with forwards({layer: partial(replaced, layer, layer.forward) for layer in self.layers}):
            yield stirred

    def _readers(self, layer: Call) -> list[Call]:
        """Return the outermost module calls in a layer that read all streams and return fewer."""

        def reads(call: Call) -> bool:
            return call is layer or any(self._widths(value) == self.n for value in call.inputs.values())

        calls_found: list[Call] = []
        for call in self.record.calls:
            outer, inside = call.parent, call is not layer and call.within(layer) and reads(call)
            while inside and outer is not layer and outer is not None:
                inside, outer = reads(outer) and outer not in calls_found, outer.parent
            if inside and not call.is_norm and call.output >= 0 and self._widths(call.output) != self.n:
                calls_found.append(call)
        return calls_found

    def _layer(self, layer: Call, stirred: Mapping[int, torch.Tensor]) -> list[tuple[StreamSum, Weights]]:
        readers, totals = self._readers(layer), list[tuple[StreamSum, Weights]]()
        state = stirred[id(layer.module)].detach().double().cpu().reshape(self.size.numel(), -1, self.width)
        block = state
        for reader, following in zip(readers, [*readers[1:], None], strict=True):
            read = self._of(reader.inputs.values(), self.n)[0]
            own = _norms_apart(state.expand_as(read), read)
            end = layer.ended if following is None else following.began
            calls = [call for call in self.record.calls if reader.ended < call.ended <= end and call.within(layer)]
            after = [call.output for call in calls] + ([] if following is None else [*following.inputs.values()])
            sources = {STREAM: read, BLOCK_INPUT: block.expand_as(read), "both": read + block}
            for x in self._of(after, self.n):
                if own is not None and (total := self._sum(x, sources, own, calls)) is not None:
                    totals.append(total)
                    state = x
                    break
        last = self._of([layer.output], self.n)
        whole = len(totals) == len(readers) > 0 and len(last) > 0 and torch.equal(last[0], state)
        return totals if whole else []

    def _sum(
        self, x: torch.Tensor, sources: Mapping[str, torch.Tensor], own: tuple[str, ...], calls: Sequence[Call]
    ) -> tuple[StreamSum, Weights] | None:
        """Fit the equation of the streams x after a sub-layer. Return the equation and all tokens' weights, or None."""
        norms, total, normed = dict[str, str](), x.clone(), [False] * self.n
        narrow, last = self._pairs(calls, 1), set[Call]()
        for call, given, made in [*narrow, *self._pairs(calls, self.n)]:
            for i in range(self.n):
                j = min(i, made.shape[1] - 1)
                if call.is_norm and torch.equal(made[:, j], x[:, i]):
                    total[:, i], normed[i] = given[:, j], True
                    norms["post_norm"] = norm_kind(call.module, given.flatten(0, 1), made.flatten(0, 1))
                    last.add(call)
        narrow = [pair for pair in narrow if pair[0] not in last]  # a post-norm fits any sum with a factor per token
        for (skip, source), (_, _, branch) in product(sources.items(), narrow[::-1]):
            weights, error = by_token(total, torch.cat([source, branch], dim=1))
            if error > ROUNDING or float(weights[:, -1].abs().max()) < _SAME:
                continue
            for call, given, made in narrow:
                if call.is_norm and torch.equal(made, branch):
                    norms["out_norm"], branch = norm_kind(call.module, given[:, 0], made[:, 0]), given
            made_by = [pair for pair in narrow if not pair[0].is_norm and torch.equal(pair[2], branch)]
            if not made_by:
                continue
            module, hidden, _ = made_by[0]
            key = next(key for key, value in module.inputs.items() if self._widths(value) == 1)
            pre_scale = Factor()
            for call, given, made in narrow:
                if call.is_norm and (factor := ratio(hidden[:, 0], made[:, 0])) is not None:
                    norms["pre_norm"], pre_scale = norm_kind(call.module, given[:, 0], made[:, 0]), as_factor(factor)
                    hidden = given
                    break
            read, own = _read(hidden, sources[STREAM], own)
            self.entries[module.path] = Point(module.module, module.path, "input", module.number, None, key)
            some = () if all(normed) or not any(normed) else tuple(normed)
            sizes = torch.linalg.svdvals(source)
            alike = bool((sizes[:, -1] < _SAME * sizes[:, 0]).any())
            if alike and not torch.equal(sources[STREAM], sources[BLOCK_INPUT]):
                others = [torch.cat([other, branch], dim=1) for name, other in sources.items() if name != skip]
                skip = UNSEEN if any(by_token(total, terms)[1] <= ROUNDING for terms in others) else skip
            mix, path = "" if alike else "free", module.path
            stream_sum = StreamSum(
                path=path, norms=norms, pre_scale=pre_scale, skip=skip, mix=mix, own=own, normed=some, error=error
            )
            return stream_sum, (read, weights[:, -1], weights[:, :-1])
        return None


def by_token(total: torch.Tensor, terms: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Fit totals as weighted sums of terms, token by token. Return weights [tokens, terms, totals] and the error."""
    largest = float(max(total.abs().max(), terms.abs().max())) or 1.0
    if not math.isfinite(largest):
        return torch.zeros(len(total), terms.shape[1], total.shape[1], dtype=total.dtype), math.inf
    basis, aim = terms.transpose(1, 2) / largest, total.transpose(1, 2) / largest
    factors = torch.linalg.lstsq(basis, aim, driver="gelsd").solution
    return factors, float((aim - basis @ factors).abs().max())


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _norms_apart(x: torch.Tensor, y: torch.Tensor) -> tuple[str, ...] | None:
    """Mark the streams that changed by a norm from x to y. Return None if a stream changed in another way."""
    norms = []
    for before, after in zip(x.unbind(1), y.unbind(1), strict=True):
        same = torch.equal(before, after)
        if not same and combination(after, [_unit(before)], by_channel=True)[1] > _SAME:
            return None
        norms.append("" if same else "stream")
    return tuple(norms)


def _read(
    hidden: torch.Tensor, streams: torch.Tensor, own: tuple[str, ...]
) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """Fit a module's input as a weighted sum of streams. Return the weights [tokens, n] and each stream's norm."""
    weights, error = by_token(hidden, streams)
    if error <= ROUNDING:
        return weights[..., 0], own
    for index in [i for i, norm in enumerate(own) if not norm]:
        terms = [_unit(x) if i == index else x for i, x in enumerate(streams.unbind(1))]
        if combination(hidden[:, 0], terms, by_channel=True)[1] <= _SAME:
            return torch.ones(1, len(own)), (*own[:index], "read", *own[index + 1 :])
    return None, own


def _judged(before: tuple[StreamSum, Weights], after: tuple[StreamSum, Weights]) -> StreamSum:
    """Compare two passes. Return the equation, with each weight marked as constant, learned or different by token."""
    one, (read, write, mix) = after
    earlier = before[0].skip  # streams that differ may add up to the block's input
    skip = earlier if one.skip == UNSEEN or earlier not in (STREAM, UNSEEN) else one.skip
    result = replace(one, skip=skip, write=_moves(before[1][1], write), error=max(one.error, before[0].error))
    if result.write == CONSTANT:
        result = replace(result, writes=tuple(write.median(0).values.tolist()))
    if read is not None and before[1][0] is not None:
        result = replace(result, read=CONSTANT if "read" in one.own else _moves(before[1][0], read))
    if not one.mix:
        return result
    largest = float(mix.abs().max())
    diagonal = torch.diagonal(mix, dim1=1, dim2=2)
    scale = diagonal.mean()
    sums = torch.cat([mix.sum(1), mix.sum(2)], dim=1)
    if float((mix - scale * torch.eye(mix.shape[1], dtype=mix.dtype)).abs().max()) < _SAME * largest:
        return replace(result, mix="identity", skip_scale=as_factor(scale.reshape(1)))
    scale = sums.mean()
    apart = float((sums - scale).abs().amax(1).median())
    if apart < _BALANCED * float(scale) and float(mix.min()) > -_SAME * largest:
        return replace(result, mix="sinkhorn", skip_scale=Factor(value=float(f"{float(scale):.5g}")))
    return result


def _moves(before: torch.Tensor, after: torch.Tensor) -> str:
    limit, middle = _MOVED * float(after.abs().max()), after.median(0).values
    if float((after - middle).abs().amax(1).median()) > limit:
        return BY_TOKEN
    return LEARNED if float((middle - before.median(0).values).abs().max()) > limit else CONSTANT
