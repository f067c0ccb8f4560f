"""Which layer, sub-layer and role each parameter of a model has."""

from __future__ import annotations

from torch import nn

from lamina.core.architectures import ROLES
from lamina.probes.structure.sites import LayerSite, Structure

Place = tuple[int, str, str]


def places(model: nn.Module, structure: Structure) -> dict[str, Place]:
    """(layer, sublayer, role) of every parameter of ``model`` by its name, each parameter once.

    Layer -1 and sublayer "model" are outside the layers; sublayer "block" is in a layer but in none of its sub-layers.
    A role is read off the table of weights' names (query, ..., feed_forward_out; a bias as ``query_bias``), is the
    norm's (pre_norm, out_norm, post_norm, inner_norm), or the path of the parameter in its sub-layer. What several
    layers share belongs to the first of them, and a readout tied to the embedding is the embedding's.
    """
    owners = _owners(structure)
    by_name: dict[str, Place] = {}
    for name, _ in model.named_parameters():
        module_path, _, last = name.rpartition(".")
        module = model.get_submodule(module_path)
        by_name[name] = _place(model, structure, owners, name, module, last)
    return by_name


def shared_layers(structure: Structure) -> list[int]:
    """The layers whose module is another layer's, too, with the first of each."""
    first: dict[int, int] = {}
    shared: set[int] = set()
    for site in structure.layers:
        before = first.setdefault(id(site.module), site.index)
        if before != site.index:
            shared |= {before, site.index}
    return sorted(shared)


def _owners(structure: Structure) -> dict[int, tuple[Place, str]]:
    """By module: its place without the role, and the role of a norm or the module's path inside the sub-layer."""
    owners: dict[int, tuple[Place, str]] = {}

    def own(root: nn.Module, place: Place, role: str | None = None) -> None:
        for path, module in root.named_modules():
            owners.setdefault(id(module), (place, role or path))

    for site in structure.layers:
        for sublayer in site.sublayers:
            for norm in sublayer.norms:
                own(norm.module, (site.index, sublayer.kind, norm.role), norm.role)
        for sublayer in site.sublayers:
            for path, module in sublayer.modules:
                _own_below(owners, site, path, module, sublayer.kind)
    for site in structure.layers:
        own(site.module, (site.index, "block", ""))
    outer = (structure.embedding_norm, structure.final_norm)
    for norm in (n for n in outer if n is not None):
        own(norm.module, (-1, "model", norm.role), norm.role)
    for module, role in ((structure.embedding, "embedding"), (structure.head, "readout")):
        if module is not None:
            own(module, (-1, "model", role), role)
    return owners


def _own_below(owners: dict, site: LayerSite, path: str, module: nn.Module, kind: str) -> None:
    inside = path.removeprefix(site.path).lstrip(".")
    for below, part in module.named_modules():
        owners.setdefault(id(part), ((site.index, kind, ""), ".".join(filter(None, (inside, below)))))


def _place(model: nn.Module, structure: Structure, owners: dict, name: str, module: nn.Module, last: str) -> Place:
    if id(module) not in owners:
        return -1, "model", name
    (layer, sublayer, role), path = owners[id(module)]
    if role:
        return layer, sublayer, role if last == "weight" or layer < 0 else f"{role}_{last}"
    holder = path.rpartition(".")[2]
    own = last if last not in ("weight", "bias") else holder
    known = ROLES.get(f"{sublayer}.{own}") or ROLES.get(own)
    if known is None:
        return layer, sublayer, ".".join(filter(None, (path, last))).removesuffix(".weight")
    return layer, sublayer, f"{known}_bias" if last == "bias" else known
