"""Describe figures as data, for report pages and for papers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from lamina.core.json_types import Json
from lamina.reports.style import Look

Value = float | str
LOST_AT = 1.06  # y position of the marks for failed runs, as a fraction of the data's height
_LONG = 28  # a longer title of a panel takes two lines


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a figure, with the spread over seeds."""

    label: str
    look: Look
    x: tuple[Value, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()  # the lower ends of the points' error bars, or () without error bars
    high: tuple[float, ...] = ()  # the upper ends of the points' error bars, or () without error bars
    # the x values at which every run failed, with the runs' statuses. The figure marks these x values at the top edge
    lost: tuple[tuple[Value, str], ...] = ()

    @property
    def bars(self) -> tuple[list[float], list[float]]:
        """The lengths of the error bars, below and above the points."""
        below = [y - low for low, y in zip(self.low, self.y, strict=True)]
        return below, [high - y for high, y in zip(self.high, self.y, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A heat map. ``values`` lists the rows from bottom to top. NaN is an empty cell."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of a figure, which shows lines or a heat map."""

    title: str = ""
    series: tuple[Series, ...] = ()
    cells: Cells | None = None

    @property
    def heading(self) -> str:
        """The title. A long title has a line break."""
        breaks = [match.end() for match in re.finditer(", ", self.title)]
        if len(self.title) <= _LONG or not breaks:
            return self.title
        middle = min(breaks, key=lambda place: abs(2 * place - len(self.title)))
        return f"{self.title[:middle].rstrip()}\n{self.title[middle:]}"


def marks(panel: Panel, axis: Axis, number: int) -> list[Value]:
    """Return the x positions of a line's marks for failed runs. Marks of several lines stand side by side."""
    losing = [index for index, series in enumerate(panel.series) if series.lost]
    aside = losing.index(number) - (len(losing) - 1) / 2 if number in losing else 0.0
    ends = [tick for tick in axis.ticks if isinstance(tick, float)]
    reach = (max(ends) / min(ends)) ** (1 / 70) if axis.log and ends else (max(ends) - min(ends)) / 70 if ends else 0.0
    places = (x for x, _ in panel.series[number].lost)
    return [x if isinstance(x, str) else x * reach**aside if axis.log and reach else x + aside * reach for x in places]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a figure. An axis with categories has a tick for each category."""

    title: str
    log: bool = False
    ticks: tuple[Value, ...] = ()

    @property
    def has_texts(self) -> bool:
        return any(isinstance(tick, str) for tick in self.ticks)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure."""

    name: str  # the file name without suffix
    title: str
    caption: str
    x: Axis
    y: Axis
    panels: tuple[Panel, ...]  # the panels, at most three per row
    joined: bool = True  # whether lines join the points
    spread: Literal["bars", "band"] = "bars"
    quantity: str = ""  # the quantity that a heat map shows

    @property
    def is_map(self) -> bool:
        return any(panel.cells is not None for panel in self.panels)

    @property
    def has_legend(self) -> bool:
        """Whether the figure needs a legend. Without a legend, the x axis names the lines."""
        names = {series.label for panel in self.panels for series in panel.series}
        return len(names) > 1 and not names <= set(self.x.ticks)

    def height(self, reach: float) -> float | None:
        """Return the y value at a height from 0 (lowest point) to 1 (highest point), or None without data."""
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
    """A request for a figure."""

    kind: str  # the kind of figure, a key of ``lamina.lab.papers.pages.study_figures.KINDS``
    x: str = ""  # the column of the x axis, or "" for the kind's usual column
    y: str = ""  # the column of the y axis, or "" for the kind's usual column
    color: str = ""  # the compared setting that colors show, or "" for the default of ``lines.color_axis``
    measure: str = ""  # the name of a measurement's table, such as "init-gradients"
    more: Json = field(default_factory=dict)  # other fields of the figure in the YAML file
