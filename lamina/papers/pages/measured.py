"""Figures of what a study measured on its models: lines over layers, and maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from lamina.papers.pages import splitting
from lamina.papers.pages.drawing import Axis, Cells, Drawing, Panel, Request, Series
from lamina.papers.pages.folder import StudyFolder, column_of, over_seeds
from lamina.reports.records import Frame, rows_of

_TIMES = {"init": "before training", "end": "after training"}
_AXES = {"start": "first layer", "size": "layers apart"}  # of a probe's table; a study's axis may have the name
_MOST_MAPS = 9
_PARTS, _MOST_PARTS, _MOST_OF_ONE_KIND = ("sublayer", "role", "index"), 6, 3


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What of a probe's table a figure shows.

    Attributes:
        metric: the metric.
        rows: values that other columns must have, where the table has the column.
        x: the column along x.
        log: whether y is logarithmic.
    """

    metric: str
    rows: Mapping[str, object]
    x: str = "layer"
    log: bool = False


_BLOCK = {"sublayer": "block", "role": "all"}
_STATE = {"sublayer": "block", "role": "state"}
_SHOWN = {
    "gradients": Shown(metric="gradient_norm", rows=_BLOCK, log=True),
    "hidden_states": Shown(metric="variance", rows=_STATE, log=True),
    "layers": Shown(metric="hidden_variance", rows={"sublayer": "feed_forward"}, log=True),
    "layer_drop": Shown(metric="loss_increase", rows={"size": 1, "meaning": "remove"}),
    "attention": Shown(metric="entropy", rows={"role": "all"}),
    "jacobian": Shown(metric="norm", rows={"sublayer": "block", "role": "jacobian"}, log=True),
    "logit_lens": Shown(metric="cross_entropy", rows=_STATE),
    "gains": Shown(metric="gain_mean", rows={"sublayer": "feed_forward"}),
    "similarity": Shown(metric="cosine_by_distance", rows={}, x="size"),
}
_MAPS = {"angular_distance": "angular_distance", "similarity": "cosine"}
MAPPED = ("angular_distance",)
"""The probes that are drawn as a map unless the study says otherwise."""


def probe_of(measure: str) -> str:
    """The probe of a measure's table: ``end-angular_distance-tokens-all`` is of angular_distance."""
    return measure.split("-")[1] if "-" in measure else measure


def can_show(measure: str) -> bool:
    """Whether there is a figure for a measure that no study has to describe."""
    return probe_of(measure) in {*_SHOWN, *_MAPS}


def lines_over_layers(study: StudyFolder, request: Request) -> Drawing | None:
    """A metric of a measure against the layer, one line per arm; the same probe before and after training in panels."""
    probe = probe_of(request.measure) if request.measure else next(iter(map(probe_of, study.measures)), "")
    known = _SHOWN.get(probe, Shown(metric=request.y, rows={}))
    metric, wanted = request.y or known.metric, request.x or known.x
    chosen = dict(known.rows) if metric == known.metric else {}
    chosen |= {name: request.more[name] for name in ("sublayer", "role", "index", "size") if name in request.more}
    drawn: list[Panel] = []
    for measure in _measures(study, probe, request.measure):
        rows = _rows(study.table(measure), metric, chosen)
        x = column_of(rows, wanted)
        if x in rows and x == "layer":
            rows = rows[rows["layer"] >= 0]  # -1: the model as a whole, or what is outside of its layers
        if x not in rows or rows.empty:
            continue
        for time, part in _times(measure, rows):
            for name, piece in _parts(part, x):
                drawn += _over(study, piece, request, x, ", ".join(filter(None, [name, time])))
    if not drawn:
        return None
    role = str(request.more["role"]) if isinstance(request.more.get("role"), str) else ""
    table = request.measure if request.measure in study.measures else probe
    usual = known.log and not metric.startswith("log10")
    log = bool(request.more.get("log", usual)) and all(y > 0 for p in drawn for s in p.series for y in s.y)
    return Drawing(
        name="-".join([study.name, study.scale, *(part.replace("_", "-") for part in (table, metric, role) if part)]),
        title=f"{_capital(splitting.title_of(metric))} by {_axis(wanted)}",
        caption="Mean over the seeds; the band is their range.",
        x=Axis(title=_axis(wanted)),
        y=Axis(title=splitting.title_of(metric), log=log),
        panels=tuple(drawn),
        spread="band",
    )


