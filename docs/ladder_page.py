"""The section on the ladder of docs/results/ours.md: losses and gaps against compute, over the sizes that ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from ladder_law import COLUMNS, compute_gain, gap_trend
from verdict_words import NONE, code, number, table

from lamina.core.frames import Frame
from lamina.core.intervals import t_interval
from lamina.jobs.names import RESULTS
from lamina.lab.papers.judging.checks import TRAINED
from lamina.lab.papers.pages.drawing import Axis, Drawing, Panel, Series
from lamina.reports.records import rows_of
from lamina.reports.style import looks

SIZES = {"S1": ("ladder-s1", 20), "S2": ("ladder-s2", 20), "S3": ("ladder-s3", 10)}
"""By size, its study and the tokens per parameter at the end of its runs."""
REFERENCE = "pre_ln"
_TREND_AT = 10.0  # tokens per parameter, which all sizes have
_LEAST_SIZES = 2
_SAYS = """\
Each point is a mean over seeds. We chose each placement's learning rate by a sweep at size S1. Each run gives four
losses: one loss at its end, and three losses of copies whose learning rate decays earlier. We wrote down the design
and the primary comparison before the runs. [The plan](../../studies/preregistration/ladder.md) lists later changes.
**The results apply only to the sizes that we trained, so the curves end there.** A trend says nothing about models with
100M parameters, where the error of the trend is as large as most differences. The interval of a trend shows how much
results vary between seeds, not between texts and model shapes. Parameter counts exclude the embeddings."""


def losses(records: Path) -> Frame:
    """Return the losses of all sizes that ran, of branches and ends: ``ladder_law.COLUMNS`` and ``per_parameter``."""
    rows = []
    for size, (study, end) in SIZES.items():
        folder = records / f"{study}-cpu"
        if not (folder / RESULTS).is_file():
            continue
        trials = pd.read_csv(folder / RESULTS)
        trials = trials[trials["tuned"] & trials["status"].isin(TRAINED)]
        branches = pd.read_parquet(folder / "tables" / "records-metrics.parquet").dropna(subset=["branch_loss"])
        for trial in rows_of(trials):
            own = branches[branches["key"] == trial["key"]]
            ended = [*zip(own["branch_steps"], own["branch_loss"], strict=True), (trial["steps"], trial["eval_loss"])]
            for steps, loss in ended:
                share = float(steps) / trial["steps"]
                row = [trial["placement"], size, trial["seed"], trial["parameters"], trial["tokens"] * share]
                row += [trial["flops"] * share, trial["seconds"] * share, float(loss)]
                rows.append([*row, round(end * share * 8) / 8])
    return pd.DataFrame(rows, columns=[*COLUMNS, "per_parameter"])


def gaps(trials: Frame) -> Frame:
    """Return each arm's mean gap to Pre-LN by size and tokens per parameter, with its 95 % t interval over seeds."""
    rows: list[dict[str, Any]] = []
    for (size, per), there in trials.groupby(["size", "per_parameter"]):
        by_seed = there.pivot_table(index="seed", columns="arm", values="eval_loss").dropna()
        for arm in (name for name in by_seed if name != REFERENCE):
            values = (by_seed[arm] - by_seed[REFERENCE]).tolist()
            low, high = t_interval(values)
            flops = fmean(there[there["arm"] == REFERENCE]["flops"])
            rows.append(
                {"arm": arm, "size": size, "per_parameter": per, "flops": flops}
                | {"gap": fmean(values), "low": low, "high": high, "seeds": len(values)}
            )
    return pd.DataFrame(rows)


