"""SVG elements: text, boxes, lines, dots and arrowheads. All text is escaped."""

from __future__ import annotations

from html import escape

LINE = "#3b4754"  # the color of lines


def text(x: float, y: float, content: str, **style: object) -> str:
    names = {"size": "font-size", "weight": "font-weight", "anchor": "text-anchor", "font": "font-family"}
    halo = style.pop("halo", None)
    extra = "".join(f' {names.get(k, k)}="{v}"' for k, v in style.items())
    if halo:
        extra += f' paint-order="stroke" stroke="{halo}" stroke-width="4" stroke-linejoin="round"'
    return f'<text x="{x}" y="{y}" xml:space="preserve"{extra}>{escape(content)}</text>'


def box(x: float, middle: float, width: float, height: float, label: str, colors: tuple[str, str]) -> str:
    size = min(11.5, width * 1.72 / max(len(label), 1))
    return (
        f'<rect x="{x - width / 2:g}" y="{middle - height / 2:g}" width="{width}" height="{height}" rx="5" '
        f'fill="{colors[0]}" stroke="{colors[1]}" stroke-width="1.2"/>'
        + text(x, round(middle + size * 0.36, 1), label, anchor="middle", size=round(size, 1))
    )


def line(x1: float, y1: float, x2: float, y2: float, arrow: bool = False) -> str:
    return path(f"M{x1} {y1}L{x2} {y2}") + (arrowhead(x2, y2, "up") if arrow else "")


def path(d: str) -> str:
    return f'<path d="{d}" fill="none" stroke="{LINE}" stroke-width="1.5"/>'


def dot(x: float, y: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="2.6" fill="{LINE}"/>'


def arrowhead(x: float, y: float, towards: str) -> str:
    wings = {"up": "l-3.5 6.5h7z", "right": "l-6.5 -3.5v7z", "left": "l6.5 -3.5v7z"}[towards]
    return f'<path d="M{x} {y}{wings}" fill="{LINE}"/>'
