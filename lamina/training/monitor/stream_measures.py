"""Measure a forward pass by sub-layer: the residual stream, the largest attention logits and the experts' loads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lamina.modeling.parts import body_of, patched, sublayers, uncompiled
from lamina.probes.engine.statistics import stream_figures
from lamina.probes.structure.hooks import Args, Kwargs, Output, evaluating, layers_running, observe
from lamina.probes.structure.sites import Point, Structure
from lamina.training.monitor.graph_hooks import GraphHooks
from lamina.training.monitor.writers import MODEL, Row

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Spot: TypeAlias = tuple[int, str, int]
"""A layer (-1 for the first layer's input), a sub-layer (or "block"), and its index among sub-layers of this kind."""
STATE_METRICS = ("hidden_variance", "hidden_mean", "hidden_abs_mean", "hidden_abs_max")
TOP = 100  # the number of the largest |x| in Peri-LN's Figure 11
_SOFTMAX = {functional.softmax, torch.softmax, torch.Tensor.softmax}
_TOPK = {torch.topk, torch.Tensor.topk}
_QUERIES = 512  # the number of queries for which memory holds logits at a time


def state_statistics(x: torch.Tensor, magnitude: torch.Tensor | None = None) -> torch.Tensor:
    """Return variance, mean, mean magnitude and largest magnitude of hidden states [batch, tokens, hidden_size]."""
    x = x.detach().float()
    magnitude = magnitudes(x) if magnitude is None else magnitude
    return torch.stack([x.var(correction=0), x.mean(), magnitude.mean(), magnitude.max()])


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of hidden states [batch, tokens, hidden_size] as [batch * tokens, hidden_size]."""
    return x.detach().float().abs().flatten(0, -2)


def largest_magnitudes(magnitude: torch.Tensor, count: int = TOP) -> torch.Tensor:
    """Return the largest values of ``magnitude`` [tokens, hidden_size], in descending order with NaN first."""
    # The largest elements are in the tokens with the largest peaks, so only these tokens are sorted.
    peaks = magnitude.amax(-1)
    tokens = peaks.topk(min(count, len(peaks)), sorted=False).indices
    values = magnitude.index_select(0, tokens).flatten()
    return values.topk(min(count, len(values))).values


def hidden_state_rows(model: nn.Module, inputs: torch.Tensor | Mapping[str, torch.Tensor], step: int) -> list[Row]:
    """Measure the residual stream on one batch, before the first layer and after every sub-layer.

    The model runs in evaluation mode, without gradients or compilation. The model computes in float32, unless FSDP2 has
    sharded the model in bfloat16.

    The metric "hidden_top_abs" is Peri-LN's "global top-100" (Fig 11): the 100 largest magnitudes before the first
    layer and after every sub-layer. An element that stays large through several sub-layers counts once for each
    sub-layer. If the model has several residual streams, most metrics cover all streams together. "stream_rms" is for
    each stream, and "stream_cosine" is the mean over pairs of streams.

    Args:
        inputs: the arguments of a Lamina model, or only its main input: token ids [batch, tokens] or pixel values
            [batch, channels, height, width].
    """
    base = body_of(model, "layer monitor")
    points: dict[Spot, Point] = {(-1, "block", 0): Point(base.layers[0], "", "input")}
    for index, name, residual in sublayers(base):
        points[index, name, 0] = Point(residual, "", "output", collapse=residual.mixer is not None)
    return stream_rows(model, base, points, inputs, step)


def stream_rows(
    model: nn.Module,
    base: nn.Module,
    points: Mapping[Spot, Point],
    inputs: torch.Tensor | Mapping[str, torch.Tensor],
    step: int,
) -> list[Row]:
    """Measure the hidden states at the given points in a forward pass, as ``hidden_state_rows`` does."""
    meter = ForwardMeter(points, top=TOP)
    with torch.no_grad(), evaluating(model), uncompiled(base), meter.measuring(base):
        named = {str(base.main_input_name): inputs} if isinstance(inputs, torch.Tensor) else inputs
        if isinstance(model, FSDPModule):  # only the root gathers the embedding. All processes must call the root
            model(**named, use_cache=False, logits_to_keep=1)
        else:
            base(**named, use_cache=False)
    return rows_of(step, [meter.take()])


@dataclass
class PassNumbers:
    """The numbers that one process measured in a forward pass."""

    # the number of elements and the ``state_statistics`` of each point
    states: dict[Spot, tuple[int, list[float]]] = field(default_factory=dict)
    # the number of elements and the mean ``stream_figures`` of each point with several residual streams
    streams: dict[Spot, tuple[int, list[float]]] = field(default_factory=dict)
    logits: dict[int, float] = field(default_factory=dict)  # the largest attention logit of each layer
    # the number of tokens and each expert's load, for each layer
    loads: dict[int, tuple[int, list[float]]] = field(default_factory=dict)
    largest: list[float] = field(default_factory=list)  # the largest magnitudes of all states, in descending order


class ForwardMeter:
    """Measure a forward pass. The numbers stay on the device until you call ``take``.

    Args:
        points: the points at which to measure the residual stream. If a model has several streams, Lamina measures the
            streams before the model combines them.
        structure: the model's layers, or None for no attention logits and expert loads.
        top: the number of largest magnitudes to keep.
        graph: the hooks of a compiled model, or None. A compiled model hides attention logits and expert loads.

    Attributes:
        half: whether a pass ran under autocast to float16.
    """

    def __init__(
        self,
        points: Mapping[Spot, Point],
        structure: Structure | None = None,
        *,
        top: int = 0,
        graph: GraphHooks[Spot] | None = None,
    ):
        self.graph = graph
        self.points = {spot: replace(point, collapse=False) for spot, point in points.items()}
        self.structure, self.top = structure, top
        self._several = {spot for spot, point in points.items() if point.collapse}
        self._streams: dict[Spot, torch.Tensor] = {}
        self.half = False
        self._states: dict[Spot, torch.Tensor] = {}
        self._elements: dict[Spot, int] = {}
        self._largest: list[torch.Tensor] = []
        self._logits: dict[int, torch.Tensor] = {}
        self._loads: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, int] = {}  # the number of tokens that chose experts

    @contextmanager
    def measuring(self, root: nn.Module) -> Iterator[None]:
        self._states, self._streams, self._largest, self._logits, self._loads = {}, {}, [], {}, {}
        with ExitStack() as stack:
            if self.graph is not None:
                stack.enter_context(self.graph.observing(self._see))
            else:
                stack.enter_context(observe(self.points, self._see, root=root))
            if self.structure is not None and self.graph is None:
                stack.enter_context(_operations(self.structure, self._see_logits, self._see_choice))
            yield

    @torch.no_grad()
    def _see(self, spot: Spot, tensor: torch.Tensor) -> None:
        self.half |= in_half(tensor.device.type)  # accelerate enters autocast only inside the model's call
        self._elements[spot] = tensor.numel()
        tensor = tensor if tensor.ndim > 1 else tensor[None]
        magnitude = magnitudes(tensor)
        self._states[spot] = state_statistics(tensor, magnitude)
        if spot in self._several and tensor.ndim > 3:
            self._streams[spot] = stream_figures(tensor.detach().float()).flatten(0, -2).mean(0)
        self._largest += [largest_magnitudes(magnitude, self.top)] if self.top else []

    @torch.no_grad()
    def _see_logits(self, layer: int, largest: torch.Tensor) -> None:
        logits = self._logits.get(layer)
        self._logits[layer] = largest if logits is None else torch.maximum(logits, largest)

    @torch.no_grad()
    def _see_choice(self, layer: int, chosen: torch.Tensor, experts: int) -> None:
        flat = chosen.detach().flatten()
        counts = torch.zeros(experts, device=flat.device).scatter_add_(
            0, flat, torch.ones_like(flat, dtype=torch.float)
        )
        if (
            layer not in self._loads or len(self._loads[layer]) <= experts
        ):  # a router may choose groups of experts first
            self._tokens[layer] = math.prod(chosen.shape[:-1])
            self._loads[layer] = counts / self._tokens[layer]

    def missing(self) -> list[str]:
        """For each kind of measurement that the last pass lacks, return a line with the reason."""
        if self.points and not self._states:
            return [
                "Lamina does not record the residual stream, because Lamina saw no forward pass of the model (a "
                "compiled function hides the pass)"
            ]
        layers = () if self.structure is None else self.structure.layers
        kinds = {sublayer.kind for site in layers for sublayer in site.sublayers}
        if self._states and self.graph is not None and self.structure is not None:
            return ["Lamina does not record attention logits and the experts' loads, because the model is compiled"]
        if self._states and "attention" in kinds and not self._logits:
            return ["Lamina does not record attention logits, because attention runs in a kernel outside PyTorch"]
        return []

    def take(self) -> PassNumbers:
        """Return the last pass's measurements and clear them. The call waits for the device."""
        seen = PassNumbers()
        if self._states:
            values = torch.stack(list(self._states.values())).tolist()
            seen.states = {spot: (self._elements[spot], each) for spot, each in zip(self._states, values, strict=True)}
        seen.streams = {spot: (self._elements[spot], each.tolist()) for spot, each in self._streams.items()}
        if self._largest:
            values = torch.cat(self._largest)
            seen.largest = values.topk(min(self.top, len(values))).values.tolist()
        if self._logits:
            seen.logits = dict(zip(self._logits, torch.stack(list(self._logits.values())).tolist(), strict=True))
        seen.loads = {layer: (self._tokens[layer], load.tolist()) for layer, load in self._loads.items()}
        self._states, self._streams, self._largest, self._logits, self._loads = {}, {}, [], {}, {}
        return seen


def rows_of(step: int, parts: Sequence[PassNumbers]) -> list[Row]:
    """Combine the processes' measurements of a batch."""
    rows: list[Row] = []
    for (layer, sublayer, index), seen in _by_key(part.states for part in parts).items():
        named = zip(STATE_METRICS, _pooled(seen), strict=True)
        rows += [Row(step, layer, sublayer, "all", index, metric, value) for metric, value in named]
    for (layer, sublayer, _), seen in _by_key(part.streams for part in parts).items():
        total = sum(count for count, _ in seen)
        each = zip(*(values for _, values in seen), strict=True)
        cosine, *squares = (sum(n * v for (n, _), v in zip(seen, vs, strict=True)) / total for vs in each)
        rows.append(Row(step, layer, sublayer, "all", 0, "stream_cosine", cosine))
        rows += [Row(step, layer, sublayer, "all", i, "stream_rms", square**0.5) for i, square in enumerate(squares)]
    for layer, logits in _by_key(part.logits for part in parts).items():
        if (largest := max(logits)) != -math.inf:  # else a mask left no key to any query
            rows.append(Row(step, layer, "attention", "all", 0, "attention_logit", largest))
    for layer, loads in _by_key(part.loads for part in parts).items():
        tokens = sum(count for count, _ in loads)
        for expert, values in enumerate(zip(*(load for _, load in loads), strict=True)):
            load = sum(count / tokens * value for (count, _), value in zip(loads, values, strict=True))
            rows.append(Row(step, layer, "feed_forward", "expert", expert, "expert_load", load))
    largest = [value for part in parts for value in part.largest]  # only a single process measures this
    return rows + [Row(step, *MODEL, rank, "hidden_top_abs", value) for rank, value in enumerate(largest)]


def _by_key(parts: Iterable[Mapping[Key, Value]]) -> dict[Key, list[Value]]:
    values: dict[Key, list[Value]] = {}
    for part in parts:
        for key, value in part.items():
            values.setdefault(key, []).append(value)
    return values


def _pooled(parts: Sequence[tuple[int, list[float]]]) -> list[float]:
    """Combine the ``state_statistics`` of several tensors, each given with the tensor's number of elements."""
    if len(parts) == 1:
        return parts[0][1]
    total = sum(count for count, _ in parts)
    mean = sum(count * values[1] for count, values in parts) / total
    variance = sum(count * (values[0] + (values[1] - mean) ** 2) for count, values in parts) / total
    magnitude = sum(count * values[2] for count, values in parts) / total
    return [variance, mean, magnitude, max(values[3] for _, values in parts)]


def in_half(device: str) -> bool:
    """Return whether autocast runs operations in float16 on this type of device, such as "cuda"."""
    available = torch.amp.is_autocast_available(device)
    return available and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16


def stream_points(structure: Structure) -> dict[Spot, Point]:
    """Return the points before the first layer and after every sub-layer."""
    points: dict[Spot, Point] = {(-1, "block", 0): structure.layers[0].input}
    for site in structure.layers:
        seen: Counter[str] = Counter()
        for sublayer in site.sublayers:
            if sublayer.after is not None:
                points[site.index, sublayer.kind, seen[sublayer.kind]] = sublayer.after
            seen[sublayer.kind] += 1
        # a layer that does not end with a feed-forward
        if not site.sublayers or site.sublayers[-1].kind != "feed_forward":
            points[site.index, "block", 0] = site.output
    return points


@contextmanager
def _operations(
    structure: Structure,
    see_logits: Callable[[int, torch.Tensor], None],
    see_choice: Callable[[int, torch.Tensor, int], None],
) -> Iterator[None]:
    """Watch each layer's calls of softmax, fused attention and topk (the choice of experts)."""

    class AttentionMode(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Output], types: object, args: Args = (), kwargs: Kwargs | None = None
        ) -> object:
            given = dict(kwargs or {})
            if inside and func is functional.multi_head_attention_forward:
                with _inner_calls(lambda largest: see_logits(inside[-1], largest)):
                    return func(*args, **given)
            output = func(*args, **given)
            if inside and func is functional.scaled_dot_product_attention:
                see_logits(inside[-1], largest_logit(*args, **given))
            elif inside and func in _SOFTMAX and args and args[0].ndim == 4:
                see_logits(inside[-1], args[0].detach().amax().float())
            elif inside and func in _TOPK and isinstance(output, tuple) and args[0].ndim > 1:
                see_choice(inside[-1], output[1], args[0].shape[-1])
            return output

    with layers_running(structure.layers) as inside, AttentionMode():
        yield


