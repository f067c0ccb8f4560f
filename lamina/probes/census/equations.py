"""Fit the equation of each addition to the residual stream, from the tensors of one forward pass.

An equation's terms are the sub-layers' outputs and a skip: the residual stream, the layer's input, a norm's output or
the embedding. Lamina chooses the simplest sum of terms that equals the measured sum, within rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from lamina.modeling.modeling_lamina import NormStyle
from lamina.probes.structure.proof import combination, watched
from lamina.probes.structure.sites import LayerSite, NormSite, Point, Structure, SublayerSite

Tensors: TypeAlias = Mapping[Hashable, torch.Tensor]
Watch: TypeAlias = Callable[[Mapping[Hashable, Point]], Tensors]
STREAM, BLOCK_INPUT, NORMED, EMBEDDING = "stream", "block_input", "the norm's output", "embedding"
# The tensors that a skip may carry, simplest first.
_SKIPS = ((STREAM,), (BLOCK_INPUT,), (STREAM, BLOCK_INPUT), (NORMED,), (STREAM, EMBEDDING), (STREAM, NORMED))
ONE, NUMBER, CHANNEL = "one", "number", "channel"
# The factors of the skips and of the branches, simplest first.
_FACTORS = ((NUMBER, ONE), (NUMBER, NUMBER), (ONE, CHANNEL), (CHANNEL, ONE), (CHANNEL, CHANNEL))
ROUNDING = 32 * torch.finfo(torch.float32).eps  # largest rounding error of a sum, divided by its largest term
_APART = 1e-4  # tolerance of a + b = 1 in a coupling
_MOVED = 1e-3  # relative change above which a factor is learned, after a change of the layer's parameters
_ROUGHLY = 1e-2  # largest error of the right kind of norm, divided by the norm's largest output


@dataclass(frozen=True, kw_only=True)
class Factor:
    value: float = 1.0  # the mean over channels, if by_channel
    by_channel: bool = False
    learned: str = "no"  # no, scalar or vector

    def __str__(self) -> str:
        if self.learned != "no":
            return f"({self.learned} {self.value:.4g}) "
        if self.by_channel:
            return f"(by channel, mean {self.value:.4g}) "
        return "" if self.value == 1.0 else f"{self.value:.6g} "


@dataclass(frozen=True, kw_only=True)
class BranchTerm:
    """A sub-layer's term in an equation: ``scale * out_norm(module(pre_scale * pre_norm(x)))``.

    x is the residual stream, or the block's input if ``beside`` is true (parallel sub-layers).
    """

    kind: str
    path: str
    norms: Mapping[str, str]
    scale: Factor
    pre_scale: Factor | None  # None if the module's input is no multiple of pre_norm(x)
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The equation of one addition to the residual stream. Parallel sub-layers share one equation."""

    branches: tuple[BranchTerm, ...]
    skip: Mapping[str, Factor]
    post_norm: str | None
    coupling: str  # of the factors a (skip) and b (branch): none, lerp (a + b = 1) or variance (a^2 + b^2 = 1)
    error: float  # largest difference from the measured sum, divided by the largest value

    def text(self) -> str:
        """Return the equation, such as ``y = rms(64 stream + attention(rms(stream)))``."""
        if not self.skip:
            return f"not a weighted sum of the residual stream and {', '.join(b.kind for b in self.branches)}"
        terms = [f"{factor}{name}" for name, factor in self.skip.items()]
        for branch in self.branches:
            read = BLOCK_INPUT if branch.beside else STREAM
            inner = read if "pre_norm" not in branch.norms else f"{branch.norms['pre_norm']}({read})"
            inner = f"{branch.pre_scale if branch.pre_scale is not None else '? '}{inner}"
            made = f"{branch.kind}({inner})"
            if "out_norm" in branch.norms:
                made = f"{branch.norms['out_norm']}({made})"
            terms.append(f"{branch.scale}{made}")
        total = " + ".join(terms)
        return f"y = {self.post_norm}({total})" if self.post_norm else f"y = {total}"


