"""Draw the figures of a study: the figures in the YAML file, and figures that Lamina chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from lamina.lab.papers.pages.drawing import Axis, Cells, Drawing, Panel, Request
from lamina.lab.papers.pages.folder import StudyFolder, arms, column_of, measuring, over_seeds
from lamina.lab.papers.pages.lines import axis, color_axis, joined, panels, title_of, value_title
from lamina.lab.papers.trials.measures import file_name
from lamina.reports.page import sentence, words
from lamina.reports.records import Frame, rows_of

logger = logging.getLogger(__name__)
ONE_LINE = "none"
"""If a figure's field "color" has this value, one line joins all configurations."""
_MOST = 6
_FIELDS = ("kind", "x", "y", "color", "measure")
LOST = "Marks along the top edge show points at which no seed trained (diverged or stuck)."
AT_BEST = "The figure shows each setting at its best learning rate."
SPREAD = "The figure shows the mean and standard deviation over the seeds that trained."
RANGE = "The line is the mean over the seeds, and the band is their range."
_TIMES = {"init": "before training", "end": "after training"}
_AXES = {"start": "first layer", "size": "layers apart"}  # columns of a probe's table
_STATES = "state (0: the embedding)"  # there is one more state than layers
_MOST_MAPS = 9
_PARTS, _MOST_PARTS, _MOST_OF_ONE_KIND = ("sublayer", "role", "index"), 6, 3


@dataclass(frozen=True, kw_only=True)
class ShownMetric:
    """The part of a probe's table that a figure shows. ``rows`` has an allowed value for each column."""

    metric: str
    rows: Mapping[str, object]
    x: str = "layer"
    log: bool = False


_STATE = {"sublayer": "block", "role": "state"}
_SHOWN = {
    "gradients": ShownMetric(metric="gradient_norm", rows={"sublayer": "block", "role": "all"}, log=True),
    "hidden_states": ShownMetric(metric="variance", rows=_STATE, log=True),
    "layers": ShownMetric(metric="hidden_variance", rows={"sublayer": "feed_forward"}, log=True),
    "layer_drop": ShownMetric(metric="loss_increase", rows={"size": 1, "meaning": "remove"}),
    "attention": ShownMetric(metric="entropy", rows={"role": "all"}),
    "jacobian": ShownMetric(metric="norm", rows={"sublayer": "block", "role": "jacobian"}, log=True),
    "logit_lens": ShownMetric(metric="cross_entropy", rows=_STATE),
    "gains": ShownMetric(metric="gain_mean", rows={"sublayer": "feed_forward"}),
    "similarity": ShownMetric(metric="cosine_by_distance", rows={}, x="size"),
}
_MAPS = {"angular_distance": "angular_distance", "similarity": "cosine"}
_MAPPED = ("angular_distance",)  # by default, drawn as a heat map


def chosen(study: StudyFolder) -> tuple[list[Drawing], list[Drawing]]:
    """Return the figures to show, and the surplus figures. Figures from the YAML file come first."""
    written = _made(study, _written(study))
    made = list({**written, **_made(study, _default(study)), **written}.values())
    count = max(_MOST, len(written))
    return made[:count], made[count:]


def _made(study: StudyFolder, requests: Iterable[Request]) -> dict[str, Drawing]:
    made: dict[str, Drawing] = {}
    for request in requests:
        if request.kind not in KINDS:
            logger.warning(
                "%s: Lamina leaves out the figure %r (known: %s)", study.name, request.kind, ", ".join(KINDS)
            )
        elif (drawing := KINDS[request.kind](study, request)) is not None:
            made.setdefault(drawing.name, drawing)
    return made


def _written(study: StudyFolder) -> list[Request]:
    for part in (study.definition_of_scale, study.definition):
        written = part.get("figures")
        requests = []
        for each in written if isinstance(written, list) else ():
            texts = {name: str(each.get(name) or "") for name in _FIELDS}
            if "/" in texts["measure"]:
                texts["measure"] = file_name(texts["measure"]).removesuffix(".parquet")
            requests.append(Request(more={k: v for k, v in each.items() if k not in _FIELDS}, **texts))
        if requests:
            return requests
    return []


