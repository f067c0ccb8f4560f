"""Find the tensor on which a norm inside an attention module acts, by changing the norm's output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from lamina.modeling.parts import temporary_hooks
from lamina.probes.census.equations import norm_kind
from lamina.probes.structure.hooks import forward, intercept
from lamina.probes.structure.sites import NormSite, Point, SublayerSite

QUERY, KEY, VALUE, OUTPUT = "queries", "keys", "values", "the output"
_MOVED = 1e-6  # smallest change that is not rounding, divided by the largest value


@dataclass(frozen=True, kw_only=True)
class InnerNorm:
    path: str
    inside: str  # the sub-layer's kind
    on: str  # queries, keys, values, "the output" (before the last projection) or "" (unknown)
    kind: str
    scope: str  # head (one head), full (all heads) or latent (a low-rank state before another projection)


def inner_norms(sublayer: SublayerSite, root: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[InnerNorm]:
    """Measure the norms inside one sub-layer. Each norm takes three forward passes."""
    norms = []
    for norm in sublayer.norms:
        if norm.role != "inner_norm" or sublayer.entry is None:
            continue
        out = Point(sublayer.entry.module, sublayer.entry.path, "output", sublayer.entry.call)
        inside = (
            "mixer" if sublayer.kind == "feed_forward" and mixes(sublayer.entry, out, root, inputs) else sublayer.kind
        )
        norms.append(replace(_inner_norm(norm, out, root, inputs), inside=inside))
    return norms


def mixes(entry: Point, out: Point, root: nn.Module, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a sub-layer mixes tokens: its output at one token depends on other tokens."""
    seen: list[torch.Tensor] = []
    middle = next(iter(inputs.values())).shape[1] // 2

    def change(key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if key == "out":
            seen.append(tensor.detach().clone())
        return _moved(tensor, middle, inputs) if key == "entry" and seen else None

    for _ in range(2):
        with torch.no_grad(), intercept({"entry": entry, "out": out}, change, roots=[root]):
            forward(root, inputs)
    apart = (seen[1] - seen[0]).abs().amax(-1).amax(0)
    return bool((apart[torch.arange(len(apart)) != middle] > _MOVED * float(seen[0].abs().max())).any())


def _inner_norm(norm: NormSite, out: Point, root: nn.Module, inputs: Mapping[str, torch.Tensor]) -> InnerNorm:
    seen: dict[str, torch.Tensor] = {}

    def run(change: str, token: int = -1) -> torch.Tensor:
        def see(key: str, tensor: torch.Tensor) -> torch.Tensor | None:
            seen[key] = tensor.detach() if change == "" else tensor.detach().clone()
            if key != "given" or not change:
                return None
            return torch.zeros_like(tensor) if change == "zero" else _moved(tensor, token, inputs)

        points = {"taken": norm.input, "given": norm.output, "output": out}
        with torch.no_grad(), intercept(points, see, roots=[root]):
            forward(root, inputs)
        return seen["output"].double()

    read: list[torch.Tensor] = []
    with temporary_hooks() as hooks:
        for module in out.module.modules():
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2:
                hooks.append(module.register_forward_pre_hook(lambda _, args: read.extend(args[:1])))
        whole = run("")
    x, y = (seen[key].double().flatten(0, -2) for key in ("taken", "given"))
    tokens = next(iter(inputs.values()))
    vectors = len(x) // tokens.numel() if tokens.ndim == 2 else 0
    projected = any(tensor.data_ptr() == seen["given"].data_ptr() for tensor in read)
    scope = "head" if vectors > 1 else "latent" if projected else "full"
    kind = norm_kind(norm.module, x, y)
    on = ""
    if tokens.ndim == 2 and whole.ndim == 3 and whole.shape[1] == tokens.shape[1]:
        limit = _MOVED * float(whole.abs().max())
        zero, middle = run("zero"), tokens.shape[1] // 2
        apart = (run("token", middle) - whole).abs().amax(-1).amax(0) > limit
        local = not bool(apart[torch.arange(len(apart)) != middle].any())
        constant = float((zero - zero[:1, :1]).abs().max()) <= limit
        if bool(apart.any()):
            on = {(False, True): QUERY, (False, False): KEY, (True, False): VALUE, (True, True): OUTPUT}[
                constant, local
            ]
    return InnerNorm(path=norm.path, inside="", on=on, kind=kind, scope=scope)


def _moved(tensor: torch.Tensor, token: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor with one token of each sequence changed."""
    sequences, length = next(iter(inputs.values())).shape
    axis = next((i for i, size in enumerate(tensor.shape) if i and size == length), None)
    changed = tensor.clone()
    if axis is not None:
        token_output = changed.select(axis, token)
    elif tensor.shape[0] == sequences * length:
        token_output = changed.unflatten(0, (sequences, length)).select(1, token)
    else:
        return changed
    generator = torch.Generator().manual_seed(1)
    token_output += torch.randn(token_output.shape, generator=generator).to(token_output) * token_output.abs().mean()
    return changed
