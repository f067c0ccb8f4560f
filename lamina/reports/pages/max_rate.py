"""Write the page of `lamina max-lr`: each placement's largest learning rate, and the loss up to the failure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from lamina.core.json_types import Json
from lamina.jobs.kinds import Kind
from lamina.jobs.status import Status
from lamina.probes.engine.figures import evenly
from lamina.reports import charts, sections
from lamina.reports.charts import line_of
from lamina.reports.page import Section, callouts, details, figure, prose, write_page
from lamina.reports.plotting import Figure
from lamina.reports.ranking import ONE_SEED, listed
from lamina.reports.records import Frame, Study, Trial, complete, read_study, rows_of
from lamina.reports.registry import report_of
from lamina.reports.style import Shown, colors, log_ticks, polish
from lamina.reports.tables import Field, Row, number, placements, status, table, text
from lamina.studies.max_rate_rules import NON_FINITE, NONE, PLATEAU, SPIKE, STUCK, smoothed

_POINTS = 400  # of a line
_MARKERS = {
    NON_FINITE: "x-thin-open",
    SPIKE: "triangle-up-open",
    PLATEAU: "square-open",
    STUCK: "circle-open",
    NONE: "triangle-right-open",
}


@report_of(Kind.MAX_LR, needs="study of largest rates")
def max_rate_report(folder: Path) -> Path:
    study = read_study(folder)
    rows = summarize(study.results)
    color = colors(study.results["placement"])
    fields = [
        placements(color),
        Field("largest learning rate", lambda row: escape(spread(row)), "number main"),
        number("low", ".3g", "lowest"),
        number("high", ".3g", "highest"),
        text("seeds", kind="number"),
        number("loss", ".3f", "its loss"),
        text("ends", "stopped by"),
    ]
    ranking = prose(sentences(rows), color) + callouts(notices(rows)) + table(fields, rows, "ranking")
    fields = [
        placements(color),
        number("seed", ".0f"),
        status("status", "status"),
        number("max_learning_rate", ".3g", "largest learning rate"),
        text("stop_rule", "stopped by"),
        number("loss_at_stop", ".3f", "its loss"),
        number("steps", ",.0f"),
        number("seconds", ",.0f"),
        text("reason", kind="reason"),
    ]
    every = rows_of(study.results)
    return write_page(
        folder,
        title=headline(rows),
        facts=sections.facts(study),
        command=study.header.get("command"),
        sections=[
            Section("Largest rates", "The largest learning rate", ranking),
            Section("Loss by rate", "Loss against learning rate", figure(loss_by_rate(study, color), _FIGURE)),
            Section(
                "Trials", "Every trial", details(f"All {len(study.results)} trials", table(fields, every, "trials"))
            ),
            Section(
                "Rules", "How Lamina finds the learning rate", details("The rules", prose(rules(study.settings), {}))
            ),
            sections.settings(study),
        ],
    )


def summarize(results: Frame) -> list[Json]:
    """Return one row per placement from results.csv, highest mean learning rate first.

    ``mean``, ``std``, ``low``, ``high``: statistics of the seeds' largest learning rates (std: ddof 1, one seed: NaN).
    ``seeds``: the number of seeds with a largest learning rate.
    ``open``: the number of seeds that reached the end of the warm-up. If this number is above 0, the mean is a lower
        bound.
    ``loss``: the mean smoothed loss at the largest learning rates.
    ``ends``: the number of runs that each rule stopped, as a text.
    """
    rows = []
    for placement, group in complete(results).groupby("placement", sort=False):
        rates = group[group["max_learning_rate"].notna()]
        values = rates["max_learning_rate"]
        counts = Counter(row["stop_rule"] or row["status"] for row in rows_of(group)).most_common()
        rows.append(
            {
                "placement": str(placement),
                "mean": values.mean(),
                "std": values.std(ddof=1),
                "low": values.min(),
                "high": values.max(),
                "seeds": len(values),
                "open": int(rates["stop_rule"].eq(NONE).sum()),
                "loss": rates["loss_at_stop"].mean(),
                "ends": ", ".join(f"{count} {end}" if len(counts) > 1 else end for end, count in counts),
            }
        )
    return sorted(rows, key=lambda row: -row["mean"] if row["seeds"] else math.inf)


def spread(row: Row) -> str:
    """Return a placement's mean largest learning rate as text, with the standard deviation. "≥" marks a lower bound."""
    if not row["seeds"]:
        return "-"
    if row["open"]:
        return f"≥ {row['mean']:.3g}"
    return f"{row['mean']:.3g}" + (f" ± {row['std']:.2g}" if math.isfinite(row["std"]) else "")


