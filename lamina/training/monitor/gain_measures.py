"""Measure the norms' gains, and the row norms of the embedding and the output head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lamina.modeling.parts import body_of, sublayers
from lamina.modeling.wiring_lamina import SCALES, LaminaNorm
from lamina.probes.structure.sites import Structure, effective_gain
from lamina.training.checkpointing.sharding import reshard
from lamina.training.monitor.writers import BETWEEN, Location, Row

Gain: TypeAlias = tuple[int, str, str, int, float, torch.Tensor]
"""The layer (-1 outside the layers), sub-layer, role, number within the role, the norm's offset, and the gain."""


def gain_rows(model: nn.Module, step: int) -> list[Row]:
    """Measure the mean and the largest magnitude of each gain and learned scale of a Lamina model."""
    return rows_of_gains(lamina_gains(model), step)


def lamina_gains(model: nn.Module) -> list[Gain]:
    reshard(model)
    base = body_of(model, "layer monitor")
    roles = ("pre_norm", "key_norm", "value_norm", "out_norm", "post_norm", *SCALES, "gate")
    parts = [(index, name, role, getattr(res, role)) for index, name, res in sublayers(base) for role in roles]
    parts += [(-1, "block", "embedding_norm", base.embedding_norm), (-1, "block", "final_norm", base.norm)]
    gains: list[Gain] = []
    for layer, sublayer, role, part in parts:
        norm = isinstance(part, LaminaNorm)
        weight, offset = (part.weight, float(part.zero_centered)) if norm else (part, 0.0)
        gains += [(layer, sublayer, role, 0, offset, weight)] if isinstance(weight, nn.Parameter) else []
    return gains


def gains_of(structure: Structure) -> list[Gain]:
    """List the learned gains of a model's norms, and the weights of its embedding and output head."""
    gains: list[Gain] = []
    counts: Counter[Location] = Counter()
    for layer, sublayer, norm in structure.norms():
        if isinstance(weight := getattr(norm.module, "weight", None), torch.Tensor) and weight.ndim == 1:
            owner = (layer, "block" if layer < 0 else sublayer, norm.role)
            gains.append((*owner, counts[owner], _offset(norm.module), weight))
            counts[owner] += 1
    for role, weight in tables_of(structure).items():
        columns = isinstance(weight, DTensor) and any(placed.is_shard(1) for placed in weight.placements)
        if not columns:  # else each process has only a part of each row
            gains.append((-1, "block", role, 0, 0.0, weight))
    return gains


def tables_of(structure: Structure) -> dict[str, nn.Parameter]:
    """Return the weight matrices [rows, width] of the embedding and the output head. A tied matrix appears once."""
    tables: dict[str, nn.Parameter] = {}
    kinds = {"embedding": nn.Embedding, "readout": nn.Linear}
    for role, module in (("embedding", structure.embedding), ("readout", structure.head), *structure.outside):
        for part in () if module is None or role not in kinds else module.modules():
            if not isinstance(part, kinds[role]):
                continue
            weight = cast(nn.Parameter, part.weight)
            if weight.ndim == 2 and (
                role not in tables or len(weight) > len(tables[role])
            ):  # else a process's part under FSDP1
                tables[role] = weight
    if tables.get("readout") is tables.get("embedding"):
        tables.pop("readout", None)
    return tables


def _offset(norm: nn.Module) -> float:
    """Return the constant that a norm adds to its stored gain: 1 for Gemma's norms, otherwise 0."""
    weight = norm.weight.detach()  # type: ignore[union-attr]
    try:
        effective = effective_gain(norm)
    except RuntimeError:  # a sharded weight
        return 0.0
    return 0.0 if effective is None else float(round(float((effective - weight.float()).mean())))


def rows_of_gains(gains: Sequence[Gain], step: int) -> list[Row]:
    """Measure the mean and the largest magnitude of each gain, and of the row norms of embedding and output head."""
    series = GainSeries(gains)
    series.end_step(step)
    return series.rows(prefix="")


