"""Find each parameter's layer, sub-layer and role from the names of all parameters.

A layer is a module that contains an attention and a feed-forward. The layer's index is the last number that the names
of the attention and the feed-forward share. So Lamina recognizes stages (layers.0.blocks.1) and stacks
(encoder.block.0.layer.1) without a list of models.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TypeAlias

Owner: TypeAlias = tuple[int, str, str]
"""The layer, sub-layer and role of a parameter."""
Parts: TypeAlias = tuple[str, ...]

_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "params", "base_model")
_NUMBERED = re.compile(r"(\w*?(?:layers?|blocks?|stages?|[^a-z]h|^h|group|expert))_?(\d{1,4})", re.IGNORECASE)
_KINDS = {
    "feed_forward": r"post_attention_layernorm|pre_feedforward_layernorm|post_feedforward_layernorm|post_mlp_layernorm|"
    r"ln_?2|norm_?2|final_layer_norm|output_layer_norm|ffn\w*|ffw\w*|\w*mlp\w*|\w*feed_?forward\w*|\w*dense_?relu_?dense\w*|"
    r"dense_?(gated_)?act_?dense|ff|\w*moe\w*|experts?|\w*router\w*|gate_proj|up_proj|down_proj|gate_up_proj|fc_?\w{0,3}|"
    r"c_fc|w[123]|wi(_\d)?|linear_?[12]|\w*intermediate\w*|\w*_inter|\w*output|dense_\w+_\w+|channel_mix\w*|pos_ff",
    "attention": r"\w*att\w*|input_layernorm|ln_?1|norm_?1|mamba\w*|ssm\w*|[qkvo]_proj|qkv\w*|c_attn|w[qkv]|"
    r"\w*rwkv|time_mix\w*|[qkv]|query|key|value|short_?conv\w*|self_\w+_layer_norm",
}
_WEAK = {"mixer": "attention", "conv": "attention", "wo": "attention"}  # where nothing inside says more
_OUTSIDE = {
    "embedding": r"\w*embed\w*|wte|wpe|tok_?emb\w*|token_embedder|shared",
    "readout": r"\w*head|output(?:_proj\w*|_layer)?|unembed\w*|embed_out|logits_dense",
}


@cache
def _kind(part: str) -> str | None:
    """Return the kind of sub-layer (attention or feed_forward) that a module's name means."""
    return next((kind for kind, words in _KINDS.items() if re.fullmatch(words, part.lower())), None)