def notices(rows: Sequence[Json]) -> list[str]:
    texts = []
    if beyond := [row["placement"] for row in rows if row["open"]]:
        texts.append(
            f"With some seeds, {listed(beyond)} did not fail, so the largest learning rate is higher than the table "
            "shows. To find the largest learning rate, raise --max-learning-rate."
        )
    if rows and max(row["seeds"] for row in rows) < 2:
        texts.append(ONE_SEED)
    if any(str(Status.INTERRUPTED) in row["ends"] for row in rows):
        texts.append("Some trials were interrupted. Continue the study with --resume.")
    return texts


def headline(rows: Sequence[Json]) -> str:
    """Return the finding in one line, with all placements that reached the end of the warm-up."""
    beyond = [row["placement"] for row in rows if row["open"]]
    if len(beyond) > 1:
        top = min(row["mean"] for row in rows if row["open"])
        lower = [row for row in rows if row["seeds"] and not row["open"] and row["mean"] < top]
        only = f", {lower[-1]['placement']} only {lower[-1]['mean']:.2g}" if lower else ""
        return f"{listed(beyond)} tolerate a learning rate of at least {top:.2g}{only}"
    return sentences(rows)[0].partition(":")[0].partition(";")[0].rstrip(".")


def sentences(rows: Sequence[Json]) -> list[str]:
    """Return sentences about the placement with the highest learning rate, and the ratio to the lowest."""
    measured = [row for row in rows if row["seeds"] and row["mean"] > 0]
    if not measured:
        return ["No run has found a largest learning rate."]
    first, last = measured[0], measured[-1]
    least = "at least " if first["open"] else ""
    texts = [f"{first['placement']} tolerates a learning rate of {least}{first['mean']:.2g}."]
    if sum(bool(row["open"]) for row in measured) > 1:
        texts[0] = f"{headline(measured)}."
    elif len(measured) > 1:
        times = f"{least}{first['mean'] / last['mean']:.2g} times"
        than = f": {times} the learning rate of {last['placement']} ({last['mean']:.2g})"
        if last["open"]:
            than = f"; {last['placement']} tolerates at least {last['mean']:.2g}, so the ratio is unknown"
        texts[0] = f"{first['placement']} tolerates the highest learning rate, {least}{first['mean']:.2g}{than}."
    stuck = [row["placement"] for row in measured if row["ends"] == STUCK]
    return texts + [f"At every learning rate, {name} learned only how often each token occurs." for name in stuck]


def rules(settings: Mapping[str, object]) -> list[str]:
    """Return the rules that stop a run, in words, with this study's thresholds."""
    value = {name: str(settings.get(name, "?")) for name in _THRESHOLDS}
    share = float(value["spike_patience"])  # steps from 1 on, a share of all steps below
    patience = f"{share:g} steps" if share >= 1 else f"{100 * share:g} % of all steps"
    return [
        f"The learning rate rises linearly from 0 to {value['max_learning_rate']} over {value['steps']} steps. All "
        f"other settings are as in lamina pretrain. The smoothed loss is the mean loss of the last {value['window']} "
        "steps. A run stops when the first of these rules holds:",
        "non-finite: the loss of a step, or the gradient's norm, was not finite.",
        f"spike: the loss stayed more than {value['spike_margin']} nats above the lowest smoothed loss for "
        f"{patience}. A shorter rise does not count.",
        f"plateau: the smoothed loss fell by less than {value['plateau_margin']} nats while the learning rate "
        f"grew by a factor of {value['plateau_factor']}. A plateau is called stuck if the loss was not "
        f"{value['stuck_margin']} nats below the corpus's unigram entropy.",
        "Lamina reports the learning rate of the last step with the lowest smoothed loss. For a plateau, Lamina "
        "reports the learning rate of the last step in which the loss fell.",
    ]


