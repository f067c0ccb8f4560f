"""Which parameters belong to which sub-layer: what norms of gradients, updates and weights are summed over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.distributed import get_world_size, is_initialized
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lamina.modeling.initialization import weights
from lamina.modeling.parts import body_of
from lamina.probes.structure.sites import Structure

Place: TypeAlias = tuple[int, str, str]
"""layer (-1 outside the blocks), sub-layer, role: "all", or "other" for a layer's parameters outside its sub-layers."""
Placed: TypeAlias = list[tuple[Place, torch.Tensor]]


def places_of(model: nn.Module) -> Placed:
    """The place of each parameter of a Lamina model. Raises UserError for any other."""
    body_of(model, "layer monitor")
    return [
        ((w.layer, w.sublayer, "all") if w.layer >= 0 else (-1, "block", w.sublayer), w.parameter)
        for w in weights(cast(PreTrainedModel, model))
    ]


def followed_places(model: nn.Module, structure: Structure | None) -> Placed:
    """The place of each parameter of any model whose layers were found; all in one place if none were.

    Parameters that several layers share (ALBERT) count in the first of them; tied ones in the embedding. Those of
    another stack of layers (a decoder behind the encoder) are neither embedding nor readout, but "other".
    """
    if structure is None:
        return [((-1, "model", "all"), parameter) for parameter in model.parameters()]
    owners: dict[int, Place] = {}

    def claim(parameters: Iterable[torch.Tensor], place: Place) -> None:
        for parameter in parameters:
            owners.setdefault(id(parameter), place)

    claim(() if structure.embedding is None else structure.embedding.parameters(), (-1, "block", "embedding"))
    for site in structure.layers:
        for sublayer in site.sublayers:
            for _, module in sublayer.modules:
                claim(module.parameters(), (site.index, sublayer.kind, "all"))
            for norm in sublayer.norms:
                claim(norm.module.parameters(), (site.index, sublayer.kind, "all"))
        claim(site.module.parameters(), (site.index, "block", "other"))
    for role, module in structure.outside:
        if role == "other":
            claim(module.parameters(), (-1, "block", "other"))
    for module in _embeddings(model):
        claim(module.parameters(), (-1, "block", "embedding"))
    for role, module in structure.outside:
        claim(module.parameters(), (-1, "block", role))
    return [(owners.get(id(p), (-1, "block", "readout")), p) for p in model.parameters()]


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this process holds."""
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def share(tensor: torch.Tensor) -> float:
    """The weight of this process' part of a tensor in a sum over all processes: shards count once, copies share one."""
    if not is_initialized():
        return 1.0
    world = get_world_size()
    if not isinstance(tensor, DTensor):
        return 1.0 / world
    mesh = tensor.device_mesh
    shards = 1
    for dimension, placement in enumerate(tensor.placements):
        shards *= mesh.size(dimension) if placement.is_shard() else 1
    return shards / world