@contextmanager
def _inner_calls(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Watch the softmax or fused attention inside nn.MultiheadAttention, which TorchFunctionMode does not see."""
    fused, softmax = functional.scaled_dot_product_attention, functional.softmax

    def seen_fused(*args: Output, **kwargs: Output) -> torch.Tensor:
        see(largest_logit(*args, **kwargs))
        return fused(*args, **kwargs)

    def seen_softmax(x: torch.Tensor, *args: Output, **kwargs: Output) -> torch.Tensor:
        see(x.detach().amax().float())
        return softmax(x, *args, **kwargs)

    with patched(functional, scaled_dot_product_attention=seen_fused, softmax=seen_softmax):
        yield


@torch.no_grad()
def largest_logit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the largest logit of a fused attention over the visible keys, after scale and bias, in float32.

    The arguments are the arguments of ``scaled_dot_product_attention``, with query [batch, heads, queries, width].
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[-3] // key.shape[-3] if query.ndim >= 3 else 1
    if groups > 1:
        key = key.repeat_interleave(groups, dim=-3)
    queries, keys = query.shape[-2], key.shape[-2]
    largest = torch.full((), -math.inf, device=query.device)
    for start in range(0, queries, _QUERIES):
        part = slice(start, min(start + _QUERIES, queries))
        visible = keys if not is_causal else min(part.stop, keys)
        logits = (query[..., part, :] @ key[..., :visible, :].transpose(-2, -1)).float() * factor
        if attn_mask is not None:
            mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., part, :]
            mask = mask[..., :visible]
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        if is_causal:
            rows = torch.arange(part.start, part.stop, device=query.device)[:, None]
            logits = logits.masked_fill(torch.arange(visible, device=query.device) > rows, -math.inf)
        largest = torch.maximum(largest, logits.amax())
    return largest
