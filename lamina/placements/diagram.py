"""Draw norm placements as SVG pictures, or write a norm placement as equations for a terminal.

In a picture, the vertical line shows the residual stream, from bottom to top. Attention and feed-forward are on
branches to the right of this line. A norm on the line normalizes the residual stream. Several vertical lines show
several residual streams. A small square shows a hidden state that the block reads, or stores for later blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from lamina.core.text import runs
from lamina.errors import UserError
from lamina.placements.plan import POSITIONS, SCALES, Layer, Learned, Norm, Plan, Sources, Sublayer
from lamina.placements.registry import get

MOST_KINDS = 4  # the largest number of columns, with one kind of layer each
KIND_NAMES = {"backbone": "LN", "rms": "RMSNorm", "layer": "LayerNorm", "group": "GroupNorm{}"}
KIND_NAMES |= {"l2": "L2", "dyt": "DyT", "derf": "Derf"}  # a user's own kind of norm has its registered name
_LINE = "#3b4754"  # the color of lines
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_INK, _GRAY = "#1f2933", "#66717d"
_FILL = {"norm": ("#fde9b8", "#b7800b"), "attention": ("#d9e8f6", "#2f6ea8"), "feed_forward": ("#d8efe4", "#2b8263")}
_END, _PANEL = ("#f1f3f5", "#98a2ad"), "#f7f8fa"
_COLUMN, _STREAM, _BRANCH, _BYPASS = 178, 62, 126, 20  # a column's width; x of the three lines in it
_NORM, _MODULE, _SUBLAYER = 21, 27, 172  # heights
_HEAD, _FOOT, _CAP = 60, 66, 22  # room above and below the blocks; a panel's top
_LEARNED = tuple(f"{name}_learned" for name in SCALES)
_NAMES = {"attention": "Attention", "feed_forward": "Feed-forward"}


def title_of(plan: Plan) -> str:
    try:
        name = get(plan.placement).title
    except UserError:
        name = plan.placement
    return f"{name}, {plan.options['wiring']}" if "wiring" in plan.options else name


def layer_groups(plan: Plan) -> list[tuple[list[Layer], list[int]]]:
    """Group equal layers. If there are more than four groups, also join layers that differ only in scales and gains."""
    kinds = plan.kinds()
    if len(kinds) <= MOST_KINDS:
        return [([layer], indices) for layer, indices in kinds]

    def wiring(sub: Sublayer) -> Sublayer:
        norms = {p: replace(norm, initial_gain=1.0) for p, norm in sub.norms.items()}
        same = dict.fromkeys((*SCALES, "weight_gain", "gate_gain"), 0.5)  # an out_scale under a coupling is below 1
        same |= {} if sub.coupling == "none" else {"skip_scale": 1.0}
        streams = sub.streams and replace(sub.streams, write=(0.5,) * len(sub.streams.write))
        return replace(sub, **same, **norms, streams=streams)

    sources = [layer.sources and Sources(states=()) for layer in plan.layers]  # layers may differ in their states
    layers = (replace(layer.map(wiring), sources=source) for layer, source in zip(plan.layers, sources, strict=True))
    wired = replace(plan, layers=tuple(layers))
    return [([plan.layers[i] for i in indices], indices) for _, indices in wired.kinds()]


def sublayers(layers: Iterable[Layer]) -> list[Sublayer]:
    return [sub for layer in layers for sub in (layer.attention, layer.feed_forward)]


def block_label(indices: list[int]) -> str:
    """Format the numbers of blocks, such as "block 0" or "blocks 0-3, 30-31"."""
    spans = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs(indices)]
    if len(spans) > 3:
        spans = [*spans[:2], "…", spans[-1]]
    return f"block{'s' * (len(indices) > 1)} {', '.join(spans)}"


def norm_label(norms: list[Norm]) -> str:
    detail, kind = norm_detail(norms), norms[0].kind
    name = "Norm" if kind == "backbone" else KIND_NAMES.get(kind, kind).format(f" {norms[0].groups}")
    return f"{name}, {detail}" if detail else name


def norm_detail(norms: list[Norm]) -> str:
    gain = scale_label([norm.initial_gain for norm in norms], "no")
    if norms[0].learnable_gain:
        gain = f"gain from {gain}" if gain else ""
        return f"1 + {gain or 'gain'}" if norms[0].zero_centered else gain
    return f"gain {gain}" if gain else "no gain"


def scale_label(values: Iterable[float], learned: Learned) -> str:
    """Format a scale factor: "64", "64 learned", "1 … 0.177" (first and last layer), or "" for a fixed factor of 1."""
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
    subs = sublayers(layers)
    gain, gate = scale_label([s.weight_gain for s in subs], "no"), scale_label([s.gate_gain for s in subs], "no")
    notes = [f"initial branch weights ×{gain} (not q, k, gate)"] if gain else []
    return [*notes, f"initial gate weights ×{gate}"] if gate else notes


def head_norms(plan: Plan) -> list[str]:
    widths = {"off": "", "head": "per head", "full": "over the full width"}
    norms = [("queries and keys", plan.qk_norm), ("values", plan.v_norm)]
    kind = plan.qkv_norm.kind
    norm = "norm" if kind in ("rms", "backbone") else KIND_NAMES.get(kind, kind).format(f" {plan.qkv_norm.groups}")
    return [f"{norm} on {name} {widths[scope]}" for name, scope in norms if scope != "off"]


def plan_notes(plan: Plan) -> list[str]:
    """Return notes on what the picture does not show, such as norms on queries and keys."""
    notes, first = head_norms(plan), plan.layers[0].attention
    if first.streams:
        norms = f", norms: {', '.join(first.streams.norms)}" if first.streams.norms else ""
        notes.append(f"{plan.streams} streams: {first.streams.weights} weights, mix: {first.streams.mix}{norms}")
    if first.reads_memory:
        notes.append(
            "each sub-layer reads a softmax-weighted sum of the earlier blocks' outputs and the current block's "
            "output so far"
        )
    elif plan.has_memory:
        states = [len(layer.sources.states) if layer.sources else 0 for layer in plan.layers]
        count = f"{states[0]} in the first block, {states[-1]} in the last"
        notes.append(f"number of earlier states added to a block's input: {count}")
        if (last := plan.layers[-1].sources) and (last.dynamic or last.multiway or last.normed_states):
            moves = ["weights depend on the stream"] * last.dynamic + ["each state has a norm"] * last.normed_states
            notes.append(", ".join([*moves, *["queries, keys and values have separate sums"] * last.multiway]))
    return notes


def svg(plan: Plan, title: str | None = None, equation: Sequence[str] = ()) -> str:
    """Draw a norm placement as SVG, with a column for each kind of layer.

    If there are more than four kinds of layer, layers that differ only in numbers share a column. The column shows the
    ranges of the numbers. The SVG has no scripts, fonts or ids, so a page can contain several drawings. Lamina escapes
    all text.

    Args:
        title: the text above the drawing. None means the placement's title, and "" means no title.
        equation: the lines of text below the drawing.
    """
    drawing, width, height = _drawing(plan, title, equation)
    return _document(drawing, width, height, f"{title or title_of(plan)}: where the norms sit")


def gallery(plans: Sequence[Plan], width: int = 1160) -> str:
    """Draw several norm placements in one SVG, in rows that are at most ``width`` pixels wide."""
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
    notes = plan_notes(plan) + sorted({note for layers, _ in columns for note in weight_notes(layers)})
    learned = {getattr(sub, f) for layers, _ in columns for sub in sublayers(layers) for f in _LEARNED}
    notes += ["learned scales: one number each"] * ("scalar" in learned)
    notes += ["learned scales: a number per channel"] * ("vector" in learned)
    if hidden > 0:
        notes.append(f"and {hidden} more kind{'s' * (hidden > 1)} of layer")
    mono = 10.5
    width = max(
        len(columns) * _COLUMN,
        math.ceil(len(heading) * 10.2) + 16,  # the widest fonts of the list
        *(math.ceil(len(line) * mono * 0.62) + 16 for line in equation),
        *(math.ceil(len(note) * 6.4) + 16 for note in notes),
        0,
    )
    top = 28 if heading else 6
    parts = [_text(8, 17, heading, size=14.5, weight=600)] if heading else []
    bottom = top + _HEAD + _CAP + 2 * _SUBLAYER
    for number, (layers, indices) in enumerate(columns):
        column = _column(plan, layers, indices, bottom, last=plan.num_layers - 1 in indices)
        parts.append(f'<g transform="translate({number * _COLUMN} 0)">{column}</g>')
    y = bottom + _FOOT + 14
    for note in notes:
        parts.append(_text(8, y, note, size=10.5, fill=_GRAY))
        y += 15
    y += 4 if equation else 0
    for line in equation:
        parts.append(_text(8, y, line, size=mono, font=_MONO))
        y += 16
    return "".join(parts), width, y


def _column(plan: Plan, layers: list[Layer], indices: list[int], bottom: int, last: bool) -> str:
    top, x = bottom - 2 * _SUBLAYER - _CAP, _STREAM
    parts = [
        f'<rect x="6" y="{top}" width="{_COLUMN - 12}" height="{bottom - top}" rx="9" fill="{_PANEL}" '
        'stroke="#e1e5ea"/>',
        _stream(plan.streams, x, top, top + _CAP),
        _text(_COLUMN - 14, top + 17, block_label(indices), anchor="end", size=11, weight=600, fill=_GRAY),
    ]
    if 0 in indices:
        parts += [_line(x, bottom + 42, x, bottom), _box(x, bottom + 52, 92, 20, "Embedding", _END)]
        scale = embedding_scale(plan)
        if plan.embedding_norm:
            parts.append(_box(x, bottom + 21, 74, _NORM, norm_label([plan.embedding_norm]), _FILL["norm"]))
        if scale:
            parts.append(_text(x + 52, bottom + 56, f"×{scale}"))
    else:
        parts += [
            _stream(plan.streams, x, bottom + 20, bottom),
            _text(x, bottom + 33, f"from block {min(indices)}", anchor="middle"),
        ]
    states, y = max(len(layer.sources.states) if layer.sources else 0 for layer in layers), bottom + 5
    if states:
        parts += [_path(f"M{x - 42} {y}H{x}"), _arrowhead(x, y, "right"), _slots(states, x - 42, y)]
    if layers[0].boundary:
        parts += [_path(f"M{x - 28} {y}H{x}"), _dot(x, y), _slots(1, x - 28, y)]
    for number, name in enumerate(("attention", "feed_forward")):
        start = bottom - number * _SUBLAYER
        parts.append(_sublayer(name, [getattr(layer, name) for layer in layers], start, bottom - 9))
    if last:
        parts += [_line(x, top, x, top - 40, arrow=True), _box(x, top - 51, 92, 20, "Output", _END)]
        if plan.final_norm:
            parts.append(_box(x, top - 21, 74, _NORM, norm_label([plan.final_norm]), _FILL["norm"]))
    else:
        parts.append(_line(x, top, x, top - 20, arrow=True))
    return "".join(parts)


def _sublayer(name: str, subs: list[Sublayer], start: int, block_input: int) -> str:
    """Draw a sub-layer upward from the height ``start``. The block's input is at the height ``block_input``."""
    sub, x, b = subs[0], _STREAM, _BRANCH
    split, add = start - 9, start - 129
    pre, module, out, post = split - 25, split - 68, split - 102, add - 27
    n = len(sub.streams.read) if sub.streams else 1
    parts = [_stream(n, x, start, split)]
    if sub.skip != "block_input":
        parts.append(_stream(n, x, split, add + 8, arrow=True))
    if sub.skip != "stream":
        parts += [
            _path(f"M{x} {block_input}H{_BYPASS + 9}q-9 0 -9 -9V{add + 9}q0 -9 9 -9H{x - 9}"),
            _dot(x, block_input),
        ]
        parts.append(_arrowhead(x - 8, add, "right"))
    parts.append(_reading(sub, split, block_input))
    parts.append(_path(f"M{b - 9} {split}q9 0 9 -9V{add + 9}q0 -9 -9 -9H{x + 9}") + _arrowhead(x + 8, add, "left"))
    box = _BRANCH - _STREAM + 12
    for position, middle in (("pre_norm", pre), ("out_norm", out)):
        if getattr(sub, position):
            parts.append(_box(b, middle, box, _NORM, norm_label([s.norms[position] for s in subs]), _FILL["norm"]))
    parts.append(_box(b, module, box + 4, _MODULE, _NAMES[name], _FILL[name]))
    if sub.inner_norm:
        label = norm_label([s.norms["inner_norm"] for s in subs])
        parts.append(_box(b, module - _MODULE / 2, box - 14, 12, label, _FILL["norm"]))
    if pre_scale := scale_label([s.pre_scale for s in subs], sub.pre_scale_learned):
        label = f"×{pre_scale}".removesuffix(" per channel")
        parts.append(_text(b, module + 25.5, label, size=10.5, weight=600, anchor="middle", halo=_PANEL))
    if out_scale := scale_label([s.out_scale for s in subs], sub.out_scale_learned):
        for line, part in enumerate(reversed(_scale_lines(out_scale))):
            style = {"size": 9.5} if part == "learned" else {"size": 10.5, "weight": 600}
            parts.append(_text(b + 6, out - 20 - 12 * line, part, halo=_PANEL, **style))
    if skip_scale := _skip_label(subs):
        label_x, anchor = (_BYPASS + 5, "start") if sub.skip == "block_input" else (x - 6 - 5 * (n > 1), "end")
        for line, part in enumerate(_scale_lines(skip_scale)):
            style = {"size": 9.5} if part == "learned" else {"size": 11, "weight": 600}
            parts.append(_text(label_x, module + 5 + 13 * line, part, anchor=anchor, halo=_PANEL, **style))
    parts.append(f'<circle cx="{x}" cy="{add}" r="8" fill="#fff" stroke="{_LINE}" stroke-width="1.4"/>')
    parts.append(_path(f"M{x - 4} {add}H{x + 4}M{x} {add - 4}V{add + 4}"))
    parts.append(_stream(n, x, add - 8, start - _SUBLAYER))
    if sub.post_norm:
        parts.append(_box(x, post, 74, _NORM, norm_label([s.norms["post_norm"] for s in subs]), _FILL["norm"]))
    return "".join(parts)


