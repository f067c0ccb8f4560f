"""The locations of a model's layers, sub-layers and norms, for every probe.

Lamina runs the model once and follows its tensors (``tracing``), so the modules' names do not matter.
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
    """Measure the gain [channels] by which a norm multiplies the normalized channels; None if the norm has no gain.

    Lamina passes a known vector through the norm, because some norms store the gain, and other norms (Gemma) store the
    gain minus 1.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    weight = weight.detach()
    sign = torch.ones_like(weight)
    sign[::2] = -1
    bias = getattr(norm, "bias", None)
    with torch.no_grad():
        try:
            normed, doubled = (norm(sign[None, None] * size).flatten().float() for size in (8, 16))
            if float((doubled - normed).abs().max()) > 0.1 * float(normed.abs().max()):
                return weight.float()  # MobileBERT's NoNorm only multiplies
        except (TypeError, AttributeError):  # a gated norm, whose gate is 20 in every channel here: its SiLU is 20
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
    """A tensor of the forward pass for probes to watch: the input or output of a module's ``call``-th call.

    ``call`` counts from 0 within one forward pass of the model, because ALBERT calls the same layer twelve times. The
    value is ``factor`` times the tensor (Granite scales its branches); None means no factor. ``argument`` is the
    position or the keyword of an input. With ``collapse``, the value is the mean of several streams [batch, tokens, n,
    width].
    """

    module: nn.Module
    path: str
    side: str  # input | output
    call: int = 0
    factor: float | torch.Tensor | None = None
    argument: int | str = 0
    collapse: bool = False


@dataclass(frozen=True, eq=False)
class NormSite:
    """A norm of a layer. ``role`` is pre_norm (on a module's input), out_norm (on a module's output, before the
    addition), post_norm (on the sum), inner_norm (inside attention or feed-forward), embedding_norm or final_norm.
    """

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
        """Return the gain's values, plus 1 if the norm stores the gain minus 1 (Gemma); None if there is no gain."""
        return effective_gain(self.module)


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The parts of a dense feed-forward. Lamina excludes experts, because an expert sees few tokens.

    ``up`` holds the up-projection and any gate projection with their paths, in order of execution. ``down`` is the
    down-projection. ``pre`` is the nonlinearity's input, and ``post`` is the input of ``down``.
    """

    up: tuple[tuple[str, nn.Module], ...]
    down: tuple[str, nn.Module]
    pre: Point | None
    post: Point

    @property
    def width(self) -> int:
        """D_ff: the number of channels that the down-projection reads."""
        down: Any = self.down[1]
        return int(down.in_features if hasattr(down, "in_features") else down.weight.shape[0])

    def stacked_side(self, module: nn.Module) -> int | None:
        """Return the axis of size 2 D_ff of a weight that stacks gate and up; None for a single projection."""
        if module is self.down[1] or len(self.up) != 1:
            return None
        weight: Any = module.weight
        # A projection is [out, in] or, in GPT-2's Conv1D, [in, out].
        out = 0 if hasattr(module, "in_features") else 1
        return out if weight.shape[out] == 2 * self.width else None


@dataclass(frozen=True, eq=False)
class SublayerSite:
    """One addition to the residual stream. Two additions of a layer may run side by side (GPT-NeoX).

    ``kind`` is attention, feed_forward, or mixer for any other module. ``contribution`` is the added tensor, after an
    out_norm. ``after`` is the residual stream after the addition and any post_norm; None if no module reads or writes
    this tensor.
    """

    kind: str
    contribution: Point
    after: Point | None
    norms: tuple[NormSite, ...] = ()
    feed_forward: FeedForward | None = None
    modules: tuple[tuple[str, nn.Module], ...] = ()  # what computes it, outermost first: owns its parameters
    entry: Point | None = None  # what goes into the first of them


@dataclass(frozen=True, eq=False)
class LayerSite:
    """One layer's call. In ALBERT, several layers share ``module``; ``call`` tells them apart.

    ``carries_more`` says whether the layer returns several streams, or earlier states in addition to the stream. If the
    layer's first sub-layer does not read the residual stream, ``reads`` is the state that this sub-layer reads.
    """

    index: int
    module: nn.Module
    path: str
    call: int
    sublayers: tuple[SublayerSite, ...]
    argument: int | str = 0  # the position or keyword of the stream among the layer's arguments
    carries_more: bool = False
    reads: Point | None = None

    @property
    def input(self) -> Point:
        """x^l, the residual stream before the layer."""
        return Point(self.module, self.path, "input", self.call, None, self.argument, collapse=self.carries_more)

    @property
    def output(self) -> Point:
        """x^(l+1), the residual stream after the layer."""
        return Point(self.module, self.path, "output", self.call, collapse=self.carries_more)


@dataclass(frozen=True, eq=False)
class Structure:
    """A model's layers in order of execution, and the modules around the layers.

    ``outside`` lists the modules outside ``layers``: "embedding" modules run before the layers, "readout" modules run
    after the layers, and "other" modules are in other lists of layers. If the final norm does not read the residual
    stream, ``end`` is the state that the final norm reads. ``others`` holds the paths of other lists of layers. If
    ``layers`` joins several stacks, ``starts`` holds the first layer of each further stack.
    """

    layers: tuple[LayerSite, ...]
    hidden_size: int
    embedding: nn.Module | None
    embedding_norm: NormSite | None
    final_norm: NormSite | None
    head: nn.Module | None
    notes: list[str] = field(default_factory=list)
    outside: tuple[tuple[str, nn.Module], ...] = ()
    end: Point | None = None
    others: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """N, the number of layers; states run from 0 to N."""
        return len(self.layers)

    @property
    def carries_more(self) -> bool:
        """Return whether a layer returns several streams, or earlier states."""
        return any(site.carries_more for site in self.layers)

    @property
    def has_memory(self) -> bool:
        """Return whether layers read earlier states."""
        return any(getattr(site.module, "has_memory", False) for site in self.layers)

    def kinds(self) -> dict[int, str]:
        """Return each layer's kind: the class names of the layer and of the layer's children with parameters."""
        kinds = {}
        for site in self.layers:
            parts = (part for part in site.module.children() if next(part.parameters(), None) is not None)
            kinds[site.index] = " ".join(type(module).__name__ for module in (site.module, *parts))
        return kinds

    def states(self) -> dict[int, Point]:
        """Return the points of x^0 ... x^N, where x^N has not passed the final norm."""
        points = {site.index: site.input for site in self.layers}
        points[self.num_layers] = self.layers[-1].output
        return points

    def reads(self) -> dict[int, Point]:
        """Return the points of the states that layers and the final norm read instead of the residual stream."""
        reads = [*(site.reads for site in self.layers), self.end]
        return {state: point for state, point in enumerate(reads) if point is not None}

    def norms(self) -> Iterator[tuple[int, str, NormSite]]:
        """Yield (layer, sublayer kind, norm); embedding and final norm have layer -1 and sublayer "model"."""
        if self.embedding_norm is not None:
            yield -1, "model", self.embedding_norm
        for site in self.layers:
            for sublayer in site.sublayers:
                for norm in sublayer.norms:
                    yield site.index, sublayer.kind, norm
        if self.final_norm is not None:
            yield -1, "model", self.final_norm