def parts_of(name: str) -> Parts | None:
    """Return the parts of a parameter's name, or None for any other name. Numbers are separate parts of a name."""
    parts: list[str] = []
    for part in re.split(r"[./]", re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", name).strip(". ")):
        if not re.fullmatch(r"\w+", part):
            return None
        if part in _WRAPPED:
            continue
        numbered = _NUMBERED.fullmatch(part)
        parts += numbered.groups() if numbered else [part]
    return tuple(parts) or None


@dataclass(frozen=True, kw_only=True)
class Places:
    """The layer, sub-layer and role of each parameter."""

    owners: Mapping[str, Owner]  # the layer, sub-layer and role, by the parameter's name
    layers: Mapping[int, str]  # the path of each layer in the model, by the layer's number


def places_of(names: Iterable[str]) -> Places:
    split = _joined({name: parts for name in names if (parts := parts_of(name)) is not None})
    below: dict[Parts, set[str | None]] = defaultdict(set)
    for parts in split.values():
        for at in _numbers(parts):
            below[parts[: at + 1]] |= {*map(_kind, parts[at + 1 :])}
    whole = {path for path, kinds in below.items() if {"attention", "feed_forward"} <= kinds}
    around = {path[:end] for path in whole for end in range(len(path))}  # stages, and stacks with a number
    layers = whole - around
    lists = {path[:-1] for path in layers}
    layer = {name: _layer(parts, layers, lists, around) for name, parts in split.items()}
    number, owners = _counted({path for path in layer.values() if path}), {}
    kinds: dict[Parts, set[str]] = defaultdict(set)  # of the modules in a layer
    for name, path in layer.items():
        inside = split[name][len(path or ()) :]
        if path and (kind := _first_kind(inside)) is not None:
            for at in range(1, len(inside)):
                kinds[path + inside[:at]].add(kind)
    for name, path in layer.items():
        parts = split[name]
        if path is None:
            if (role := _outside_role(parts)) is not None:
                owners[name] = (-1, "block", role)
            continue
        inside = parts[len(path) :]
        beside = (kinds[path + inside[:at]] for at in range(len(inside) - 1, 0, -1))
        kind = (
            _first_kind(inside)
            or next((next(iter(neighbor)) for neighbor in beside if len(neighbor) == 1), None)
            or _first_kind(path[-2:-1])
            or next((_WEAK[part.lower()] for part in inside if part.lower() in _WEAK), None)
        )
        owners[name] = (number[path], *((kind, "all") if kind else ("block", "other")))
    return Places(owners=owners, layers={index: ".".join(path) for path, index in number.items()})


def _joined(split: dict[str, Parts]) -> dict[str, Parts]:
    """Rename parameters in parallel lists (attentions.0, ffns.0), as if one list of layers held both sub-layers."""
    beside: dict[Parts, set[str | None]] = defaultdict(set)
    first = {name: numbers[0] for name, parts in split.items() if (numbers := _numbers(parts)) and numbers[0]}
    for name, at in first.items():
        beside[split[name][: at - 1]] |= {_kind(split[name][at - 1])}
    both = {path for path, kinds in beside.items() if {"attention", "feed_forward"} <= kinds}
    for name, at in first.items():
        parts = split[name]
        if parts[: at - 1] in both:
            split[name] = (*parts[: at - 1], "layers", parts[at], parts[at - 1], *parts[at + 1 :])
    return split


def _numbers(parts: Parts) -> list[int]:
    return [at for at, part in enumerate(parts) if re.fullmatch(r"\d{1,5}", part)]


def _first_kind(parts: Iterable[str]) -> str | None:
    return next((kind for part in parts if (kind := _kind(part)) is not None), None)


def _layer(parts: Parts, layers: Container[Parts], lists: Collection[Parts], around: Container[Parts]) -> Parts | None:
    """Return the layer that contains a parameter, or None for a parameter outside the layers."""
    numbers = [parts[: at + 1] for at in _numbers(parts)]
    inside = next((path for path in numbers if path in layers), None)
    alone = next((path for path in numbers if path[:-1] in lists and path not in around), None)  # one of another kind
    return inside or alone or (numbers[0] if numbers and not lists else None)


def _counted(paths: Iterable[Parts]) -> dict[Parts, int]:
    """Assign an index from 0 to each layer, by the numbers in the layers' names and through all stages in order."""
    numbers: dict[Parts, int] = {}
    begin = 0
    for _, stack in groupby(sorted(paths, key=_order), key=lambda path: _order(path)[:2]):
        layers = list(stack)
        alone = all(len(_numbers(path)) == 1 for path in layers)
        numbers |= {path: begin + (int(path[-1]) if alone else at) for at, path in enumerate(layers)}
        begin = 1 + max(numbers.values())
    return numbers


def _order(path: Parts) -> tuple[tuple[bool, bool], tuple[str, ...], list[int]]:
    words = tuple(part for part in path if not part.isdigit())
    said = "_".join(words).lower()
    return ("decoder" in said, "encoder" not in said), words, [int(part) for part in path if part.isdigit()]


def _outside_role(parts: Parts) -> str | None:
    """Return the role of a parameter outside the layers, or None for a statistic of the whole model."""
    roles = (role for part in parts for role, words in _OUTSIDE.items() if re.fullmatch(words, part.lower()))
    if (role := next(roles, None)) is not None or _numbers(parts):
        return role or "other"
    if len(parts) == 1 and not re.search(r"weight|bias|gain|scale|kernel|norm", parts[0]):
        return None
    last = "norm" in "".join(parts[-2:]).lower()  # a norm without a layer is the last one
    return "other" if _first_kind(parts[:-1]) and not last else "readout"
