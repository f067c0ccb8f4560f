"""Write the report pages for fine-tuning, reward models and policies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.files import read_result
from lamina.jobs.kinds import Kind
from lamina.jobs.run_folder import RunFolder
from lamina.reports import charts, layers, sections
from lamina.reports.charts import Line
from lamina.reports.page import Section, callouts, details, figure, sentence, write_page
from lamina.reports.plotting import Figure
from lamina.reports.records import is_number, read_run
from lamina.reports.registry import ending_of, report_of
from lamina.reports.style import PALETTE, polish
from lamina.reports.tables import chip, table, text
from lamina.reports.terminal import run_ended

_TUNED = {
    "eval_loss": "held-out loss {:.4f}",
    "eval_accuracy": "accuracy {:.3f}",
    "eval_reward": "held-out reward {:.4f}",
    "reward_gain": "gain {:+.4f} (95 % interval: {reward_gain_low:+.4f} to {reward_gain_high:+.4f})",
    "eval_kl": "KL {:z.3f} nats",
}
ending_of(Kind.SFT, Kind.REWARD, Kind.RLHF, Kind.DPO)(partial(run_ended, forms=_TUNED))
# Each curve's title, its names in metrics.jsonl (training, held out), the y axis, and the caption.
CURVES = (
    ("Loss", "loss", "eval_loss", "loss", (
        "Points show the loss on all held-out examples. The line shows the training loss, averaged since the last "
        "record."
    )),
    ("Reward", "reward", "eval_reward", "reward", (
        "Each point is the mean reward over the held-out prompts, without clipping. The line shows the mean reward in "
        "training, after any clipping. With ReMax, the line is the mean over sampled and greedy answers."
    )),
    ("KL to the initial model", "kl_per_answer", "eval_kl", "nats per answer", (
        "The KL is the policy's distance from the initial model: the mean of the answers' log-probability ratios."
    )),
    ("Length of the answers", "completions_mean_length", "eval_length", "tokens", (
        "If the reward rises only with the length, the policy may exploit the reward."
    )),
    ("Accuracy", "mean_token_accuracy", "eval_accuracy", "share", (
        "The fraction of correctly predicted tokens, among the tokens that the loss counts. For a reward model, the "
        "accuracy is the fraction of pairs in which the better answer has the higher score."
    )),
    ("Accuracy of the pairs", "rewards_accuracies", "eval_rewards_accuracies", "share", (
        "The fraction of pairs in which the policy prefers the better answer more strongly than the initial model does."
    )),
    ("Margin", "margin", "eval_margin", "score", "The better answers' mean score minus the worse answers' mean score."),
)  # fmt: skip
_LOSS_ALONE = "The training loss, averaged since the last record. To judge a policy, read the policy's reward and KL."
_FRONTIER = (
    "Each point shows an evaluation's KL and held-out reward. The point's label is the step. Compare policies "
    "at equal KL. At equal steps, policies with faster changing logits have an advantage."
)
MEASURES = {
    "status": ("status", ""),
    "eval_loss": ("held-out loss", ".4f"),
    "eval_accuracy": ("held-out accuracy", ".1%"),
    "eval_rewards_accuracies": ("held-out accuracy of the pairs", ".1%"),
    "eval_margin": ("held-out margin", ".4f"),
    "eval_reward": ("held-out reward", ".4f"),
    "eval_kl": ("held-out KL (nats per answer)", ".3f"),
    "eval_length": ("held-out length (tokens)", ".1f"),
    "eval_ended": ("fraction of held-out answers that end", ".1%"),
    "reward_gain": ("gain of the held-out reward", "+.4f"),
    "reward_gain_low": ("lower end of the gain's 95 % interval", "+.4f"),
    "reward_gain_high": ("upper end of the gain's 95 % interval", "+.4f"),
    "loss_tokens": ("training tokens that the loss counts", ",.0f"),
    "steps": ("steps", ",.0f"),
    "tokens": ("tokens", ",.0f"),
    "parameters": ("parameters", ",.0f"),
    "trained_parameters": ("trained parameters", ",.0f"),
}
"""The title and the number format of each metric in a model card."""
_TITLES = {
    Kind.SFT: "Fine-tuning",
    Kind.REWARD: "A reward model",
    Kind.DPO: "Direct preference optimization",
    Kind.RLHF: "A policy",
}
_JUDGED_BY = {
    Kind.SFT: "eval_loss",
    Kind.REWARD: "eval_accuracy",
    Kind.DPO: "eval_rewards_accuracies",
    Kind.RLHF: "eval_reward",
}
_COUNTS = {"examples": "examples", "held_out": "held out", "skipped": "left out", "truncated": "cut off"}


def _write(kind: Kind, folder: Path) -> Path:
    study, result, records = read_run(folder), read_result(folder) or {}, RunFolder(folder).metrics
    _, items, _ = sections.prepare(study)
    status, reason = str(result.get("status") or "unfinished"), str(result.get("reason") or "")
    counts = [f"{result[name]:,} {noun}" for name, noun in _COUNTS.items() if isinstance(result.get(name), int)]
    counts += [f"loss on {result['loss_on']}"] if result.get("loss_on") else []
    origin = f"from {result['from']}" if result.get("from") else ""
    body = chip(status) + (callouts([reason]) if reason else "") + _numbers(result)
    return write_page(
        folder,
        title=_headline(kind, records, result),
        facts=[
            f"{_TITLES[kind]} with {study.results['placement'].iloc[0]}",
            f"status: {status}",
            origin,
            *counts,
            *sections.facts(study),
        ],
        command=study.header.get("command"),
        sections=[
            Section("Result", "Result", body),
            Section("Curves", "Over the steps", "".join(_curve(*curve, records) for curve in CURVES)),
            Section("Kept", "How much the model has forgotten", sections.forgetting(items)),
            Section("Frontier", "Reward against KL", figure(_frontier(records), _FRONTIER)),
            *layers.sections(items),
            sections.diagrams(study, items),
            sections.settings(study),
        ],
    )


for _kind in _TITLES:
    report_of(_kind)(partial(_write, _kind))


def _headline(kind: Kind, records: Sequence[Json], result: Json) -> str:
    """Return the page's title, which gives the main metric's first and last value, and whether chance explains both."""
    name = _JUDGED_BY[kind]
    values = [record[name] for record in records if is_number(record.get(name))]
    if len(values) < 2:
        return _TITLES[kind]
    measure, form = MEASURES[name]
    if form.endswith("%"):
        form, measure = ".0%", f"{measure} ({result.get('held_out')} examples)"
    first, last = (f"{value:{form}}" for value in (values[0], values[-1]))
    if kind is Kind.DPO:  # the first policy is the initial model, so its accuracy is 0
        return f"{sentence(measure)} ended at {last}"
    if first == last:
        return f"{sentence(measure)} stayed at {last}"
    low, high = (result.get(name) for name in ("reward_gain_low", "reward_gain_high"))
    unclear = is_number(low) and is_number(high) and float(low) <= 0.0 <= float(high)
    chance = ", but the 95 % interval of the gain includes 0" if unclear else ""
    return f"{sentence(measure)} went from {first} to {last}{chance}"


def _numbers(result: Json) -> str:
    def shown(numbers: Json) -> str:
        written = {name: f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for name, value in numbers.items()}
        rows = [{"name": MEASURES.get(name, (name,))[0], "value": value} for name, value in written.items()]
        return table([text("name", "", "name"), text("value", "", "number")], rows, "trials") if rows else ""

    numbers = {name: v for name, v in result.items() if is_number(v) and not isinstance(v, bool)}
    unnamed = {name: value for name, value in numbers.items() if name not in MEASURES}
    named = {name: numbers[name] for name in MEASURES if name in numbers}
    return shown(named) + details("All numbers", shown(unnamed))


def _curve(title: str, trained: str, held_out: str, quantity: str, caption: str, records: Sequence[Json]) -> str:
    lines = []
    for name, legend, color in ((trained, "training", PALETTE[0]), (held_out, "held out", PALETTE[1])):
        points = [(record["step"], float(record[name])) for record in records if is_number(record.get(name))]
        if points:
            x, y = zip(*points, strict=True)
            lines.append(Line(x=x, y=y, color=color, name=legend, legend=True, markers=name == held_out, width=1.4))
    if sum(len(line.x) for line in lines) < 2:
        return ""
    alone = title == "Loss" and len(lines) == 1 and not lines[0].markers
    return figure(charts.against("step", quantity, lines), _LOSS_ALONE if alone else caption, title)


def _frontier(records: Sequence[Json]) -> Figure | None:
    rows = [record for record in records if is_number(record.get("eval_kl")) and is_number(record.get("eval_reward"))]
    if len(rows) < 2:
        return None
    chart = Figure()
    chart.add_scatter(
        x=[row["eval_kl"] for row in rows],
        y=[row["eval_reward"] for row in rows],
        mode="lines+markers+text",
        text=[str(row["step"]) for row in rows],
        textposition="top center",
        line={"color": PALETTE[0], "width": 1.4},
        hovertemplate="KL %{x:.3g}, reward %{y:.3g}<extra>step %{text}</extra>",
        showlegend=False,
    )
    return polish(chart.update_xaxes(title="KL (nats per answer)").update_yaxes(title="held-out reward"), 380)
