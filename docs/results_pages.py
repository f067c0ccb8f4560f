"""The five pages of docs/results, made from the records of studies: a page per paper, and one of our own."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import against_pre_ln
import comparisons
import pandas as pd
import verdict_words as said
from against_pre_ln import Difference
from study_tables import left_out_seeds, more_tables
from verdict_words import NONE, code, number, plain, table

from lamina.core.frames import Frame
from lamina.core.intervals import CONFIDENCE
from lamina.core.json_types import Json
from lamina.core.yaml_files import read_mapping
from lamina.jobs.files import write_text
from lamina.jobs.names import CLAIMS, RESULTS
from lamina.lab.papers.judging.checks import TRAINED, optimum, values_of
from lamina.lab.papers.judging.claims import judgeable
from lamina.lab.papers.judging.findings import Verdict
from lamina.lab.papers.judging.trials import Trials
from lamina.lab.papers.pages.drawing import Drawing
from lamina.lab.papers.pages.folder import OURS, StudyFolder, arms, read_folder, value_of
from lamina.lab.papers.pages.lines import arms_title
from lamina.lab.papers.pages.matplotlib_figures import FIGURES, write
from lamina.lab.papers.pages.page import plot
from lamina.lab.papers.pages.study_figures import AT_BEST, LOST, RANGE, SPREAD, chosen
from lamina.lab.papers.study_catalog import STAGE, Scale, StudyDefinition
from lamina.reports.ranking import listed
from lamina.reports.records import rows_of

PAPERS = {
    "fusenorm": ("fusenorm", "FuseNorm (SpanNorm)", "2601.22580"),
    "keel": ("keel", "Keel", "2601.19895"),
    "mix_ln": ("mix-ln", "Mix-LN", "2412.13795"),
    "peri_ln": ("peri-ln", "Peri-LN", "2502.02732"),
    "field": ("ours", "Our own comparisons, and other papers", ""),
}
"""By a study's ``paper``: the name of its page, the page's title, and the paper's number at arXiv."""
_FIELD = "field"
_SCALES = ("cpu", "gpu", "paper")
_HOW = (
    "**A verdict applies only to models of this size.** The papers' models are hundreds to thousands of times larger, "
    "and train on more than a hundred thousand times as much text. [Methods](../evidence/methods.md) explains each "
    "verdict and its test. The folder `studies/records` has every number."
)
_BIGRAM = (
    "A bigram table counts how often each token follows another token. If a model's loss is above the loss of a bigram "
    "table, we draw no conclusion from the model."
)
_READ = (
    "The headings below are the names of the studies. Each study has these tables and figures:",
    "- **Comparisons.** Each row compares two settings and shows each setting's mean over the seeds. The difference is "
    "the first mean minus the second mean. If runs failed, Lamina ranks these runs last, and shows the median of the "
    "paired differences. If the models are too small to decide a claim, each comparison for the claim shows the "
    "verdict `cannot tell at this size`.",
    '- **p values.** The column "p" shows the p value of each test. In the column "p (Holm)", we corrected these '
    "values for the number of claims in the study.",
    "- **Settings.** A run is `finished` if the model learned more than token frequencies. Otherwise, the run is "
    "`short` if the loss was still falling at the end, and `stuck` if the loss was not falling. A learning rate is "
    "good if the mean loss is within 0.02 nats of the best mean loss.",
    "- **Figures.** Error bars show the standard deviation over the seeds that trained. Bands show the range over the "
    "seeds. A mark at the top edge shows that no seed trained at this point. If a study has several learning rates, "
    "most figures show each setting at its best learning rate.",
)
_SAID = (LOST, SPREAD, AT_BEST, RANGE)  # captions that _READ replaces
WITHIN = 0.02  # nats above the best mean at which a rate still counts as good
_SWEPT = 3  # rates from which on their interval says something
_TOLERANCE = "range of good learning rates, in factors of 2:"
_GENERATED = "<!-- Made from studies/records by `make results-docs`. -->"