def _scale_lines(label: str) -> list[str]:
    text = f"×{label}".removesuffix(" per channel").replace(" - ", "-")
    return text.replace(" … ", " …\n").replace(" learned", "\nlearned").split("\n")


def _reading(sub: Sublayer, split: int, block_input: int) -> str:
    x, end = _STREAM, _BRANCH - 9
    if sub.read == "block_input":
        bypass = f"M{x} {block_input}H{_BYPASS + 9}q-9 0 -9 -9V{split + 9}q0 -9 9 -9H{end}"
        return _path(bypass) + _dot(x, block_input)
    start = x + 20 if sub.read == "memory" else x
    dot = _dot(x, split) if start == x and sub.skip != "block_input" else ""
    return _path(f"M{start} {split}H{end}") + dot + (_slots(3, x + 20, split) if sub.reads_memory else "")


def _skip_label(subs: list[Sublayer]) -> str:
    """Format the skip's factor: a number, or "(1 - b)" or "√(1 - b²)", where b is the branch's factor."""
    coupled = {"lerp": "(1 - b)", "variance": "√(1 - b²)"}
    return coupled.get(subs[0].coupling) or scale_label([s.skip_scale for s in subs], subs[0].skip_scale_learned)


def text(plan: Plan) -> str:
    """Format a norm placement for a terminal, with two equations for each kind of layer."""
    lines = [f"{plan.placement}, {plan.num_layers} layer{'s' * (plan.num_layers > 1)}"]
    scale = embedding_scale(plan)
    embedding = f"{scale} E" if scale else "E"
    if plan.embedding_norm:
        embedding = f"{_ln([plan.embedding_norm])} {embedding}" if not scale else f"LN( {embedding} )"
    lines.append(f"├─ embedding         x0 = {embedding}")
    for layers, indices in layer_groups(plan):
        lines.append(f"├─ {block_label(indices)}")
        for name, equation in zip(("attention   ", "feed-forward"), equations(layers), strict=True):
            lines.append(f"│    {name}    {equation}")
        lines += [f"│    {note}" for note in weight_notes(layers)]
    last = f"{_ln([plan.final_norm])} x{plan.num_layers}" if plan.final_norm else f"x{plan.num_layers}"
    lines += [f"├─ {note}" for note in plan_notes(plan)]
    return "\n".join([*lines, f"└─ output            logits = W {last}"])