def _default(study: StudyFolder) -> Iterable[Request]:
    axes = [axis for axis in study.varied if axis != "placement"]
    if "num_layers" in axes:
        yield Request(kind="by_depth")
    for other in axes or [""]:
        if other != "num_layers":
            yield Request(kind="by_axis", x=other)
    yield Request(kind="sweep")
    probes: set[str] = set()
    for measure in study.measures:
        probe = probe_of(measure)
        if measure == "records-metrics":
            yield Request(kind="curves")
        elif probe in _MAPPED:
            yield Request(kind="heatmap", measure=measure)
        elif probe in {*_SHOWN, *_MAPS} and probe not in probes:
            yield Request(kind="lines_over_layers", measure=probe)
        probes.add(probe)


def probe_of(measure: str) -> str:
    """Return the probe's name from a table's name, such as "gradients" from "init-gradients"."""
    return measure.split("-")[1] if "-" in measure else measure


def sweep(study: StudyFolder, request: Request) -> Drawing | None:
    """Draw the result against the learning rate, with a line for each configuration."""
    rows = study.first_stage
    if not study.has_sweep or rows[_value(study, request)].isna().all():
        return None
    arm = list(dict.fromkeys(["placement", *study.varied]))
    # keep only the seeds that ran at every learning rate, so that all points have the same seeds
    rates = rows.groupby(arm, dropna=False)["learning_rate"].transform("nunique")
    rates_tried = rows.groupby([*arm, "seed"], dropna=False)["learning_rate"].transform("nunique")
    rows = rows[rates_tried == rates] if (rates_tried == rates).any() else rows
    table = over_seeds(rows, list(dict.fromkeys([*arm, "learning_rate"])), _value(study, request))
    return _drawing(study, request, table, "learning_rate", f"{SPREAD} {LOST}")


def by_axis(study: StudyFolder, request: Request) -> Drawing | None:
    """Draw each configuration's result against a compared setting, at the configuration's best learning rate."""
    usual = next((a for a in study.varied if a != "placement"), study.varied[0])
    x, value = request.x or ("num_layers" if request.kind == "by_depth" else usual), _value(study, request)
    table = arms(study)
    if value != study.value or "stage" in study.axes:
        at = {(row["label"], row["learning_rate"]) for row in rows_of(table)}
        rows = measuring(study.tuned, value)
        rows = rows.assign(label=[study.label(row, without=("learning_rate",)) for row in rows_of(rows)])
        rows = rows[[(row["label"], row["learning_rate"]) in at for row in rows_of(rows)]]
        table = over_seeds(rows, list(dict.fromkeys(["label", "placement", *study.varied, "learning_rate"])), value)
    if table.empty or x not in table or table["mean"].isna().all() or table[x].nunique() < 2:
        return None
    table = table.drop(columns="learning_rate") if x != "learning_rate" else table
    rate = f" {AT_BEST}" if study.has_sweep else ""
    return _drawing(study, request, table, x, f"{SPREAD}{rate} {LOST}")


def curves(study: StudyFolder, request: Request) -> Drawing | None:
    """Draw a training record over the steps. The line is the mean over seeds, and the band is the range."""
    rows = study.table(request.measure or "records-metrics")
    x, y = request.x or "step", request.y or "loss"
    by_layer = {"metric", "value"} <= set(rows)
    if by_layer:
        rows = rows[rows["metric"].eq(y)].rename(columns={"value": y})
    if rows.empty or not {x, y} <= set(rows):
        return None
    trial = list(dict.fromkeys(["placement", *study.measured_axes, "seed", "status", x]))
    of_trial = rows[rows[y].notna()].groupby(trial, sort=False)[y]
    rows = (
        of_trial.max() if by_layer else of_trial.mean()
    ).reset_index()  # a record may have several rows per step, such as one row per prompt
    name = title_of(y)
    name = f"largest {name} of all layers" if by_layer and not name.startswith("largest") else name
    by = list(dict.fromkeys(["placement", *study.measured_axes, x]))
    table = over_seeds(rows.rename(columns={y: "y"}), by, "y")
    facets = panels(study, table, color_axis(study, x, request.color), x, band="range", numeric=True)
    if not facets:
        return None
    return Drawing(
        name=_name(study, "curves", y),
        title=f"{sentence(name)} while training",
        caption=RANGE,
        x=Axis(title=title_of(x)),
        y=Axis(title=name, log=bool(request.more.get("log")) and bool((table["mean"] > 0).all())),
        panels=facets,
        spread="band",
    )


