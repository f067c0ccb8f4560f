"""Call single layers on the hidden states of a real forward pass."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from lamina.errors import UserError
from lamina.modeling.parts import patched, temporary_hooks
from lamina.probes.engine.context import Context
from lamina.probes.engine.registry import Probe, Sample, check_most, sample_of
from lamina.probes.structure.hooks import Args, Key, Kwargs, Output, argument_of, intercept, stream_of, with_argument
from lamina.probes.structure.sites import LayerSite, Point


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One recorded call of a layer: the residual stream x^l, and all other arguments."""

    site: LayerSite
    stream: torch.Tensor
    args: Args
    kwargs: Kwargs
    calls: Mapping[nn.Module, int]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer on ``x`` instead of x^l. Return the stream [sequences, tokens, (streams,) channels] after the
        layer.
        """
        args, kwargs = with_argument(self.args, self.kwargs, self.site.input.argument, x)
        layer = self.site.module  # Lamina's first block of several streams is to take them, not to make them
        with patched(layer, streams=0) if vars(layer).get("streams") else nullcontext():
            return stream_of(self.site.module(*args, **kwargs))

    def residual_path(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer on ``x`` with gradients only through the skips."""
        points = {index: sublayer.contribution for index, sublayer in enumerate(self.site.sublayers)}
        with intercept(points, lambda key, tensor: tensor.detach(), calls=self.calls):
            return self(x)

    def observe(self, points: Mapping[Key, Point], x: torch.Tensor) -> tuple[torch.Tensor, dict[Key, torch.Tensor]]:
        """Run the layer on ``x``. Return the layer's output and the tensors at ``points``, with autograd graphs."""
        tensors: dict[Key, torch.Tensor] = {}
        with intercept(points, lambda key, tensor: tensors.update({key: tensor}), calls=self.calls):
            return self(x), tensors

    def between(self, start: Point, end: Point, y: torch.Tensor) -> torch.Tensor:
        """Run the layer with ``y`` as the tensor at ``start``, and return the tensor at ``end``."""
        ends: list[torch.Tensor] = []
        points = {"start": start, "end": end}
        with intercept(points, lambda key, tensor: y if key == "start" else ends.append(tensor), calls=self.calls):
            self(self.stream)
        return ends[0]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turn off the parameters' gradients, and make 16-bit parameters float32, because Jacobians need the precision."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    small = [(t, t.data) for t in (*model.parameters(), *model.buffers()) if t.dtype in (torch.float16, torch.bfloat16)]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        for tensor, data in small:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in small:
            tensor.data = data
        for parameter in trainable:
            parameter.requires_grad_(True)


def record_layer_calls(context: Context, inputs: Mapping[str, torch.Tensor]) -> list[LayerCall]:
    """Record every layer's call in one forward pass. Use a short input, because memory holds all hidden states."""
    sites: dict[nn.Module, dict[int, LayerSite]] = {}
    for site in context.structure.layers:
        sites.setdefault(site.module, {})[site.call] = site
    watched = set(sites)
    for sublayer in (sublayer for site in context.structure.layers for sublayer in site.sublayers):
        points = [sublayer.contribution, sublayer.after, *(norm.input for norm in sublayer.norms)]
        points += [sublayer.feed_forward.post] if sublayer.feed_forward is not None else []
        watched |= {point.module for point in points if point is not None}
    finished: Counter[nn.Module] = Counter()
    calls: dict[int, LayerCall] = {}

    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        site = sites.get(module, {}).get(finished[module])
        if site is not None:
            stream = stream_of(argument_of(args, kwargs, site.input.argument))
            if site.carries_more and (copies := getattr(module, "streams", 0)):
                stream = stream.unsqueeze(-2).repeat_interleave(copies, dim=-2)
            calls[site.index] = LayerCall(site, stream.detach(), args, kwargs, dict(finished))

    def after(module: nn.Module, args: Args, output: Output) -> None:
        finished[module] += 1

    with temporary_hooks() as hooks, torch.no_grad():
        for module in watched:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
        context.forward(inputs, head=False)
    return [calls[index] for index in sorted(calls)]


class ShortProbe(Probe):
    """A costly probe that measures only the first ``tokens`` tokens of the first ``sequences`` inputs (0: all).

    The default is all of the user's own text, or 1 sequence of 32 tokens from a corpus. Raises UserError for an invalid
    number.
    """

    def __init__(self, sequences: int | None, tokens: int | None):
        self._sequences = check_most(self.name, "sequences", sequences)
        self._tokens = check_most(self.name, "tokens", tokens)
        if self._tokens == 1:
            raise UserError(f"{self.name}: option 'tokens' is 1. Give a whole number of at least 2, or 0 for all.")
        self.inputs: list[dict[str, torch.Tensor]] = []

    def measured(self, context: Context) -> Sample:
        return sample_of(self.inputs)

    def tokens_of(self, context: Context) -> float:
        sequences, tokens = self._most(context)
        sequences = sample_of(context.first(sequences)).sequences
        return min(context.tokens(sequences), sequences * (tokens or math.inf))

    def take(self, context: Context) -> None:
        """Set ``inputs`` to the first tokens of the first texts. If a limit is 0, each batch has one sequence."""
        sequences, tokens = self._most(context)
        if sequences and tokens:
            self.inputs = [short_inputs(context, sequences, tokens)]
            return
        rows = [row for batch in context.first(sequences) for row in rows_of(batch)]
        self.inputs = [short_inputs(replace(context, batches=[row]), 1, tokens or sys.maxsize) for row in rows]

    def _most(self, context: Context) -> tuple[int, int]:
        return context.most(self._sequences, 1), context.most(self._tokens, 32)


def rows_of(batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split a batch into batches of one sequence."""
    return [
        {name: value[row : row + 1] for name, value in batch.items()} for row in range(sample_of([batch]).sequences)
    ]


def short_inputs(context: Context, sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return the first tokens of the first texts without padding, or images. Raises UserError for single tokens."""
    if not context.reads_tokens:
        (name,) = list(context.batches[0])[:1]
        pixels = torch.cat([batch[name] for batch in context.batches[:sequences]])
        return {name: pixels[:sequences].to(context.device)}
    rows: list[dict[str, torch.Tensor]] = []
    for batch in context.batches:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        for row in range(min(len(ids), sequences - len(rows))):
            chosen = {name: value[row][mask[row]] for name, value in batch.items() if value.shape == ids.shape}
            chosen.pop("attention_mask", None)
            rows.append({name: value[:tokens] for name, value in chosen.items()})
        if len(rows) == sequences:
            break
    length = min(len(row["input_ids"]) for row in rows)
    if length < 2:
        raise UserError(f"texts: a text has {length} token. Give texts of at least 2 tokens.")
    return {name: torch.stack([row[name][:length] for row in rows]).to(context.device) for name in rows[0]}
