"""The kinds of figures that a study may have, each a function from its tables to a drawing."""

from __future__ import annotations

from collections.abc import Callable

from lamina.papers.pages import splitting
from lamina.papers.pages.drawing import Axis, Drawing, Panel, Request, Series
from lamina.papers.pages.folder import StudyFolder, arms, measuring, over_seeds
from lamina.papers.pages.measured import heatmap, lines_over_layers
from lamina.reports.records import Frame, rows_of

Kind = Callable[[StudyFolder, Request], Drawing | None]
ONE_LINE = "none"
"""A figure's color that makes one line of all arms."""
_LOST = "Marks along the top edge: no seed trained there (diverged or stuck)."
_SPREAD = "Mean and standard deviation over the seeds that trained."


def sweep(study: StudyFolder, request: Request) -> Drawing | None:
    """The value against the learning rate, one line per arm."""
    rows = study.first_stage
    if not study.has_sweep or rows[_value(study, request)].isna().all():
        return None
    by = list(dict.fromkeys(["placement", *study.varied, "learning_rate"]))
    table = over_seeds(_of_the_sweep(rows, by[:-1]), by, _value(study, request))
    return _drawing(study, request, table, "learning_rate", f"{_SPREAD} {_LOST}")


def _of_the_sweep(rows: Frame, arm: list[str]) -> Frame:
    """The trials of the seeds that an arm has at each of its rates: more seeds at the best one are another sample."""
    rates = rows.groupby(arm, dropna=False)["learning_rate"].transform("nunique")
    own = rows.groupby([*arm, "seed"], dropna=False)["learning_rate"].transform("nunique")
    return rows[own == rates] if (own == rates).any() else rows


def by_axis(study: StudyFolder, request: Request) -> Drawing | None:
    """The value of each arm at its rate, against one axis."""
    x = request.x or next((a for a in study.varied if a != "placement"), study.varied[0])
    plain = _value(study, request) == study.value and "stage" not in study.axes
    table = arms(study) if plain else _other(study, request)
    if table.empty or x not in table or table["mean"].isna().all() or table[x].nunique() < 2:
        return None
    table = table.drop(columns="learning_rate") if x != "learning_rate" else table
    rate = " Each arm at its own best learning rate." if study.has_sweep else ""
    return _drawing(study, request, table, x, f"{_SPREAD}{rate} {_LOST}")


def by_depth(study: StudyFolder, request: Request) -> Drawing | None:
    """``by_axis`` over the number of layers."""
    return by_axis(study, Request(kind=request.kind, x=request.x or "num_layers", y=request.y, color=request.color))


def curves(study: StudyFolder, request: Request) -> Drawing | None:
    """A training record against the steps: the mean over the seeds, and their range as a band."""
    rows = study.table(request.measure or "records-metrics")
    x, y = request.x or "step", request.y or "loss"
    by_layer = {"metric", "value"} <= set(rows)
    if by_layer:
        rows = rows[rows["metric"].eq(y)].rename(columns={"value": y})
    if rows.empty or not {x, y} <= set(rows):
        return None
    trial = list(dict.fromkeys(["placement", *study.measured_axes, "seed", "status", x]))
    of_trial = rows[rows[y].notna()].groupby(trial, sort=False)[y]
    rows = (of_trial.max() if by_layer else of_trial.mean()).reset_index()  # a record may have a row per prompt
    name = splitting.title_of(y)
    name = f"largest {name} of all layers" if by_layer and not name.startswith("largest") else name
    by = list(dict.fromkeys(["placement", *study.measured_axes, x]))
    table = over_seeds(rows.rename(columns={y: "y"}), by, "y")
    color = splitting.color_axis(study, x, request.color)

    def series(part: Frame, label: str, look: splitting.Look) -> Series | None:
        return splitting.line(part, x, label, look, band="range", numeric=True)

    drawn = splitting.panels(study, table, color, x, series)
    if not drawn:
        return None
    return Drawing(
        name=_name(study, "curves", y),
        title=f"{name[:1].upper()}{name[1:]} while training",
        caption="Mean over the seeds; the band is their range.",
        x=Axis(title=splitting.title_of(x)),
        y=Axis(title=name, log=bool(request.more.get("log")) and bool((table["mean"] > 0).all())),
        panels=drawn,
        spread="band",
    )


KINDS: dict[str, Kind] = {
    "sweep": sweep,
    "by_depth": by_depth,
    "by_axis": by_axis,
    "lines_over_layers": lines_over_layers,
    "heatmap": heatmap,
    "curves": curves,
}


def _drawing(study: StudyFolder, request: Request, table: Frame, x: str, caption: str) -> Drawing | None:
    color = splitting.color_axis(study, "" if x == "placement" else x, request.color)

    def series(part: Frame, label: str, look: splitting.Look) -> Series | None:
        return splitting.line(part, x, label, look)

    if request.color == ONE_LINE:
        table, color = table.assign(all=splitting.value_title(study, study.value)), "all"
    drawn: tuple[Panel, ...] = splitting.panels(study, table, color, x, series)
    if not drawn:
        return None
    value = _value(study, request)
    return Drawing(
        name=_name(
            study,
            request.kind,
            "" if request.kind in ("sweep", "by_depth") else x,
            "" if value == study.value else value,
        ),
        title=f"{splitting.title_of(value).capitalize()} by {splitting.title_of(x)}",
        caption=" ".join(caption.split()),
        x=splitting.axis(x, table[x]),
        y=Axis(title=splitting.value_title(study, value)),
        panels=drawn,
        joined=splitting.joined(table[x]),
    )


def _value(study: StudyFolder, request: Request) -> str:
    return request.y if request.y in study.results else study.value


def _other(study: StudyFolder, request: Request) -> Frame:
    """The arms with another column than the study's own value."""
    at = {(row["label"], row["learning_rate"]) for row in rows_of(arms(study))}
    rows = measuring(study.tuned, value := _value(study, request))
    rows = rows.assign(label=[study.label(row, without=("learning_rate",)) for row in rows_of(rows)])
    rows = rows[[(row["label"], row["learning_rate"]) in at for row in rows_of(rows)]]
    by = list(dict.fromkeys(["label", "placement", *study.varied, "learning_rate"]))
    return over_seeds(rows, by, value)


def _name(study: StudyFolder, *parts: str) -> str:
    return "-".join([study.name, study.scale, *(part.replace("_", "-") for part in parts if part)])
