"""Write figures for a paper as SVG and PDF with matplotlib (Lamina's extra "figures")."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lamina.core.extras import install
from lamina.errors import UserError
from lamina.jobs.files import writing
from lamina.lab.papers.pages.drawing import LOST_AT, Axis, Drawing, Panel, Value, marks
from lamina.lab.papers.pages.folder import has_claims, read_folder
from lamina.lab.papers.pages.study_figures import chosen
from lamina.reports.charts import Grid
from lamina.reports.style import log_ticks

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

FIGURES = "figures"
_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "cross": "P",
    "x": "X",
    "star": "*",
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_STYLE = {
    "svg.hashsalt": "lamina",  # the same numbers give the same file
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # an editor can change the text
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
}
_ASIDE = 0.12  # the distance between two lines' points at a category
_WIDTH, _HEIGHT = 2.5, 2.1  # the size of a panel, in inches


def write_all(folder: Path) -> list[Path]:
    """Write a study's figures as SVG and PDF to the subfolder "figures", and return the paths."""
    if not has_claims(folder):
        raise UserError(f"figures: {str(folder)!r} holds no study with claims. Give the folder of `lamina study run`.")
    shown, left_out = chosen(read_folder(folder))
    return [path for drawing in (*shown, *left_out) for path in write(drawing, folder / FIGURES)]


def write(drawing: Drawing, folder: Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Write a figure as SVG and PDF. Returns the paths. Raises UserError if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"figures: matplotlib is not installed. Run: {install('figures')}") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(cast("dict[RcKeyType, Any]", _STYLE)):
        figure = _figure(drawing, Figure)
        for form in formats:
            path, content = folder / f"{drawing.name}.{form}", io.BytesIO()
            dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
            figure.savefig(content, format=form, metadata=dated, bbox_inches="tight", dpi=200)
            with writing(path) as temporary:
                temporary.write_bytes(content.getvalue())
            paths.append(path)
    return paths


def _figure(drawing: Drawing, make: type[Figure]) -> Figure:
    grid = Grid(len(drawing.panels))
    alone = 1.5 if grid.count == 1 else 1.0
    longest = max((len(tick if isinstance(tick, str) else f"{tick:g}") for tick in drawing.x.ticks), default=0)
    names = {series.label for panel in drawing.panels for series in panel.series}
    legend = 0.18 * math.ceil(len(names) / (3 + grid.across)) if drawing.has_legend else 0.0
    height = (_HEIGHT * alone + (0.035 * longest if _turned(drawing.x) else 0.0)) * grid.down + legend
    figure = make(figsize=(_WIDTH * alone * grid.across, height), layout="constrained")
    axes = figure.subplots(grid.down, grid.across, sharex=not drawing.x.has_texts, sharey=True, squeeze=False)
    mapped, top = None, drawing.height(LOST_AT)
    values = [v for panel in drawing.panels if panel.cells for row in panel.cells.values for v in row if np.isfinite(v)]
    low, high = min(values, default=None), max(values, default=None)
    for number in range(grid.down * grid.across):
        row, col = number // grid.across, number % grid.across
        field: Axes = axes[row][col]
        if number >= grid.count:
            field.set_visible(False)
            continue
        panel = drawing.panels[number]
        field.set_title(_plain(panel.heading), fontsize=8)
        if panel.cells is not None:
            cells = np.ma.masked_invalid(np.asarray(panel.cells.values, dtype=float))
            mapped = field.pcolormesh(
                panel.cells.columns, panel.cells.rows, cells, vmin=low, vmax=high, rasterized=True, shading="nearest"
            )
            field.grid(visible=False)
        _lines(field, drawing, panel, top)
        if grid.lowest(number):
            field.set_xlabel(_plain(drawing.x.title))
            field.tick_params(labelbottom=True)
        if col == 0:
            field.set_ylabel(_plain(drawing.y.title))
    if drawing.y.log:  # readable ticks: 0.2, 0.5, 1 within two decades, otherwise powers of ten
        field = axes[0][0]
        bottom, top = field.get_ylim()
        exponents, texts = log_ticks(math.log10(bottom), math.log10(top))
        texts = [text.replace("<sup>", "$^{").replace("</sup>", "}$") for text in texts]
        field.set_yticks([10**exponent for exponent in exponents], texts, minor=False)
        field.set_yticks([], minor=True)
        field.set_ylim(bottom, top)
    if mapped is not None:
        figure.colorbar(mapped, ax=axes, label=_plain(drawing.quantity))
    if drawing.has_legend:
        named: dict[str, Artist] = {}
        for field in axes.ravel():
            handles, labels = field.get_legend_handles_labels()
            named |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in named}
        columns = min(len(named), 3 + grid.across)
        figure.legend(list(named.values()), list(named), loc="outside upper left", ncols=columns, columnspacing=1.2)
    return figure