def heatmap(study: StudyFolder, request: Request) -> Drawing | None:
    """A measure as maps, one per arm: its mean over the seeds by two columns."""
    measure = request.measure or next((m for m in study.measures if probe_of(m) in _MAPS), "")
    metric = str(request.more.get("metric") or _MAPS.get(probe_of(measure), ""))
    x, y = request.x or "start", request.y or "size"
    rows = _rows(study.table(measure), metric, {})
    along, up = column_of(rows, x), column_of(rows, y)
    if rows.empty or not {along, up} <= set(rows):
        return None
    rows = rows.assign(label=[study.label(row) for row in rows_of(rows)])
    panels = []
    for label, part in rows.groupby("label", sort=False):
        cells = part.pivot_table(index=up, columns=along, values="value", aggfunc="mean")
        cells = cells.sort_index().sort_index(axis=1)
        if cells.shape[1] > 1:
            panels.append(Panel(title=str(label), cells=_cells(cells)))
    if not panels:
        return None
    return Drawing(
        name="-".join([study.name, study.scale, measure.replace("_", "-")]),
        title=f"{_capital(splitting.title_of(metric))}, {_TIMES.get(measure.split('-')[0], 'while training')}",
        caption=f"Mean over the seeds.{' The first maps of several.' if len(panels) > _MOST_MAPS else ''}",
        x=Axis(title=_axis(x)),
        y=Axis(title=_axis(y)),
        panels=tuple(panels[:_MOST_MAPS]),
        quantity=splitting.title_of(metric),
    )


def _axis(column: str) -> str:
    return _AXES.get(column, splitting.title_of(column))


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]


def _measures(study: StudyFolder, probe: str, wanted: str) -> list[str]:
    """The tables of a probe, those before training first."""
    if wanted in study.measures:
        return [wanted]
    order = ["init", "end", "records"]
    return sorted((m for m in study.measures if probe_of(m) == probe), key=lambda m: order.index(m.split("-")[0]))


def _rows(table: Frame, metric: str, chosen: Mapping[str, object]) -> Frame:
    if table.empty or "metric" not in table:
        return pd.DataFrame()
    rows = table[table["metric"].eq(metric)]
    for name, value in ((column_of(rows, each), value) for each, value in chosen.items()):
        if name in rows:
            listed = value if isinstance(value, list) else [value]
            last = rows[name].astype(str).str.rpartition(".")[2]  # up_proj of a path
            ends = [one.rpartition(".")[2] for one in listed if isinstance(one, str)]
            rows = rows[rows[name].isin(listed) | last.isin(ends)]
    if "role" in rows and "role" not in chosen and rows["role"].eq("all").any():
        rows = rows[rows["role"].eq("all")]  # a sub-layer's whole, not the mean of its parts
    return rows


def _times(measure: str, rows: Frame) -> list[tuple[str, Frame]]:
    """A table's panels: one, or for a training record its first and its last step."""
    if "step" not in rows:
        return [(_TIMES.get(measure.split("-")[0], ""), rows)]
    steps = sorted(rows["step"].unique())
    ends = dict.fromkeys([steps[0], steps[-1]])
    return [(f"step {step:g}", rows[rows["step"].eq(step)]) for step in ends]


def _parts(rows: Frame, x: str) -> list[tuple[str, Frame]]:
    """The parts of a layer that rows tell apart, by name: each sub-layer, each role, each of a few norms."""
    several = [name for name in _PARTS if name in rows and name != x and rows[name].nunique(dropna=False) > 1]
    if "index" in several and rows["index"].nunique() > _MOST_OF_ONE_KIND:
        several.remove("index")  # heads, ranks: their mean
    if not several:
        return [("", rows)]
    return [
        (" ".join(str(value).replace("feed_forward", "feed-forward").replace("_", " ") for value in values), part)
        for values, part in rows.groupby(several, sort=False, dropna=False)
    ][:_MOST_PARTS]


def _over(study: StudyFolder, rows: Frame, request: Request, x: str, time: str) -> list[Panel]:
    by = list(dict.fromkeys(["placement", *study.measured_axes, x]))
    seeds = rows.groupby([*by, "seed", "status"], sort=False, dropna=False)["value"].mean().reset_index()
    table = over_seeds(seeds, by, "value")
    color = splitting.color_axis(study, x, request.color)

    def series(part: Frame, label: str, look: splitting.Look) -> Series | None:
        return splitting.line(part[part["mean"].notna()], x, label, look, band="range")

    drawn = splitting.panels(study, table, color, x, series)
    return [Panel(title=", ".join(filter(None, [panel.title, time])), series=panel.series) for panel in drawn]


def _cells(table: Frame) -> Cells:
    return Cells(
        rows=tuple(float(value) for value in table.index),
        columns=tuple(float(value) for value in table.columns),
        values=tuple(tuple(float(value) for value in row) for row in table.to_numpy()),
    )
