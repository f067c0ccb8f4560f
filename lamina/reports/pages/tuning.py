"""The pages of the jobs after pretraining: fine-tuning, reward models, policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from lamina.core.json_types import Json
from lamina.jobs.files import read_result
from lamina.jobs.kinds import Kind
from lamina.jobs.names import PAGE
from lamina.jobs.run_folder import RunFolder
from lamina.reports import layers, sections
from lamina.reports.charts import Line
from lamina.reports.page import Section, callouts, details, figure, write_page
from lamina.reports.palette import PALETTE
from lamina.reports.records import Study, read_run
from lamina.reports.registry import report_of
from lamina.reports.style import polish
from lamina.reports.table import Field, Table, chip, text

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A quantity over the steps: ``trained`` and ``held_out`` are its names in metrics.jsonl.

    ``alone`` is the caption where nothing was held out.
    """

    title: str
    trained: str
    held_out: str
    quantity: str
    caption: str
    alone: str = ""


CURVES = (
    Curve(
        title="Loss",
        trained="loss",
        held_out="eval_loss",
        quantity="loss",
        caption="Points: held-out loss, over all held-out examples. Line: training loss, mean since the last record.",
        alone="Training loss, mean since the last record. It says little of a policy: its reward and KL do.",
    ),
    Curve(
        title="Reward",
        trained="reward",
        held_out="eval_reward",
        quantity="reward",
        caption=(
            "Points: mean reward of one sampled answer per held-out prompt, not clipped. Line: rewards in training, "
            "clipped; with ReMax, sampled and greedy answers together."
        ),
    ),
    Curve(
        title="KL to the model at the start",
        trained="kl_per_answer",
        held_out="eval_kl",
        quantity="nats per answer",
        caption="Mean over answers of the sum of log-ratios, policy over start: how far the policy has moved.",
    ),
    Curve(
        title="Length of the answers",
        trained="completions_mean_length",
        held_out="eval_length",
        quantity="tokens",
        caption="A reward that rises with the length alone is a warning.",
    ),
    Curve(
        title="Accuracy",
        trained="mean_token_accuracy",
        held_out="eval_accuracy",
        quantity="share",
        caption="Share of the answers' tokens predicted right; for a reward model, of the pairs ordered right.",
    ),
    Curve(
        title="Accuracy of the pairs",
        trained="rewards_accuracies",
        held_out="eval_rewards_accuracies",
        quantity="share",
        caption="Share of the pairs whose better answer the policy prefers more than the model at the start does.",
    ),
    Curve(
        title="Margin",
        trained="margin",
        held_out="eval_margin",
        quantity="score",
        caption="Mean score of the better answers over that of the worse ones.",
    ),
)
_FRONTIER = (
    "Each point is an evaluation, labeled with its step: the held-out reward against the KL that it cost. Compare "
    "policies at equal KL: equal steps favor the one whose logits move faster."
)
_NAMES = {
    "eval_loss": "held-out loss",
    "eval_accuracy": "held-out accuracy",
    "eval_margin": "held-out margin",
    "eval_reward": "held-out reward",
    "eval_kl": "held-out KL (nats per answer)",
    "eval_length": "held-out length (tokens)",
    "eval_ended": "share of held-out answers that end",
    "reward_gain": "gain of the held-out reward",
    "reward_gain_low": "its 95 % interval, from",
    "reward_gain_high": "to",
}


@report_of(Kind.SFT)
def sft_report(folder: Path) -> Path:
    """Write the page of a fine-tuning run."""
    return _write(Path(folder), "Fine-tuning")


@report_of(Kind.REWARD)
def reward_report(folder: Path) -> Path:
    """Write the page of a reward model's run."""
    return _write(Path(folder), "A reward model")


@report_of(Kind.DPO)
def dpo_report(folder: Path) -> Path:
    """Write the page of a run of direct preference optimization."""
    return _write(Path(folder), "Direct preference optimization")