def _reason(needs: str) -> str:
    """Return why a scale cannot run, with the scales' names as flags."""
    planned = r"its claims are registered only for the scales? (\w+)(?: and (\w+))?"
    found = re.fullmatch(planned, needs)
    if not found:
        return plain(needs)
    return f"we planned its claims only for {listed([code(f'--scale {name}') for name in found.groups() if name])}"


def paper_of(study: StudyDefinition) -> str:
    """The paper on whose page a study is."""
    return study.paper if study.paper in PAPERS else _FIELD


def link(study: StudyDefinition) -> str:
    """Where a study is, from docs/results."""
    return f"{PAPERS[paper_of(study)][0]}.md#{study.name}"


def paper_page(
    paper: str,
    studies: Sequence[StudyDefinition],
    verdicts: Sequence[Json],
    folders: Mapping[str, Mapping[str, StudyFolder]],
    figures: Mapping[str, Mapping[str, list[Drawing]]],
    differences: Sequence[Difference] = (),
    links: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the page of a paper's claims; ``folders`` and ``figures`` are by study and scale.

    Args:
        differences: all studies' differences to Pre-LN.
        links: by study, where its details are.
    """
    _, title, number_ = PAPERS[paper]
    names = {study.name for study in studies}
    own = [one for one in verdicts if one["study"] in names]
    ran = [folder for study in studies for folder in folders.get(study.name, {}).values()]
    source = f"[The paper](https://arxiv.org/abs/{number_}). " if number_ else ""
    heading = f"# {title}: the paper's claims on our small models" if number_ else f"# {title}"
    with_result, without = _tables(own)
    not_ran = [name for name in _SCALES if not any(folder.scale == name for folder in ran)] if ran else []
    return "\n\n".join(
        [
            _GENERATED,
            heading,
            f"{source}{on_scale(ran)}".strip(),
            _HOW,
            *against_pre_ln.section(paper, differences, {study: _here(link_, paper) for study, link_ in links.items()}),
            "## Which claims do our models support?",
            *said.counts(own),
            *_claims_table("what we measured", with_result),
            "Main claims are in bold. Below a main claim, the table lists the parts of the claim that our models could "
            "decide. If a claim needs several comparisons, the table shows only the comparison that decided the "
            "verdict. The section Details shows all comparisons, and what the papers report.",
            *(["## Claims without a result", f"{_BIGRAM} {_too_short(without, folders)}".strip()] if without else []),
            *(_claims_table("reason", without)),
            *(["## Run a study again", _again(ran[0], not_ran)] if ran else []),
            "## Details",
            _READ[0],
            "\n".join(_READ[1:]),
            *(
                part
                for study in studies
                for part in study_section(
                    study,
                    own,
                    folders.get(study.name, {}),
                    figures.get(study.name, {}),
                    not_ran=not_ran,
                    losses=[] if paper == _FIELD else [one for one in differences if one.placement == paper],
                )
            ),
        ]
    )


def _here(link_: str, paper: str) -> str:
    """Shorten a link to a study on the same page."""
    return link_.removeprefix(f"{PAPERS[paper][0]}.md")


def _too_short(claims: Sequence[Json], folders: Mapping[str, Mapping[str, StudyFolder]]) -> str:
    """Say how little text the models have read whose size cannot decide a claim, or ""."""
    names = {one["study"] for one in claims if one["verdict"] == Verdict.NEEDS_SCALE and said.is_whole(one)}
    shares, most = [], 0.0
    for folder in (folder for name in sorted(names) for folder in folders.get(name, {}).values()):
        rows = folder.first_stage
        rows = rows[rows["tokens"].notna() & rows["bigram_entropy"].notna()] if "bigram_entropy" in rows else rows[:0]
        if len(rows):
            shares.append(float((rows["tokens"] / rows["parameters"]).max()))
            most = max(most, float(rows["tokens"].max()))
    below = sum(share < 1 for share in shares)
    if not below:
        return ""
    return (
        f"In {below} of {len(shares)} studies without a result, the models read less than one token per parameter. No "
        f"model in these studies reads more than {_span([most])} tokens. These runs are too short to decide the "
        "claims, so the verdict says nothing about the placements."
    )


def _tables(own: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """Return the claims of a page's two tables: with a result (main claims and decided parts), and without."""
    shown = [one for one in said.best(own) if said.is_on_top(one)]
    order, whole = [*said.IN_WORDS.values()], {one["study"]: one for one in shown if said.is_whole(one)}
    rank = {study: (order.index(said.verdict(one)), study) for study, one in whole.items()}
    shown.sort(key=lambda one: (rank.get(one["study"], (0, "")), not said.is_whole(one)))
    return (
        [one for one in shown if one["verdict"] not in _NO_RESULT],
        [one for one in shown if one["verdict"] in _NO_RESULT],
    )


def _again(folder: StudyFolder, not_ran: Sequence[str]) -> str:
    """How to run a study of the page, with a study's name as the example."""
    command = said.command(folder.name, folder.scale)
    lines = [
        f"{command} --dry-run  # lists the trials",
        f"{command}  # trains the models",
        f"lamina report runs/studies/{folder.name}-{folder.scale} --figures  # writes SVG and PDF files",
    ]
    names = " or ".join(code(f"--scale {name}") for name in not_ran)
    larger = f"\n\nWe have not run these studies at {names} yet." if names else ""
    return "```bash\n" + "\n".join(lines) + "\n```" + larger


def study_section(
    study: StudyDefinition,
    verdicts: Sequence[Json],
    folders: Mapping[str, StudyFolder],
    figures: Mapping[str, list[Drawing]],
    not_ran: Collection[str] = (),
    losses: Sequence[Difference] = (),
) -> list[str]:
    """Return the parts of a study's section, folded below its heading; ``folders`` and ``figures`` are by scale.

    Args:
        not_ran: the scales at which no study of the page ran.
        losses: differences between the losses of the page's placement and of Pre-LN.
    """
    own = [one for one in verdicts if one["study"] == study.name and one["verdict"] != Verdict.NOT_RUN]
    own += [one for one in verdicts if one["study"] == study.name and one not in own and said.is_whole(one)]
    source = "" if study.source == OURS else f"The claims come from {said.source(study.source)}."
    inside, later, undecided = [], [], dict[str, list[str]]()
    for name, scale in study.scales.items():
        here = [one for one in own if one["scale"] == name]
        if name in folders:
            earlier = folders[name].definition_of_scale != read_mapping(study.file)["scales"][name]
            inside += _ran(folders[name], here, figures.get(name, []), scale, earlier=earlier)
        elif scale.needs:
            undecided.setdefault(scale.needs, []).append(code(f"--scale {name}"))
        elif here or name not in not_ran:
            run = code(said.command(study.name, name))
            later.append(f"We have not run this study at `--scale {name}` yet. To run the study, use {run}.")
    later += [
        f"We cannot judge this study at {' or '.join(scales)}, because {_reason(needs)}."
        for needs, scales in undecided.items()
    ]
    about = [source, *against_pre_ln.sentences(study.name, losses)]
    return [
        f"### {study.name}",
        f"**{plain(study.title)}**",
        *([" ".join(filter(None, about))] if any(about) else []),
        '<details markdown="1">\n<summary>All numbers and figures</summary>',
        *inside,
        *later,
        "</details>",
    ]


def on_scale(folders: Sequence[StudyFolder]) -> str:
    """Say how small the models are, from their records."""
    sentences = []
    for scale in _SCALES:
        tables = [folder.results for folder in folders if folder.scale == scale]
        parameters = [value for rows in tables for value in rows["parameters"].dropna()]
        tokens = [value for rows in tables for value in rows["tokens"].dropna()]
        if parameters and tokens:
            count = len({key for rows in tables for key in rows["key"]})
            where = "" if scale == "cpu" else f" at scale {scale}"
            sizes = f"{_span(parameters)} parameters and read {_span(tokens)} tokens"
            sentences.append(f"We ran {count:,} trials{where}. The trained models have {sizes}.")
    return " ".join(sentences)


def _span(values: Sequence[float]) -> str:
    low, high = (f"{number:,.0f}" if number < 1e4 else f"{number / 1e6:.2g}M" for number in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _claims_table(heading: str, claims: Sequence[Json]) -> list[str]:
    """Return the table of these claims, if there are any. ``heading``: of the last column."""
    rows = []
    for one in claims:
        says = f"**{said.claimed(one)}**" if said.is_whole(one) else said.claimed(one)
        details = f"[{plain(one['claim'])}](#{one['study']})"
        rows.append([f"{says} ({details})", said.verdict(one), comparisons.in_short(one)])
    return [table(["claim", "verdict", heading], rows)] if rows else []


def _compared(folder: StudyFolder, scale: Scale) -> Frame:
    """Return the tuned runs that claims may read."""
    rows = judgeable(folder.results, list(scale.axis_names), scale.tuning_seeds, scale.seeds)
    return rows[rows["tuned"].astype(bool)]


def _ran(
    folder: StudyFolder,
    verdicts: Sequence[Json],
    drawings: Sequence[Drawing],
    scale: Scale,
    *,
    earlier: bool = False,
) -> list[str]:
    """Return the parts of a scale with a record.

    Args:
        earlier: whether the trials are not the trials that the study now asks for.
    """
    now = code(said.command(folder.name, folder.scale))
    old = f"**These trials come from an earlier version of the study.** To train the current version, run {now}."
    parts = ["" if folder.scale == "cpu" else f"**At scale {folder.scale}**", old if earlier else ""]
    if verdicts:
        parts += [comparisons.claims(verdicts), comparisons.compared(verdicts), comparisons.noted(verdicts)]
    for drawing in drawings:
        caption = drawing.caption
        for above in _SAID:
            caption = caption.replace(above, "")
        parts += [f"![{plain(drawing.title)}]({FIGURES}/{drawing.name}.svg)", plain(caption)]
    left_out = left_out_seeds(folder.tuned, _compared(folder, scale)) if verdicts else ""
    unit = against_pre_ln.unit_of(scale.settings)
    parts += [*resolution(folder), *_arms(folder, left_out, unit), *more_tables(folder), _provenance(folder, verdicts)]
    return [part for part in parts if part]


_OF_A_STAGE = {
    "score": "mean score over all tasks (%)",
    "eval_reward": "held-out reward",
    "eval_loss": "loss on held-out text (nats per token)",
}


def _arms(folder: StudyFolder, left_out: str, unit: str) -> list[str]:
    """The tables of arms, one for each job. ``left_out``: a sentence above the first table, ``unit``: of a loss."""
    rows = arms(folder)
    if rows.empty:
        return []
    if STAGE not in folder.axes:
        title = arms_title(folder).replace("eval loss (nats per token)", f"loss on held-out text ({unit})")
        return ["**The settings**", left_out, _arms_of_a_job(folder, rows, title)]
    parts = [left_out]
    for stage, ran in folder.tuned.groupby(STAGE, sort=False):
        suffix = f", {stage}"
        own = rows[rows["label"].str.endswith(suffix)]
        own = own.assign(label=own["label"].str.removesuffix(suffix))
        column = value_of(ran, folder.value)
        unit = (
            "loss on held-out pairs of answers (nats)"
            if stage in ("reward", "dpo")
            else _OF_A_STAGE.get(column, column)
        )
        parts += [f"**The settings after the job {code(stage)}**", _arms_of_a_job(folder, own, unit)]
    return parts


def _arms_of_a_job(folder: StudyFolder, rows: Frame, title: str) -> str:
    """The table of arms: each at its rate, its mean and spread, and how its trials ended."""
    several, widths = folder.results["learning_rate"].nunique() > 1, tolerances(folder)
    widths = widths if set(map(str, rows["label"])) & set(widths) else {}
    cells = [
        {
            "setting": plain(row["label"]),
            "best learning rate:" if several else "learning rate:": number(row["learning_rate"], "g"),
            f"{title}, mean ± std:": _with_spread(row["mean"], row["std"], ".4f" if abs(row["mean"]) >= 0.1 else ".3g"),
            "runs in the mean:": f"{row['trained']}",
            "how all runs ended": plain(row["ended"] or NONE),
            **({_TOLERANCE: widths.get(str(row["label"]), NONE)} if widths else {}),
        }
        for row in rows_of(rows)
    ]
    if not any(row["trained"] for row in rows_of(rows)):  # a study of models before training
        cells = [{name: each[name] for name in ("setting", "how all runs ended")} for each in cells]
    return table(list(cells[0]), [[*each.values()] for each in cells])


def tolerances(folder: StudyFolder) -> dict[str, str]:
    """Return by arm how many factors of 2 its rates may span within 0.02 nats of its best; empty without a sweep.

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
        means = swept.dropna().mean()
        if len(means) < _SWEPT or not math.isfinite(float(means.min())):
            continue
        width = tolerance({float(rate): [float(mean)] for rate, mean in means.items()}, WITHIN)
        edge = min(means.iloc[0], means.iloc[-1]) <= means.min() + WITHIN
        widths[str(label)] = f"{'≥ ' if edge else ''}{width:.1f}"
    return widths


def _provenance(folder: StudyFolder, verdicts: Sequence[Json]) -> str:
    header = folder.header
    machine = header.get("machine")
    known = {**header, "machine": machine.get("processor") if isinstance(machine, dict) else machine}
    first: Json = next(iter(verdicts), known)
    facts = [plain(first[name]) for name in ("date", "machine") if first.get(name)]
    facts += [f"revision {plain(first['revision'])}"] if first.get("revision") else []
    machines = Counter[str]()
    for one in header.get("trained", ()):
        machines[(one.get("gpus") or [one["processor"]])[0]] += one["trials"]
    trained = " and ".join(f"{count} trials on {plain(name)}" for name, count in machines.most_common())
    apart = f" We trained {trained}." if set(machines) - {first.get("machine")} else ""
    judged = f" We judged the claims on {facts[0]} ({', '.join(facts[1:])})." if len(facts) > 1 else ""
    judged = judged if verdicts else judged.replace("judged the claims", "recorded the trials")
    return f"The record has {len(folder.results):,} trials.{judged}{apart}"


PAIRS = 5
_REFERENCE = "pre_ln"


def resolution(folder: StudyFolder) -> list[str]:
    """Return the section on a study that sweeps learning rates of placements and tunes none; empty for others."""
    if folder.arm_axes != ("placement",) or not folder.has_sweep or folder.results["tuned"].any():
        return []
    trials = Trials(folder.results, axes=list(folder.axes), scale=folder.scale)
    rows = rows_of(spreads(trials, reference=_REFERENCE, pairs=PAIRS))
    if not rows:
        return []
    cells = [
        {
            "placement": plain(row["placement"]),
            "best learning rate tried:": number(row["best_rate"], "g"),
            "minimum of a parabola:": number(row["optimum"], ".2g") + (" (at the edge)" if row["at_edge"] else ""),
            "loss there, mean ± std over seeds:": _with_spread(row["loss"], row["std"], ".3f"),
            "seeds:": str(row["seeds"]),
            f"paired difference from {_REFERENCE}:": number(row["difference"], "+.3f"),
            "std of the paired difference:": number(row["paired_std"], ".3f"),
            f"smallest difference that {PAIRS} pairs detect:": number(row["detectable"], ".3f"),
        }
        for row in rows
    ]
    trained = {row["placement"] for row in rows}
    lost = [str(placement) for placement in trials.values("placement") if placement not in trained]
    shown = sorted(row["detectable"] for row in rows if math.isfinite(row["detectable"]))
    words = [
        "A pair is two runs with the same seed. Pairs detect a difference if a two-sided t test at 95 % finds the "
        "difference in nine of ten studies.",
        *(
            [
                f"For the placement with the least noise, {PAIRS} pairs detect a difference of {shown[0]:.3f} nats. "
                f"For the placement with the most noise, {PAIRS} pairs detect a difference of {shown[-1]:.3f} nats."
            ]
            if shown
            else []
        ),
        *(
            [f"For these placements, no learning rate trained all seeds: {', '.join(map(plain, lost))}."]
            if lost
            else []
        ),
    ]
    return [
        "**Which differences these models can show**",
        table(list(cells[0]), [[*each.values()] for each in cells]),
        " ".join(words),
    ]


_POWER = 0.9
_COLUMNS = ("placement", "best_rate", "optimum", "at_edge", "loss", "std", "seeds")
_NO_RESULT = (Verdict.NEEDS_SCALE, Verdict.NOT_RUN)
_PAIRED = ("difference", "paired_std", "detectable")


def spreads(trials: Trials, *, reference: str = "pre_ln", pairs: int = 5) -> Frame:
    """One row per placement that trains at some rate of a sweep, the lowest loss first.

    Columns: ``best_rate`` (of those trained), ``optimum`` (a parabola's through log rate), ``at_edge``; at the best
    rate the mean ``loss``, its ``std`` over the seeds and their number; of the difference to ``reference``, each at its
    own best rate and paired by seed, the mean ``difference``, its standard deviation ``paired_std``, and
    ``detectable``: the difference that this many ``pairs`` show with a power of 90 %.
    """
    best = {}
    for arm in map(str, trials.values("placement")):
        with suppress(ValueError):  # it trains at no rate
            found = optimum(trials, arm)
            best[arm] = found, values_of(trials.where(placement=arm, learning_rate=found.trained), arm)
    rows = []
    for arm, (found, losses) in best.items():
        others = best[reference][1] if reference in best and arm != reference else {}
        mean, std = _mean_and_std(list(losses.values()))
        row = [arm, found.trained, found.rate, found.at_edge, mean, std, len(losses)]
        difference, std = _mean_and_std([losses[seed] - others[seed] for seed in losses if seed in others])
        rows.append([*row, difference, std, detectable(std, pairs)])
    return pd.DataFrame(rows, columns=[*_COLUMNS, *_PAIRED]).sort_values("loss", ignore_index=True)


def detectable(std: float, pairs: int) -> float:
    """Return the mean difference that a two-sided t test on so many pairs shows with a power of about 90 %."""
    from scipy import stats

    quantiles = stats.t.ppf([1 - (1 - CONFIDENCE) / 2, _POWER], pairs - 1)
    return float(quantiles.sum()) * std / math.sqrt(pairs)


def _mean_and_std(values: list[float]) -> tuple[float, float]:
    """Return the mean and a sample's standard deviation (n - 1); NaN where there are too few values."""
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) if len(values) > 1 else math.nan


def tolerance(losses: Mapping[float, Sequence[float]], within: float = 0.02) -> float:
    """Return the width, in factors of 2, of the rates whose mean loss is within ``within`` nats of the best.

    The ends are interpolated in the log of the rate. An end at the sweep's edge counts as the edge: the true interval
    is at least as wide.

    Args:
        losses: by rate, the losses over the seeds; a rate with a run that failed has an infinite one.
        within: nats.
    """
    rates = sorted(losses)
    means = [statistics.fmean(losses[rate]) for rate in rates]
    best = min(range(len(rates)), key=means.__getitem__)
    limit = means[best] + within

    def reach(step: int) -> float:
        here = best
        while 0 <= here + step < len(rates) and means[here + step] <= limit:
            here += step
        if not 0 <= here + step < len(rates):
            return math.log2(rates[here])
        beyond = means[here + step]
        share = 0.0 if math.isinf(beyond) else (limit - means[here]) / (beyond - means[here])
        return math.log2(rates[here]) + share * (math.log2(rates[here + step]) - math.log2(rates[here]))

    return reach(1) - reach(-1)


def _with_spread(mean: float, std: float, form: str) -> str:
    spread = number(std, form)
    return number(mean, form) + ("" if spread == NONE else f" ± {spread}")


_FIGURES_OF_A_PAGE = 3
_DIGITS = 5  # of the numbers in a figure


def write_results(
    verdicts: Sequence[Json],
    studies: Sequence[StudyDefinition],
    records: Path,
    folder: Path,
    *,
    draw: bool = True,
    ladder: str = "",
) -> list[Path]:
    """Write a page per paper that has a study; returns the paths of the pages.

    ``folder`` holds nothing else: what an earlier call wrote and this one did not is deleted.

    Args:
        verdicts: as ``all_verdicts`` gives them, with those that were not run.
        studies: the catalog.
        records: a folder ``STUDY-SCALE`` for each study that ran.
        draw: whether the figures are drawn, too (SVG, and JSON for the site); it needs matplotlib.
        ladder: the last section of our own page.
    """
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    pages: dict[Path, str] = {}
    kept: set[Path] = {folder / f"{FIGURES}/{name}" for name in re.findall(rf"\({FIGURES}/([^)]+)\)", ladder)}
    folders: dict[str, dict[str, StudyFolder]] = {}
    figures: dict[str, dict[str, list[Drawing]]] = {}
    found: list[Difference] = []
    for study in studies:
        folders[study.name] = ran = read_folders(study, records)
        found += [each for one in ran.values() for each in against_pre_ln.differences(study, one)]
        figures[study.name] = {scale: chosen(one)[0][:_FIGURES_OF_A_PAGE] for scale, one in ran.items()}
        for drawing in (drawing for every in figures[study.name].values() for drawing in every) if draw else ():
            kept |= write_drawing(drawing, folder)
    links = {study.name: link(study) for study in studies}
    for paper, (name, *_) in PAPERS.items():
        if own := [study for study in studies if paper_of(study) == paper]:
            last = [ladder] if ladder and paper == _FIELD else []
            pages[folder / f"{name}.md"] = (
                "\n\n".join([paper_page(paper, own, verdicts, folders, figures, found, links), *last]) + "\n"
            )
    for path, text in pages.items():
        write_text(path, text)
    stale = [*folder.glob("*.md"), *((folder / FIGURES).iterdir() if draw else ())]
    for path in stale:
        if path not in pages and path.with_suffix(".svg") not in kept and path not in kept:
            path.unlink()
    return sorted(pages)


def read_folders(study: StudyDefinition, records: Path) -> dict[str, StudyFolder]:
    """Return the records of a study by scale, of the scales that ran."""
    places = {scale: records / f"{study.name}-{scale}" for scale in study.scales}
    return {
        scale: read_folder(place)
        for scale, place in places.items()
        if (place / RESULTS).is_file() and (place / CLAIMS).is_file()
    }


def write_drawing(drawing: Drawing, folder: Path) -> set[Path]:
    """Write a figure of a page in ``folder``: JSON for the site, and SVG."""
    path, figure = folder / FIGURES / f"{drawing.name}.json", _rounded(json.loads(str(plot(drawing).to_json())))
    write_text(path, json.dumps(figure, separators=(",", ":"), allow_nan=False) + "\n")
    return {path, *write(drawing, folder / FIGURES, ["svg"])}


def _rounded(value: object) -> object:
    """Round numbers to the digits that a figure shows, so that every machine writes the same file."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items() if name != "template"}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
