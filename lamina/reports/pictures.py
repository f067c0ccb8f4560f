"""Each figure of a probing as a PNG, drawn by an installed browser."""

from __future__ import annotations

import json
import tempfile
from html import escape
from pathlib import Path

import plotly.graph_objects as go
import plotly.io

from lamina.jobs.names import RESULT
from lamina.probes.job.compact import compact
from lamina.reports.screenshot import screenshot
from lamina.reports.style import FONT, polish_own

WIDTH = 900


def draw(folder: Path) -> list[Path]:
    """Write FOLDER/figures/NAME.png beside each figure's .json. Raises UserError without a working browser."""
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    paths = []
    for entry in result["probes"].values():
        for drawn in entry.get("figures") or ():
            source = folder / "figures" / Path(drawn["file"]).name
            figure = polish_own(compact(plotly.io.from_json(source.read_text(encoding="utf-8")))[0])
            paths.append(_picture(figure, drawn["title"], source.with_suffix(".png"), figure.layout.height))
    return paths


def _picture(figure: go.Figure, title: str, target: Path, height: int) -> Path:
    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "figure.html"
        drawn = plotly.io.to_html(figure, full_html=False, include_plotlyjs=True, config={"displayModeBar": False})
        page.write_text(
            f"<!doctype html><meta charset=utf-8><body style='margin:0;background:#fff'>"
            f"<h3 style='font:600 16px {escape(FONT)};color:#1f2933;margin:10px 16px 0'>{escape(title)}</h3>"
            f"{drawn}</body>",
            encoding="utf-8",
        )
        return screenshot(page, target, WIDTH, int(height) + 34)