def sums_of(structure: Structure, watch: Watch, others: Sequence[nn.Module] = ()) -> list[list[Sum]]:
    """Fit the equation of every addition to the residual stream. ``watch`` returns the tensors at points."""
    groups = [_groups(site) for site in structure.layers]
    points = {key: point for site, found in zip(structure.layers, groups, strict=True) for key, point in _points(site)}
    tensors = watch(points)
    embedding = tensors[0, "input"]
    # the second pass does not change the parameters of ``others``
    parameters_by_layer = [_own_parameters(site, others) for site in structure.layers]
    moved = None
    if any(parameters_by_layer):  # a second pass with changed parameters shows which factors are learned
        with changed([parameter for parameters in parameters_by_layer for parameter in parameters]):
            moved = watch(points)
    layers = []
    for site, found, parameters in zip(structure.layers, groups, parameters_by_layer, strict=True):
        fitted = [_Fit(site, group, tensors, embedding) for group in found]
        sums = [fit.sum() for fit in fitted]
        if moved is not None and parameters:
            again = [_Fit(site, group, moved, moved[0, "input"]) for group in found]
            sums = [_learned(a, b, total) for a, b, total in zip(fitted, again, sums, strict=True)]
        layers.append(sums)
    return layers


def _groups(site: LayerSite) -> list[list[tuple[int, SublayerSite]]]:
    """Group the parallel sub-layers. No module reads the residual stream between the additions of one group."""
    groups: list[list[tuple[int, SublayerSite]]] = [[]]
    for number, sublayer in enumerate(site.sublayers):
        if groups[-1] and groups[-1][-1][1].after is not None and groups[-1][-1][1].after is not sublayer.after:
            groups.append([])
        groups[-1].append((number, sublayer))
    return [group for group in groups if group]


def _points(site: LayerSite) -> Iterator[tuple[Hashable, Point]]:
    yield (site.index, "input"), site.input
    yield (site.index, "output"), site.output
    for number, sublayer in enumerate(site.sublayers):
        key = (site.index, number)
        yield (*key, "branch"), replace(sublayer.contribution, factor=None)
        if sublayer.after is not None:
            yield (*key, "after"), sublayer.after
        if sublayer.entry is not None:
            yield (*key, "entry"), sublayer.entry
        for norm in sublayer.norms:
            if norm.role != "inner_norm":
                yield (*key, norm.role, "input"), norm.input
                yield (*key, norm.role, "output"), norm.output


def watched_rows(root: nn.Module, inputs: Mapping[str, torch.Tensor], points: Mapping[Hashable, Point]) -> Tensors:
    """Run the model, and return the tensors at the points as [tokens, channels] in float64."""
    return {key: tensor.double().flatten(0, -2) for key, tensor in watched(root, points, inputs).items()}


