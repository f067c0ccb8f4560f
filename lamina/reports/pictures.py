"""Each figure of a probing as a PNG, drawn by an installed browser."""

from __future__ import annotations

import json
import tempfile
from html import escape
from pathlib import Path

import plotly.io
from plotly.offline import get_plotlyjs

from lamina.probes.job.compact import compact
from lamina.reports.screenshot import screenshot
from lamina.reports.style import FONT, polish_own, to_html

WIDTH = 900


def draw(folder: Path) -> list[Path]:
    """Write FOLDER/figures/NAME.png beside each figure's .json. Raises UserError without a working browser."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    paths = []
    for entry in result["probes"].values():
        for drawn in entry.get("figures") or ():
            source = folder / "figures" / Path(drawn["file"]).name
            figure = polish_own(compact(plotly.io.from_json(source.read_text(encoding="utf-8")))[0])
            paths.append(_picture(to_html(figure), drawn["title"], source.with_suffix(".png"), figure.layout.height))
    return paths


def _picture(html: str, title: str, target: Path, height: int) -> Path:
    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "figure.html"
        page.write_text(
            f"<!doctype html><meta charset=utf-8><script>{get_plotlyjs()}</script>"
            "<style>.modebar { display: none }</style>"
            f"<body style='margin:0;background:#fff'><h3 style='font:600 16px {escape(FONT)};color:#1f2933;"
            f"margin:10px 16px 0'>{escape(title)}</h3>{html}</body>",
            encoding="utf-8",
        )
        return screenshot(page, target, WIDTH, int(height) + 34)
