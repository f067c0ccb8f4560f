"""The sections that the pages of a run and of a study share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from typing import cast

import pandas as pd

from lamina import placements
from lamina.core.json_types import Json
from lamina.placements import Plan, diagram
from lamina.placements.resolution import parse_spec
from lamina.reports import depth, figures, layers, tables
from lamina.reports.metrics import METRICS
from lamina.reports.page import Section, callouts, details, figure, moment, prose
from lamina.reports.ranking import notices, summarize
from lamina.reports.records import Frame, Study, rows_of
from lamina.reports.sentences import Guess, differences, sentences
from lamina.reports.style import Shown, colors


def prepare(study: Study) -> tuple[pd.DataFrame, list[Shown], dict[str, str]]:
    """Return the ranking, each placement with the trials at its best learning rate, and each placement's color."""
    summary = summarize(study.results)
    color = colors(study.results["placement"])
    rates = study.results["learning_rate"]
    items = []
    for row in rows_of(summary):
        rate, placement = row["learning_rate"], row["placement"]
        same = rates.eq(rate) if math.isfinite(rate) else rates.isna()
        rows = study.results.index[study.results["placement"].eq(placement) & same]
        trials = tuple(study.trials[i] for i in rows)
        items.append(Shown(placement=placement, color=color[placement], trials=trials, status_text=row["status_text"]))
    return summary, items, color


def finding(summary: Frame, color: dict[str, str]) -> str:
    """Return sentences in HTML about the best placement and the placements that failed."""
    return prose(sentences(summary), color, "finding")


def cautions(study: Study, summary: Frame, items: list[Shown]) -> str:
    """Return the warnings that a reader needs before trusting the numbers."""
    plans = {item.placement: next((trial.plan for trial in item.trials if trial.plan), None) for item in items}
    recommended = {placement: plan.initialization or "normal" for placement, plan in plans.items() if plan}
    return callouts([*notices(summary, study.results, recommended, study.settings), *scale_note(study.results)])


def by_layer(summary: Frame, items: list[Shown], color: dict[str, str]) -> Section:
    gradients, variances = (
        {item.placement: depth.over_seeds(item, layers.blocks(METRICS[name])) for item in items}
        for name in ("gradient_norm", "hidden_variance")
    )
    text = differences(summary, gradients, variances)
    title = "What differs by layer" if len(items) > 1 else "From layer to layer"
    return Section("By layer", title, prose([text], color) if text else "")


def loss(study: Study, items: list[Shown], several: bool) -> Section:
    unigram, bigram = study.results["unigram_entropy"].dropna(), study.results["bigram_entropy"].dropna()
    guess = Guess.of_any(study.results)
    levels = {guess.name: unigram, figures.BIGRAM: bigram}
    chart = figures.loss_curves(items, guess.unit, {name: float(of.mean()) for name, of in levels.items() if len(of)})
    caption = _LOSS.format(guess.target) + (_SEEDS if study.results["seed"].nunique() > 1 else "")
    caption += _BIGRAM if len(bigram) else ""
    caption += " The chart shows each placement at its best learning rate." if several else ""
    html = figure(chart, caption)
    return Section("Loss", "Loss against tokens", html + forgetting(items, guess))


def forgetting(items: list[Shown], guess: Guess | None = None) -> str:
    """Return charts of the loss on --eval-corpus and the scores on --eval-tasks, for runs with these results."""
    html = figure(figures.second_losses(items, guess), _SECOND, "On the second corpus")
    return html + figure(figures.task_scores(items), _TASKS, "On tasks")


def diagrams(study: Study, items: list[Shown]) -> Section:
    cards = []
    for item in items:
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
            f'<div class="plan" style="border-top-color:{item.color};width:{width}px"><h3>{escape(title)}{spec}</h3>'
            f'<div class="drawing">{drawing}</div><pre>{escape(lines)}</pre>{source}</div>'
        )
    html = f"<p>{escape(_DIAGRAMS)}</p><div class=plans>{''.join(cards)}</div>" if cards else ""
    return Section("Placements", "Where the norms sit", html)


