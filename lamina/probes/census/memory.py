"""Fit the weighted sums of earlier hidden states that layers read instead of the residual stream."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lamina.errors import UserError
from lamina.modeling.parts import temporary_hooks
from lamina.placements.matching import resolved, with_options
from lamina.placements.plan import SUBLAYERS, Plan
from lamina.placements.wirings import WIRINGS
from lamina.probes.census.equations import ROUNDING, changed, ratio, watched_rows
from lamina.probes.census.streams import BY_TOKEN, CONSTANT, LEARNED, by_token
from lamina.probes.structure.hooks import Args, Kwargs, argument_of, forward, stream_of
from lamina.probes.structure.proof import combination
from lamina.probes.structure.sites import LayerSite, Point, Structure

Tensors: TypeAlias = Mapping[Hashable, torch.Tensor]
_Given: TypeAlias = dict[int, dict[int, torch.Tensor]]  # by reader number and state number: [tokens, width]
_Made: TypeAlias = dict[int, tuple[torch.Tensor, ...]]  # by reader number: the outputs, in the order of ``into``
THE_STREAM, SO_FAR = "the stream", -1
NORMS_OF_WAYS = ("pre_norm", "key_norm", "value_norm")
_WAYS = ("queries", "keys", "values", THE_STREAM)
_WEIGHT = 1e-3  # a layer does not read a state with a smaller weight in both passes
_MOVED, _SAME = 1e-3, 1e-4


@dataclass(frozen=True, kw_only=True)
class StateRead:
    """A weighted sum of earlier hidden states that a layer reads instead of the residual stream."""

    into: str  # the use of the sum: the stream, queries, keys, values, or the kind of a sub-layer
    states: tuple[int, ...]  # l for x^l, -1 for the stream between two sub-layers
    weights: str  # constant | learned | by token
    shares: bool  # whether the weights are positive and sum to 1
    error: float

    def text(self) -> str:
        names = ", ".join("x" if state == SO_FAR else f"x^{state}" for state in self.states) or "nothing"
        how = " and sum to 1" if self.shares else ""
        kind = "different for each token" if self.weights == BY_TOKEN else self.weights
        return f"{self.into} reads a weighted sum of {names}. The weights are {kind}{how}."


@dataclass(frozen=True)
class _Reader:
    """A module that computes weighted sums of earlier hidden states."""

    module: nn.Module
    layer: int  # the layer's index, or the number of layers for the final norm
    into: tuple[str, ...]  # the use of each output, such as "queries"


class MemoryLayers:
    """The layers of a model that passes earlier hidden states from layer to layer."""

    def __init__(self, structure: Structure, root: nn.Module, inputs: Mapping[str, torch.Tensor]):
        self.root, self.inputs = root, inputs
        self.structure = replace(structure, layers=tuple(map(_with_entries, structure.layers)), notes=[])
        self.readers = [*_readers(structure)]
        self.made: _Made = {}

    def others(self) -> list[nn.Module]:
        return [reader.module for reader in self.readers]

    def watch(self, points: Mapping[Hashable, Point]) -> Tensors:
        """Return the tensors at the points. If a layer reads a weighted sum, the sum replaces the layer's input."""
        with self._noted():
            tensors = dict(watched_rows(self.root, self.inputs, points))
        width = self.structure.hidden_size
        for index, reader in enumerate(self.readers):
            parts = [*self.made[index]]
            for into, part in zip(reader.into, parts, strict=True):
                if into == THE_STREAM and reader.layer < self.structure.num_layers:
                    tensors[reader.layer, "input"] = part
                elif into in SUBLAYERS or into == _WAYS[0]:
                    tensors[reader.layer, SUBLAYERS.index(into) if into in SUBLAYERS else 0, "read"] = part
            if len(parts) == len(_WAYS):
                self._part_ways(tensors, reader.layer, parts, width)
        return tensors

    def _part_ways(self, tensors: dict[Hashable, torch.Tensor], layer: int, parts: list[torch.Tensor], w: int) -> None:
        """If the queries, keys and values read equal multiples of one tensor, keep only the input of the queries."""
        entry = tensors.pop((layer, 0, "entry"))
        if entry.shape[-1] != len(parts[:-1]) * w:
            return
        factors: list[torch.Tensor] = []
        for number, (role, read) in enumerate(zip(NORMS_OF_WAYS, parts, strict=False)):
            normed, given = (tensors.get((layer, 0, role, side)) for side in ("output", "input"))
            if given is not None and not torch.equal(given, read):
                return
            factor = ratio(entry[:, number * w : (number + 1) * w], read if normed is None else normed)
            if factor is None:
                return
            factors.append(factor)
        if all(f.shape == factors[0].shape and torch.allclose(f, factors[0]) for f in factors):
            tensors[layer, 0, "entry"] = entry[:, :w]

    def reads(self) -> list[list[StateRead]]:
        """Fit the weights of the hidden states that each layer reads. The last entry is for the final norm."""
        parameters = [parameter for reader in self.readers for parameter in reader.module.parameters()]
        # With random hidden states, only one set of weights fits. A second pass shows which weights are learned.
        with self._noted(noise=True) as before:
            forward(self.root, self.inputs)
        with changed(parameters), self._noted(noise=True) as after:
            forward(self.root, self.inputs)
        reads_by_layer: list[list[StateRead]] = [[] for _ in range(self.structure.num_layers + 1)]
        for index, reader in enumerate(self.readers):
            for number, into in enumerate(reader.into):
                fits = [_Fit(index, number, *noted) for noted in (before, after)]
                reads_by_layer[reader.layer].append(_judged(into, *fits))
        return reads_by_layer

    @contextmanager
    def _noted(self, noise: bool = False) -> Iterator[tuple[_Given, _Made]]:
        """Record the outputs of the modules that sum hidden states. ``noise`` replaces and records their inputs."""
        given, made = _Given(), _Made()
        self.made, last = made, self.structure.num_layers
        states: dict[int, torch.Tensor] = {}

        def enter_layer(site: LayerSite, _: nn.Module, args: Args, more: Kwargs) -> None:
            states[site.index] = stream_of(argument_of(args, more, site.argument))

        def enter(place: int, args: tuple[object, ...]) -> tuple[object, ...]:
            given[place] = {}
            inside: list[torch.Tensor] = []

            def drawn(tensor: torch.Tensor) -> torch.Tensor:
                index = next((index for index, state in states.items() if state is tensor), SO_FAR)
                if index == SO_FAR:
                    inside.append(tensor)
                    if tensor is not inside[0]:
                        raise UserError(
                            "inside a layer, the model sums several new hidden states, but Lamina can follow only one"
                        )
                generator = torch.Generator().manual_seed(index + 2)
                random = torch.randn(tensor.shape, generator=generator).to(tensor)
                given[place][index] = _rows(random)
                return random

            return cast("tuple[object, ...]", tree_map_only(torch.Tensor, drawn, args))

        def leave(place: int, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            first, *more = output if isinstance(output, tuple) else (output,)
            made[place] = tuple(_rows(one) for one in (*(way for part in more for way in part.unbind(-2)), first))

        with temporary_hooks() as hooks, torch.no_grad():
            for site in self.structure.layers:
                hook = partial(enter_layer, site)
                hooks.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
            end = self.structure.layers[-1].module
            hooks.append(end.register_forward_hook(lambda _, args, out: states.update({last: stream_of(out)})))
            for place, reader in enumerate(self.readers):
                if noise:
                    hook = partial(lambda place, _, args: enter(place, args), place)
                    hooks.append(reader.module.register_forward_pre_hook(hook))
                hooks.append(
                    reader.module.register_forward_hook(partial(lambda place, _, args, out: leave(place, out), place))
                )
            yield given, made


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().cpu().flatten(0, -2)


class _Fit:
    """The fit of a weighted sum of hidden states: weights [tokens, states], or [1, states] if all tokens share them."""

    def __init__(self, place: int, number: int, given: _Given, made: _Made):
        self.states = tuple(sorted(given[place], key=lambda state: (state == SO_FAR, state)))
        terms = torch.stack([given[place][state] for state in self.states], dim=1)
        total = made[place][number]
        factors, self.error = combination(total, [*terms.unbind(1)], by_channel=False)
        self.weights = torch.stack([factor.reshape(()) for factor in factors])[None]
        if self.error > ROUNDING:
            if 2 * len(self.states) > terms.shape[-1]:
                raise UserError(
                    f"Lamina cannot fit weights of {len(self.states)} hidden states, because the fit needs at least "
                    "twice as many channels as hidden states"
                )
            weights, self.error = by_token(total[:, None], terms)
            self.weights = weights[..., 0]


def _judged(into: str, before: _Fit, after: _Fit) -> StateRead:
    error = max(before.error, after.error)
    if error > ROUNDING:
        raise UserError(
            f"the input of {into} is not a weighted sum of hidden states, with one weight per state and token"
        )
    large = torch.stack([fit.weights.abs().amax(0) for fit in (before, after)]).amax(0) > _WEIGHT
    shares = all(
        bool((w > -_SAME).all()) and float((w.sum(1) - 1).abs().max()) < _MOVED for w in (before.weights, after.weights)
    )
    moved = before.weights.mean(0) - after.weights.mean(0)
    kind = BY_TOKEN if len(after.weights) > 1 else LEARNED if float(moved.abs().max()) > _MOVED else CONSTANT
    states = tuple(state for state, on in zip(after.states, large.tolist(), strict=True) if on)
    return StateRead(into=into, states=states, weights=kind, shares=shares, error=error)


def _with_entries(site: LayerSite) -> LayerSite:
    entries = []
    for sublayer in site.sublayers:
        (path, half), *_ = sublayer.modules
        module = half.get_submodule("module")
        entry = Point(module, f"{path}.module", "input")
        inside = {id(part) for part in module.modules()}
        norms = tuple(norm for norm in sublayer.norms if norm.role != "inner_norm" or id(norm.module) in inside)
        entries.append(replace(sublayer, entry=entry, modules=((entry.path, module),), norms=norms))
    return replace(site, sublayers=tuple(entries))


def _readers(structure: Structure) -> Iterator[_Reader]:
    for site in structure.layers:
        parts = dict(site.module.named_children())
        if "sources" in parts:
            ways = getattr(parts["sources"], "ways", 1)
            yield _Reader(parts["sources"], site.index, _WAYS if ways > 1 else (THE_STREAM,))
        for sublayer in site.sublayers:
            depth = dict(sublayer.modules[0][1].named_children()).get("depth")
            if depth is not None:
                yield _Reader(depth, site.index, (sublayer.kind,))
    if structure.end is not None:
        yield _Reader(structure.end.module, structure.num_layers, (THE_STREAM,))


def memories_of(spec: str, reads: Sequence[Sequence[StateRead]]) -> list[str]:
    """Return the placement with each ``wiring`` that reads the measured hidden states, smallest ``size`` first."""
    specs: dict[str, str] = {}
    layers = len(reads) - 1
    for more in ({}, *({"size": size} for size in range(1, layers + 1))):
        for name in WIRINGS.names():
            plan = resolved(spec, layers, wiring=name, **more)
            if name not in specs and plan is not None and plan.has_memory and _reads_of(plan) == [*map(_form, reads)]:
                specs[name] = with_options(spec, [f"{key}={value}" for key, value in {"wiring": name, **more}.items()])
    return [*specs.values()]


Form: TypeAlias = list[tuple[str, tuple[int, ...], str, bool]]


def _form(reads: Sequence[StateRead]) -> Form:
    # The weight of a single state is 1, so Lamina cannot tell whether the weight is learned.
    return [(r.into, r.states, BY_TOKEN if r.shares and len(r.states) == 1 else r.weights, r.shares) for r in reads]


def _reads_of(plan: Plan) -> list[Form]:
    """Return the hidden states that a placement's layers and final norm read, in the format of ``_form``."""
    found: list[Form] = []
    kept: tuple[int, ...] = ()
    depth = any(getattr(layer, half).reads_memory for layer in plan.layers for half in SUBLAYERS)
    for index, layer in enumerate((*plan.layers, None)):
        sources, forms = plan.final_sources if layer is None else layer.sources, Form()
        if sources is not None:
            states = tuple(sorted({index, *(state for state, _ in sources.states)}))
            kind = BY_TOKEN if sources.dynamic else LEARNED if sources.learned != "no" else CONSTANT
            forms += [(into, states, kind, False) for into in (_WAYS if sources.multiway else _WAYS[-1:])]
        if layer is None:
            forms += [(THE_STREAM, (*kept, index), BY_TOKEN, True)] if depth else []
        else:
            kept += (index,) if layer.boundary else ()
            more = {"attention": () if index in kept else (index,), "feed_forward": (SO_FAR,)}
            for part in SUBLAYERS:
                read = getattr(layer, part).read
                if read in ("depth", "memory"):
                    forms.append((part, (*kept, *(more[part] if read == "depth" else ())), BY_TOKEN, True))
        found.append(forms)
    return found
