"""Verdicts as sentences and rows in Markdown. Every text of a claim is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from lamina.core.json_types import Json
from lamina.lab.papers.judging.findings import FAILED, IN_WORDS, Verdict, in_words
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


_PAST = "not past the loss of a table of bigrams (in brackets)"
_RECORDED = re.compile(rf"^({'|'.join(map(re.escape, IN_WORDS))}): ")


def worded(text: object) -> str:
    """Escape a record's text, with the verdict at its beginning and the note on bigrams in the words of the pages."""
    return plain(in_words(text).replace(_PAST, "no lower loss than a bigram table (its loss in parentheses)"))


_CLAIMED = (  # the records' words, and the pages'
    (r"\bturn(s?) the stream", r"change\1 the hidden states' direction"),
    (r"(?<!learning )\brate", "learning rate"),
    (r"(?<!residual )\bstream", "residual stream"),
    (r"\bat (an|that) initializer", r"with \1 initializer"),
    (r"\b([Aa])t init\b", r"\1t initialization"),
)


def claimed(one: Json) -> str:
    """Return a claim in the words of the pages, escaped."""
    text = str(one.get("says") or one["claim"])
    for recorded, shown in _CLAIMED:
        text = re.sub(recorded, shown, text)
    return plain(text)


def verdict(one: Json) -> str:
    """The verdict of a claim in the words of the pages."""
    return in_words(one["verdict"])


def is_whole(one: Json) -> bool:
    """Whether a verdict is about a study's main claim, not about a part of it."""
    return "/" not in str(one["claim"])


def counts(verdicts: Sequence[Json]) -> str:
    """Count the main claims by verdict. Each counts once, at the scale where it was decided."""
    whole = best(filter(is_whole, verdicts))
    by_word: dict[str, int] = {}
    for word in IN_WORDS.values():
        by_word[word] = sum(verdict(one) == word for one in whole)
    words = [f"**{count}** {word}" for word, count in by_word.items() if count]
    return f"Verdicts on {len(whole)} main claims: {listed(words)}." if whole else "There is no claim yet."


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


def command(study: str, scale: str) -> str:
    """How to run a study again."""
    return f"lamina study run {study}" + ("" if scale == "cpu" else f" --scale {scale}")


def ours(one: Json) -> str:
    """Say what we found, or how to find it: a line per part, the deciding ones first."""
    if one["verdict"] == Verdict.NOT_RUN:
        return code(command(one["study"], one["scale"]))
    if one["verdict"] == Verdict.NEEDS_SCALE:
        return worded(one.get("note") or NONE)
    return "<br>".join(worded(part) for part in one.get("parts") or [one.get("ours") or NONE])


def in_short(one: Json) -> str:
    """Say what we found in one line: the values that decided, or why they cannot."""
    note = str(one.get("note") or NONE)
    if one["verdict"] == Verdict.NEEDS_SCALE:
        return "some settings did not beat a bigram table" if "bigrams" in note else worded(note)
    if one["verdict"] == Verdict.NOT_RUN:
        return ours(one)
    parts = one.get("parts") or [one.get("ours") or NONE]
    first = _RECORDED.sub("", str(parts[0]))
    more = f" (1 of {len(parts)} comparisons)" if len(parts) > 1 else ""
    return plain(re.split(r": difference | \(95 %", first)[0]) + more


def row(one: Json) -> list[str]:
    """The cells of a verdict on its study's page."""
    interval = one.get("interval")
    within = f" [{number(interval[0], '.3g')}, {number(interval[1], '.3g')}]" if interval else ""
    margin = number(one.get("margin"), ".3g")
    p = one.get("p_holm", one.get("p"))
    note = "" if one["verdict"] in (Verdict.NOT_RUN, Verdict.NEEDS_SCALE) else worded(one.get("note") or "")
    return [
        f"{claimed(one)} ({code(one['claim'])})",
        f"**{verdict(one)}**",
        ours(one),
        plain(one.get("paper") or NONE),
        margin + (within.replace("[", "&#91;").replace("]", "&#93;") if margin != NONE else ""),
        number(p, ".2g"),
        str(one.get("seeds") or NONE),
        note or NONE,
    ]


def findings(verdicts: Iterable[Json]) -> dict[str, str]:
    """Return a sentence for each claim that was supported or refuted, by the claim's name."""
    sentences = {}
    for one in (one for one in best(verdicts) if one["verdict"] in {Verdict.HOLDS, *FAILED} and one["ours"]):
        verb = "supports" if one["verdict"] == Verdict.HOLDS else "does not support"
        models = "small models" if one["scale"] == "cpu" else f"models of scale {one['scale']}"
        sentences[str(one["claim"])] = f'On {models}, Lamina\'s study {one["claim"]} {verb}: "{one["says"]}".'
    return sentences