def lines_over_layers(study: StudyFolder, request: Request) -> Drawing | None:
    """Draw a metric against the layer, before and after training, with a line for each configuration."""
    probe = probe_of(request.measure or next(iter(study.measures), ""))
    shown = _SHOWN.get(probe, ShownMetric(metric=request.y, rows={}))
    metric, wanted = request.y or shown.metric, request.x or shown.x
    rows_with = dict(shown.rows) if metric == shown.metric else {}
    rows_with |= {name: request.more[name] for name in ("sublayer", "role", "index", "size") if name in request.more}
    measures, drawn = [request.measure], list[Panel]()
    if request.measure not in study.measures:  # in the order of training
        order = ["init", "end", "records"]
        own_measures = (measure for measure in study.measures if probe_of(measure) == probe)
        measures = sorted(own_measures, key=lambda measure: order.index(measure.split("-")[0]))
    for measure in measures:
        rows = _rows(study.table(measure), metric, rows_with)
        x = column_of(rows, wanted)
        if x in rows and x == "layer":
            rows = rows[rows["layer"] >= 0]  # layer -1 is the whole model, or a part outside the layers
        if x not in rows or rows.empty:
            continue
        times = [(_TIMES.get(measure.split("-")[0], ""), rows)]
        if "step" in rows:  # of a training record, show the first and the last step
            ends = dict.fromkeys([rows["step"].min(), rows["step"].max()])
            times = [(f"step {step:g}", rows[rows["step"].eq(step)]) for step in ends]
        for time, part in times:
            for name, piece in _parts(part, x):
                drawn += _over(study, piece, request, x, ", ".join(filter(None, [name, time])))
    if not drawn:
        return None
    of_states = metric == shown.metric and shown.rows == _STATE
    along = _STATES if of_states else _axis(wanted)
    role = str(request.more["role"]) if isinstance(request.more.get("role"), str) else ""
    table = request.measure if request.measure in study.measures else probe
    log = bool(request.more.get("log", shown.log and not metric.startswith("log10")))
    return Drawing(
        name=_name(study, table, metric, role),
        title=f"{sentence(title_of(metric))} by {'state' if of_states else along}",
        caption=RANGE,
        x=Axis(title=along),
        y=Axis(title=title_of(metric), log=log and all(y > 0 for p in drawn for s in p.series for y in s.y)),
        panels=tuple(drawn),
        spread="band",
    )


def heatmap(study: StudyFolder, request: Request) -> Drawing | None:
    """Draw a measurement as one heat map per configuration. Colors show the mean over seeds."""
    measure = request.measure or next((m for m in study.measures if probe_of(m) in _MAPS), "")
    metric = str(request.more.get("metric") or _MAPS.get(probe_of(measure), ""))
    x, y = request.x or "start", request.y or "size"
    rows = _rows(study.table(measure), metric, {})
    along, up = column_of(rows, x), column_of(rows, y)
    if rows.empty or not {along, up} <= set(rows):
        return None
    rows = rows.assign(label=[study.label(row) for row in rows_of(rows)])
    maps = []
    for label, part in rows.groupby("label", sort=False):
        table = part.pivot_table(index=up, columns=along, values="value", aggfunc="mean")
        table = table.sort_index().sort_index(axis=1).astype(float)
        table.index, table.columns = table.index.astype(float), table.columns.astype(float)
        if table.shape[1] > 1:
            values = tuple(map(tuple, table.to_numpy().tolist()))
            cells = Cells(rows=tuple(table.index.tolist()), columns=tuple(table.columns.tolist()), values=values)
            maps.append(Panel(title=str(label), cells=cells))
    if not maps:
        return None
    return Drawing(
        name=_name(study, measure),
        title=f"{sentence(title_of(metric))}, {_TIMES.get(measure.split('-')[0], 'while training')}",
        caption="Colors show the mean over the seeds."
        + (f" The figure shows only the first {_MOST_MAPS} of {len(maps)} maps." if len(maps) > _MOST_MAPS else ""),
        x=Axis(title=_axis(x)),
        y=Axis(title=_axis(y)),
        panels=tuple(maps[:_MOST_MAPS]),
        quantity=title_of(metric),
    )