def equations(layers: list[Layer]) -> tuple[str, str]:
    """Return the equations of attention and feed-forward, for layers that differ only in scale factors.

    In ``y = LN( [64 learned] x + A( LN x ) )``, the factor starts at 64. ``LN[no gain]`` has no learned gain.
    """
    attention = _expression([layer.attention for layer in layers], "A", "x")
    return f"y  = {attention}", f"x' = {_expression([layer.feed_forward for layer in layers], 'F', 'y')}"


def _expression(subs: list[Sublayer], module: str, x: str) -> str:
    sub = subs[0]
    pre, out, post = (_ln([s.norms[p] for s in subs]) if getattr(sub, p) else "" for p in POSITIONS)
    factor = _factor([s.pre_scale for s in subs], sub.pre_scale_learned)
    inside = f"[{_ln([s.norms['inner_norm'] for s in subs])} inside]" if sub.inner_norm else ""
    read = "x" if sub.read == "block_input" else x
    branch = f"{module}{inside}( {factor}{pre + ' ' if pre else ''}{read} )"
    coupled, skip_scale = sub.coupling != "none", _skip_label(subs)
    factor = _factor([s.out_scale for s in subs], sub.out_scale_learned, "b = " * coupled)
    branch = factor + (f"{out}( {branch} )" if out else branch)
    bare = coupled or " " not in skip_scale
    factor = (f"{skip_scale} " if bare else f"[{skip_scale}] ") if skip_scale else ""
    skip = {"stream": x, "block_input": "x", "both": f"({x} + x)" if factor else f"{x} + x"}[sub.skip]
    return f"{post}( {factor}{skip} + {branch} )" if post else f"{factor}{skip} + {branch}"


