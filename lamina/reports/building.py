"""From a study's or a run's folder to its report.html."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from lamina import placements
from lamina.errors import UserError
from lamina.placements import Plan, diagram
from lamina.placements.resolution import parse_spec
from lamina.reports import depth, evolution, figures, monitored, tables
from lamina.reports.coordinates import coordinates_report
from lamina.reports.mixture import refuse_other_experiments
from lamina.reports.notices import notices
from lamina.reports.page import Section, callouts, details, figure, prose, write_page
from lamina.reports.preflight import RECORDS, preflight_report
from lamina.reports.probing import is_probing, probing_report
from lamina.reports.ranking import summarize
from lamina.reports.records import Frame, Study, read_run, read_study, rows_of
from lamina.reports.sentences import sentences
from lamina.reports.style import Shown, colours, to_html
from lamina.reports.transfer import transfer_report
from lamina.studies.record import has_study

PAGE = "report.html"


def report(folder: Path) -> Path:
    """Write the report of a study, a probed checkpoint, a preflight or a single run, whichever the folder holds.

    Raises UserError where it holds neither (study.yaml marks a study, result.json or config.yaml a run).
    """
    folder = Path(folder)
    if (folder / "coordinates.parquet").is_file():
        return coordinates_report(folder)
    if (folder / "transfer.json").is_file():
        return transfer_report(folder)
    if (folder / RECORDS).is_file():
        return preflight_report(folder)
    if is_probing(folder):
        return probing_report(folder)
    if has_study(folder):
        return study_report(folder)
    if (folder / "result.json").is_file() or (folder / "config.yaml").is_file():
        return run_report(folder)
    raise UserError(f"{str(folder)!r}: neither a study's folder (study.yaml) nor a run's (result.json, config.yaml)")


def study_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from a study's results.csv and trials. Raises UserError where there is no result."""
    study = read_study(Path(folder))
    refuse_other_experiments(study)
    summary, shown, colour = _prepare(study)
    several = bool((summary["learning_rates"] > 1).any())
    ranking = tables.ranking_table(summary, colour) + details(
        f"All {len(study.results)} trials", tables.trials_table(study.results, colour)
    )
    rates = figures.u_curves(study.results, colour, list(summary["placement"]))
    return write_page(
        study.folder / PAGE,
        title=f"Where the norms sit: {_title(summary)}",
        facts=_facts(study),
        command=str(study.header.get("command") or ""),
        sections=[
            _happened(study, summary, shown, colour),
            Section(
                name="Ranking",
                title="Ranking by eval loss",
                html=_ranking_note(several, summary) + ranking + tables.spike_note(summary),
            ),
            _loss_section(study, shown, several),
            Section(
                name="Learning rates",
                title="Learning rates",
                html="" if rates is None else figure(to_html(rates), _RATES),
            ),
            *_depth_sections(shown),
            *monitored.sections(shown),
            *evolution.sections(shown),
            _diagrams(study, shown),
            _settings(study),
        ],
    )


def run_report(folder: Path) -> Path:
    """Write ``folder/report.html`` of a single run: the sections of a study's report that apply to one."""
    study = read_run(Path(folder))
    summary, shown, colour = _prepare(study)
    row = rows_of(study.results)[0]
    course = figures.course(shown[0])
    return write_page(
        study.folder / PAGE,
        title=f"A run with {row['placement']}",
        facts=[f"status: {row['status']}", *_facts(study)],
        command=str(study.header.get("command") or ""),
        sections=[
            _happened(study, summary, shown, colour),
            Section(
                name="Result",
                title="Result",
                html=tables.ranking_table(summary, colour) + tables.spike_note(summary),
            ),
            _loss_section(study, shown, several=False),
            Section(
                name="Course",
                title="Learning rate and gradient norm",
                html="" if course is None else figure(to_html(course), _COURSE),
            ),
            *_depth_sections(shown),
            *monitored.sections(shown),
            *evolution.sections(shown),
            _diagrams(study, shown),
            _settings(study),
        ],
    )


