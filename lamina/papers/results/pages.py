"""The pages of docs/results: one of all claims, and one per study."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from lamina.core.json_types import Json
from lamina.papers.catalog.study import Study
from lamina.papers.judging.checks import TRAINED
from lamina.papers.judging.scaling import tolerance
from lamina.papers.pages.drawing import Drawing
from lamina.papers.pages.folder import OURS, StudyFolder, arms
from lamina.papers.pages.printed import FIGURES
from lamina.papers.pages.splitting import arms_title
from lamina.papers.results import verdicts as said
from lamina.papers.results.markdown import NONE, code, number, plain, table
from lamina.papers.results.resolution import resolution
from lamina.reports.records import rows_of

PAPERS = {
    "fusenorm": "FuseNorm (SpanNorm, arXiv 2601.22580)",
    "keel": "Keel (arXiv 2601.19895)",
    "mix_ln": "Mix-LN (arXiv 2412.13795)",
    "peri_ln": "Peri-LN (arXiv 2502.02732)",
    "field": "Others, and our own",
}
_HOW = (
    "A difference is paired over seeds, each arm at its own best learning rate, with Student's 95 % interval. What "
    "holds and what fails is tested at the same level, with Holm's correction over all claims of the study, and over "
    "the looks where seeds were added after one. Of losses and scores, runs that failed are ranked last. "
    "[Methods](../methods.md) has the rules, those of power too."
)
_SCALE = (
    "**A verdict is about its scale and no more.** The papers train models hundreds to thousands of times larger than "
    "those of scale cpu, on more than a hundred thousand times more text: what fails here may hold there, and what "
    "holds here may not."
)
WITHIN = 0.02  # nats above the best mean at which a rate still counts as good
_SWEPT = 3  # rates from which on their interval says something
_TOLERANCE = f"rates within {WITHIN:g} nats of the best, factors of 2:"
_SHOWN = 2  # numbers of a claim on the page of all; its own page has the rest
_GENERATED = "<!-- Made from studies/records by `make results-docs`. -->"


def index(studies: Sequence[Study], verdicts: Sequence[Json], folders: Iterable[StudyFolder]) -> str:
    """The page of all claims."""
    parts = [
        _GENERATED,
        "# What the papers claim, and what we found",
        said.counts(verdicts),
        _on_scale(list(folders)),
        table(["verdict", "it means"], [[f"**{verdict}**", meaning] for verdict, meaning in said.MEANINGS.items()]),
        _HOW,
    ]
    for paper, title in PAPERS.items():
        own = [study for study in studies if study.paper == paper]
        rows = [_claim(study, one) for study in own for one in verdicts if one["study"] == study.name]
        if own:
            parts.append(f"## {title}")
        if rows:
            parts.append(table(["claim", "verdict", "ours", "paper", "seeds:", "scale"], rows))
        if silent := [study for study in own if study.name not in {one["study"] for one in verdicts}]:
            links = [f"[{study.name}]({study.name}.md) ({plain(study.title)})" for study in silent]
            parts.append(f"Measured without a claim: {'; '.join(links)}.")
    return "\n\n".join(parts) + "\n"


def study_page(
    study: Study, verdicts: Sequence[Json], folders: Mapping[str, StudyFolder], figures: Mapping[str, list[Drawing]]
) -> str:
    """The page of one study: ``folders`` and ``figures`` by scale, of those that ran."""
    own = [one for one in verdicts if one["study"] == study.name]
    parts = [
        _GENERATED,
        f"# {study.name}: {plain(study.title)}",
        "Lamina's own." if study.source == OURS else f"{plain(study.source)}. {PAPERS.get(study.paper, study.paper)}.",
    ]
    for scale in study.scales:
        here = [one for one in own if one["scale"] == scale]
        if scale in folders:
            parts += _ran(folders[scale], here, figures.get(scale, []))
        else:
            parts += [f"## At scale {scale}", _not_run(study, scale, here)]
    return "\n\n".join(parts) + "\n"


def _on_scale(folders: Sequence[StudyFolder]) -> str:
    """How small the trials are, from their records."""
    sentences = []
    for scale in ("cpu", "gpu", "paper"):
        tables = [folder.results for folder in folders if folder.scale == scale]
        parameters = [value for rows in tables for value in rows["parameters"].dropna()]
        tokens = [value for rows in tables for value in rows["tokens"].dropna()]
        if parameters and tokens:
            count = len({key for rows in tables for key in rows["key"]})
            sizes = f"{_span(parameters)} parameters and {_span(tokens)} tokens each"
            sentences.append(f"At scale {scale}: {count:,} trials of {sizes}.")
    return " ".join([*sentences, _SCALE])


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def _claim(study: Study, one: Json) -> list[str]:
    says = plain(one.get("says") or study.title)
    link = f"[{plain(one['claim'])}]({study.name}.md)"
    return [
        f"{link}<br>{says}" if "/" in str(one["claim"]) else f"**{link}**<br>{says}",
        f"**{one['verdict']}**",
        said.ours(one, most=_SHOWN),
        plain(one.get("paper") or NONE),
        str(one.get("seeds") or NONE),
        str(one["scale"]),
    ]


def _not_run(study: Study, scale: str, verdicts: Sequence[Json]) -> str:
    needs = study.scales[scale].needs
    if needs:
        return f"Not decidable at this scale: {plain(needs)}"
    says = "".join(f"\n- {plain(one.get('says') or one['claim'])}" for one in verdicts)
    return f"Not run yet: {code(said.command(study.name, scale))}" + (f"\n{says}" if says else "")


def _ran(folder: StudyFolder, verdicts: Sequence[Json], drawings: Sequence[Drawing]) -> list[str]:
    headings = ["claim", "verdict", "ours", "paper", "margin and 95 % interval", "p (Holm):", "seeds:", "note"]
    parts = [f"## At scale {folder.scale}", said.summary(verdicts)]
    if verdicts:
        parts.append(table(headings, [said.row(one) for one in verdicts]))
    for drawing in drawings:
        picture = f"![{plain(drawing.title)}]({FIGURES}/{drawing.name}.svg)"
        parts += [f"### {plain(drawing.title)}", picture, plain(drawing.caption)]
    parts += [*resolution(folder), _arms(folder), _provenance(folder, verdicts)]
    return [part for part in parts if part]


def _arms(folder: StudyFolder) -> str:
    """The table of arms: each at its rate, its mean and spread, and how its trials ended."""
    rows = arms(folder)
    if rows.empty:
        return ""
    several = folder.results["learning_rate"].nunique() > 1
    rate = "best learning rate:" if several else "learning rate:"
    value = arms_title(folder)
    widths = tolerances(folder)
    cells = [
        [
            plain(row["label"]),
            number(row["learning_rate"], "g"),
            _mean(row["mean"], row["std"]),
            f"{row['trained']}",
            plain(row["ended"] or NONE),
            *([widths.get(str(row["label"]), NONE)] if widths else []),
        ]
        for row in rows_of(rows)
    ]
    headings = ["arm", rate, f"{value}, mean ± std:", "trials in the mean:", "how all ended"]
    return "### The arms\n\n" + table([*headings, *([_TOLERANCE] if widths else [])], cells)


def tolerances(folder: StudyFolder) -> dict[str, str]:
    """By arm, over how many factors of 2 its rates stay within 0.02 nats of its best; empty without a swept loss.

    Over the seeds that every rate has. "≥" where the interval reaches the sweep's edge.
    """
    if not folder.has_sweep or folder.value != "eval_loss":
        return {}
    rows = folder.first_stage
    rows = rows.assign(label=[folder.label(row, without=("learning_rate", "seed")) for row in rows_of(rows)])
    widths = {}
    for label, arm in rows.groupby("label", sort=False):
        losses = arm["eval_loss"].where(arm["status"].isin(TRAINED), math.inf)
        swept = arm.assign(eval_loss=losses).pivot_table(index="seed", columns="learning_rate", values="eval_loss")
        swept = swept.dropna()
        if swept.empty or swept.shape[1] < _SWEPT or not math.isfinite(float(swept.mean().min())):
            continue
        means = swept.mean()
        width = tolerance({float(rate): [float(mean)] for rate, mean in means.items()}, WITHIN)
        edge = min(means.iloc[0], means.iloc[-1]) <= means.min() + WITHIN
        widths[str(label)] = f"{'≥ ' if edge else ''}{width:.1f}"
    return widths


def _mean(mean: float, std: float) -> str:
    form = ".4f" if abs(mean) >= 0.1 else ".3g"
    spread = number(std, form)
    return number(mean, form) + ("" if spread == NONE else f" ± {spread}")


def _provenance(folder: StudyFolder, verdicts: Sequence[Json]) -> str:
    header = folder.header
    machine = header.get("machine")
    known = {**header, "machine": machine.get("processor") if isinstance(machine, dict) else machine}
    first: Json = next(iter(verdicts), known)
    facts = [
        f"{len(folder.results):,} trials",
        *(plain(first[name]) for name in ("machine", "date") if first.get(name)),
        *([f"revision {plain(first['revision'])}"] if first.get("revision") else []),
    ]
    again = code(said.command(folder.name, folder.scale))
    pdf = code(f"lamina report runs/studies/{folder.name}-{folder.scale} --figures")
    return f"{', '.join(facts)}. Run it again: {again}; {pdf} then writes its figures as SVG and PDF."