def _lines(field: Axes, drawing: Drawing, panel: Panel, top: float | None) -> None:
    points = [x for series in panel.series for x in series.x]
    apart = len(set(points)) == len(points)  # no two lines have a point at the same x
    for number, series in enumerate(panel.series):
        aside = 0.0 if drawing.joined or apart else _ASIDE * (number - (len(panel.series) - 1) / 2)
        x = [place + aside for place in _places(series.x, drawing.x)]
        color, few = series.look.color, len(x) <= 16
        field.plot(
            x,
            series.y,
            color=color,
            linestyle=_DASHES[series.look.dash] if drawing.joined else "",
            marker=_MARKERS[series.look.marker] if few else "",
            label=_plain(series.label),
        )
        if series.low and drawing.spread == "bars":
            field.errorbar(x, series.y, yerr=series.bars, fmt="none", ecolor=color, capsize=2, elinewidth=0.8)
        if series.low and drawing.spread == "band":
            field.fill_between(x, series.low, series.high, color=color, alpha=0.14, linewidth=0)
        if series.lost and top is not None:
            at = _places(marks(panel, drawing.x, number), drawing.x)
            field.plot(at, [top] * len(at), linestyle="", marker="x", color=color, clip_on=False)
    _scale(field, drawing.x)
    if drawing.y.log:
        field.set_yscale("log")


def _scale(field: Axes, axis: Axis) -> None:
    if axis.has_texts:
        field.set_xticks(range(len(axis.ticks)), [_plain(str(tick)) for tick in axis.ticks])
        if _turned(axis):
            field.tick_params(axis="x", rotation=40)
            for label in field.get_xticklabels():
                label.set_horizontalalignment("right")
        field.margins(x=0.1)
        return
    if axis.log:
        field.set_xscale("log")
    elif "layer" in axis.title:
        from matplotlib.ticker import MaxNLocator

        field.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axis.ticks and len(axis.ticks) <= 10:
        numbers = [tick for tick in axis.ticks if isinstance(tick, float)]
        field.set_xticks(numbers, [f"{tick:g}" for tick in numbers])
        field.minorticks_off()
        if _turned(axis):
            field.tick_params(axis="x", rotation=40)


def _turned(axis: Axis) -> bool:
    """Return whether the x labels are too long to fit side by side."""
    if axis.has_texts:
        return max(len(str(tick)) for tick in axis.ticks) * len(axis.ticks) > 34
    return 5 < len(axis.ticks) <= 10


def _places(values: Sequence[Value], axis: Axis) -> list[float]:
    """Return the x positions of values. The position of a category is the index of the category's tick."""
    if not axis.has_texts:
        return [value for value in values if isinstance(value, float)]
    order = {str(tick): number for number, tick in enumerate(axis.ticks)}
    return [float(order[str(value)]) for value in values]


def _plain(text: str) -> str:
    """Escape the characters that start a formula in matplotlib."""
    return text.replace("$", r"\$")
