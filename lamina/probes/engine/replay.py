"""Layers called again on their own, at states that the model met: what Jacobians and detached branches are taken of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.removal import refill
from lamina.probes.structure import tracing
from lamina.probes.structure.discovery import LayerSite, Point

Change = Callable[[Any, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class Block:
    """One layer's call as the model made it: the stream x^l and everything else that the layer was handed.

    ``calls``: how often each module had been called before the layer, so that points find their call again.
    """

    site: LayerSite
    stream: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: Mapping[nn.Module, int]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The stream behind the layer, of ``x`` [sequences, tokens, channels] in the place of x^l."""
        where = self.site.input.argument
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(where, int):
            args[where] = x
        else:
            kwargs[where] = x
        return first_tensor(self.site.module(*args, **kwargs))

    def residual_path(self, x: torch.Tensor) -> torch.Tensor:
        """The same value, but no gradient goes through what attention and feed-forward add: only the skips carry it."""
        points = {index: sublayer.contribution for index, sublayer in enumerate(self.site.sublayers)}
        with intercept(points, lambda key, tensor: tensor.detach(), self.calls):
            return self(x)

    def watch(self, points: Mapping[Any, Point], x: torch.Tensor) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """The stream behind the layer and the tensors at ``points``, both with their graphs."""
        found: dict[Any, torch.Tensor] = {}
        with intercept(points, lambda key, tensor: found.update({key: tensor}), self.calls):
            return self(x), found

    def between(self, start: Point, end: Point, y: torch.Tensor) -> torch.Tensor:
        """The tensor at ``end`` when ``y`` is put in the place of the one at ``start``; the stream stays as it was."""
        found: list[torch.Tensor] = []
        points = {"start": start, "end": end}
        with intercept(points, lambda key, tensor: y if key == "start" else found.append(tensor), self.calls):
            self(self.stream)
        return found[0]


def first_tensor(value: Any) -> torch.Tensor:
    """A layer's result: itself, or the first tensor of what it hands on."""
    found = tracing.first_tensor(value)
    assert found is not None
    return found


@contextmanager
def intercept(
    points: Mapping[Any, Point],
    change: Change,
    calls: Mapping[nn.Module, int] | None = None,
    *,
    root: nn.Module | None = None,
) -> Iterator[None]:
    """Hand the tensor at each point to ``change(key, tensor)`` while the model runs; what it returns takes its place.

    ``calls``: how many calls of each module are over already, where a layer is run alone; with ``root``, the model that
    is run, they are counted anew in each of its forward passes. Factors are left out: the tensor is the one that the
    model computes with.
    """
    done: Counter[nn.Module] = Counter(calls or {})
    by_module: dict[nn.Module, list[tuple[Any, Point]]] = {}
    for key, point in points.items():
        by_module.setdefault(point.module, []).append((key, point))

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args_, kwargs_ = list(args), dict(kwargs)
        for key, point in by_module[module]:
            if point.side == "input" and point.call == done[module]:
                where: Any = args_ if isinstance(point.argument, int) else kwargs_
                replaced = change(key, where[point.argument])
                if replaced is not None:
                    where[point.argument] = replaced
        return tuple(args_), kwargs_

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        for key, point in by_module[module]:
            if point.side == "output" and point.call == done[module]:
                replaced = change(key, first_tensor(output))
                if replaced is not None:
                    output = refill(output)(replaced)
        done[module] += 1
        return output

    hooks = []
    try:
        if root is not None:
            hooks.append(root.register_forward_pre_hook(lambda module, args: done.clear()))
        for module in by_module:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient meanwhile, so that graphs hold what the states need and nothing else.

    What is kept in 16 bits is computed in float32 meanwhile: products with a Jacobian need more than three digits.
    """
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [(t, t.data) for t in (*model.parameters(), *model.buffers()) if t.dtype in (torch.float16, torch.bfloat16)]
    try:
        for parameter in asked:
            parameter.requires_grad_(False)
        for tensor, data in kept:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
        for parameter in asked:
            parameter.requires_grad_(True)


def record_blocks(context: Context, inputs: Mapping[str, torch.Tensor]) -> list[Block]:
    """Every layer's call in one forward pass. Keeps the states x^0 ... x^(N-1) of this input: let it be a short one."""
    sites: dict[nn.Module, dict[int, LayerSite]] = {}
    for site in context.structure.layers:
        sites.setdefault(site.module, {})[site.call] = site
    watched = {p.module for site in context.structure.layers for p in _points_of(site)} | set(sites)
    done: Counter[nn.Module] = Counter()
    blocks: dict[int, Block] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        site = sites.get(module, {}).get(done[module])
        if site is not None:
            where = site.input.argument
            stream = args[where] if isinstance(where, int) else kwargs[where]
            blocks[site.index] = Block(site, stream.detach(), args, kwargs, dict(done))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        done[module] += 1

    hooks = []
    try:
        for module in watched:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
        with torch.no_grad():
            context.forward(inputs, head=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [blocks[index] for index in sorted(blocks)]


def _points_of(site: LayerSite) -> Iterator[Point]:
    for sublayer in site.sublayers:
        yield sublayer.contribution
        if sublayer.after is not None:
            yield sublayer.after
        yield from (norm.input for norm in sublayer.norms)
        if sublayer.feed_forward is not None:
            yield sublayer.feed_forward.post


def short_inputs(context: Context, sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    """The first ``tokens`` real tokens of the first ``sequences`` texts, without padding; or the first images, whole.

    Raises UserError where not even two tokens are left.
    """
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
        raise UserError(f"texts: one is {length} token long (allowed: at least 2)")
    return {name: torch.stack([row[name][:length] for row in rows]).to(context.device) for name in rows[0]}