def _prepare(study: Study) -> tuple[pd.DataFrame, list[Shown], dict[str, str]]:
    """The ranking, what the figures show of it (each placement's trials at its best rate) and each one's colour."""
    summary = summarize(study.results)
    colour = colours(study.results["placement"])
    rates = study.results["learning_rate"]
    shown = []
    for row in rows_of(summary):
        rate = row["learning_rate"]
        same = rates.eq(rate) if math.isfinite(rate) else rates.isna()
        chosen = study.results.index[study.results["placement"].eq(row["placement"]) & same]
        shown.append(
            Shown(
                placement=row["placement"],
                colour=colour[row["placement"]],
                trials=tuple(study.trials[i] for i in chosen),
                status_text=row["status_text"],
            )
        )
    return summary, shown, colour


def _happened(study: Study, summary: Frame, shown: list[Shown], colour: dict[str, str]) -> Section:
    said = sentences(
        summary,
        gradients={item.placement: depth.over_seeds(item, depth.gradients) for item in shown},
        variances={item.placement: depth.over_seeds(item, depth.variances) for item in shown},
    )
    own = {item.placement: t.plan.initialization for item in shown for t in item.trials if t.plan is not None}
    html = prose(said, colour) + callouts(notices(summary, study.results, {k: v or "normal" for k, v in own.items()}))
    return Section(name="What happened", title="What happened", html=html)


def _ranking_note(several: bool, summary: Frame) -> str:
    one = len(summary) == 1
    if several:
        parts = ["At its best learning rate" if one else "Each placement at its best learning rate"]
    else:
        same = summary["learning_rate"].nunique() < 2
        parts = ["At one learning rate" if one else f"Every placement at {'the same' if same else 'one'} learning rate"]
    if summary["seeds"].max() > 1 and summary["finished"].any():
        parts.append("mean ± standard deviation over the seeds that finished")
    if not one and not summary["finished"].all():
        some = summary["finished"].any()
        parts.append("those that did not finish stand last" if some else "none finished: ordered by status, then loss")
    return f"<p>{escape(', '.join(parts))}.</p>"


def _title(summary: Frame) -> str:
    return f"{len(summary)} placements side by side" if len(summary) > 1 else str(summary["placement"].iloc[0])


def _loss_section(study: Study, shown: list[Shown], several: bool) -> Section:
    entropy = study.results["unigram_entropy"].dropna()
    drawn = figures.loss_curves(shown, float(entropy.iloc[0]) if len(entropy) else math.nan)
    caption = _LOSS + (" Each placement is shown at its best learning rate." if several else "")
    return Section(name="Loss", title="Loss against tokens", html=figure(to_html(drawn), caption) if drawn else "")


def _depth_sections(shown: list[Shown]) -> list[Section]:
    sections = []
    for name, table, quantity, title, at_ends, over_steps in (
        ("Gradients", depth.gradients, "gradient norm", "Gradient norm by layer", _GRADIENT_ENDS, _GRADIENT_STEPS),
        ("Variances", depth.variances, "hidden variance", "Hidden variance by layer", _VARIANCE_ENDS, _VARIANCE_STEPS),
    ):
        ends, maps = depth.ends(shown, table, quantity), depth.heat_maps(shown, table, quantity)
        html = figure(to_html(ends), at_ends) if ends else ""
        html += figure(to_html(maps), over_steps, "Over the steps") if maps else ""
        html = html or '<p class="notice">No records by layer in this folder.</p>'
        sections.append(Section(name=name, title=title, html=html))
    return sections


