"""A page's own figures are those that plotly makes of the same calls."""

import json
import math

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.subplots import make_subplots

from lamina.reports.charts import Line, over_steps
from lamina.reports.plotting import Figure, panels


def of_plotly(figure):
    drawn = json.loads(figure.to_json())
    drawn["layout"].pop("template", None)
    return drawn


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 3), (2, 3), (3, 2)])
@pytest.mark.parametrize(
    ("share_x", "share_y", "plotlys"), [(False, "", False), (True, "row", True), (True, "all", "all")]
)
def test_panels_lie_and_share_their_axes_as_plotlys(rows, cols, share_x, share_y, plotlys):
    titles = [f"<{number}>" for number in range(rows * cols - 1)]
    ours = panels(rows, cols, across=0.03, down=0.1, titles=titles, share_x=share_x, share_y=share_y)
    shared = {"shared_xaxes": share_x, "shared_yaxes": {"": False, "row": True, "all": "all"}[share_y]}
    spaced = {"horizontal_spacing": 0.03, "vertical_spacing": 0.1}
    theirs = make_subplots(rows=rows, cols=cols, subplot_titles=titles, **spaced, **shared)
    for figure in (ours, theirs):
        figure.add_scatter(x=[1], y=[2], row=rows, col=cols)
        figure.update_yaxes(title="all").update_xaxes(title="last", row=rows, col=cols)
    found, wanted = json.loads(ours.to_json()), of_plotly(theirs)
    for name, axis in wanted["layout"].items():
        if "axis" in name:
            assert found["layout"][name].pop("domain") == pytest.approx(axis.pop("domain"))
    for title, plotlys_title in zip(
        *(drawn["layout"].get("annotations", []) for drawn in (found, wanted)), strict=True
    ):
        for side in "xy":
            assert title.pop(side) == pytest.approx(plotlys_title.pop(side))
    assert found == wanted


@pytest.mark.parametrize(
    "values",
    [
        *([1.5, math.nan, math.inf], [None, 2, "text"], [np.float32(0.1), np.int64(3)]),
        *(np.array([0.5, math.nan]), np.array([0.1], np.float32), np.ones((2, 3)), np.array([], float)),
        *(np.array([-128, 127]), np.array([128]), np.array([40_000]), np.array([2**31]), np.array(["a", "b"])),
    ],
)
def test_values_are_packed_as_plotly_packs_them(values):
    trace = {"x": values, "y": values, "customdata": values, "name": None, "line": {"dash": None, "color": "#fff"}}
    found = json.loads(Figure().add_scatter(**trace, meta={"range": [1]}).to_json())["data"]
    assert found == of_plotly(go.Figure().add_scatter(**trace, meta={"range": [1]}))["data"]


def test_changes_join_what_is_there_and_none_takes_away():
    changes = [
        {"margin": {"l": 1, "t": 2}, "title": "Text", "hovermode": "x"},
        {"margin": {"t": 3}, "hovermode": None, "legend": {"font": {"size": 4}}},
        {"legend": {"font": {"family": "serif"}}, "title": {"font": {"size": 5}}},
    ]
    ours, theirs = Figure(), go.Figure()
    for figure in (ours, theirs):
        for change in changes:
            figure.update_layout(**change)
    figure = json.loads(ours.to_json())["layout"]
    assert {name: value for name, value in figure.items() if value} == of_plotly(theirs)["layout"]
    assert changes[0]["margin"] == {"l": 1, "t": 2}, "the given ones stay as they were"


def test_lines_across_a_figure_are_plotlys():
    ours, theirs = Figure(), go.Figure()
    line, font = {"color": "#000", "width": 1}, {"size": 12}
    ours.add_hline(2.5, line, text="level", font=font).add_vline(7, line)
    theirs.add_hline(y=2.5, line=line, annotation={"text": "level", "font": font}, annotation_position="bottom left")
    theirs.add_vline(x=7, line=line)
    found, wanted = json.loads(ours.to_json())["layout"], of_plotly(theirs)["layout"]
    assert (found["shapes"], found["annotations"]) == (wanted["shapes"], wanted["annotations"])


def test_a_level_line_is_drawn_at_its_height():
    """Plotly draws a learning rate of 1e-3 that never changes at 0, between -1 and 1, unless its axis begins at 0."""
    lines = {
        "learning rate": [Line(x=[1, 2], y=[1e-3, 1e-3], color="#000")],
        "loss": [Line(x=[1, 2], y=[4.0, 3.0], color="#000")],
    }
    assert [axis.get("rangemode") for axis in over_steps(lines, 300).axes("y")] == ["tozero", None]