def settings(study: Study) -> Section:
    return settings_of(study.settings, study.environment)


def settings_of(settings: object, environment: object) -> Section:
    sections = {name: of for name, of in (("Settings", settings), ("Environment", environment)) if of}
    html = "".join(details(name, tables.settings_table(cast("Json", of))) for name, of in sections.items())
    return Section("Settings", "Settings and environment", html)


def course(item: Shown, caption: str) -> Section:
    return Section("Course", "Learning rate and gradient norm", figure(figures.course(item), caption))


def _folded(equation: Sequence[str], columns: float) -> str:
    """Wrap an equation's lines. A line that is too long breaks before each formula except the first."""
    lines = []
    for line in equation:
        head, *formulas = re.split(r"(?<=:)\s+|(?<=,)\s+(?=[\w']+ = )", line) if len(line) > columns else [line]
        lines += [head, *(f"  {formula}" for formula in formulas)]
    return "\n".join(lines)


def _scheme(spec: str) -> placements.Placement | None:
    name = spec.partition("(")[0].strip()
    return placements.get(name) if name in placements.names() else None


def _resolved(spec: str, study: Study) -> Plan | None:
    """Return where a placement's norms sit in each layer, for trials without plan.json."""
    layers = study.settings.get("num_layers")
    try:
        if _scheme(spec) is None or not isinstance(layers, int):
            return None
        target, options = parse_spec(spec)
        return placements.resolve(target, layers, **options) if isinstance(target, str) else None
    except ValueError:
        return None


def scale_note(results: Frame) -> list[str]:
    """Return a warning if the models are far smaller than the papers' models."""
    sizes = [results[name].max() if name in results else math.nan for name in ("parameters", "tokens")]
    if not all(map(math.isfinite, sizes)) or sizes[0] >= _SMALL:
        return []
    parameters, tokens = (f"{size / 1e6:,.1f} million" if size >= 1e5 else f"{size:,.0f}" for size in sizes)
    what = "the ranking" if len(results) > 1 else "the numbers of each layer"
    return [
        f"These models have {parameters} parameters and saw {tokens} tokens each. The papers' smallest models have 71 "
        f"million parameters and see a billion tokens, so {what} may differ for larger models."
    ]


def facts(study: Study) -> list[str]:
    backbone, layers, width = (study.settings.get(name) for name in ("backbone", "num_layers", "hidden_size"))
    parameters, tokens = study.results["parameters"].max(), study.results["tokens"].max()
    seeds, version = study.results["seed"].nunique(), study.header.get("version")
    return [
        backbone if isinstance(backbone, str) else "",
        f"{layers} layers" + (f" of width {width}" if width else "") if layers else "",
        f"{parameters:,.0f} parameters" if math.isfinite(parameters) else "",
        f"{tokens:,.0f} tokens" + " each" * (len(study.results) > 1) if math.isfinite(tokens) else "",
        f"{seeds} seed{'s' * (seeds > 1)}" if seeds else "",
        f"lamina {version}" if version else "",
        moment(study.header.get("created")),
    ]


_SMALL = 20e6  # parameters
_LOSS = (
    "Points show the eval loss, and thin lines show the training loss. A run at the dashed line has learned only how "
    "often each {} occurs. If all runs are better, the line is above the chart. Double-click to also see the high "
    "losses of the first steps. Click a name in the legend to hide its lines."
)
_BIGRAM = " The dotted line is a bigram table's loss. A model above this line does not use its depth."
_SEEDS = " With several seeds, the line is the mean of the finished seeds, and the band shows one standard deviation."
_SECOND = "Loss on the text of --eval-corpus, with the same tokenizer. The run did not train on this text."
_TASKS = "Scores on the tasks of --eval-tasks. Accuracies go from 0 to 1."
_DIAGRAMS = (
    "The diagrams show the trained placements from bottom to top. The vertical line is the residual stream, and each "
    "branch to its right holds a module. A norm on the line rescales the residual stream. A norm on a branch does not "
    "rescale the stream."
)
