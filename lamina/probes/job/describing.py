"""The description of a model at the top of the page: its kind, its size, and where its norms sit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lamina.probes.structure.sites import LayerSite, Structure

# The name of the norms around a sub-layer, by their roles.
_FAMILIES = {
    frozenset({"pre_norm"}): "Pre-LN",
    frozenset({"post_norm"}): "Post-LN",
    frozenset({"pre_norm", "out_norm"}): "norms before and behind each module (Peri-LN, Sandwich-LN)",
    frozenset({"out_norm"}): "norms on each module's output (OLMo 2)",
    frozenset({"pre_norm", "post_norm"}): "norms on each module's input and on the stream (Keel, Pre-Post-LN)",
    frozenset(): "no norms on inputs, outputs or the stream",
}


def describe(model: nn.Module, structure: Structure) -> dict[str, object]:
    """The facts about a model in result.json, found by running it, not looked up by name."""
    config = getattr(model, "config", None)
    parameters = {id(p): p for p in model.parameters()}.values()
    shared = len({id(site.module) for site in structure.layers}) < structure.num_layers
    return {
        "model_type": getattr(config, "model_type", None),
        "class": type(model).__name__,
        "num_layers": structure.num_layers,
        "hidden_size": structure.hidden_size,
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(next(iter(parameters)).dtype).removeprefix("torch."),
        "placement": placement(structure.layers),
        "layers": _path(structure.layers),
        "layers_share_weights": shared or None,
        "sublayers": "; ".join(_runs([", ".join(s.kind for s in site.sublayers) for site in structure.layers])),
        "norms": "; ".join(_runs([_norms(site) for site in structure.layers])),
        "embedding_norm": structure.embedding_norm.path if structure.embedding_norm else None,
        "final_norm": structure.final_norm.path if structure.final_norm else "none",
        "notes": list(structure.notes),
    }


def placement(layers: Sequence[LayerSite]) -> str:
    """The norms' places in a word or two, by layer where the layers differ."""
    return "; ".join(_runs([_family(site) for site in layers]))


def _family(site: LayerSite) -> str:
    role_sets = [frozenset(n.role for n in s.norms if n.role != "inner_norm") for s in site.sublayers]
    names = [_FAMILIES.get(roles) or " and ".join(sorted(roles)) for roles in role_sets]
    if len(set(names)) <= 1:
        return names[0] if names else "no sub-layers found"
    return ", ".join(f"{s.kind.replace('_', '-')}: {name}" for s, name in zip(site.sublayers, names, strict=True))


def _norms(site: LayerSite) -> str:
    parts = []
    for sublayer in site.sublayers:
        roles = [norm.role for norm in sublayer.norms]
        counted = [role + (f" × {roles.count(role)}" if roles.count(role) > 1 else "") for role in dict.fromkeys(roles)]
        parts.append(f"{sublayer.kind}: {' + '.join(counted) or 'none'}")
    return ", ".join(parts)


def _path(layers: Sequence[LayerSite]) -> str:
    """``model.layers.0 … model.layers.29``."""
    first, last = layers[0].path, layers[-1].path
    return first if first == last else f"{first} … {last}"


def _runs(texts: Iterable[str]) -> list[str]:
    """The text if it is the same for all layers; else each text with its layers."""
    spans: list[tuple[int, int, str]] = []
    for index, text in enumerate(texts):
        if spans and spans[-1][2] == text:
            spans[-1] = (spans[-1][0], index, text)
        else:
            spans.append((index, index, text))
    if len(spans) == 1:
        return [spans[0][2]]
    if len(spans) > 8:  # alternating kinds: each once, with its count
        kinds = {text: sum(last - first + 1 for first, last, other in spans if other == text) for _, _, text in spans}
        return [f"{count} layers: {text}" for text, count in kinds.items()]
    return [
        f"layer{'s' * (last > first)} {first}{f'–{last}' if last > first else ''}: {text}"
        for first, last, text in spans
    ]
