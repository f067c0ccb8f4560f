"""Describe where a model's layers, sub-layers and norms are. Every probe uses this description.

Lamina follows tensors through one forward pass (see ``tracing``), so the names of the modules do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


def is_norm(module: nn.Module) -> bool:
    """Return whether a module's class name contains "norm". Linear layers and modules with children do not count."""
    return (
        "norm" in type(module).__name__.lower()
        and not isinstance(module, nn.Linear)
        and next(module.children(), None) is None
    )


def effective_gain(norm: nn.Module) -> torch.Tensor | None:
    """Return the gain [channels] of a norm, or None if the norm has no gain. Gemma's norms store the gain minus 1."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    weight = weight.detach()  # the gain, or the gain minus 1: a known vector through the norm shows which
    sign = torch.ones_like(weight)
    sign[::2] = -1
    bias = getattr(norm, "bias", None)
    with torch.no_grad():
        try:
            normed, doubled = (norm(sign[None, None] * size).flatten().float() for size in (8, 16))
            if float((doubled - normed).abs().max()) > 0.1 * float(normed.abs().max()):
                return weight.float()  # MobileBERT's NoNorm only multiplies
        except (TypeError, AttributeError):  # a gated norm: with the gate 20 in every channel, the SiLU is 20, too
            try:
                gate = torch.full_like(sign, 20.0)
                normed = norm(sign[None, None] * 8, gate[None, None]).flatten().float() / 20.0
            except (TypeError, AttributeError, RuntimeError):
                return None
    if normed.shape != weight.shape:
        return None
    if isinstance(bias, torch.Tensor):
        normed = normed - bias.detach().float()
    measured = normed * sign.float()
    plain, shifted = weight.float(), weight.float() + 1
    far = ((measured - shifted).abs().mean() < (measured - plain).abs().mean()).item()
    return shifted if far else plain


@dataclass(frozen=True, eq=False)
class Point:
    """A tensor of the forward pass: the input or the output of one call of a module."""

    module: nn.Module
    path: str
    side: str
    """The tensor's side of the module: "input" or "output"."""
    call: int = 0
    """The index of the call, if a forward pass calls the module several times (as in ALBERT)."""
    factor: float | torch.Tensor | None = None
    """The factor by which the model multiplies the tensor, as Granite scales its branches (None: no factor)."""
    argument: int | str = 0
    """The position or keyword of an input among the module's arguments."""
    collapse: bool = False
    """Whether to average the streams of a tensor [batch, tokens, streams, width]."""


