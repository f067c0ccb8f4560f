"""Write a few plain sentences about a run or a study from its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten

from lamina.core.json_types import Json
from lamina.reports.ranking import is_above_bigram, is_ranked, listed
from lamina.reports.records import Frame, is_number, rows_of

Tables = Mapping[str, Frame]
_LEVEL = 1.5  # a factor below which two layers' values count as the same size
_MARGIN = 0.1  # nats that still count as at the unigram entropy


@dataclass(frozen=True)
class Guess:
    """The words for a baseline model that knows only how often each target occurs."""

    name: str  # the name of the baseline's loss
    target: str  # the predicted item, such as a token
    source: str  # the input of the prediction
    unit: str  # the loss's unit

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Guess:
        """Return the words for a run's kind of data. Only runs on images have a top-5 accuracy."""
        if is_number(row.get("top5_accuracy")):
            return _OF_IMAGES
        loss, bits = row.get("eval_loss"), row.get("bits_per_byte")
        # if each token is a byte, the text has a few more tokens than bytes, because of the end-of-text tokens
        is_bytes = is_number(loss) and is_number(bits) and loss > 0 and 0.9999 < bits * math.log(2) / loss < 1.01
        return _OF_BYTES if is_bytes else _OF_TEXT

    @classmethod
    def of_any(cls, results: Frame) -> Guess:
        """Return the words for all runs in a table. A failed run may lack the numbers, so Lamina reads all rows."""
        words = {cls.of(row) for row in rows_of(results) if is_number(row.get("eval_loss"))}
        return _OF_IMAGES if _OF_IMAGES in words else _OF_BYTES if words == {_OF_BYTES} else _OF_TEXT


_OF_TEXT = Guess("unigram entropy", "token", "context", "nats per token")
_OF_BYTES = Guess("unigram entropy", "byte", "context", "nats per byte")
_OF_IMAGES = Guess("entropy of the classes", "class", "images", "nats per image")


def sentences(summary: Frame) -> list[str]:
    """Return sentences about the best placement, the gaps and the failures. A page must escape these sentences."""
    return [sentence for sentence in (_lead(summary), _trouble(summary)) if sentence]


def headline(summary: Frame) -> str:
    """Return the finding in one line: the best placement, or how the only run ended."""
    rows = rows_of(summary)
    ended = [row for row in rows if row["finished"]]
    if len(rows) == 1:
        row = rows[0]
        if not ended:
            return f"{row['placement']} {_STATES.get(row['status'], 'did not finish')}"
        return f"{row['placement']} ended at an eval loss of {row['eval_loss']:.3f}"
    ranked = [row for row in ended if is_ranked(row)]
    if not ranked:
        return f"Lamina cannot name the best of {len(rows)} placements"
    if len(ranked) == 1 < len(ended):
        return f"Of {len(rows)} placements, only {ranked[0]['placement']} beats a bigram table"
    return f"{ranked[0]['placement']} has the lowest eval loss of {len(rows)} placements"


_STATES = {
    "short": "ran too short to tell",
    "stuck": "is stuck",
    "diverged": "diverged",
    "failed": "failed",
    "interrupted": "was interrupted",
}


def _lead(summary: Frame) -> str:
    ended = [row for row in rows_of(summary) if row["finished"]]
    if not ended:
        return _nobody(rows_of(summary))
    first = ended[0]
    lead = f"{first['placement']} "
    if len(summary) == 1:
        perplexity = f", a perplexity of {first['perplexity']:.3g}" if math.isfinite(first["perplexity"]) else ""
        return lead + f"ended at an eval loss of {_loss(first)}{perplexity}."
    finished = [row for row in ended if is_ranked(row)]
    if not finished:
        return ""  # the next sentence says that all are above a bigram table
    lead += f"has the lowest eval loss, {_loss(first)}"
    if len(finished) == 1:
        return f"{lead}. No other placement {'has beaten a bigram table' if len(ended) > 1 else 'finished'}."
    baseline = [row for row in finished[2:] if row["placement"] == "pre_ln"]
    rivals = [finished[1], *(baseline or finished[2:][-1:])]
    return f"{lead}, {listed([_gap(first, other) for other in rivals])}{_noise(first, rivals[0])}."


