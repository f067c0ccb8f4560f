"""What happened, in two or three plain sentences computed from the numbers, and what a reader should beware of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from lamina.reports.ranking import severity
from lamina.reports.records import Frame, rows_of

Tables = Mapping[str, Frame]
_LEVEL = 1.5  # a factor below which two layers' values count as the same size


def sentences(summary: Frame, *, gradients: Tables | None = None, variances: Tables | None = None) -> list[str]:
    """Say who leads and by how much, who got nowhere, and what gradients and variances by layer show of the reason.

    ``summary`` is that of ``summarize``; ``gradients`` and ``variances`` are by placement, a row a block (counted from
    1; 0 is the embedding) and a column a logged step. Plain text: whoever puts it into a page escapes it.
    """
    said = [_lead(summary), _trouble(summary), _why(summary, gradients or {}, variances or {})]
    return [sentence for sentence in said if sentence]


def notices(summary: Frame, results: Frame) -> list[str]:
    """What a reader must know before trusting the ranking: one learning rate, one seed, trials cut short."""
    said = []
    if len(summary) > 1 and results["learning_rate"].nunique() < 2:
        said.append(
            "One learning rate: placements differ in the rate that suits them, so a comparison at a single rate is "
            "confounded. Several rates, each placement ranked at its best one: --learning-rates 1e-3,3e-3,1e-2"
        )
    if len(summary) > 1 and summary["seeds"].max() < 2:
        said.append("One seed: small differences may be noise, and nothing here tells how small. --seeds 0,1,2 does.")
    edges = _at_an_edge(summary, results)
    if edges:
        said.append(
            f"For {_and(edges)} the best learning rate is the lowest or the highest one tried: a wider range may move "
            "the ranking."
        )
    cut = int((results["status"] == "interrupted").sum())
    if cut:
        said.append(f"{cut} trial{'s were' if cut > 1 else ' was'} interrupted: --resume goes on with the study.")
    return said


def _lead(summary: Frame) -> str:
    done = [row for row in rows_of(summary) if row["finished"]]
    if not done:
        return f"No trial finished, so there is nothing to rank: {_and(_statuses(summary))}."
    first = done[0]
    said = f"{first['placement']} "
    if len(summary) == 1:
        return said + f"ended at an eval loss of {_loss(first)}, a perplexity of {first['perplexity']:.3g}."
    said += f"has the lowest eval loss, {_loss(first)}"
    if len(done) == 1:
        return f"{said}; it is the only one of {len(summary)} placements that finished."
    others = [done[1]]
    baseline = [row for row in done[2:] if row["placement"] == "pre_ln"]
    others += baseline or done[2:][-1:]
    gaps = [f"{o['eval_loss'] - first['eval_loss']:.3f} below {o['placement']} ({_loss(o)})" for o in others]
    return f"{said}, {_and(gaps)}{_noise(first, others[0])}."


def _noise(first: dict[str, Any], second: dict[str, Any]) -> str:
    gap = second["eval_loss"] - first["eval_loss"]
    spread = math.hypot(first["eval_loss_std"], second["eval_loss_std"])
    if not math.isfinite(spread):
        return ""
    seeds = int(min(first["finished"], second["finished"]))
    if gap <= spread:
        return f"; the gap to {second['placement']} is within the seeds' spread ({spread:.3f}, {seeds} seeds)"
    return f"; the gap to {second['placement']} is {gap / spread:.1f} times the seeds' spread ({seeds} seeds)"


def _trouble(summary: Frame) -> str:
    said = []
    for row in rows_of(summary[summary["finished"] == 0]):
        if row["status"] == "stuck" and math.isfinite(row["eval_loss"]):
            entropy = row["unigram_entropy"]
            known = f", {entropy:.2f} nats" if math.isfinite(entropy) else ""
            said.append(
                f"{row['placement']} is stuck: at {row['eval_loss']:.2f} its eval loss is no better than the unigram "
                f"entropy{known}, so it has learned how often each token occurs and next to nothing of the context"
            )
        else:
            reason = f" ({shorten(row['reason'], 160, placeholder=' …').rstrip('.')})" if row["reason"].strip() else ""
            verb = {"diverged": "diverged", "failed": "failed", "interrupted": "was interrupted", "stuck": "is stuck"}
            said.append(f"{row['placement']} {verb.get(row['status'], 'did not finish')}{reason}")
    partly = summary[(summary["finished"] > 0) & (summary["finished"] < summary["seeds"])]
    said += [f"{row['placement']}: {row['status_text']}" for row in rows_of(partly)]
    return "; ".join(said) + "." if said and summary["finished"].any() else ""


def _why(summary: Frame, gradients: Tables, variances: Tables) -> str:
    known = [p for p in summary["placement"] if _ratio(gradients.get(p), 0) or _ratio(gradients.get(p), -1)]
    said = []
    if len(known) == 1:
        said.append(_evenness(known[0], gradients[known[0]], -1))
    elif known:
        best, worst = known[0], _worst(summary, known)
        column = max((0, -1), key=lambda c: abs(math.log(_ratio(gradients[worst], c) or 1)))
        here, there = _ratio(gradients[worst], column), _ratio(gradients[best], column)
        if here and there and abs(math.log(here)) > abs(math.log(there)) and _size(here) > _LEVEL:
            said.append(
                f"Why, by layer: {_evenness(worst, gradients[worst], column)}, while in {best} the two "
                + (f"differ {_times(_size(there))}" if _size(there) > _LEVEL else "are of one size")
            )
        else:
            said.append(
                f"Gradients by layer do not set the first and the last of the ranking apart: {worst} has them no less "
                f"even than {best}"
            )
    growth = {p: g for p in summary["placement"] if (g := _ratio(variances.get(p), -1))}
    if growth:
        most, least = max(growth, key=lambda p: growth[p]), next(iter(growth))
        if growth[most] > 2:
            by = _times(growth[most])
            part = f"by the end the hidden variance grows {by} from the first block to the last in {most}"
            even = (
                f" and {'stays level' if _size(growth[least]) < _LEVEL else f'changes {_times(_size(growth[least]))}'}"
            )
            said.append(part + (f"{even} in {least}" if least != most else ""))
        else:
            said.append("the hidden variance stays of one size from the first block to the last")
    return _capital("; ".join(said)) + "." if said else ""


def _worst(summary: Frame, known: list[str]) -> str:
    """The stuck placement where there is one (a diverged one's gradients only say that it diverged), else the last."""
    rows = [row for row in rows_of(summary) if row["placement"] in known]
    stuck = [row for row in rows if row["status"] == "stuck" and not row["finished"]]
    return (stuck or sorted(rows, key=lambda row: (severity(row["status"]), row["rank"]))[-1:])[0]["placement"]


def _evenness(placement: str, table: Frame, column: int) -> str:
    """One placement's first and last block's gradient norm at the first (0) or last (-1) logged step."""
    ratio, column = _ratio(table, column) or 1.0, column if _ratio(table, column) else 0
    blocks, step = table.loc[1:], table.columns[column]
    low, high = ("first", "last") if ratio >= 1 else ("last", "first")
    small, large = sorted((blocks[step].iloc[0], blocks[step].iloc[-1]))
    if _size(ratio) <= _LEVEL:
        return f"in {placement} the first and the last block's gradient norms are of one size at step {step:.0f}"
    return (
        f"at step {step:.0f} the {high} block's gradient norm in {placement} is {_times(_size(ratio), 'as large')} as "
        f"the {low} block's ({_short(large)} against {_short(small)})"
    )


def _ratio(table: Frame | None, column: int) -> float | None:
    """Last block's value over the first's at a logged step, by position; None where it has no meaning."""
    if table is None or table.empty or len(table.loc[1:]) < 2:
        return None
    values = table.loc[1:].iloc[:, column]
    first, last = float(values.iloc[0]), float(values.iloc[-1])
    if not (math.isfinite(first) and math.isfinite(last) and first > 0 and last > 0):
        return None
    return last / first


def _size(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def _times(factor: float, comparison: str = "") -> str:
    number = f"{factor:.1f}" if factor < 10 else f"{float(f'{factor:.2g}'):,.0f}" if factor < 1e6 else f"{factor:.0e}"
    return f"{number} times {comparison}".strip() if comparison else f"{number}-fold"


def _short(value: float) -> str:
    rounded = float(f"{value:.2g}")
    if rounded >= 10:
        return f"{rounded:,.0f}" if rounded < 1e6 else f"{rounded:.0e}"
    return f"{rounded:.5f}".rstrip("0").rstrip(".") if rounded >= 1e-4 else f"{rounded:.0e}"


def _loss(row: dict[str, Any]) -> str:
    std = row["eval_loss_std"]
    return f"{row['eval_loss']:.3f}" + (f" ± {std:.3f}" if math.isfinite(std) else "")


def _statuses(summary: Frame) -> list[str]:
    return [f"{row['placement']} {row['status_text']}" for row in rows_of(summary)]


def _at_an_edge(summary: Frame, results: Frame) -> list[str]:
    if results["learning_rate"].nunique() < 2:
        return []
    found = []
    for row in rows_of(summary[summary["finished"] > 0]):
        rates = results.loc[results["placement"] == row["placement"], "learning_rate"].dropna()
        if rates.nunique() > 1 and row["learning_rate"] in (rates.min(), rates.max()):
            found.append(str(row["placement"]))
    return found


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _capital(text: str) -> str:
    return (
        text if text[:1].isupper() or not text.startswith(("in ", "at ", "by ", "the ")) else text[0].upper() + text[1:]
    )