@dataclass(frozen=True, eq=False)
class NormSite:
    # pre_norm (on a module's input), out_norm (on its output, before the sum), post_norm (on the sum), inner_norm
    # (inside attention or feed-forward), embedding_norm or final_norm
    role: str
    module: nn.Module
    path: str
    call: int = 0

    @property
    def input(self) -> Point:
        return Point(self.module, self.path, "input", self.call)

    @property
    def output(self) -> Point:
        return Point(self.module, self.path, "output", self.call)

    @property
    def gain(self) -> torch.Tensor | None:
        """The gain that the norm applies [channels], or None."""
        return effective_gain(self.module)


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The projections of a dense feed-forward. Experts do not count, because an expert sees few tokens."""

    up: tuple[tuple[str, nn.Module], ...]  # (path, module) of the up-projection and any gate, in order of execution
    down: tuple[str, nn.Module]
    pre: Point | None  # the nonlinearity's input
    post: Point  # the input of ``down``

    @property
    def width(self) -> int:
        down: Any = self.down[1]
        return int(down.in_features if hasattr(down, "in_features") else down.weight.shape[0])

    def stacked_side(self, module: nn.Module) -> int | None:
        """Return the axis along which a weight stacks the gate and the up-projection, otherwise None."""
        if module is self.down[1] or len(self.up) != 1:
            return None
        weight: Any = module.weight
        # A projection is [out, in] or, in GPT-2's Conv1D, [in, out].
        out = 0 if hasattr(module, "in_features") else 1
        return out if weight.shape[out] == 2 * self.width else None


@dataclass(frozen=True, eq=False)
class SublayerSite:
    """A sub-layer, and the tensor that the sub-layer adds to the residual stream."""

    kind: str  # attention | feed_forward | mixer (any other module)
    contribution: Point  # the added tensor, after any out_norm
    after: Point | None  # the stream after the addition and any post_norm; None if no module reads or writes it
    norms: tuple[NormSite, ...] = ()
    feed_forward: FeedForward | None = None
    modules: tuple[tuple[str, nn.Module], ...] = ()  # (path, module) of its modules, outermost first
    entry: Point | None = None  # the first module's input


@dataclass(frozen=True, eq=False)
class LayerSite:
    """One call of a layer. In ALBERT, several layers share one module."""

    index: int
    module: nn.Module
    path: str
    call: int
    sublayers: tuple[SublayerSite, ...]
    argument: int | str = 0  # the position or keyword of the stream among the layer's arguments
    carries_more: bool = False  # the layer returns several streams, or earlier hidden states as well
    reads: Point | None = None  # the first sub-layer's input, if it is not the residual stream

    @property
    def input(self) -> Point:
        """The residual stream before the layer."""
        return Point(self.module, self.path, "input", self.call, None, self.argument, collapse=self.carries_more)

    @property
    def output(self) -> Point:
        """The residual stream after the layer."""
        return Point(self.module, self.path, "output", self.call, collapse=self.carries_more)


@dataclass(frozen=True, eq=False)
class Structure:
    """A model's layers in order of execution, and the modules around these layers."""

    layers: tuple[LayerSite, ...]
    hidden_size: int
    embedding: nn.Module | None
    embedding_norm: NormSite | None
    final_norm: NormSite | None
    head: nn.Module | None
    notes: list[str] = field(default_factory=list)
    outside: tuple[tuple[str, nn.Module], ...] = ()  # (kind, module). Kinds: embedding, readout, other (layer lists)
    end: Point | None = None  # the final norm's input, if it is not the residual stream
    others: tuple[str, ...] = ()  # the paths of other lists of layers
    starts: tuple[int, ...] = ()  # the first layer of each joined stack, except for the first stack

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def carries_more(self) -> bool:
        """Return whether a layer's output holds several streams or earlier hidden states."""
        return any(site.carries_more for site in self.layers)

    @property
    def has_memory(self) -> bool:
        """Return whether layers read the hidden states of earlier layers."""
        return any(getattr(site.module, "has_memory", False) for site in self.layers)

    def kinds(self) -> dict[int, str]:
        """Return each layer's class name, followed by the class names of its children that have parameters."""
        kinds = {}
        for site in self.layers:
            parts = (part for part in site.module.children() if next(part.parameters(), None) is not None)
            kinds[site.index] = " ".join(type(module).__name__ for module in (site.module, *parts))
        return kinds

    def states(self) -> dict[int, Point]:
        """Return the points of the residual stream before each layer and after the last layer."""
        points = {site.index: site.input for site in self.layers}
        points[self.num_layers] = self.layers[-1].output
        return points

    def reads(self) -> dict[int, Point]:
        """Return the points of the hidden states that layers and the final norm read instead of the residual stream."""
        reads = [*(site.reads for site in self.layers), self.end]
        return {state: point for state, point in enumerate(reads) if point is not None}

    def norms(self) -> Iterator[tuple[int, str, NormSite]]:
        """Yield (layer, sub-layer, norm). For the embedding's norm and the final norm, the layer is -1."""
        if self.embedding_norm is not None:
            yield -1, "model", self.embedding_norm
        for site in self.layers:
            for sublayer in site.sublayers:
                for norm in sublayer.norms:
                    yield site.index, sublayer.kind, norm
        if self.final_norm is not None:
            yield -1, "model", self.final_norm
