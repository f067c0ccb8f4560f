"""Draw the loss against tokens, a run's metrics against the step, and the loss against the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import cast

import numpy as np
import pandas as pd

from lamina.reports import charts
from lamina.reports.charts import Line, line_of
from lamina.reports.plotting import Figure
from lamina.reports.ranking import by_rate
from lamina.reports.records import Frame, Trial, is_number
from lamina.reports.sentences import Guess
from lamina.reports.style import GREY, Shown, colors, looks, polish, rgba, thin

BIGRAM = "bigram entropy"
_TRAIN_POINTS = 350
_ENDS = {
    "short": "circle-open",
    "stuck": "triangle-up-open",
    "interrupted": "square-open",
    "diverged": "x-thin-open",
    "failed": "cross-open",
}


def loss_curves(
    items: Sequence[Shown], unit: str = "nats per token", known: Mapping[str, float] | None = None
) -> Figure | None:
    """Draw training loss (thin) and eval loss (points) against tokens. ``known`` maps names to reference losses."""
    figure, evaluated, trained = Figure(), [], []
    # the reader can also choose FLOPs or seconds as the x axis
    factors: list[dict[str, float]] = []
    for item in items:
        for trial in item.trials:
            tokens, losses = thin(trial.known("tokens", "loss"), _TRAIN_POINTS)
            if len(losses):
                trained.append(losses)
                factors.append(per_token([trial]))
                figure.add_scatter(
                    x=tokens.astype(np.float32),
                    y=losses.astype(np.float32),
                    mode="lines",
                    line={"color": rgba(item.color, 0.38), "width": 1},
                    legendgroup=item.label,
                    showlegend=False,
                    hoverinfo="skip",
                    meta={"line": f"{item.label}, training loss{_seed(trial)}"},
                )
        means = _mean_eval(item)
        if means.empty and not any(trial.lines for trial in item.trials):
            continue
        evaluated.append(means["eval_loss"].to_numpy())
        x, y, spread = _float32(means["tokens"]), _float32(means["eval_loss"]), means["spread"].fillna(0)
        band = (x, _float32(means["eval_loss"] - spread), _float32(means["eval_loss"] + spread))
        has_band = means["spread"].notna().any()
        line_of(
            item,
            x if len(means) else [None],
            y if len(means) else [None],
            band=band if has_band else None,
            width=2.2,
            markers=True,
            marker=6,
            symbol=item.marker,
            name=item.label + ("" if item.status_text in ("finished", "") else f" ({escape(item.status_text)})"),
            data_name=f"{item.label}, eval loss",
            hover=f"{item.label}: %{{y:.3f}}",
        ).draw(figure)
        factors += [per_token(item.trials)] * (1 + bool(has_band))  # the band is a trace of its own
    if not figure.data:
        return None
    _frame_losses(figure, evaluated, trained, known or {})
    figure.update_xaxes(title="tokens", rangemode="tozero").update_yaxes(title=f"loss ({unit})")
    figure.update_layout(hovermode="x unified", meta={"against": _against(factors)})
    return polish(figure, 440)


def _frame_losses(
    figure: Figure, evaluated: Sequence[np.ndarray], trained: Sequence[np.ndarray], known: Mapping[str, float]
) -> None:
    """Draw the reference losses, and choose an axis range that hides the high losses of the first steps."""
    everything = np.concatenate([*evaluated, *trained]) if evaluated or trained else np.array([])
    everything = everything[np.isfinite(everything)]
    if len(everything):
        low = min(float(everything.min()), *known.values(), math.inf)
        top = float(np.quantile(everything, 0.9))
        for name, loss in known.items():
            figure.add_hline(
                y=loss,
                line={"color": GREY, "width": 1.2, "dash": "dot" if name == BIGRAM else "dash"},
                text=f"{name} {loss:.2f}",
                font={"size": 12, "color": GREY},
            )
        highest = max(known.values(), default=math.inf)
        if evaluated and BIGRAM in known and all(losses[-1] < known[BIGRAM] for losses in evaluated if len(losses)):
            highest = known[BIGRAM]  # all runs are below it, so the ends of the curves matter
        if known:
            top = highest + 0.35 * max(highest - low, 0.3)
        ends = [losses[-1] for losses in evaluated if len(losses)]
        if ends and min(ends) > highest:  # no run is close to it, so show the distance
            ends += [losses[len(losses) // 2] for losses in evaluated if len(losses)]
        top = max([top, *ends])  # include the end of each curve
        pad = 0.06 * max(top - low, 0.1)
        figure.update_yaxes(range=[low - pad, top + pad])


def per_token(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the runs' mean FLOPs and seconds per token. The result omits a unit that is missing in any run."""
    units: dict[str, list[float]] = {"FLOPs": [], "seconds": []}
    for trial in trials:
        tokens, flops = trial.result.get("tokens"), trial.result.get("flops")
        has_both = is_number(tokens) and is_number(flops) and tokens > 0 and flops > 0
        units["FLOPs"].append(cast("float", flops) / cast("float", tokens) if has_both else math.nan)
        (speeds,) = trial.known("tokens_per_second")
        units["seconds"].append(1 / speeds.mean() if len(speeds) and speeds.mean() > 0 else math.nan)
    means = {unit: float(np.mean(values)) for unit, values in units.items()}
    return {unit: mean for unit, mean in means.items() if math.isfinite(mean)}


