"""Figures of training: losses against tokens, the course of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lamina.reports.charts import Line
from lamina.reports.palette import colors, look
from lamina.reports.records import Frame, Trial
from lamina.reports.sentences import Guess
from lamina.reports.style import GREY, Shown, polish, rgba, thin

BIGRAM = "bigram entropy"
_TRAIN_POINTS = 350


def loss_curves(
    items: Sequence[Shown], unit: str = "nats per token", known: Mapping[str, float] | None = None
) -> go.Figure | None:
    """Training loss (thin) and eval loss (points) against tokens; ``known`` losses to compare with as lines, by name.

    Over several seeds the eval loss is the mean of those that finished, in a band of one standard deviation. The page
    can draw it against FLOPs and seconds, too: ``layout.meta.against`` has the factors of each trace's tokens.
    """
    figure, evaluated, trained = go.Figure(), [], []
    factors: list[dict[str, float]] = []
    for item in items:
        for trial in item.trials:
            train = thin(trial.metrics.dropna(subset=["loss", "tokens"]), _TRAIN_POINTS)
            if len(train):
                trained.append(train["loss"].to_numpy())
                factors.append(per_token([trial]))
                figure.add_scatter(
                    x=_float32(train["tokens"]),
                    y=_float32(train["loss"]),
                    mode="lines",
                    line={"color": rgba(item.color, 0.38), "width": 1},
                    legendgroup=item.label,
                    showlegend=False,
                    hoverinfo="skip",
                    meta={"line": f"{item.label}, training loss{_seed(trial)}"},
                )
        means = _mean_eval(item)
        has_lines = any(len(trial.metrics) for trial in item.trials)
        if not has_lines and means.empty:
            continue
        evaluated.append(means["eval_loss"].to_numpy())
        spread = means["spread"] if len(means) and means["spread"].notna().any() else None
        own = look(item.placement)
        Line(
            x=_float32(means["tokens"]) if len(means) else [None],
            y=_float32(means["eval_loss"]) if len(means) else [None],
            low=None if spread is None else _float32(means["eval_loss"] - spread.fillna(0)),
            high=None if spread is None else _float32(means["eval_loss"] + spread.fillna(0)),
            band_x=_float32(means["tokens"]),
            color=item.color,
            width=2.2,
            dash=item.dash,
            markers=True,
            marker=6,
            symbol=own.marker if own else None,
            group=item.label,
            name=item.label + _in_legend(item),
            data_name=f"{item.label}, eval loss",
            hover=f"{item.label}: %{{y:.3f}}",
        ).draw(figure)
        factors += [per_token(item.trials)] * (1 if spread is None else 2)  # the band is a trace of its own
    if not figure.data:
        return None
    _frame_losses(figure, evaluated, trained, known or {})
    figure.update_xaxes(title="tokens", rangemode="tozero")
    figure.update_yaxes(title=f"loss ({unit})")
    figure.update_layout(hovermode="x unified", meta={"against": _against(factors)})
    return polish(figure, 440)


def _frame_losses(
    figure: go.Figure,
    evaluated: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    known: Mapping[str, float],
) -> None:
    """Draw losses to compare with as lines; the range shows each curve's end, not its first steps."""
    everything = np.concatenate([*evaluated, *trained]) if evaluated or trained else np.array([])
    everything = everything[np.isfinite(everything)]
    if len(everything):
        low = min(float(everything.min()), *known.values(), math.inf)
        top = float(np.quantile(everything, 0.9))
        for name, loss in known.items():
            figure.add_hline(
                y=loss,
                line={"color": GREY, "width": 1.2, "dash": "dot" if name == BIGRAM else "dash"},
                annotation={"text": f"{name} {loss:.2f}", "font": {"size": 12, "color": GREY}},
                annotation_position="bottom left",
            )
        highest = max(known.values(), default=math.inf)
        if known:
            top = highest + 0.35 * max(highest - low, 0.3)
        ends = [losses[-1] for losses in evaluated if len(losses)]
        if ends and min(ends) > highest:  # none has come close yet: show how far they are
            ends += [losses[len(losses) // 2] for losses in evaluated if len(losses)]
        top = max([top, *ends])  # the end of each curve is in the picture
        pad = 0.06 * max(top - low, 0.1)
        figure.update_yaxes(range=[low - pad, top + pad])


def per_token(trials: Sequence[Trial]) -> dict[str, float]:
    """Return FLOPs and seconds per token, averaged over runs, without a unit that one of the runs lacks."""
    units: dict[str, list[float]] = {"FLOPs": [], "seconds": []}
    for trial in trials:
        tokens, flops = (trial.result.get(name) for name in ("tokens", "flops"))
        speed = float(trial.metrics["tokens_per_second"].mean())
        units["FLOPs"].append(_over(flops, tokens))
        units["seconds"].append(_over(1.0, speed))
    means = {unit: float(np.mean(values)) for unit, values in units.items()}
    return {unit: mean for unit, mean in means.items() if math.isfinite(mean)}


def _over(part: object, whole: object) -> float:
    """Divide two positive numbers; NaN for anything else, since a folder may hold anything."""
    if not isinstance(part, int | float) or not isinstance(whole, int | float) or not (part > 0 and whole > 0):
        return math.nan
    return part / whole


def _against(factors: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    """Return the units that lines can be drawn against: tokens, and each unit that all runs have."""
    shared = [unit for unit in ("FLOPs", "seconds") if factors and all(unit in each for each in factors)]
    if not shared:
        return []
    names = {"seconds": "seconds of training, at each run's mean speed"}
    return [{"name": "tokens", "label": "tokens", "factors": [1.0] * len(factors)}] + [
        {"name": names.get(unit, unit), "label": unit, "factors": [each[unit] for each in factors]} for unit in shared
    ]


def second_losses(items: Sequence[Shown], guess: Guess | None = None) -> go.Figure | None:
    """The loss on the second corpus against tokens, averaged over the seeds; None where no run has one."""
    figure = go.Figure()
    for item in items:
        means = _mean_eval(item, "eval_corpus_loss")
        if len(means):
            Line(
                x=_float32(means["tokens"]),
                y=_float32(means["eval_corpus_loss"]),
                color=item.color,
                dash=item.dash,
                name=item.label,
                legend=len(items) > 1,
                markers=True,
                hover=f"{item.label}: %{{y:.3f}}",
            ).draw(figure)
    if not figure.data:
        return None
    figure.update_xaxes(title="tokens", rangemode="tozero")
    figure.update_yaxes(title=f"loss on the second corpus ({(guess or Guess.of({})).unit})")
    return polish(figure.update_layout(hovermode="x unified"), 360)


def task_scores(items: Sequence[Shown]) -> go.Figure | None:
    """The scores on --eval-tasks against tokens, a line per task and trial; None where no run has any."""
    figure = go.Figure()
    every = [scores for item in items for trial in item.trials for _, scores in trial.task_scores]
    tasks = dict.fromkeys(task for scores in every for task in scores)
    shades = colors(list(tasks)) if len(items) == 1 else {}
    for item in items:
        for trial in item.trials:
            for task in tasks:
                points = [(tokens, scores[task]) for tokens, scores in trial.task_scores if task in scores]
                name = escape(task) if len(items) == 1 else f"{item.label}: {escape(task)}"
                Line(
                    x=[tokens for tokens, _ in points],
                    y=[value for _, value in points],
                    color=shades.get(task, item.color),
                    name=name,
                    data_name=f"{name}{_seed(trial)}",
                    legend=trial is item.trials[0],
                    markers=True,
                    hover=f"{name}: %{{y:.3f}}",
                ).draw(figure)
    if not figure.data:
        return None
    figure.update_xaxes(title="tokens", rangemode="tozero")
    figure.update_yaxes(title="score")
    return polish(figure.update_layout(hovermode="x unified"), 360)


def course(items: Shown) -> go.Figure | None:
    """One run's learning rate and whole gradient norm (before clipping) against the steps."""
    metrics = items.trials[0].metrics
    names = [("learning_rate", "learning rate"), ("grad_norm", "gradient norm")]
    names = [(column, title) for column, title in names if metrics[column].notna().any()]
    if not names:
        return None
    figure = make_subplots(rows=1, cols=len(names), horizontal_spacing=0.09)
    for number, (column, title) in enumerate(names, start=1):
        rows = thin(metrics.dropna(subset=[column]), _TRAIN_POINTS)
        Line(
            x=rows["step"],
            y=rows[column],
            color=items.color,
            width=1.8,
            legend=False,
            hover="step %{x}: %{y:.3g}",
        ).draw(figure, 1, number)
        figure.update_yaxes(title=title, row=1, col=number)
        if column == "grad_norm" and rows[column].max() > 20 * rows[column].min() > 0:
            figure.update_yaxes(type="log", row=1, col=number)
    figure.update_xaxes(title="step")
    polish(figure, 300)
    return figure.update_layout(margin_t=24)


def _mean_eval(item: Shown, column: str = "eval_loss") -> Frame:
    """Mean over the seeds by tokens, with the standard deviation as ``spread`` (NaN for one seed).

    As in the ranking, of the seeds that finished, if any did: the figure and the table show one number.
    """
    finished = [trial for trial in item.trials if trial.status == "finished"]
    points = [trial.metrics[["tokens", column]].dropna() for trial in finished or item.trials]
    points = [table for table in points if len(table)]
    if not points:
        return pd.DataFrame(columns=["tokens", column, "spread"], dtype=float)
    grouped = pd.concat(points).groupby("tokens")[column]
    return pd.DataFrame({column: grouped.mean(), "spread": grouped.std()}).reset_index()


def _seed(trial: Trial) -> str:
    return f", seed {trial.seed:g}" if math.isfinite(trial.seed) else ""


def _in_legend(item: Shown) -> str:
    return "" if item.status_text in ("finished", "") else f" ({escape(item.status_text)})"


def _float32(values: Frame) -> np.ndarray:
    return values.to_numpy(dtype=np.float32)