@report_of(Kind.RLHF)
def rlhf_report(folder: Path) -> Path:
    """Write the page of a policy's run."""
    return _write(Path(folder), "A policy")


def _write(folder: Path, title: str) -> Path:
    study, result, records = read_run(folder), read_result(folder) or {}, RunFolder(folder).metrics
    _, items, _ = sections.prepare(study)
    status = str(result.get("status") or "unfinished")
    reason = str(result.get("reason") or "")
    return write_page(
        folder / PAGE,
        title=f"{title} with {study.results['placement'].iloc[0]}",
        facts=[f"status: {status}", *_facts(study, result)],
        command=str(study.header.get("command") or ""),
        sections=[
            Section(
                name="Result",
                title="Result",
                html=chip(status) + (callouts([reason]) if reason else "") + _numbers(result),
            ),
            Section(name="Curves", title="Over the steps", html="".join(_curve(curve, records) for curve in CURVES)),
            Section(name="Frontier", title="Reward against KL", html=_frontier(records)),
            *layers.sections(items),
            sections.diagrams(study, items),
            sections.settings(study),
        ],
    )


def _facts(study: Study, result: Json) -> list[str]:
    counts = [f"{result[name]:,} {noun}" for name, noun in _COUNTS if isinstance(result.get(name), int)]
    return [f"from {result['from']}" if result.get("from") else "", *counts, *sections.facts(study)]


_COUNTS = (("examples", "examples"), ("held_out", "held out"), ("skipped", "left out"), ("truncated", "cut off"))


def _numbers(result: Json) -> str:
    rows = [
        {"name": _NAMES.get(name, name), "value": value}
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
    value = Field(title="", kind="number", cell=lambda row: escape(_form(row["value"])))
    known = [row for row in rows if row["name"] in _NAMES.values()]
    others = [row for row in rows if row not in known]
    tables = [Table(fields=[text("name", "", "name"), value], rows=part, kind="trials") for part in (known, others)]
    html = tables[0].html() if known else ""
    return html + (details("All numbers", tables[1].html()) if others else "")


def _form(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _points(records: Sequence[Json], name: str) -> list[Point]:
    return [
        (record["step"], float(record[name]))
        for record in records
        if isinstance(record.get(name), int | float) and math.isfinite(record[name])
    ]


def _curve(curve: Curve, records: Sequence[Json]) -> str:
    trained, held_out = _points(records, curve.trained), _points(records, curve.held_out)
    if len(trained) + len(held_out) < 2:
        return ""
    drawn = go.Figure()
    for points, name, color, markers in (
        (trained, "training", PALETTE[0], False),
        (held_out, "held out", PALETTE[1], True),
    ):
        if points:
            x, y = zip(*points, strict=True)
            Line(x=x, y=y, color=color, name=name, legend=True, markers=markers, width=1.4).draw(drawn)
    drawn.update_xaxes(title="step")
    drawn.update_yaxes(title=curve.quantity)
    return figure(polish(drawn, 340), curve.caption if held_out or not curve.alone else curve.alone, curve.title)


def _frontier(records: Sequence[Json]) -> str:
    rows = [record for record in records if _points([record], "eval_kl") and _points([record], "eval_reward")]
    if len(rows) < 2:
        return ""
    drawn = go.Figure()
    drawn.add_scatter(
        x=[row["eval_kl"] for row in rows],
        y=[row["eval_reward"] for row in rows],
        mode="lines+markers+text",
        text=[str(row["step"]) for row in rows],
        textposition="top center",
        line={"color": PALETTE[0], "width": 1.4},
        hovertemplate="KL %{x:.3g}, reward %{y:.3g}<extra>step %{text}</extra>",
        showlegend=False,
    )
    drawn.update_xaxes(title="KL (nats per answer)")
    drawn.update_yaxes(title="held-out reward")
    return figure(polish(drawn, 380), _FRONTIER)