class GainSeries:
    """After each step, measure the gains, and the row norms of the embedding and the output head.

    Gains of the same size are measured together, because one small operation per gain would slow each step down. Only
    ``rows`` waits for the device. All processes of a sharded model must call ``rows`` at the same step.
    """

    def __init__(self, gains: Sequence[Gain] = ()):
        self.follow(gains)

    def follow(self, gains: Sequence[Gain]) -> None:
        """Measure the given gains and matrices from now on, and forget all earlier steps."""
        self.gains = gains
        self._steps: list[int] = []
        self._values: list[torch.Tensor] = []  # for each step: [mean or largest, gain], with gains in this order:
        self._order: list[int] = []
        self._sharded: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}  # by the mesh's sharded dimensions
        self._offsets: dict[
            tuple[float, ...], torch.Tensor
        ] = {}  # cached, because sending a tensor waits for the device

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        if not self.gains:
            return
        kinds: dict[tuple[int, torch.Size, torch.dtype, torch.device], list[int]] = {}
        parts: list[torch.Tensor] = []
        self._sharded = {}
        for index, (*_, parameter) in enumerate(self.gains):
            value = parameter.detach()
            if isinstance(value, DTensor):
                dims = tuple(dim for dim, placed in enumerate(value.placements) if not placed.is_replicate())
                self._sharded.setdefault((value.device_mesh, dims), []).append(index)
                value = value.to_local()
            whole = parameter.shape[0] if parameter.ndim == 2 else parameter.numel()
            kinds.setdefault((whole, value.shape, value.dtype, value.device), []).append(index)
            parts.append(value)
        self._order = [index for members in kinds.values() for index in members]
        measured = [self._measured([parts[at] for at in members], members, of[0]) for of, members in kinds.items()]
        self._values.append(torch.cat([part.to(measured[0].device) for part in measured], dim=1))
        self._steps.append(step)

    def _measured(self, parts: Sequence[torch.Tensor], members: Sequence[int], whole: int) -> torch.Tensor:
        """Return the means and largest magnitudes of tensors of one shape. ``whole`` is the unsharded size."""
        if parts[0].ndim == 2:
            values = torch.stack([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in parts])
        else:
            values = torch.stack([part.flatten() for part in parts]).float()
        offsets = tuple(self.gains[index][4] for index in members)
        if any(offsets):
            if offsets not in self._offsets:
                self._offsets[offsets] = torch.tensor(offsets, dtype=values.dtype, device=values.device)[:, None]
            values = values + self._offsets[offsets]
        largest = values.abs().amax(1) if values.shape[1] else values.new_zeros(len(values))
        return torch.stack([values.sum(1) / whole, largest])

    def rows(self, prefix: str = BETWEEN) -> list[Row]:
        """Return the measurements of the steps since the last call. Metric names begin with ``prefix``."""
        steps, self._steps = self._steps, []
        if not steps:
            return []
        places = sorted(range(len(self._order)), key=self._order.__getitem__)
        means, largest = torch.stack(self._values)[:, :, places].unbind(1)
        self._values = []
        try:
            for (mesh, dims), members in self._sharded.items():
                of_shards, most = means[:, members], largest[:, members]
                for group in map(mesh.get_group, dims):
                    torch.distributed.all_reduce(of_shards, group=group)
                    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
                means[:, members], largest[:, members] = of_shards, most
        except RuntimeError:  # the group's backend cannot reduce tensors of this device
            return []
        names = ["row_norm" if parameter.ndim == 2 else "gain" for *_, parameter in self.gains]
        return [
            Row(step, layer, sublayer, role, index, f"{prefix}{name}_{of}", value)
            for step, *both in zip(steps, means.tolist(), largest.tolist(), strict=True)
            for (layer, sublayer, role, index, *_), name, *pair in zip(self.gains, names, *both, strict=True)
            for of, value in zip(("mean", "abs_max"), pair, strict=True)
        ]