def _nobody(rows: list[Json]) -> str:
    """Return the first sentence about a study in which no placement finished."""
    statuses = {row["status"] for row in rows}
    if len(rows) == 1:
        return ""  # its status is all there is to say
    if statuses == {"failed"}:
        return f"All {len(rows)} placements failed, so there is nothing to compare."
    if statuses == {"short"}:
        after = max(row["steps"] for row in rows)
        steps = f"After {after:.0f} steps the" if math.isfinite(after) else "The"
        return (
            f"{steps} losses of all {len(rows)} placements still fall, so the runs are too short to tell which "
            f"placement is best, or whether one is stuck. Raise --steps."
        )
    return f"None of {len(rows)} placements finished, so Lamina cannot name the best placement."


def _gap(first: Json, other: Json) -> str:
    gap = other["eval_loss"] - first["eval_loss"]
    better = f"{other['placement']} ({_loss(other)})"
    return f"{gap:.3f} below {better}" if gap >= 0.0005 else f"level with {better}"


def _noise(first: Json, second: Json) -> str:
    gap = second["eval_loss"] - first["eval_loss"]
    spread = math.hypot(first["eval_loss_std"], second["eval_loss_std"])
    if not math.isfinite(spread) or spread == 0:
        return ""
    seeds, what = int(min(first["finished"], second["finished"])), "the standard deviation over seeds"
    if gap <= spread:
        return f"; the gap to {second['placement']} is within {what} ({spread:.3f}, {seeds} seeds)"
    return f"; the gap to {second['placement']} is {gap / spread:.1f} times {what} ({seeds} seeds)"


def _trouble(summary: Frame) -> str:
    groups: dict[str, list[Json]] = {}
    for row in rows_of(summary[summary["finished"] == 0]):
        groups.setdefault(_end(row), []).append(row)
    texts = [*(_together(end, rows) for end, rows in groups.items()), *_above_bigram(summary)]
    partly = summary[(summary["finished"] > 0) & (summary["finished"] < summary["seeds"])]
    texts += [f"{row['placement']}: {row['status_text']}" for row in rows_of(partly)]
    return ". ".join(texts) + "." if texts else ""


def _above_bigram(summary: Frame) -> list[str]:
    """Name the placements that finished above the loss of a bigram table."""
    rows = [row for row in rows_of(summary) if row["finished"] and is_above_bigram(row)]
    if not rows:
        return []
    names, losses = listed([row["placement"] for row in rows]), listed([_loss(row) for row in rows])
    tables = listed(list(dict.fromkeys(f"{row['bigram_entropy']:.3f}" for row in rows)))
    has, it = ("has", "Its loss says") if len(rows) == 1 else ("have", "Their losses say")
    return [
        f"{names} {has} not beaten a bigram table of the training text ({losses} against {tables} nats per token). "
        f"{it} nothing about depth" + (", so Lamina gives no rank" if len(summary) > 1 else "")
    ]


def _end(row: Json) -> str:
    """Describe the end of a placement that did not finish. Placements with the same end share a sentence."""
    entropy, loss, guess = row["unigram_entropy"], row["eval_loss"], Guess.of(row)
    nats = f" of {entropy:.2f} nats" if math.isfinite(entropy) else ""
    if row["status"] == "short":
        return f"ran too short to tell: {{at}} not clearly below the {guess.name}{nats} yet, but still {{fall}}"
    if row["status"] == "stuck" and loss > entropy + _MARGIN:
        return f"{{is}} stuck: {{at}} above the {guess.name}{nats} and hardly {{fall}} any more"
    if row["status"] == "stuck" and math.isfinite(loss):
        close = "hardly better than" if loss < entropy else "no better than"
        return (
            f"{{is}} stuck: {{at}} {close} the {guess.name}{nats}, so {{it}} learned how often each "
            f"{guess.target} occurs and almost nothing else about the {guess.source}"
        )
    reason = f" ({shorten(row['reason'], 160, placeholder=' …').rstrip('.')})" if row["reason"].strip() else ""
    verb = {"diverged": "diverged", "failed": "failed", "interrupted": "{was} interrupted", "stuck": "{is} stuck"}
    return verb.get(row["status"], "did not finish") + reason.replace("{", "{{").replace("}", "}}")


def _together(end: str, rows: list[Json]) -> str:
    """Complete a sentence about one placement or several placements."""
    names, losses = listed([row["placement"] for row in rows]), listed([f"{row['eval_loss']:.2f}" for row in rows])
    words = {"is": "are", "was": "were", "it": "they have", "fall": "fall", "at": f"their eval losses of {losses} are"}
    if len(rows) == 1:
        words = {"is": "is", "was": "was", "it": "it has", "fall": "falls", "at": f"its eval loss of {losses} is"}
    return f"{names} {end.format(**words)}"


