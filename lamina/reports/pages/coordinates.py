"""The page of a coordinate check: mean |x| against the width or depth, the exponents, the verdict."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pandas as pd

from lamina.core.json_types import Json
from lamina.jobs.files import read_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import COORDINATES, RESULT, SLOPES
from lamina.reports import charts, tables
from lamina.reports.charts import Line
from lamina.reports.page import Section, callouts, details, figure, moment, prose, write_page
from lamina.reports.plotting import Figure
from lamina.reports.records import Frame, read_parquet, study_header
from lamina.reports.registry import report_of
from lamina.reports.style import PALETTE
from lamina.reports.tables import number, status, table, text

_FIGURE = (
    "Every line is a module, averaged over layers and seeds; both axes are logarithmic. Level lines are right. A "
    "module whose line rises grows with a power of the {axis}, and the model blows up once it is {large} enough. A "
    "module whose line falls matters less and less as the {axis} grows."
)
_WORDS = {
    "width": {"axis": "width", "small": "narrow", "large": "wide"},
    "depth": {"axis": "depth", "small": "shallow", "large": "deep"},
}
_SAID = {
    "flat": "No module's output grows or shrinks with the {axis}: a learning rate tuned {small} should hold {large}.",
    "grows": "Outputs grow with the {axis}, so a learning rate tuned {small} will be too large {large}.",
    "shrinks": "Outputs shrink with the {axis}: a {large} model learns less at the same learning rate.",
    "broken": "Outputs are zero or not finite at some {axis}: the learning rate is too large, or a module is dead.",
}


@report_of(Kind.COORD_CHECK, needs="coordinate check")
def coordinates_report(folder: Path) -> Path:
    sizes: Frame = read_parquet(folder / COORDINATES)
    slopes: Frame = pd.read_csv((folder / SLOPES).absolute())
    result = read_json(folder / RESULT)
    header = study_header(folder)
    settings: Json = header.get("settings", {})
    verdict, words = str(result.get("verdict", "")), _WORDS["depth" if "depth" in sizes else "width"]
    axis, scheme = words["axis"], settings.get(f"{words['axis']}_scaling", "")
    said = prose([_SAID.get(verdict, verdict).format(**words)], {})
    if result.get("modules"):
        said += callouts([f"{verdict}: {', '.join(map(str, result['modules']))}."])
    return write_page(
        folder,
        title=f"{settings.get('placement', '')}, {axis} scaling {scheme}: outputs are {verdict}",
        facts=[
            f"{axis}s {settings.get(f'{axis}s', '')}",
            f"{settings.get('num_layers', '')} layers" if axis == "width" else "",
            f"learning rate {settings.get('learning_rate', '')}",
            moment(header.get("created")),
        ],
        command=header.get("command"),
        sections=[
            Section("Verdict", "Verdict", said),
            Section(
                "Sizes",
                f"Size of the outputs against the {axis}",
                figure(_figure(sizes, axis), _FIGURE.format(**words)),
            ),
            Section("Exponents", f"Exponents of the {axis}", _table(slopes, axis)),
            Section("Settings", "Settings", details("Settings", tables.settings_table(settings))),
        ],
    )


def _figure(sizes: Frame, axis: str) -> Figure:
    """Draw mean |x| against the width or depth: before the first step and after the last, one line per module."""
    sizes = sizes[sizes["metric"] == "size"]
    steps = sorted({int(sizes["step"].min()), int(sizes["step"].max())})
    titles = ["before the first step" if step == 0 else f"after {step} steps" for step in steps]
    means = sizes.groupby(["step", "module", axis])["value"].mean()
    lines = []
    for column, step in enumerate(steps, start=1):
        for index, module in enumerate(dict.fromkeys(sizes["module"])):
            values = means.loc[step, module]
            line = Line(
                x=list(values.index),
                y=list(values),
                color=PALETTE[index % len(PALETTE)],
                dash=("solid", "dot", "dash")[index // len(PALETTE) % 3],
                width=None,
                name=escape(module),
                group=module,
                legend=column == 1,
                markers=True,
                hover=f"{escape(module)}: %{{y:.3g}} at %{{x}}",
            )
            lines.append((column, line))
    chart = charts.side_by_side(titles, lines, axis, "mean |x|", 560)
    ticks = sorted(set(map(int, sizes[axis])))
    chart.update_xaxes(type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    chart.update_yaxes(type="log", exponentformat="power")
    legend = {"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top", "font": {"size": 11}}
    return chart.update_layout(legend=legend, margin={"t": 52, "r": 260}, hovermode=None)


def _table(slopes: Frame, axis: str) -> str:
    """Return a table of each module's exponent at the start and after the last step, with its range over the layers."""
    last = int(slopes["step"].max())
    rows = []
    for module in dict.fromkeys(slopes["module"]):
        module_rows = slopes[slopes["module"] == module]
        sizes = module_rows[module_rows["metric"] == "size"].set_index("step")
        change = module_rows[(module_rows["metric"] == "change") & (module_rows["step"] == last)]["slope"]
        rows.append(
            {
                "module": module,
                "layers": int(sizes["layers"].iloc[0]),
                "start": sizes["slope"][0],
                **{name: sizes[name][last] for name in ("slope", "low", "high")},
                "change": change.iloc[0],
                "verdict": next((v for v in ("broken", "grows", "shrinks") if sizes["verdict"].eq(v).any()), "flat"),
            }
        )
    fields = [
        text("module", kind="name"),
        text("layers", kind="number"),
        number("start", "+.2f", "at the start"),
        number("slope", "+.2f", f"after {last} steps"),
        number("low", "+.2f", "least"),
        number("high", "+.2f", "largest"),
        number("change", "+.2f", "of the change"),
        status("verdict", "verdict"),
    ]
    note = f"<p>e in mean |x| ~ {axis}<sup>e</sup>; the change is mean |x &minus; x before the first step|.</p>"
    return note + table(fields, rows, "ranking")