def drawings(trials: Frame) -> list[Drawing]:
    """Return the figures: the losses of each size over compute, and the gaps over the sizes."""
    arms = sorted(trials["arm"].unique())
    colors = looks(arms)
    ticks = [first * 10.0**power for power in range(9, 24) for first in (1, 3)]
    shown = [tick for tick in ticks if trials["flops"].min() / 1.5 < tick < trials["flops"].max() * 1.5]
    compute = Axis(title="FLOPs of the run", log=True, ticks=tuple(shown))
    means = trials.groupby(["size", "arm", "per_parameter"], as_index=False)[["flops", "eval_loss"]].mean()
    by_size = [
        Panel(
            title=str(size),
            series=tuple(_line(arm, colors[arm], own, "eval_loss") for arm, own in there.groupby("arm")),
        )
        for size, there in means.groupby("size")
    ]
    found = gaps(trials)
    shared = found.groupby("per_parameter").filter(lambda at: at["size"].nunique() >= _LEAST_SIZES)
    by_budget = [
        Panel(
            title=f"{per:g} tokens per parameter",
            series=tuple(_line(arm, colors[arm], own, "gap") for arm, own in there.groupby("arm")),
        )
        for per, there in list(shared.groupby("per_parameter"))[-3:]
    ]
    return [
        Drawing(
            name="ladder-loss",
            title="Loss against compute",
            caption="Each panel shows one model size after 2.5 to 20 tokens per parameter. Losses are in nats per "
            "token.",
            x=compute,
            y=Axis(title="eval loss"),
            panels=tuple(by_size),
        ),
        Drawing(
            name="ladder-gap",
            title="Difference from Pre-LN's loss, against compute",
            caption="Each curve connects the model sizes. The band around a curve is the 95 % t interval over seeds. "
            "A negative value means a lower loss than Pre-LN.",
            x=compute,
            y=Axis(title="loss minus Pre-LN's"),
            panels=tuple(by_budget),
            spread="band",
        ),
    ]


def _line(arm: str, look: Any, rows: Frame, value: str) -> Series:
    rows = rows.sort_values("flops")
    ends = {name: tuple(rows[name]) for name in ("low", "high") if name in rows}
    return Series(label=arm, look=look, x=tuple(rows["flops"]), y=tuple(rows[value]), **ends)


def section(trials: Frame, figures: Sequence[Drawing]) -> str:
    """Return the section."""
    found, arms = gaps(trials), [arm for arm in sorted(trials["arm"].unique()) if arm != REFERENCE]
    cells = [
        [str(size), f"{per:g}", *(_interval(*own[own["arm"] == arm][["gap", "low", "high"]].iloc[0]) for arm in arms)]
        for (size, per), own in found.groupby(["size", "per_parameter"])
    ]
    return "\n\n".join(
        [
            "### ladder",
            "These figures and tables compare the losses of the placements with Pre-LN's loss at three model sizes: S1 "
            "(study `ladder-s1`), S2 and S3.",
            '<details markdown="1">\n<summary>All numbers and figures</summary>',
            _SAYS,
            *(
                part
                for one in figures
                for part in (f"**{one.title}**", f"![{one.title}](figures/{one.name}.svg)", one.caption)
            ),
            "**Each placement's loss minus Pre-LN's loss (nats per token, with 95 % intervals)**",
            table(["size", "tokens per parameter:", *(f"{code(arm)}:" for arm in arms)], cells),
            "**How the difference changes with compute, and how much compute a loss needs**",
            _trends(trials, arms),
            "</details>",
        ]
    )


def _trends(trials: Frame, arms: Sequence[str]) -> str:
    sizes = sorted(trials["size"].unique())
    end = max(trials[trials["size"] == sizes[0]]["per_parameter"])
    at_end = trials[trials["per_parameter"] == end]
    compared = {_TREND_AT: sizes, end: sorted(at_end["size"].unique())}
    rows = []
    for arm in arms:
        trends = [gap_trend(trials[trials["per_parameter"] == per], arm, REFERENCE) for per in compared]
        gains = compute_gain(at_end, arm, REFERENCE)
        cells = [_interval(one.slope, *one.interval) for one in trends]
        rows.append([code(arm), *cells, *(number(gains.get(size), ".2f") for size in sizes)])
    headings = [
        f"change of the difference per factor of 10 in FLOPs, {' and '.join(own)} at {per:g} tokens per parameter:"
        for per, own in compared.items()
    ]
    headings += [
        f"FLOPs at which Pre-LN reaches this placement's loss at {size}, divided by this placement's FLOPs:"
        for size in sizes
    ]
    notes = (
        f"\n\nWe had not planned the trend at {end:g} tokens per parameter before the runs. "
        f'"{NONE}" means that Pre-LN did not reach this loss at these sizes. The ratios of FLOPs come from mean losses '
        "and have no intervals. We do not compare seconds, because the trials shared one GPU."
    )
    return table(["placement", *headings], rows) + notes


def _interval(mean: float, low: float, high: float) -> str:
    return f"{number(mean, '+.3f')} ({number(low, '+.3f')} to {number(high, '+.3f')})"
