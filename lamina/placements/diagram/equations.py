"""A plan as equations, and in a few lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.placements.diagram import (
    KIND_NAMES,
    block_label,
    embedding_scale,
    head_norms,
    layer_groups,
    norm_detail,
    scale_label,
    weight_notes,
)
from lamina.placements.plan import POSITIONS, Layer, Learned, Norm, Plan, Sublayer


def equations(kind: Layer) -> tuple[str, str]:
    """What a layer computes: ``("y  = LN( 64 x + A( LN x ) )", "x' = LN( 64 y + F( LN y ) )")``.

    ``[64 learned] x`` is a learned scale that starts at 64, ``LN[no gain]`` a norm without a learned gain.
    """
    return _equations([kind])


def text(plan: Plan) -> str:
    """The plan in a few lines for a terminal: a pair of equations for each kind of layer."""
    lines = [f"{plan.placement}, {plan.num_layers} layer{'s' * (plan.num_layers > 1)}"]
    scale = embedding_scale(plan)
    embedding = f"{scale} E" if scale else "E"
    if plan.embedding_norm:
        embedding = f"{_ln([plan.embedding_norm])} {embedding}" if not scale else f"LN( {embedding} )"
    lines.append(f"├─ embedding         x0 = {embedding}")
    for layers, indices in layer_groups(plan):
        lines.append(f"├─ {block_label(indices)}")
        for name, equation in zip(("attention   ", "feed-forward"), _equations(layers), strict=True):
            lines.append(f"│    {name}    {equation}")
        lines += [f"│    {note}" for note in weight_notes(layers)]
    last = f"{_ln([plan.final_norm])} x{plan.num_layers}" if plan.final_norm else f"x{plan.num_layers}"
    lines += [f"├─ {note}" for note in head_norms(plan)]
    return "\n".join([*lines, f"└─ output            logits = W {last}"])


def _equations(layers: list[Layer]) -> tuple[str, str]:
    attention = _expression([layer.attention for layer in layers], "A", "x")
    return f"y  = {attention}", f"x' = {_expression([layer.feed_forward for layer in layers], 'F', 'y')}"


def _expression(subs: list[Sublayer], module: str, x: str) -> str:
    sub = subs[0]
    pre, out, post = (_ln([s.norms[p] for s in subs]) if getattr(sub, p) else "" for p in POSITIONS)
    factor = _factor([s.pre_scale for s in subs], sub.pre_scale_learned)
    branch = f"{module}( {factor}{pre + ' ' if pre else ''}{x} )"
    branch = f"{out}( {branch} )" if out else branch
    factor = _factor([s.skip_scale for s in subs], sub.skip_scale_learned)
    skip = {"stream": x, "block_input": "x", "both": f"({x} + x)" if factor else f"{x} + x"}[sub.skip]
    return f"{post}( {factor}{skip} + {branch} )" if post else f"{factor}{skip} + {branch}"


def _ln(norms: list[Norm]) -> str:
    detail = norm_detail(norms)
    return KIND_NAMES[norms[0].kind].format(norms[0].groups) + (f"[{detail}]" if detail else "")


def _factor(values: Iterable[float], learned: Learned) -> str:
    scale = scale_label(values, learned)
    return f"[{scale}] " if " " in scale else f"{scale} " if scale else ""