def _diagrams(study: Study, shown: list[Shown]) -> Section:
    cards = []
    for item in shown:
        plan = next((trial.plan for trial in item.trials if trial.plan), None) or _resolved(item.placement, study)
        if plan is None:
            continue
        scheme = _scheme(item.placement)
        title = scheme.title if scheme else plan.placement
        drawing = diagram.svg(plan, title="")
        width = max(int(re.findall(r'width="(\d+)"', drawing)[0]), 250) + 34
        lines = _folded(scheme.equation, (width - 34) // 7.3) if scheme else diagram.text(plan)
        spec = "" if item.placement == title else f'<span class="spec">{escape(item.placement)}</span>'
        source = f'<p class="source">{escape(scheme.source)}</p>' if scheme else ""
        cards.append(
            f'<div class="plan" style="border-top-color:{item.colour};width:{width}px"><h3>{escape(title)}{spec}</h3>'
            f'<div class="drawing">{drawing}</div><pre>{escape(lines)}</pre>{source}</div>'
        )
    html = f"<p>{escape(_DIAGRAMS)}</p><div class=plans>{''.join(cards)}</div>" if cards else ""
    return Section(name="Placements", title="Where the norms sit", html=html)


def _settings(study: Study) -> Section:
    html = details("Settings", tables.settings_table(study.settings)) if study.settings else ""
    html += details("Environment", tables.settings_table(study.environment)) if study.environment else ""
    return Section(name="Settings", title="Settings and environment", html=html)


def _folded(equation: Sequence[str], columns: float) -> str:
    """The equation's lines, those too long for the card broken before each further formula."""
    lines = []
    for line in equation:
        head, *formulas = re.split(r"(?<=:)\s+|(?<=,)\s+(?=[\w']+ = )", line) if len(line) > columns else [line]
        lines += [head, *(f"  {formula}" for formula in formulas)]
    return "\n".join(lines)


def _scheme(spec: str) -> placements.Placement | None:
    """The registered placement that a spec names; a file of the user's own is not one (and is never loaded here)."""
    name = spec.partition("(")[0].strip()
    return placements.get(name) if name in placements.names() else None


def _resolved(spec: str, study: Study) -> Plan | None:
    """A plan for a registered placement none of whose trials left one."""
    layers = _setting(study, "num_layers")
    try:
        if _scheme(spec) is None or not isinstance(layers, int):
            return None
        target, options = parse_spec(spec)
        return placements.resolve(target, layers, **options) if isinstance(target, str) else None
    except ValueError:
        return None


def _setting(study: Study, name: str) -> Any:
    return study.settings.get(name, study.settings.get(name.replace("_", "-")))


def _facts(study: Study) -> list[str]:
    """The few settings that a reader needs first."""
    backbone, layers, width = (_setting(study, name) for name in ("backbone", "num_layers", "hidden_size"))
    facts = [str(backbone)] if isinstance(backbone, str) else []
    if layers:
        facts.append(f"{layers} layers" + (f" of width {width}" if width else ""))
    parameters, tokens = study.results["parameters"].max(), study.results["tokens"].max()
    facts += [f"{parameters:,.0f} parameters"] if math.isfinite(parameters) else []
    facts += [f"{tokens:,.0f} tokens" + " each" * (len(study.results) > 1)] if math.isfinite(tokens) else []
    seeds = study.results["seed"].nunique()
    facts += [f"{seeds} seed{'s' * (seeds > 1)}"] if seeds else []
    version = study.header.get("version")
    facts += [f"lamina {version}"] if version else []
    return [*facts, str(study.header.get("created") or "")]


_LOSS = (
    "Points: eval loss. Thin lines: training loss. A curve that stays on the dashed line has learned how often each "
    "token occurs and nothing else. A double-click shows what lies above the picture (the first steps, mostly). A "
    "click on a name hides it."
)
_RATES = (
    "The lower the better; the bottom of each U is the rate at which a placement is ranked (larger point), and a wide, "
    "flat U forgives a badly chosen one. Marks along the top edge did not finish at that rate: triangle stuck, "
    "x diverged, cross failed, square interrupted, circle too short to tell."
)
_COURSE = "The gradient norm is that of all parameters together, before clipping."
_GRADIENT_ENDS = (
    "Norm of the gradient of each block's parameters, before clipping. Level lines are what one hopes for: every layer "
    "is told equally much. A line that falls towards either end leaves the layers there almost untaught."
)
_GRADIENT_STEPS = (
    "Layers upwards, steps to the right, one colour scale for all. An even colour from bottom to top is healthy; a map "
    "that turns dark from one edge shows where, and when, the gradient vanishes."
)
_VARIANCE_ENDS = (
    "Variance of the stream behind each block. Where it climbs through depth, each further block changes the stream by "
    "a smaller share and deep layers matter less; where a norm stands on the stream it stays level."
)
_VARIANCE_STEPS = (
    "As above, for the variance: a map that brightens upwards grows through depth, one that brightens to the right "
    "grows in training."
)
_DIAGRAMS = (
    "Drawn from the plans that were trained, bottom to top: the vertical line is the stream, the branch to its right "
    "holds the module. A norm on the line rescales the stream itself, a norm on the branch does not."
)
