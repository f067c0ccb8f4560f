"""Write the page of a coordinate check: mean |x| against the width or depth, the exponents, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.files import read_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import COORDINATES, RESULT, SLOPES
from lamina.reports import charts, tables
from lamina.reports.charts import Line
from lamina.reports.page import Section, callouts, details, figure, moment, prose, write_page
from lamina.reports.plotting import Figure
from lamina.reports.records import Frame, read_table, study_header
from lamina.reports.registry import report_of
from lamina.reports.style import PALETTE
from lamina.reports.tables import number, status, table, text

LEVEL = "#b9bcc2"
_FIGURE = (
    "Mean |x| of each module's output, averaged over layers and seeds. Both axes are logarithmic. Gray lines are "
    "flat within the tolerance. If a colored line rises, a {large} model blows up. If a colored line falls, the module "
    "matters less in a {large} model."
)
_WORDS = {
    "width": {"axis": "width", "small": "narrow", "large": "wide"},
    "depth": {"axis": "depth", "small": "shallow", "large": "deep"},
}
_TITLES = {
    "flat": "No output grows or shrinks with the {axis}",
    "grows": "Outputs grow with the {axis}",
    "shrinks": "Outputs shrink with the {axis}",
    "broken": "Outputs are zero or not finite at some {axis}",
}
_SAID = {
    "flat": "A learning rate that you tune on a {small} model should hold for a {large} model.",
    "grows": "A learning rate that you tune on a {small} model will be too large for a {large} model.",
    "shrinks": "A {large} model learns less at the same learning rate.",
    "broken": "The learning rate is too large, or a module is dead. Lower --learning-rate first.",
}
_SCALING = {"width": "--width-scaling standard", "depth": "--depth-scaling completep"}


@report_of(Kind.COORD_CHECK, needs="coordinate check")
def coordinates_report(folder: Path) -> Path:
    header = study_header(folder)
    settings: Json = header.get("settings", {})
    axis = "depth" if "depth" in read_table(folder / COORDINATES) else "width"
    sizes = read_table(folder / COORDINATES, [axis, "step", "module", "metric", "value"])
    slopes = read_table(folder / SLOPES, ["metric", "module", "step", "slope", "low", "high", "layers", "verdict"])
    result, words = read_json(folder / RESULT), _WORDS[axis]
    verdict, scheme = str(result.get("verdict", "")), settings.get(f"{axis}_scaling", "")
    advice = [_SAID.get(verdict, verdict).format(**words)]
    if verdict in ("grows", "shrinks") and scheme == "none":
        advice.append(f"To scale the learning rates with the {axis}, add {_SCALING[axis]}.")
    said = prose(advice, {}, "finding")
    if result.get("modules"):
        said += callouts([f"{verdict.capitalize()}: {', '.join(map(str, result['modules']))}."])
    return write_page(
        folder,
        title=f"{_TITLES.get(verdict, verdict).format(**words)} ({settings.get('placement', '')})",
        facts=[
            f"{axis} scaling {scheme}",
            f"{axis}s {settings.get(f'{axis}s', '')}",
            f"{settings.get('num_layers', '')} layers" if axis == "width" else "",
            f"learning rate {settings.get('learning_rate', '')}",
            moment(header.get("created")),
        ],
        command=header.get("command"),
        sections=[
            Section("Verdict", "What it means", said),
            Section(
                "Sizes",
                f"Size of the outputs against the {axis}",
                figure(_figure(sizes, _verdicts(slopes), axis), _FIGURE.format(**words)),
            ),
            Section("Exponents", f"Exponents of the {axis}", _table(slopes, axis)),
            Section("Settings", "Settings", details("Settings", tables.settings_table(settings))),
        ],
    )


def _verdicts(slopes: Frame) -> dict[str, str]:
    """Return the verdict of each module: the worst verdict of any layer."""
    found = {name: set(rows["verdict"]) for name, rows in slopes[slopes["metric"] == "size"].groupby("module")}
    worst = ("broken", "grows", "shrinks")
    return {str(name): next((one for one in worst if one in verdicts), "flat") for name, verdicts in found.items()}


def _figure(sizes: Frame, verdicts: Mapping[str, str], axis: str) -> Figure:
    """Draw each module's mean |x| before the first and after the last step. Modules with a flat line are gray."""
    sizes = sizes[sizes["metric"] == "size"]
    steps = sorted({int(sizes["step"].min()), int(sizes["step"].max())})
    titles = ["before the first step" if step == 0 else f"after {step} steps" for step in steps]
    means = sizes.groupby(["step", "module", axis])["value"].mean()
    lines = []
    modules = sorted(verdicts, key=lambda name: verdicts[name] != "flat")  # the level ones lie below
    level = modules[0] if verdicts[modules[0]] == "flat" else None
    for column, step in enumerate(steps, start=1):
        for index, module in enumerate(modules):
            values, flat = means.loc[step, module], verdicts[module] == "flat"
            line = Line(
                x=list(values.index),
                y=list(values),
                color=LEVEL if flat else PALETTE[index % len(PALETTE)],
                dash="solid" if flat else ("solid", "dot", "dash")[index // len(PALETTE) % 3],
                width=1.4 if flat else 2,
                name="flat" if flat else escape(module),
                data_name=escape(module),
                group="level" if flat else module,
                legend=column == 1 and (not flat or module == level),
                markers=True,
                hover=f"{escape(module)}: %{{y:.3g}} at %{{x}}",
            )
            lines.append((column, line))
    chart = charts.in_panels(titles, lines, axis, "mean |x|", 460)
    ticks = sorted(set(map(int, sizes[axis])))
    chart.update_xaxes(type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    chart.update_yaxes(type="log", exponentformat="power")
    return chart.update_layout(hovermode=None)


def _table(slopes: Frame, axis: str) -> str:
    """Return a table of each module's exponents before the first and after the last step, with the layers' range."""
    verdicts = _verdicts(slopes)
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
                "verdict": verdicts[module],
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
    note = (
        f"<p>The table shows the exponent e in mean |x| ~ {axis}<sup>e</sup>. If e is 0, the output does not change "
        f"with the {axis}. The column &quot;of the change&quot; is the exponent of mean |x &minus; x<sub>0</sub>|, "
        "where x<sub>0</sub> is the output before the first step.</p>"
    )
    bad = [row for row in rows if row["verdict"] != "flat"]
    shown = table(fields, bad, "ranking") if bad else ""
    return note + shown + details(f"All {len(rows)} modules", table(fields, rows, "ranking"))
