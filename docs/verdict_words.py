"""Verdicts as sentences and rows in Markdown. Every text of a claim is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from lamina.core.json_types import Json
from lamina.lab.papers.judging.findings import FAILED, Verdict
from lamina.reports.ranking import listed

NONE = "–"
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "[": "&#91;", "]": "&#93;", "`": "&#96;"}


def plain(text: object) -> str:
    """Escape a text so that Markdown shows its very characters, on one line."""
    line = " ".join(str(text).split())
    line = re.sub(r"[&<>|\[\]`]", lambda found: _ENTITIES[found[0]], line)
    marks = r"\*|(?<!\w)_|_(?!\w)|^[#+-](?= )|^\d+(?=\. )"
    return re.sub(marks, lambda found: f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}", line)


def code(text: object) -> str:
    """A text as code."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39))}`"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells in Markdown. A heading that ends in ``:`` has its column set to the right."""
    rule = ["---:" if heading.endswith(":") else "---" for heading in headings]
    lines = [[heading.removesuffix(":") for heading in headings], rule, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: object, form: str) -> str:
    """A number in a format; a dash where there is none."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return format(value, form).replace("-", "−") if known else NONE


WORDS = {
    Verdict.HOLDS: ("holds", "hold", "Held", "our trials show it"),
    Verdict.HOLDS_AT_ISO_LOSS: (
        *("holds at iso-loss", "hold at iso-loss", "Held at equal loss, too"),
        "our trials show it, and at equal loss of pretraining, too",
    ),
    Verdict.EXPLAINED: (
        *("is explained by the loss", "are explained by the loss", "Explained by the loss"),
        "our trials show it, but at equal loss of pretraining it is gone",
    ),
    Verdict.REVERSED: ("is reversed", "are reversed", "The opposite", "our trials show the opposite, at this scale"),
    Verdict.EXCLUDED: (
        *("is excluded", "are excluded", "Excluded"),
        "a difference as large as the smallest that counts is excluded, at this scale",
    ),
    Verdict.PART_FAILED: (
        *("has a part that failed", "have a part that failed", "Failed in a part"),
        "our trials show that a part of it is false; each link has its own verdict",
    ),
    Verdict.FAILS: (
        *("fails", "fail", "Contradicted"),
        "a count of runs or a formula contradicts it, or a difference where it claims none, at this scale",
    ),
    Verdict.INCONCLUSIVE: (
        *("is inconclusive", "are inconclusive", "Not decided by these trials"),
        "the difference is inside the spread over seeds",
    ),
    Verdict.NEEDS_SCALE: (
        *("needs a larger scale", "need a larger scale", "Not decidable at this scale"),
        "this scale cannot decide it; the note says why",
    ),
    Verdict.NOT_RUN: (
        *("has not been run yet", "have not been run yet", "Not run yet"),
        "not all of its planned trials have been trained; the command is beside it",
    ),
}
"""Of each verdict: what one claim does, what several do, the head of their list, and what the verdict means."""


def counts(verdicts: Sequence[Json]) -> str:
    """Count the claims by verdict: first the claims of the studies, then with their parts.

    Each claim counts once, at the scale where it was decided.
    """
    whole = [one for one in verdicts if "/" not in str(one["claim"])]
    sentences = [f"Of {len(best(whole))} claims, {_numbers(best(whole))}."]
    if len(whole) < len(verdicts):
        sentences.append(f"Their parts counted by themselves, of {len(best(verdicts))} {_numbers(best(verdicts))}.")
    return " ".join(sentences) if verdicts else "There is no claim yet."


def _numbers(by_claim: Sequence[Json]) -> str:
    words = []
    for verdict, (one, several, *_) in WORDS.items():
        if number := sum(each["verdict"] == verdict for each in by_claim):
            words.append(f"**{number}** {one if number == 1 else several}")
    return listed(words)


def best(verdicts: Iterable[Json]) -> list[Json]:
    """Return one verdict per claim: from the largest scale that decided it, or else the most informative one."""
    undecided = [Verdict.NOT_RUN, Verdict.NEEDS_SCALE, Verdict.INCONCLUSIVE]
    order = [*undecided, *FAILED, Verdict.HOLDS, Verdict.EXPLAINED, Verdict.HOLDS_AT_ISO_LOSS]
    scales = ["cpu", "gpu", "paper"]

    def rank(one: Json) -> tuple[int, int]:
        known = min(order.index(one["verdict"]), order.index(FAILED[0])) if one["verdict"] in order else -1
        return known, scales.index(one["scale"]) if one["scale"] in scales else -1

    chosen: dict[str, Json] = {}
    for one in verdicts:
        name = str(one["claim"])
        if name not in chosen or rank(one) > rank(chosen[name]):
            chosen[name] = one
    return list(chosen.values())


def summary(verdicts: Sequence[Json]) -> str:
    """Summarize the claims, a sentence per verdict."""
    sentences = []
    for verdict, (_, _, head, _) in WORDS.items():
        said = [plain(one.get("says") or one["claim"]).rstrip(".") for one in verdicts if one["verdict"] == verdict]
        if said:
            sentences.append(f"**{head}:** {'; '.join(said)}.")
    return "\n\n".join(sentences)


def command(study: str, scale: str) -> str:
    """How to run a study again."""
    return f"lamina study run {study}" + ("" if scale == "cpu" else f" --scale {scale}")


def ours(one: Json, *, most: int | None = None) -> str:
    """Say what we found, or how to find it: a line per part, at most ``most``, the deciding ones first."""
    if one["verdict"] == Verdict.NOT_RUN:
        return code(command(one["study"], one["scale"]))
    if one["verdict"] == Verdict.NEEDS_SCALE:
        return plain(one.get("note") or NONE)
    parts = one.get("parts") or [one.get("ours") or NONE]
    shown = [plain(part) for part in parts[:most]]
    more = len(parts) - len(shown)
    return "<br>".join([*shown, *([f"and {more} more"] if more else [])])


def row(one: Json) -> list[str]:
    """The cells of a verdict on its study's page."""
    interval = one.get("interval")
    within = f" [{number(interval[0], '.3g')}, {number(interval[1], '.3g')}]" if interval else ""
    margin = number(one.get("margin"), ".3g")
    p = one.get("p_holm", one.get("p"))
    note = "" if one["verdict"] in (Verdict.NOT_RUN, Verdict.NEEDS_SCALE) else plain(one.get("note") or "")
    return [
        f"{plain(one.get('says') or '')} ({code(one['claim'])})",
        f"**{one['verdict']}**",
        ours(one),
        plain(one.get("paper") or NONE),
        margin + (within.replace("[", "&#91;").replace("]", "&#93;") if margin != NONE else ""),
        number(p, ".2g"),
        str(one.get("seeds") or NONE),
        note or NONE,
    ]


def findings(verdicts: Iterable[Json]) -> dict[str, str]:
    """Return a sentence for each claim that was decided, by the claim's name."""
    decided = {Verdict.HOLDS, *FAILED, Verdict.INCONCLUSIVE}
    sentences = {}
    for one in (one for one in best(verdicts) if one["verdict"] in decided and one["ours"]):
        number = f"; {one['ours']}" if len(one["parts"]) == 1 else ""  # the study's page has several
        verdict = one["verdict"] if one["verdict"] in ("holds", "fails") else f"is {one['verdict']}"
        verdict = "failed in a part" if one["verdict"] == Verdict.PART_FAILED else verdict
        sentences[str(one["claim"])] = f'"{one["says"]}" {verdict} at scale {one["scale"]} ({one["claim"]}{number})'
    return sentences