def loss_by_rate(study: Study, color: Mapping[str, str]) -> Figure | None:
    """Draw the smoothed loss against the learning rate up to the failure, with one line per placement and seed."""
    picture, curves = Figure(), []
    named_in_legend: set[str] = set()
    for trial, row in zip(study.trials, rows_of(study.results), strict=True):
        curve = curve_of(trial, study.settings)
        if len(curve) < 2:
            continue
        item = Shown(placement=trial.placement, color=color[trial.placement], trials=(trial,))
        name = f"{item.label}, seed {trial.seed:g}"
        line_of(
            item,
            curve["rate"].to_numpy(dtype=np.float32),
            curve["loss"].to_numpy(dtype=np.float32),
            data_name=name,
            legend=item.label not in named_in_legend,
            width=1.6,
            hover=f"{name}<br>%{{x:.3g}}: %{{y:.3f}}",
        ).draw(picture)
        named_in_legend.add(item.label)
        curves.append(curve)
        rule, rate, loss = row["stop_rule"], row["max_learning_rate"], row["loss_at_stop"]
        if rule and math.isfinite(loss) and rate > 0:
            marker = {"symbol": _MARKERS.get(rule, "circle"), "size": 11, "color": item.color, "line": {"width": 2.2}}
            picture.add_scatter(
                x=[rate],
                y=[loss],
                mode="markers",
                marker=marker,
                legendgroup=item.label,
                showlegend=False,
                meta={"line": name, "notes": [f"stopped by: {rule}"]},
                hovertemplate=f"{name}: {escape(rule)} after {rate:.3g}<extra></extra>",
            )
    if not curves:
        return None
    low, high = min(curve["loss"].min() for curve in curves), max(curve["loss"].iloc[0] for curve in curves)
    left, right = min(curve["rate"].min() for curve in curves), max(curve["rate"].max() for curve in curves)
    entropy = study.results["unigram_entropy"].dropna()
    if len(entropy):
        charts.reference(picture, [left, right], float(entropy.iloc[0]), "unigram entropy")
    exponents, texts = log_ticks(math.log10(left), math.log10(right))
    ticks = [10**exponent for exponent in exponents]
    picture.update_xaxes(type="log", title="learning rate", tickvals=ticks, ticktext=texts)
    margin = 0.06 * (high - low)
    picture.update_yaxes(title="training loss (nats per token)", range=[low - margin, high + margin])
    return polish(picture, 460)


def curve_of(trial: Trial, settings: Mapping[str, object]) -> Frame:
    """Return a trial's smoothed loss by learning rate. The first step is left out, because its learning rate is 0."""
    rows = trial.layers.of("step_loss").drop_duplicates("step", keep="last").sort_values("step")
    top, steps, window = (float(str(settings.get(name, 1))) for name in ("max_learning_rate", "steps", "window"))
    losses = smoothed(rows["value"].astype(float).to_numpy(), int(window))
    curve = rows[["step"]].assign(rate=top * (rows["step"].astype(float) - 1) / steps, loss=losses)
    curve = curve[(curve["rate"] > 0) & np.isfinite(curve["loss"])]
    return curve.iloc[evenly(len(curve), _POINTS)]


_THRESHOLDS = (
    *("max_learning_rate", "steps", "window", "spike_margin", "spike_patience"),
    *("plateau_margin", "plateau_factor", "stuck_margin"),
)
_FIGURE = (
    "Smoothed training loss against the learning rate, which rises during the run. Each line shows one "
    "placement and seed. The mark at a line's end shows why the run stopped: a cross (not finite), a triangle (lasting "
    "spike), a square (plateau), a circle (stuck at the unigram entropy) or a right-pointing triangle (end of the "
    "warm-up). Click a name in the legend to hide its lines."
)
