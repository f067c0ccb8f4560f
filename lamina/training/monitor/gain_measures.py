"""Measure the norms' gains, and the row norms of the embedding and the output head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamina.modeling.parts import body_of, sublayers
from lamina.modeling.wiring_lamina import SCALES, LaminaNorm
from lamina.probes.structure.sites import Structure, effective_gain
from lamina.training.checkpointing.sharding import reshard
from lamina.training.monitor.parameter_measures import Owner
from lamina.training.monitor.writers import Row

Gain: TypeAlias = tuple[int, str, str, int, float, torch.Tensor]
"""layer (-1 outside the layers), sub-layer, role, index among the gains of this role, the offset that the norm adds to
the gain, the gain.
"""


def gain_rows(model: nn.Module, step: int) -> list[Row]:
    """Measure the mean and the largest magnitude of each gain and learned scale of a Lamina model."""
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
    return rows_of_gains(gains, step)


def gains_of(structure: Structure) -> list[Gain]:
    """List the learned gains of a followed model's norms, and the weights of its embedding and output head."""
    gains: list[Gain] = []
    counts: Counter[Owner] = Counter()
    for layer, sublayer, norm in structure.norms():
        if isinstance(weight := getattr(norm.module, "weight", None), torch.Tensor) and weight.ndim == 1:
            owner = (layer, "block" if layer < 0 else sublayer, norm.role)
            gains.append((*owner, counts[owner], _offset(norm.module), weight))
            counts[owner] += 1
    weights = tables_of(structure)
    gains += [(-1, "block", role, 0, 0.0, weight) for role, weight in weights.items()]
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
            if weight.ndim == 2 and (role not in tables or len(weight) > len(tables[role])):  # else FSDP1's part
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


def rows_of_gains(gains: Iterable[Gain], step: int) -> list[Row]:
    """Return tidy rows: the mean and the largest magnitude of each gain, and of each table's row norms."""
    keys, names, sums, magnitudes, mesh = [], [], [], [], None
    for *key, offset, parameter in gains:
        keys.append(key)
        names.append("row_norm" if parameter.ndim == 2 else "gain")
        value, whole = parameter.detach(), parameter.shape[0] if parameter.ndim == 2 else parameter.numel()
        if isinstance(value, DTensor):
            mesh, value = value.device_mesh, value.to_local()
        if parameter.ndim == 2:
            value = torch.linalg.vector_norm(value, dim=-1, dtype=torch.float32)
        value = value.float() + offset if offset else value.float()
        sums.append(value.sum() / whole)
        magnitudes.append(value.abs().max() if value.numel() else value.new_zeros(()))
    if not keys:
        return []
    means, largests = torch.stack(sums), torch.stack(magnitudes)
    if mesh is not None:
        torch.distributed.all_reduce(means, group=mesh.get_group())
        torch.distributed.all_reduce(largests, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    rows: list[Row] = []
    for key, name, mean, largest in zip(keys, names, means.tolist(), largests.tolist(), strict=True):
        layer, sublayer, role, index = key
        rows += [
            (step, layer, sublayer, role, index, f"{name}_mean", mean),
            (step, layer, sublayer, role, index, f"{name}_abs_max", largest),
        ]
    return rows
