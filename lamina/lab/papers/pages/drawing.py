"""Describe figures as data, which a page and a paper render differently."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from lamina.core.json_types import Json
from lamina.reports.style import Look

Value = float | str
LOST_AT = 1.06  # where the marks of points without a seed that trained stand, in heights of the data
_LONG = 28  # letters of a panel's title, from which on it takes two lines


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line with its spread over seeds.

    Attributes:
        x: the points' positions along x, sorted.
        y: the points' values.
        low: the lower end of each point's spread (empty if the line has no spread).
        high: the upper end of each point's spread (empty if the line has no spread).
        lost: the x values at which no seed trained, and how these runs ended. The figure marks these x values at the
            top edge.
    """

    label: str
    look: Look
    x: tuple[Value, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    lost: tuple[tuple[Value, str], ...] = ()

    @property
    def bars(self) -> tuple[list[float], list[float]]:
        """The distances from each point to the lower and upper end of its spread."""
        below = [y - low for low, y in zip(self.low, self.y, strict=True)]
        return below, [high - y for high, y in zip(self.high, self.y, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A map of colors. ``values`` has the rows from bottom to top, and NaN for an empty cell."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a figure, which shows lines or a map."""

    title: str = ""
    series: tuple[Series, ...] = ()
    cells: Cells | None = None

    @property
    def heading(self) -> str:
        """The title, which Lamina breaks into two lines if it is long."""
        breaks = [match.end() for match in re.finditer(", ", self.title)]
        if len(self.title) <= _LONG or not breaks:
            return self.title
        middle = min(breaks, key=lambda place: abs(2 * place - len(self.title)))
        return f"{self.title[:middle].rstrip()}\n{self.title[middle:]}"


def marks(panel: Panel, axis: Axis, number: int) -> list[Value]:
    """Return the positions along x of a series' marks for failed points. Lamina shifts the marks of several series, so
    that they stand side by side.
    """
    losing = [index for index, series in enumerate(panel.series) if series.lost]
    aside = losing.index(number) - (len(losing) - 1) / 2 if number in losing else 0.0
    ends = [tick for tick in axis.ticks if isinstance(tick, float)]
    reach = (max(ends) / min(ends)) ** (1 / 70) if axis.log and ends else (max(ends) - min(ends)) / 70 if ends else 0.0
    places = (x for x, _ in panel.series[number].lost)
    return [x if isinstance(x, str) else x * reach**aside if axis.log and reach else x + aside * reach for x in places]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a figure. ``ticks`` lists the positions of the ticks. An axis with categories has a tick at each
    value.
    """

    title: str
    log: bool = False
    ticks: tuple[Value, ...] = ()

    @property
    def has_texts(self) -> bool:
        """Whether the axis's values are categories."""
        return any(isinstance(tick, str) for tick in self.ticks)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure.

    Attributes:
        name: the name of the figure's files, without the ending.
        x: the x axis that all panels share.
        y: the y axis that all panels share.
        panels: the panels, at most three in a row.
        joined: whether a line joins the points of a series.
        quantity: the quantity that a map shows by color.
    """

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    panels: tuple[Panel, ...]
    joined: bool = True
    spread: Literal["bars", "band"] = "bars"
    quantity: str = ""

    @property
    def is_map(self) -> bool:
        return any(panel.cells is not None for panel in self.panels)

    @property
    def has_legend(self) -> bool:
        """Whether the figure needs a legend. If the ticks of x name the lines, the figure needs no legend."""
        names = {series.label for panel in self.panels for series in panel.series}
        return len(names) > 1 and not names <= set(self.x.ticks)

    def height(self, reach: float) -> float | None:
        """Return the y value at a height from 0 (the data's lowest point) to 1 (the highest point), or None without
        data.
        """
        lines = [series for panel in self.panels for series in panel.series]
        values = [y for series in lines for y in (*series.y, *series.low, *series.high) if math.isfinite(y)]
        if not values:
            return None
        low, high = min(values), max(values)
        if self.y.log and low > 0:
            return low * (high / low) ** reach
        height = max(high - low, 0.02 * abs(high), 1e-9)
        return (low if reach < 0 else high) + (reach if reach < 0 else reach - 1) * height


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for a figure, from a study's YAML or from its axes.

    Attributes:
        kind: a name in ``lamina.lab.papers.pages.study_figures.KINDS``.
        x: the column along x, or "" if the kind chooses the column.
        y: the column along y, or "" if the kind chooses the column.
        color: the axis whose values get one line each, or "" for the placement (or the first axis that varies).
        measure: the table's file without its ending (``init-gradients``), for kinds that draw a measure.
        more: all other entries of the figure in the YAML.
    """

    kind: str
    x: str = ""
    y: str = ""
    color: str = ""
    measure: str = ""
    more: Json = field(default_factory=dict)
