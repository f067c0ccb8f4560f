"""A plan, or several, as one SVG: the geometry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lamina.placements.diagram import (
    MOST_KINDS,
    block_label,
    embedding_scale,
    head_norms,
    layer_groups,
    norm_label,
    scale_label,
    shapes,
    sublayers,
    title_of,
    weight_notes,
)
from lamina.placements.plan import Layer, Plan, Sublayer

_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_INK, _GRAY = "#1f2933", "#66717d"
_FILL = {"norm": ("#fde9b8", "#b7800b"), "attention": ("#d9e8f6", "#2f6ea8"), "feed_forward": ("#d8efe4", "#2b8263")}
_END, _PANEL = ("#f1f3f5", "#98a2ad"), "#f7f8fa"
_COLUMN, _STREAM, _BRANCH, _BYPASS = 178, 62, 126, 20  # a column's width; x of the three lines in it
_NORM, _MODULE, _SUBLAYER = 21, 27, 172  # heights
_HEAD, _FOOT, _CAP = 60, 66, 22  # room above and below the blocks; a panel's top
_LEARNED = ("skip_scale_learned", "pre_scale_learned")
_NAMES = {"attention": "Attention", "feed_forward": "Feed-forward"}


def svg(plan: Plan, title: str | None = None, equation: Sequence[str] = ()) -> str:
    """One plan as a self-contained SVG: a column for each kind of layer, with the lines of ``equation`` below.

    ``title`` stands above it (default: the placement's own; an empty one leaves the room to the drawing).

    A plan with more than four kinds shows those of one wiring as one column, their scales as a range. No scripts, fonts
    or ids, so that several stand in one page; all text is escaped.
    """
    drawing, width, height = _drawing(plan, title, equation)
    return _document(drawing, width, height, f"{title or title_of(plan)}: where the norms sit")


def gallery(plans: Sequence[Plan], width: int = 1160) -> str:
    """One SVG with the diagrams of several plans, in rows of at most ``width`` pixels."""
    drawings = [_drawing(plan, None, ()) for plan in plans]
    parts, x, y, row, widest = [], 0, 0, 0, 0
    for drawing, wide, high in drawings:
        if x and x + wide > width:
            x, y, row = 0, y + row + 28, 0
        parts.append(f'<g transform="translate({x} {y})">{drawing}</g>')
        x, row = x + wide + 14, max(row, high)
        widest = max(widest, x - 14)
    return _document("".join(parts), widest, y + row, "Where the norms sit: " + ", ".join(title_of(p) for p in plans))


def _document(drawing: str, width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{_FONT}" font-size="11.5" fill="{_INK}" '
        f'style="background:#fff;max-width:100%;height:auto"><title>{escape(title)}</title>{drawing}</svg>'
    )


def _drawing(plan: Plan, title: str | None, equation: Sequence[str]) -> tuple[str, int, int]:
    groups = layer_groups(plan)
    hidden = len(groups) - MOST_KINDS
    columns = groups[:MOST_KINDS]
    heading = title_of(plan) if title is None else title
    notes = head_norms(plan) + sorted({note for layers, _ in columns for note in weight_notes(layers)})
    learned = {getattr(sub, f) for layers, _ in columns for sub in sublayers(layers) for f in _LEARNED}
    notes += ["learned scales: one number each"] * ("scalar" in learned)
    notes += ["learned scales: a number per channel"] * ("vector" in learned)
    if hidden > 0:
        notes.append(f"and {hidden} more kind{'s' * (hidden > 1)} of layer")
    mono = 10.5
    width = max(
        len(columns) * _COLUMN,
        math.ceil(len(heading) * 8.6) + 16,
        *(math.ceil(len(line) * mono * 0.62) + 16 for line in equation),
        *(math.ceil(len(note) * 5.6) + 16 for note in notes),
        0,
    )
    top = 28 if heading else 6
    parts = [shapes.text(8, 17, heading, size=14.5, weight=600)] if heading else []
    bottom = top + _HEAD + _CAP + 2 * _SUBLAYER
    for number, (layers, indices) in enumerate(columns):
        column = _column(plan, layers, indices, bottom, last=plan.num_layers - 1 in indices)
        parts.append(f'<g transform="translate({number * _COLUMN} 0)">{column}</g>')
    y = bottom + _FOOT + 14
    for note in notes:
        parts.append(shapes.text(8, y, note, size=10.5, fill=_GRAY))
        y += 15
    y += 4 if equation else 0
    for line in equation:
        parts.append(shapes.text(8, y, line, size=mono, font=_MONO))
        y += 16
    return "".join(parts), width, y


def _column(plan: Plan, layers: list[Layer], indices: list[int], bottom: int, last: bool) -> str:
    top, x = bottom - 2 * _SUBLAYER - _CAP, _STREAM
    parts = [
        f'<rect x="6" y="{top}" width="{_COLUMN - 12}" height="{bottom - top}" rx="9" fill="{_PANEL}" '
        'stroke="#e1e5ea"/>',
        shapes.line(x, top, x, top + _CAP),
        shapes.text(_COLUMN - 14, top + 17, block_label(indices), anchor="end", size=11, weight=600, fill=_GRAY),
    ]
    if 0 in indices:
        parts += [shapes.line(x, bottom + 42, x, bottom), shapes.box(x, bottom + 52, 92, 20, "Embedding", _END)]
        scale = embedding_scale(plan)
        if plan.embedding_norm:
            parts.append(shapes.box(x, bottom + 21, 74, _NORM, norm_label([plan.embedding_norm]), _FILL["norm"]))
        if scale:
            parts.append(shapes.text(x + 52, bottom + 56, f"×{scale}"))
    else:
        parts += [
            shapes.line(x, bottom + 20, x, bottom),
            shapes.text(x, bottom + 33, f"from block {min(indices)}", anchor="middle"),
        ]
    for number, name in enumerate(("attention", "feed_forward")):
        start = bottom - number * _SUBLAYER
        parts.append(_sublayer(name, [getattr(layer, name) for layer in layers], start, bottom - 9))
    if last:
        parts += [shapes.line(x, top, x, top - 40, arrow=True), shapes.box(x, top - 51, 92, 20, "Output", _END)]
        if plan.final_norm:
            parts.append(shapes.box(x, top - 21, 74, _NORM, norm_label([plan.final_norm]), _FILL["norm"]))
    else:
        parts.append(shapes.line(x, top, x, top - 20, arrow=True))
    return "".join(parts)


def _sublayer(name: str, subs: list[Sublayer], start: int, block_input: int) -> str:
    """Draw one sub-layer upwards from ``start``; ``block_input`` is the height at which a bypass leaves the stream."""
    sub, x, b = subs[0], _STREAM, _BRANCH
    split, add = start - 9, start - 129
    pre, module, out, post = split - 25, split - 68, split - 102, add - 27
    parts = [shapes.line(x, start, x, split)]
    if sub.skip != "block_input":
        parts.append(shapes.line(x, split, x, add + 8, arrow=True))
    if sub.skip != "stream":
        parts += [
            shapes.path(f"M{x} {block_input}H{_BYPASS + 9}q-9 0 -9 -9V{add + 9}q0 -9 9 -9H{x - 9}"),
            shapes.dot(x, block_input),
        ]
        parts.append(shapes.arrowhead(x - 8, add, "right"))
    parts.append(
        shapes.path(f"M{x} {split}H{b - 9}q9 0 9 -9V{add + 9}q0 -9 -9 -9H{x + 9}")
        + shapes.arrowhead(x + 8, add, "left")
    )
    parts.append(shapes.dot(x, split) if sub.skip != "block_input" else "")
    box = _BRANCH - _STREAM + 12
    for position, middle in (("pre_norm", pre), ("out_norm", out)):
        if getattr(sub, position):
            parts.append(
                shapes.box(b, middle, box, _NORM, norm_label([s.norms[position] for s in subs]), _FILL["norm"])
            )
    parts.append(shapes.box(b, module, box + 4, _MODULE, _NAMES[name], _FILL[name]))
    if pre_scale := scale_label([s.pre_scale for s in subs], sub.pre_scale_learned):
        label = f"×{pre_scale}".removesuffix(" per channel")
        parts.append(shapes.text(b, module + 25.5, label, size=10.5, weight=600, anchor="middle", halo=_PANEL))
    if skip_scale := scale_label([s.skip_scale for s in subs], sub.skip_scale_learned):
        label_x, anchor = (_BYPASS + 5, "start") if sub.skip == "block_input" else (x - 6, "end")
        label = f"×{skip_scale}".removesuffix(" per channel").replace(" … ", " …\n").replace(" learned", "\nlearned")
        for line, part in enumerate(label.split("\n")):
            style = {"size": 9.5} if part == "learned" else {"size": 11, "weight": 600}
            parts.append(shapes.text(label_x, module + 5 + 13 * line, part, anchor=anchor, halo=_PANEL, **style))
    parts.append(f'<circle cx="{x}" cy="{add}" r="8" fill="#fff" stroke="{shapes.LINE}" stroke-width="1.4"/>')
    parts.append(shapes.path(f"M{x - 4} {add}H{x + 4}M{x} {add - 4}V{add + 4}"))
    parts.append(shapes.line(x, add - 8, x, start - _SUBLAYER))
    if sub.post_norm:
        parts.append(shapes.box(x, post, 74, _NORM, norm_label([s.norms["post_norm"] for s in subs]), _FILL["norm"]))
    return "".join(parts)