def _against(factors: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    """Return the units that the reader can choose for the x axis, or [] if tokens are the only unit."""
    shared = [unit for unit in ("FLOPs", "seconds") if factors and all(unit in each for each in factors)]
    if not shared:
        return []
    names = {"seconds": "seconds of training, at each run's mean speed"}
    return [{"name": "tokens", "label": "tokens", "factors": [1.0] * len(factors)}] + [
        {"name": names.get(unit, unit), "label": unit, "factors": [each[unit] for each in factors]} for unit in shared
    ]


def second_losses(items: Sequence[Shown], guess: Guess | None = None) -> Figure | None:
    lines = [
        line_of(
            item,
            _float32(means["tokens"]),
            _float32(means["eval_corpus_loss"]),
            legend=len(items) > 1,
            markers=True,
            hover=f"{item.label}: %{{y:.3f}}",
        )
        for item in items
        if len(means := _mean_eval(item, "eval_corpus_loss"))
    ]
    y = f"loss on the second corpus ({(guess or Guess.of({})).unit})"
    return charts.against("tokens", y, lines, 360, unified=True)


def task_scores(items: Sequence[Shown]) -> Figure | None:
    every = [scores for item in items for trial in item.trials for _, scores in trial.task_scores]
    tasks = dict.fromkeys(task for scores in every for task in scores)
    shades = colors(list(tasks)) if len(items) == 1 else {}
    lines = []
    for item, trial, task in ((own, trial, task) for own in items for trial in own.trials for task in tasks):
        points = [(tokens, scores[task]) for tokens, scores in trial.task_scores if task in scores]
        name = escape(task) if len(items) == 1 else f"{item.label}: {escape(task)}"
        lines.append(
            Line(
                x=[tokens for tokens, _ in points],
                y=[value for _, value in points],
                color=shades.get(task, item.color),
                name=name,
                data_name=f"{name}{_seed(trial)}",
                legend=trial is item.trials[0],
                markers=True,
                hover=f"{name}: %{{y:.3f}}",
            )
        )
    return charts.against("tokens", "score", lines, 360, unified=True)


def course(item: Shown) -> Figure | None:
    panels, steep = {}, False
    for column, title in (("learning_rate", "learning rate"), ("grad_norm", "gradient norm")):
        steps, values = thin(item.trials[0].known("step", column), _TRAIN_POINTS)
        if len(values):
            hover = "step %{x}: %{y:.3g}"
            panels[title] = [Line(x=steps, y=values, color=item.color, width=1.8, legend=False, hover=hover)]
            steep = column == "grad_norm" and values.max() > 20 * values.min() > 0
    figure = charts.over_steps(panels, 300)
    if steep and figure is not None:
        figure.update_yaxes(type="log", row=1, col=len(panels))
    return None if figure is None else figure.update_layout(margin={"t": 24})


def u_curves(results: Frame, color: Mapping[str, str], order: Sequence[str]) -> Figure | None:
    """Draw the mean eval loss of finished seeds against the learning rate, with marks where no seed finished."""
    rates = by_rate(results[np.isfinite(results["learning_rate"])])
    if rates.empty or rates["learning_rate"].nunique() < 2:
        return None
    measured = (rates["finished"] > 0) | (rates["status"].eq("short") & np.isfinite(rates["eval_loss"]))
    rates, measured_rates = rates.assign(measured=measured), rates[measured]
    losses = measured_rates["eval_loss"] if len(measured_rates) else pd.Series([1.0, 2.0])
    reach = max(float(losses.max() - losses.min()), 0.05)
    top = float(losses.max()) + 0.16 * reach
    figure, looks_of = Figure(), looks(order)
    for number, placement in enumerate(order):
        label = escape(placement)
        rows = rates[rates["placement"] == placement].sort_values("learning_rate")
        fine, lost = rows[rows["measured"]], rows[~rows["measured"]]
        spread = fine["eval_loss_std"].fillna(0)
        figure.add_scatter(
            x=fine["learning_rate"] if len(fine) else [None],
            y=fine["eval_loss"] if len(fine) else [None],
            error_y={"type": "data", "array": spread, "thickness": 1.1, "width": 3} if spread.any() else None,
            mode="lines+markers",
            line={"color": color[placement], "width": 2.2, "dash": looks_of[placement].dash},
            marker={
                "size": [11 if loss == fine["eval_loss"].min() else 7 for loss in fine["eval_loss"]],
                "symbol": looks_of[placement].marker,
            },
            name=label,
            legendgroup=label,
            showlegend=True,
            hovertemplate=f"{label}<br>%{{x}}: %{{y:.3f}}<extra></extra>",
        )
        figure.add_scatter(
            x=lost["learning_rate"] * (1 + 0.035 * (number - (len(order) - 1) / 2)),
            y=[top] * len(lost),
            mode="markers",
            marker={
                "symbol": [_ENDS.get(status, "x-thin-open") for status in lost["status"]],
                "size": 11,
                "color": color[placement],
                "line": {"width": 2.2, "color": color[placement]},
            },
            customdata=lost[["learning_rate", "status_text"]].map(lambda v: escape(str(v))).to_numpy(),
            name=label,
            legendgroup=label,
            showlegend=False,
            cliponaxis=False,
            hovertemplate=f"{label}<br>%{{customdata[0]}}: %{{customdata[1]}}<extra></extra>",
        )
    ticks = sorted(rates["learning_rate"].unique())
    figure.update_xaxes(type="log", title="learning rate", tickvals=ticks, ticktext=[f"{rate:g}" for rate in ticks])
    unit = Guess.of_any(results).unit
    figure.update_yaxes(title=f"eval loss ({unit})", range=[float(losses.min()) - 0.1 * reach, top + 0.04 * reach])
    figure.update_yaxes(showticklabels=len(measured_rates) > 0)
    return polish(figure, 420)


def _mean_eval(item: Shown, column: str = "eval_loss") -> Frame:
    """Return the mean and standard deviation of the loss over the seeds, for each number of tokens."""
    # as in the ranking, only finished seeds count
    finished = [trial for trial in item.trials if trial.status == "finished"]
    points = np.concatenate([trial.known("tokens", column) for trial in finished or item.trials], axis=1)
    if not points.size:
        return pd.DataFrame(columns=["tokens", column, "spread"], dtype=float)
    grouped = pd.DataFrame({"tokens": points[0], column: points[1]}).groupby("tokens")[column]
    return pd.DataFrame({column: grouped.mean(), "spread": grouped.std()}).reset_index()


def _seed(trial: Trial) -> str:
    return f", seed {trial.seed:g}" if math.isfinite(trial.seed) else ""


def _float32(values: Frame) -> np.ndarray:
    return values.to_numpy(dtype=np.float32)