def _ln(norms: list[Norm]) -> str:
    detail = norm_detail(norms)
    return KIND_NAMES.get(norms[0].kind, norms[0].kind).format(norms[0].groups) + (f"[{detail}]" if detail else "")


def _factor(values: Iterable[float], learned: Learned, name: str = "") -> str:
    scale = scale_label(values, learned)
    return f"[{name}{scale}] " if " " in name + scale else f"{scale} " if scale else ""


def _text(x: float, y: float, content: str, **style: object) -> str:
    names = {"size": "font-size", "weight": "font-weight", "anchor": "text-anchor", "font": "font-family"}
    halo = style.pop("halo", None)
    extra = "".join(f' {names.get(k, k)}="{v}"' for k, v in style.items())
    if halo:
        extra += f' paint-order="stroke" stroke="{halo}" stroke-width="4" stroke-linejoin="round"'
    return f'<text x="{x}" y="{y}" xml:space="preserve"{extra}>{escape(content)}</text>'


def _box(x: float, middle: float, width: float, height: float, label: str, colors: tuple[str, str]) -> str:
    size = min(11.5, width * 1.72 / max(len(label), 1))
    return (
        f'<rect x="{x - width / 2:g}" y="{middle - height / 2:g}" width="{width}" height="{height}" rx="5" '
        f'fill="{colors[0]}" stroke="{colors[1]}" stroke-width="1.2"/>'
        + _text(x, round(middle + size * 0.36, 1), label, anchor="middle", size=round(size, 1))
    )


