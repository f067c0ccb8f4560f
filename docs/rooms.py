"""Draws docs/dev/rooms.svg, the picture of the package's rooms, from the imports: ``python docs/rooms.py``."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "dev" / "rooms.svg"
WIDTH, BOX, GAP = 620, 262, 26  # of the picture, a room, and between two rooms
PLAIN, DIVIDED, FLOOR = 34, 52, 40  # heights: of a room, of one with folders in it, of the space between floors

Imports = dict[str, set[str]]


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Each module's dotted name and file."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room_of(module: str) -> str:
    """The room of a module: the part behind the package's name; "" for the package itself."""
    return [*module.split("."), ""][1]


def imports(package: Path) -> Imports:
    """Which other rooms each room imports, inside functions and for types, too, but by no row that names the lab."""
    found: Imports = {}
    rows = allowed_upwards()
    for module, path in modules(package):
        room = room_of(module)
        if room in ("", "__main__", "auto_classes"):
            continue
        targets = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inside = node.module == package.name  # from lamina import placements
                names = [f"{node.module}.{alias.name}" for alias in node.names] if inside else [node.module]
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
                names = [text.value for text in ast.walk(node.args[0]) if isinstance(text, ast.Constant)]
            names = [name for name in names if not f"{module} -> {name}".startswith(rows)]
            targets |= {room_of(name) for name in names if name.split(".")[0] == package.name}
    return {room: targets & set(found) - {room} for room, targets in found.items()}


def reachable(graph: Imports, start: str) -> set[str]:
    """All rooms that a room's imports lead to, over others too."""
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        room = todo.pop()
        if room not in seen:
            seen.add(room)
            todo += graph[room]
    return seen


def reduced(graph: Imports) -> Imports:
    """The imports without those that others imply: an arrow to a room that another arrow's room leads to."""
    return {
        room: {t for t in targets if not any(t in reachable(graph, other) for other in targets - {t})}
        for room, targets in graph.items()
    }


def floors(graph: Imports) -> list[list[str]]:
    """The rooms by floor, the ground floor first: each stands on the floor above the highest that it imports."""
    height: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in height:
            height[room] = 1 + max((of(target) for target in sorted(graph[room])), default=-1)
        return height[room]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(of, sorted(graph))))]
    for room in sorted(graph):
        rows[height[room]].append(room)
    return rows


def contracts() -> list[dict[str, Any]]:
    """The contracts of imports in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


def allowed_upwards() -> tuple[str, ...]:
    """The imports, as beginnings of "a -> b", by which a row of a lower room names what is in the lab."""
    layers = (contract for contract in contracts() if contract["type"] == "layers")
    return tuple(row.removesuffix(".*") for contract in layers for row in contract.get("ignore_imports", ()))


def light_rooms() -> set[str]:
    """The rooms that must not load torch, by the contracts in pyproject.toml."""
    return {
        room_of(module)
        for contract in contracts()
        if contract["type"] == "forbidden" and "torch" in contract["forbidden_modules"]
        for module in contract["source_modules"]
        if module.count(".") == 1
    }


def parts(package: Path, room: str) -> list[str]:
    """The folders inside a room."""
    folder = package / room
    return sorted(f.name for f in folder.iterdir() if (f / "__init__.py").is_file()) if folder.is_dir() else []


def picture(package: Path = ROOT / "lamina") -> str:
    """The rooms as an SVG."""
    graph = imports(package)
    rows, inside, light = floors(graph), {room: parts(package, room) for room in graph}, light_rooms()
    place: dict[str, tuple[float, float, float]] = {}  # left, top, height
    top = 20.0
    for row in reversed(rows):
        left = (WIDTH - len(row) * BOX - (len(row) - 1) * GAP) / 2
        height = DIVIDED if any(inside[room] for room in row) else PLAIN
        for number, room in enumerate(row):
            place[room] = (left + number * (BOX + GAP), top, height)
        top += height + FLOOR
    drawn = sorted((room, target) for room, targets in reduced(graph).items() for target in targets)
    arrows = [_arrow(place[room], place[target]) for room, target in drawn]
    boxes = [_box(room, inside[room], place[room], room in light) for room in sorted(graph)]
    return "\n".join([_HEAD.format(width=WIDTH, height=round(top - FLOOR + 20)), *arrows, *boxes, "</svg>\n"])


def _arrow(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    x1, y1 = start[0] + BOX / 2, start[1] + start[2]
    x2, y2 = end[0] + BOX / 2, end[1] - 2
    if y2 < y1:  # rooms of one floor do not import each other
        raise ValueError("an import leads upwards")
    bend = min(40.0, (y2 - y1) / 2)
    curve = f"M{x1:g} {y1:g} C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"
    return f'<path class="arrow" d="{curve}" marker-end="url(#head)"/>'


def _box(room: str, folders: list[str], place: tuple[float, float, float], light: bool) -> str:
    left, top, height = place
    middle, kind = left + BOX / 2, "light" if light else "room"
    inside = "  ".join(f"{name}/" for name in folders)
    line = f'<text class="part" x="{middle:g}" y="{top + 40:g}">{escape(inside)}</text>' if folders else ""
    base = top + (22 if folders else height / 2 + 5)
    return (
        f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="{BOX}" height="{height:g}" rx="7"/>'
        f'<text class="name" x="{middle:g}" y="{base:g}">{escape(room)}</text>{line}'
    )


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
text {{ font-family: system-ui, sans-serif; text-anchor: middle; fill: #1f2933; }}
.name {{ font-size: 15px; font-weight: 600; }}
.part {{ font-size: 12px; fill: #66717d; }}
.room {{ fill: #f7f8fa; stroke: #c9d0d8; }}
.light {{ fill: #e5f3ec; stroke: #8fc4a9; }}
.arrow {{ fill: none; stroke: #9aa5b1; stroke-width: 1.4; }}
</style>
<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">
<path d="M1 1L7 4L1 7" fill="none" stroke="#9aa5b1"/></marker></defs>
<rect width="100%" height="100%" fill="#fff"/>"""


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