def _own_parameters(site: LayerSite, more: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return a layer's parameters, except the parameters of norms and of modules with a weight matrix."""
    parts = [module for sublayer in site.sublayers for _, module in sublayer.modules]
    parts = [module for module in parts if any(parameter.ndim > 1 for parameter in module.parameters())]
    parts += [*more, *(norm.module for sublayer in site.sublayers for norm in sublayer.norms)]
    others = {id(parameter) for part in parts for parameter in part.parameters()}
    return [parameter for parameter in site.module.parameters() if id(parameter) not in others]


@contextmanager
def changed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.rand(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.add_((0.5 + noise) * (parameter.shape[-1] if parameter.ndim > 1 else 1) ** -0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


class _Fit:
    def __init__(
        self, site: LayerSite, group: list[tuple[int, SublayerSite]], tensors: Tensors, embedding: torch.Tensor
    ):
        self.site, self.group, self.tensors = site, group, tensors
        first, last = group[0][0], group[-1][0]
        before = (site.index, first - 1)
        self.stream = tensors[site.index, "input"]
        if first:
            self.stream = tensors.get((*before, "after"), self.stream)
        total = tensors.get((site.index, last, "post_norm", "input"))
        if total is None:
            total = tensors.get((site.index, last, "after"), tensors[site.index, "output"])
        self.total = total
        skips = {STREAM: self.stream, BLOCK_INPUT: tensors[site.index, "input"], EMBEDDING: embedding}
        normed = tensors.get((site.index, first, "pre_norm", "output"))
        if normed is not None:
            skips[NORMED] = normed
        different = [name for name in skips if name == STREAM or not torch.equal(skips[name], self.stream)]
        self.skips = {name: skips[name] for name in different if skips[name].shape == total.shape}
        branches = [tensors[site.index, number, "branch"] for number, _ in group]
        self.error = math.inf
        self.names: tuple[str, ...] = ()
        self.factors: list[torch.Tensor] = []
        leaves = tensors.get((site.index, last, "post_norm", "output"), total)
        output = tensors[site.index, "output"]
        apart = float((leaves - output).abs().max()) if leaves.shape == output.shape else math.inf
        changed = last == len(site.sublayers) - 1 and apart > ROUNDING * float(output.abs().max())
        if not changed and all(branch.shape == total.shape for branch in branches):
            self._solve(branches)

    def _solve(self, branches: list[torch.Tensor]) -> None:
        """Find the simplest equation that fits within rounding error."""
        largest = max(float(tensor.abs().max()) for tensor in (self.total, self.stream, *branches)) or 1.0
        for skips_have, branches_have in _FACTORS:
            for names in _SKIPS:
                if not set(names) <= self.skips.keys():
                    continue
                given = [self.skips[name] for name in names]
                fixed = (given if skips_have == ONE else []) + (branches if branches_have == ONE else [])
                fitted = (given if skips_have != ONE else []) + (branches if branches_have != ONE else [])
                rest = self.total - torch.stack(fixed).sum(0) if fixed else self.total
                by_channel = CHANNEL in (skips_have, branches_have)
                factors, error = combination(rest, fitted, by_channel, largest)
                self.error = min(error, self.error)
                if error <= ROUNDING:
                    ones = [torch.ones(1, dtype=torch.float64)] * len(fixed)
                    self.names = names
                    self.factors = factors + ones if branches_have == ONE else ones + factors
                    return

    def sum(self) -> Sum:
        """Return the equation, with an empty ``skip`` if no equation fits."""
        factors = [as_factor(f) for f in self.factors] or [Factor()] * (len(self.names) + len(self.group))
        skip = dict(zip(self.names, factors, strict=False))
        branches = []
        for (number, sublayer), factor in zip(self.group, factors[len(self.names) :], strict=True):
            norms = self._norms(number, sublayer.norms)
            path = (sublayer.modules[0] if sublayer.modules else (sublayer.contribution.path,))[0]
            pre = self.pre_factor(number, sublayer)
            pre_scale = None if pre is None else as_factor(pre)
            term = BranchTerm(kind=sublayer.kind, path=path, norms=norms, scale=factor, pre_scale=pre_scale)
            branches.append(replace(term, beside=self._is_beside(number)))
        post = self._norms(self.group[-1][0], self.group[-1][1].norms, post=True).get("post_norm")
        return Sum(branches=tuple(branches), skip=skip, post_norm=post, coupling=self._coupling(), error=self.error)

    def _is_beside(self, number: int) -> bool:
        """Return whether a sub-layer reads the block's input instead of the stream after the previous sub-layer."""
        block, key = self.tensors[self.site.index, "input"], (self.site.index, number)
        read = self.tensors.get((*key, "pre_norm", "input"), self.tensors.get((*key, "entry")))
        return read is not None and torch.equal(read, block) and not torch.equal(read, self.stream)

    def _coupling(self) -> str:
        if len(self.factors) != 2 or len(self.names) != 1:
            return "none"
        skip, branch = torch.broadcast_tensors(*self.factors)
        inside = bool(((branch > _APART) & (branch < 1 - _APART) & (skip < 1 - _APART)).all())
        kinds = {"lerp": skip + branch, "variance": skip.pow(2) + branch.pow(2)}
        return next((k for k, total in kinds.items() if inside and float((total - 1).abs().max()) < _APART), "none")

    def pre_factor(self, number: int, sublayer: SublayerSite) -> torch.Tensor | None:
        """Return the factor from the pre-norm's output to the module's input, or None if no single factor fits."""
        entry = self.tensors.get((self.site.index, number, "entry"))
        normed = self.tensors.get((self.site.index, number, "pre_norm", "output"))
        norm = next((norm for norm in sublayer.norms if norm.role == "pre_norm"), None)
        within = norm is not None and sublayer.entry is not None and norm.path.startswith(f"{sublayer.entry.path}.")
        stream = self.tensors[self.site.index, "input"] if self._is_beside(number) else self.stream
        read = self.tensors.get((self.site.index, number, "read"), stream)
        source = read if normed is None or within else normed
        return None if entry is None or entry.shape != source.shape else ratio(entry, source)

    def _norms(self, number: int, norms: Sequence[NormSite], post: bool = False) -> dict[str, str]:
        kinds: dict[str, str] = {}
        for norm in norms:
            if norm.role == "inner_norm" or (norm.role == "post_norm") is not post:
                continue
            x, y = (self.tensors.get((self.site.index, number, norm.role, side)) for side in ("input", "output"))
            kind = "norm" if x is None or y is None else norm_kind(norm.module, x, y)
            kinds[norm.role] = f"{kinds[norm.role]} of {kind}" if norm.role in kinds else kind
        return kinds


def ratio(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    for by_channel in (False, True):
        (factor,), error = combination(tensor, [source], by_channel)
        if error <= ROUNDING:
            return factor
    return None


def as_factor(values: torch.Tensor) -> Factor:
    return Factor(value=float(f"{float(values.mean()):.6g}"), by_channel=len(values) > 1)


def norm_kind(norm: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    """Return the kind of norm that maps x to y, both [vectors, channels]: rms, layer, "group of G" (G groups) or other.

    Lamina applies each kind to x with the module's epsilon, and fits a gain per channel (and a bias for layer) to y.
    """
    channels, eps = x.shape[-1], NormStyle.of(norm).eps
    if y.shape != x.shape:
        return "other"

    def error(parts: int, centered: bool) -> float:
        z = x.unflatten(-1, (parts, -1))
        z = z - z.mean(-1, keepdim=True) if centered else z
        z = (z * (z.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
        return combination(y, [z, torch.ones_like(z)] if centered else [z], by_channel=True)[1]

    errors = {"rms": error(1, centered=False), "layer": error(1, centered=True)}
    best = min(errors, key=lambda kind: errors[kind])
    if errors[best] <= _ROUGHLY:
        return best
    parts = [g for g in range(2, channels // 2 + 1) if channels % g == 0]
    return next((f"group of {g}" for g in parts if error(g, centered=False) <= _ROUGHLY), "other")


def _learned(before: _Fit, after: _Fit, found: Sum) -> Sum:
    """Mark the factors that changed between the two passes as learned."""
    if not (before.factors and after.factors and before.names == after.names):
        return found
    skip = {
        name: _marked(factor, before.factors[i], after.factors[i])
        if bool(before.skips[name].any())
        else as_factor(after.factors[i])  # the skip is 0 in the first pass (after ReZero's branches, which start at 0)
        for i, (name, factor) in enumerate(found.skip.items())
    }
    branches = []
    for i, ((number, sublayer), branch) in enumerate(zip(before.group, found.branches, strict=True)):
        column = len(before.names) + i
        scale = _marked(branch.scale, before.factors[column], after.factors[column])
        pre, again = (fit.pre_factor(number, sublayer) for fit in (before, after))
        pre_scale = branch.pre_scale
        if pre is not None and again is not None and pre_scale is not None:
            pre_scale = _marked(pre_scale, pre, again)
        branches.append(replace(branch, scale=scale, pre_scale=pre_scale))
    return replace(found, skip=skip, branches=tuple(branches))


def _marked(factor: Factor, before: torch.Tensor, after: torch.Tensor) -> Factor:
    apart = float((before - after).abs().max())
    if apart <= _MOVED * max(float(before.abs().max()), float(after.abs().max())):
        return factor
    return replace(factor, learned="vector" if len(after) > 1 else "scalar")