def _line(x1: float, y1: float, x2: float, y2: float, arrow: bool = False) -> str:
    return _path(f"M{x1} {y1}L{x2} {y2}") + (_arrowhead(x2, y2, "up") if arrow else "")


def _stream(n: int, x: float, y1: float, y2: float, arrow: bool = False) -> str:
    beside = [x + (i - (n - 1) / 2) * min(4, 14 / n) for i in range(n)]  # all lines meet the circle of a sum
    lines = "".join(_line(at, y1, at, y2) for at in (beside if n > 1 else [x]))
    return lines + (_arrowhead(x, y2, "up") if arrow else "")


def _slots(count: int, x: float, y: float) -> str:
    style = f'width="8" height="8" rx="1.5" fill="{_END[0]}" stroke="{_END[1]}" stroke-width="1.2"'
    return "".join(f'<rect x="{x - 4 + 10 * i:g}" y="{y - 4:g}" {style}/>' for i in range(min(count, 3)))


def _path(d: str) -> str:
    return f'<path d="{d}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>'


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="2.6" fill="{_LINE}"/>'


def _arrowhead(x: float, y: float, towards: str) -> str:
    wings = {"up": "l-3.5 6.5h7z", "right": "l-6.5 -3.5v7z", "left": "l6.5 -3.5v7z"}[towards]
    return f'<path d="M{x} {y}{wings}" fill="{_LINE}"/>'