def differences(summary: Frame, gradients: Tables, variances: Tables) -> str:
    """Describe how the placements differ by layer. These differences need not be the reason for the ranking."""
    rows = [row for row in rows_of(summary) if row["finished"] or row["status"] in ("stuck", "diverged")]
    known = [row for row in rows if any(_ratio(gradients.get(row["placement"]), at) for at in (0, -1))]
    texts = []
    if len(known) == 1 or (known and not known[0]["finished"]):
        name = _worst(known)
        texts.append(_evenness(name, gradients[name], -1))
    elif known:
        best, worst = known[0]["placement"], _worst(known)
        column = max((0, -1), key=lambda c: abs(math.log(_ratio(gradients[worst], c) or 1)))
        worst_ratio, best_ratio = _ratio(gradients[worst], column), _ratio(gradients[best], column)
        less = worst_ratio and best_ratio and abs(math.log(worst_ratio)) > abs(math.log(best_ratio))
        if less and best_ratio and worst_ratio and _size(worst_ratio) > _LEVEL:
            texts.append(
                f"{_evenness(worst, gradients[worst], column)}, while in {best} the two norms "
                + (f"differ {_times(_size(best_ratio))}" if _size(best_ratio) > _LEVEL else "are about equal")
            )
        else:
            even = f"nearly even in {worst}, too" if less else f"at least as even in {worst} as in {best}"
            texts.append(f"Gradients by layer do not explain the ranking: across layers, the gradients are {even}")
    growth = {p: g for p in summary["placement"] if (g := _ratio(variances.get(p), -1))}
    if growth:
        first = next(iter(growth))
        most, least = (end(growth, key=growth.__getitem__) for end in (max, min))
        if growth[most] > 2:
            grows = f"grows {_times(growth[most])} from the first block to the last in {most}"
            even = "stays level" if _size(growth[first]) < _LEVEL else f"changes {_times(_size(growth[first]))}"
            grows += f" and {even} in {first}" if first != most else ""
            texts.append(f"by the end the hidden states' variance {grows}")
        elif growth[least] < 1 / 2:
            by = _times(1 / growth[least])
            texts.append(
                f"by the end the hidden states' variance falls {by} from the first block to the last in {least}"
            )
        else:
            texts.append("the hidden states' variance stays about the same from the first block to the last")
    starts = ("in ", "at ", "by ", "the ")  # not a placement's name
    return " ".join(f"{text[0].upper() + text[1:] if text.startswith(starts) else text}." for text in texts)


def _worst(known: list[Json]) -> str:
    """Return the last stuck placement. If no placement is stuck, return the last placement."""
    stuck = [row for row in known if row["status"] == "stuck" and not row["finished"]]
    return (stuck or known)[-1]["placement"]


def _evenness(placement: str, table: Frame, column: int) -> str:
    """Compare a placement's gradient norms in the first and last block, at the first (0) or last (-1) logged step."""
    ratio, column = _ratio(table, column) or 1.0, column if _ratio(table, column) else 0
    blocks, step = table.loc[0:], table.columns[column]
    low, high = ("first", "last") if ratio >= 1 else ("last", "first")
    small, large = sorted((blocks[step].iloc[0], blocks[step].iloc[-1]))
    if _size(ratio) <= _LEVEL:
        return f"in {placement} the first and the last block's gradient norms are about equal at step {step:.0f}"
    return (
        f"at step {step:.0f} the {high} block's gradient norm in {placement} is {_times(_size(ratio), 'as large')} as "
        f"the {low} block's ({_short(large)} against {_short(small)})"
    )


def _ratio(table: Frame | None, column: int) -> float | None:
    """Return the last block's value divided by the first block's value, or None if the ratio is undefined."""
    if table is None or len(table.loc[0:]) < 2:
        return None
    first, last = (float(table.loc[0:].iloc[end, column]) for end in (0, -1))
    return last / first if is_number(first) and is_number(last) and first > 0 and last > 0 else None


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


def _loss(row: Json) -> str:
    """Return a placement's mean loss and spread as text, with the number of finished seeds if not all finished."""
    std, part = row["eval_loss_std"], 0 < row["finished"] < row["seeds"]
    spread = f" ± {std:.3f}" if math.isfinite(std) else ""
    return f"{row['eval_loss']:.3f}{spread}" + (f" over {row['finished']} of {row['seeds']} seeds" if part else "")
