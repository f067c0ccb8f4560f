"""One batch without each layer in turn, the layers before it run once and not again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from lamina.modeling.hooks import temporary_hooks
from lamina.probes.engine.context import Context
from lamina.probes.engine.removal import BRANCH, REMOVE, as_written, contributions, removed, replaced, roots_of, zeros
from lamina.probes.structure.outputs import Args, Kwargs, Output, argument_of, refill, stream_of, with_argument
from lamina.probes.structure.sites import LayerSite, Point

Forward: TypeAlias = Callable[..., Output]


class _Unchanged(Exception):
    """The layers without their branches return their input, so the pass can stop."""


class Suffixes:
    """Forward passes of one batch without blocks of layers, by their starts in ascending order; used as a context.

    Only one state is held. A pass for the start l computes the layers after the omitted ones; those before them
    pass the stored x^l through. That costs half of running the whole model each time. If a model changes the
    stream between two layers, so that a layer's output is not the next one's input, whole passes run.
    """

    def __init__(self, context: Context, run: Callable[[], torch.Tensor]):
        self.context, self.run = context, run
        self.sites = {(id(site.module), site.call): site for site in context.structure.layers}
        self.chained = True
        self._mode, self._start, self._size = "full", 0, 1
        self._calls: dict[int, int] = {}
        self._refill: dict[int, Callable[[torch.Tensor], Output]] = {}
        self._bases: dict[int, dict[int, int]] = {}
        self._counts: dict[int, int] = {}
        self._state = self._next = self._last = torch.zeros(0)
        self._changed = False

    def full(self) -> torch.Tensor:
        """The whole model's result."""
        self._mode, self._counts = "full", {}
        modules = {id(p.module): p.module for site in self.context.structure.layers for p in _points(site)}
        try:
            with temporary_hooks() as hooks:
                hooks += [m.register_forward_pre_hook(partial(self._count, key)) for key, m in modules.items()]
                return self.run()
        finally:
            self._last = torch.zeros(0)

    def without(self, start: int, size: int) -> torch.Tensor:
        """The result without the layers ``start`` ... ``start + size - 1``; starts go up by one from 0."""
        if not self.chained:
            return self._hooked(start, size, REMOVE)
        assert start in (0, self._start + 1)
        if start:
            self._state = self._next
        self._mode, self._start, self._size = REMOVE, start, size
        return self.run()

    def without_branches(self, start: int, size: int) -> torch.Tensor | None:
        """The result with the layers' contributions set to zero, after ``without``; None if it equals that."""
        if not self.chained:
            return self._hooked(start, size, BRANCH)
        assert start == self._start
        self._mode, self._size, self._changed = BRANCH, size, False
        try:
            return self.run()
        except _Unchanged:
            return None

    def _hooked(self, start: int, size: int, meaning: str) -> torch.Tensor:
        self._mode = "plain"
        with removed(self.context, range(start, start + size), meaning):
            return self.run()

    def __enter__(self) -> Suffixes:
        """Intercept the layers' calls."""
        self._opened = ExitStack()
        self._opened.enter_context(as_written(self.context.model))
        self._before: list[tuple[nn.Module, Forward | None]] = []
        for module in {id(site.module): site.module for site in self.context.structure.layers}.values():
            self._before.append((module, module.__dict__.get("forward")))
            module.forward = partial(self._call, module, module.forward)
        hooks = self._opened.enter_context(temporary_hooks())
        for root in roots_of(self.context):
            hooks.append(root.register_forward_pre_hook(lambda *_: self._calls.clear()))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the layers."""
        for module, forward in self._before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
        self._opened.close()

    def _count(self, key: int, module: nn.Module, args: Args) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1

    def _call(self, module: nn.Module, original: Forward, *args: object, **kwargs: object) -> Output:
        number = self._calls.get(id(module), 0)
        self._calls[id(module)] = number + 1
        site = self.sites.get((id(module), number))
        if site is None or self._mode == "plain":
            return original(*args, **kwargs)
        stream = argument_of(args, kwargs, site.argument)
        if self._mode == "full":
            return self._record(site, stream, original, args, kwargs)
        if site.index < self._start:
            return self._refill[site.index](stream)
        if site.index >= self._start + self._size:
            return original(*args, **kwargs)
        if self._mode == BRANCH:
            stream = self._state.clone() if site.index == self._start else stream
            return self._bare(site, stream, original, args, kwargs)
        if site.index > self._start:
            return self._refill[site.index](stream)
        if site.index == 0:
            self._state = stream.clone()
        # Computed for the next start; its other outputs are the model's own.
        args, kwargs = with_argument(args, kwargs, site.argument, self._state.clone())
        output = original(*args, **kwargs)
        self._next = stream_of(output)
        return refill(output)(self._state.clone())

    def _record(self, site: LayerSite, stream: torch.Tensor, original: Forward, args: Args, kwargs: Kwargs) -> Output:
        if site.index and (self._last.shape != stream.shape or not torch.equal(self._last, stream)):
            self.chained = False
        self._bases[site.index] = {id(p.module): self._counts.get(id(p.module), 0) for p in _points(site)}
        output = original(*args, **kwargs)
        self._refill[site.index] = refill(output)
        self._last = stream_of(output)
        return output

    def _bare(self, site: LayerSite, stream: torch.Tensor, original: Forward, args: Args, kwargs: Kwargs) -> Output:
        args, kwargs = with_argument(args, kwargs, site.argument, stream)
        before = stream.clone()
        bases = self._bases[site.index]
        with ExitStack() as stack:
            for point in contributions(site):  # counted from the layer's own start: the layers before it did not run
                point = dataclasses.replace(point, call=point.call - bases[id(point.module)])
                stack.enter_context(replaced(roots_of(self.context), point, zeros))
            output = original(*args, **kwargs)
        self._changed = self._changed or not torch.equal(stream_of(output), before)
        if site.index == self._start + self._size - 1 and not self._changed:
            raise _Unchanged
        return output


def _points(site: LayerSite) -> list[Point]:
    return [sublayer.contribution for sublayer in site.sublayers]
