"""Further tables of a study's details: scores by task, layers without which the loss rises, and why ramps stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pandas as pd
from verdict_words import number, plain, table

from lamina.core.frames import Frame
from lamina.lab.papers.pages.folder import StudyFolder
from lamina.lab.papers.study_catalog import STAGE
from lamina.lab.papers.trials.store import TABLES
from lamina.reports.ranking import listed
from lamina.reports.records import read_table

_STOPPED = {
    "none": "reached the ceiling",
    "plateau": "stopped at a plateau of the loss",
    "spike": "stopped at a spike of the loss",
    "stuck": "stopped before learning more than token frequencies",
    "diverged": "diverged",
}
_CEILINGS = (
    "In each run, the learning rate rises in a straight line from 0 to the ceiling. The run stops when the loss no "
    "longer falls. A run's highest learning rate is the last learning rate at which the loss still fell. If the loss "
    "still falls at the ceiling, we know only that the highest learning rate is at least the ceiling."
)
_TWO_RAMPS = (
    "The claims use only the runs with the ceiling {low:g}, because every placement has these runs. With the ceiling "
    "{high:g}, the learning rate rises {ratio:.0f} times as fast, so a model has fewer steps to learn at each learning "
    "rate. The two ceilings can rank the placements in opposite orders, so compare placements only at the same ceiling."
)


def more_tables(folder: StudyFolder) -> list[str]:
    """Return the further tables of a study that its record allows, each with a title and an explanation."""
    parts = [_highest_rates(folder), _scores(folder), _layers_dropped(folder), _residual_path(folder)]
    return [part for every in parts for part in every]


def _titled(title: str, text: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"**{title}**", text, table(headings, rows)] if rows else []


def _label(folder: StudyFolder, row: pd.Series, without: Sequence[str] = ()) -> str:
    names = cast("dict[str, object]", row.to_dict())
    return plain(folder.label(names, without=("learning_rate", "seed", STAGE, *without)))


def _grouped(folder: StudyFolder, rows: Frame, without: Sequence[str] = ()) -> list[tuple[str, Frame]]:
    labels = [_label(folder, row, without) for _, row in rows.iterrows()]
    return [(str(name), group) for name, group in rows.groupby(labels, sort=False)]


def _highest_rates(folder: StudyFolder) -> list[str]:
    """How each ramp of the learning rate stopped."""
    rows = folder.results
    if folder.value != "max_learning_rate" or "stop_rule" not in rows:
        return []
    cells = []
    for name, group in _grouped(folder, rows):
        counts = group["stop_rule"].astype(str).value_counts()
        how = ", ".join(f"{count} {_STOPPED.get(str(rule), str(rule))}" for rule, count in counts.items())
        cells.append([name, number(group["max_learning_rate"].mean(), ".2g"), how])
    text = _CEILINGS
    if "ceiling" in rows and rows["ceiling"].nunique() > 1:
        scale = folder.definition_of_scale
        usual, steeper = scale["settings"], scale["axes"]["ceiling"]["0.5"]
        low, high = float(usual["max_learning_rate"]), float(steeper["max_learning_rate"])
        ratio = high / float(steeper["steps"]) / (low / float(usual["steps"]))
        text += " " + _TWO_RAMPS.format(low=low, high=high, ratio=ratio)
    return _titled(
        "Why the runs stopped", text, ["setting", "highest learning rate:", "how many runs stopped, and why"], cells
    )


def _scores(folder: StudyFolder) -> list[str]:
    """The mean score of each setting in each task."""
    rows = folder.tuned
    tasks = [name for name in rows if str(name).startswith("score_") and rows[name].notna().any()]
    if not tasks:
        return []
    asked = rows[rows["score"].notna()]
    cells = [
        [name, *(number(group[task].mean(), ".1f") for task in tasks), number(group["score"].mean(), ".1f")]
        for name, group in _grouped(folder, asked)
    ]
    headings = ["setting", *(f"{str(task).removeprefix('score_')}:" for task in tasks), "mean of all tasks:"]
    return _titled(
        "Scores by task", "Scores are percentages of right answers, as means over the seeds.", headings, cells
    )


def _layers_dropped(folder: StudyFolder) -> list[str]:
    """How much of the rise in loss the first layer and the deeper half cause, if each layer is removed in turn."""
    rows = _measured(folder, "end-layer_drop")
    rows = rows[(rows["metric"] == "loss_increase") & (rows["meaning"] == "remove")] if len(rows) else rows
    cells = []
    for name, group in _grouped(folder, rows) if len(rows) else ():
        rises = group.pivot_table(index="seed", columns="layer", values="value")
        counted = rises.clip(lower=0.0)
        shares = counted.div(counted.sum(axis=1), axis=0)
        deep = [layer for layer in rises if layer >= (max(rises) + 1) / 2]
        cells.append(
            [
                name,
                number(group.groupby("seed")["eval_loss"].first().mean(), ".3f"),
                number(rises[0].mean(), ".3f"),
                number(rises.drop(columns=0).mean(axis=1).mean(), ".3f"),
                f"{number(100 * shares[0].mean(), '.0f')} %",
                f"{number(100 * shares[deep].sum(axis=1).mean(), '.0f')} %",
            ]
        )
    text = (
        "We removed each layer in turn and measured the rise of the loss in nats. A layer's share is the rise without "
        "this layer, divided by the sum of all layers' rises. If the loss falls without a layer, this layer's rise "
        "counts as 0."
    )
    headings = ["setting", "loss of the whole model:", "rise without the first layer:"]
    headings += ["mean rise without another layer:", "first layer's share:", "deeper half's share:"]
    return _titled("Which layers matter most", text, headings, cells)


def _residual_path(folder: StudyFolder) -> list[str]:
    """The factors by which the skips change the gradient: in the first block, in the others, and in all."""
    rows = _measured(folder, "init-jacobian")
    if len(rows):
        rows = rows[
            (rows["sublayer"] == "block") & (rows["role"] == "residual_path") & (rows["metric"] == "log10_product")
        ]
    cells = []
    for name, group in _grouped(folder, rows) if len(rows) else ():
        logs = group.pivot_table(index="seed", columns="layer", values="value")
        first, last = logs[0], logs[max(logs)]
        factors = (10**first, 10 ** (last - first), 10**last)
        cells.append([name, *(_span(factor.min(), factor.max()) for factor in factors)])
    text = (
        "A factor of 1 leaves the gradient's norm unchanged. The claims are about the blocks after the first. The "
        "first block has other factors: its norm divides the small embeddings by their standard deviation, and so "
        "enlarges the gradient. Each cell shows the range over the seeds."
    )
    headings = ["setting", "first block", "blocks after the first", "all blocks"]
    return _titled("Factors by which the skips change the gradient's norm before training", text, headings, cells)


def _measured(folder: StudyFolder, start: str) -> Frame:
    """Return the recorded table whose name begins so, joined with the tuned runs. The table is empty if none exists."""
    for path in sorted((folder.folder / TABLES).glob(f"{start}*.parquet")):
        rows = read_table(path)
        if {"layer", "metric", "value"} <= set(rows):
            if "meaning" not in rows:
                rows = rows.assign(meaning="remove")
            present = [*dict.fromkeys(["key", "placement", *folder.arm_axes, "seed", "eval_loss"])]
            own = folder.tuned[[name for name in present if name in folder.tuned]]
            return own.merge(rows.drop(columns=[n for n in rows if n in own and n != "key"]), on="key", how="inner")
    return pd.DataFrame()


def _span(low: float, high: float) -> str:
    ends = [number(end, ".3g") for end in (low, high)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def left_out_seeds(rows: Frame, compared: Frame) -> str:
    """Say which seeds the comparisons leave out although the table of settings has them, or "".

    Args:
        rows: the tuned runs of a study.
        compared: the runs that claims may read.
    """
    seeds = sorted(set(map(int, rows["seed"])) - set(map(int, compared["seed"])))
    if not seeds:
        return ""
    several, names = len(seeds) > 1, listed([str(seed) for seed in seeds])
    return (
        f"We tuned the learning rates with the seed{'s' * several} {names}. The comparisons above leave out the runs "
        f"with {'these seeds' if several else 'this seed'}, but the next table includes these runs. So the means "
        "differ between the two tables."
    )
