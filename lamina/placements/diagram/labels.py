"""The words of a diagram and of a plan in text: kinds of layer, norms, scales and what the weights start from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lamina.core.text import runs
from lamina.errors import UserError
from lamina.placements.plan import Layer, Learned, Norm, Plan, Sublayer
from lamina.placements.registry import get

MOST_KINDS = 4  # of layers that are shown one by one
KIND_NAMES = {"backbone": "LN", "rms": "RMSNorm", "layer": "LayerNorm", "group": "GroupNorm{}"}


def title_of(plan: Plan) -> str:
    try:
        return get(plan.placement).title
    except UserError:
        return plan.placement


def layer_groups(plan: Plan) -> list[tuple[list[Layer], list[int]]]:
    """The kinds of layer; where there are many (a scale that differs by layer), those of one wiring together."""
    kinds = plan.kinds()
    if len(kinds) <= MOST_KINDS:
        return [([layer], indices) for layer, indices in kinds]
    together: dict[Layer, list[int]] = {}
    for index, layer in enumerate(plan.layers):
        wiring = Layer(attention=_wiring(layer.attention), feed_forward=_wiring(layer.feed_forward))
        together.setdefault(wiring, []).append(index)
    return [([plan.layers[i] for i in indices], indices) for indices in together.values()]


def _wiring(sub: Sublayer) -> Sublayer:
    norms = {p: replace(norm, initial_gain=1.0) for p, norm in sub.norms.items()}
    return replace(sub, skip_scale=1.0, pre_scale=1.0, weight_gain=1.0, gate_gain=1.0, **norms)


def sublayers(layers: Iterable[Layer]) -> list[Sublayer]:
    return [sub for layer in layers for sub in (layer.attention, layer.feed_forward)]


def block_label(indices: list[int]) -> str:
    """Blocks counted from 1: "block 1", "blocks 2-32", "blocks 1-4, 31-32"."""
    spans = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs(index + 1 for index in indices)]
    if len(spans) > 3:
        spans = [*spans[:2], "…", spans[-1]]
    return f"block{'s' * (len(indices) > 1)} {', '.join(spans)}"


def norm_label(norms: list[Norm]) -> str:
    detail, kind = norm_detail(norms), norms[0].kind
    name = "Norm" if kind == "backbone" else KIND_NAMES[kind].format(f" {norms[0].groups}")
    return f"{name}, {detail}" if detail else name


def norm_detail(norms: list[Norm]) -> str:
    gain = scale_label([norm.initial_gain for norm in norms], "no")
    if norms[0].learnable_gain:
        return f"gain from {gain}" if gain else ""
    return f"gain {gain}" if gain else "no gain"


def scale_label(values: Iterable[float], learned: Learned) -> str:
    """Empty for a constant 1, else "64", "1 … 0.177" where it differs from first layer to last, "64 learned"."""
    distinct = list(dict.fromkeys(values))
    label = number(distinct[0]) if len(distinct) == 1 else f"{number(distinct[0])} … {number(distinct[-1])}"
    if learned == "no":
        return "" if distinct == [1.0] else label
    return f"{label} learned" + (" per channel" if learned == "vector" else "")


def number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"


def embedding_scale(plan: Plan) -> str:
    return "√d" if plan.embedding_scale == "sqrt_hidden_size" else scale_label([float(plan.embedding_scale)], "no")


def weight_notes(layers: list[Layer]) -> list[str]:
    """What the plan asks of the initial weights: it does not show in the forward pass."""
    subs = sublayers(layers)
    gain, gate = scale_label([s.weight_gain for s in subs], "no"), scale_label([s.gate_gain for s in subs], "no")
    notes = [f"initial value and output weights ×{gain}"] if gain else []
    return [*notes, f"initial gate weights ×{gate}"] if gate else notes


def head_norms(plan: Plan) -> list[str]:
    widths = {"off": "", "head": "per head", "full": "over the full width"}
    norms = [("queries and keys", plan.qk_norm), ("values", plan.v_norm)]
    kind = plan.qkv_norm.kind
    norm = "norm" if kind in ("rms", "backbone") else KIND_NAMES[kind].format(f" {plan.qkv_norm.groups}")
    return [f"{norm} on {name} {widths[scope]}" for name, scope in norms if scope != "off"]