KINDS: dict[str, Callable[[StudyFolder, Request], Drawing | None]] = {
    "sweep": sweep,
    "by_depth": by_axis,
    "by_axis": by_axis,
    "lines_over_layers": lines_over_layers,
    "heatmap": heatmap,
    "curves": curves,
}


def _drawing(study: StudyFolder, request: Request, table: Frame, x: str, caption: str) -> Drawing | None:
    color, value = color_axis(study, "" if x == "placement" else x, request.color), _value(study, request)
    if request.color == ONE_LINE:
        table, color = table.assign(all=value_title(study, study.value)), "all"
    drawn = panels(study, table, color, x)
    if not drawn:
        return None
    named = ("" if request.kind in ("sweep", "by_depth") else x, "" if value == study.value else value)
    return Drawing(
        name=_name(study, request.kind, *named),
        title=f"{title_of(value).capitalize()} by {title_of(x)}",
        caption=caption,
        x=axis(x, table[x]),
        y=Axis(title=value_title(study, value)),
        panels=drawn,
        joined=joined(table[x]),
    )


def _value(study: StudyFolder, request: Request) -> str:
    return request.y if request.y in study.results else study.value


def _name(study: StudyFolder, *parts: str) -> str:
    return "-".join([study.name, study.scale, *(part.replace("_", "-") for part in parts if part)])


def _axis(column: str) -> str:
    return _AXES.get(column, title_of(column))


def _rows(table: Frame, metric: str, chosen: Mapping[str, object]) -> Frame:
    if table.empty or "metric" not in table:
        return pd.DataFrame()
    rows = table[table["metric"].eq(metric)]
    for name, value in ((column_of(rows, each), value) for each, value in chosen.items()):
        if name in rows:
            listed = value if isinstance(value, list) else [value]
            last = rows[name].astype(str).str.rpartition(".")[2]  # the last part of a path, such as up_proj
            ends = [entry.rpartition(".")[2] for entry in listed if isinstance(entry, str)]
            rows = rows[rows[name].isin(listed) | last.isin(ends)]
    if "role" in rows and "role" not in chosen and rows["role"].eq("all").any():
        rows = rows[rows["role"].eq("all")]  # the whole sub-layer, not the mean of its parts
    return rows


def _parts(rows: Frame, x: str) -> list[tuple[str, Frame]]:
    """Split rows into parts of a layer, such as sub-layers or norms. Returns each part's name and rows."""
    several = [name for name in _PARTS if name in rows and name != x and rows[name].nunique(dropna=False) > 1]
    if "index" in several and rows["index"].nunique() > _MOST_OF_ONE_KIND:
        several.remove("index")  # with many heads or ranks, draw their mean
    if not several:
        return [("", rows)]
    return [
        (" ".join(words(str(value)) for value in values), part)
        for values, part in rows.groupby(several, sort=False, dropna=False)
    ][:_MOST_PARTS]


def _over(study: StudyFolder, rows: Frame, request: Request, x: str, time: str) -> list[Panel]:
    by = list(dict.fromkeys(["placement", *study.measured_axes, x]))
    seeds = rows.groupby([*by, "seed", "status"], sort=False, dropna=False)["value"].mean().reset_index()
    drawn = panels(
        study, over_seeds(seeds, by, "value"), color_axis(study, x, request.color), x, band="range", lost=False
    )
    return [replace(panel, title=", ".join(filter(None, [panel.title, time]))) for panel in drawn]
