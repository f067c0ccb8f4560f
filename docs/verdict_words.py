"""Verdicts as sentences and rows in Markdown. Every text of a claim is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from lamina.core.json_types import Json
from lamina.lab.papers.judging.findings import FAILED, IN_WORDS, Verdict, in_words
from lamina.reports.ranking import listed

NONE = "–"
_UNDECIDED = (Verdict.NOT_RUN, Verdict.NEEDS_SCALE, Verdict.INCONCLUSIVE)
_SOURCES = (  # a study's source, and its words on the page
    (r"^The ", "the "),
    (r"^Section", "the paper's Section"),
    (r"^Keel's summary", "a summary of the Keel paper"),
    (r"^KEEL's perplexity after", "the paper's perplexities after"),
    (r"^KEEL ", "the Keel paper, "),
)
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


def _bigrams(found: re.Match[str]) -> str:
    tables = re.findall(r" [\d.]+ \(([\d.]+)\)(?=, |$)", found[1])
    table = " to ".join(dict.fromkeys((min(tables), max(tables))))
    settings = "setting has a loss" if len(tables) == 1 else "settings have a loss"
    return f"{len(tables)} {settings} above the loss of a bigram table, which is {table} nats"


def _narrow_and_wide(found: re.Match[str]) -> str:
    ends = re.findall(r"([\d.e-]+): (\w+ and \w+)", found[1])
    parts = {end: listed([rate for rate, other in ends if other == end]) for _, end in ends}
    said = []
    for end, rates in parts.items():
        narrow, wide = end.split(" and ")
        said.append(f"at the learning rates {rates}, the narrow model {narrow} and the wide model {wide}")
    return ". ".join(text[:1].upper() + text[1:] for text in said)


_OLDER = (  # words of older records, and today's words for the same
    (r"^not past the loss of a table of bigrams \(in brackets\): (.*)", _bigrams),
    (r"(\d+ of \d+) stuck \(share that failed: 95 % ", r"\1 runs got stuck (95 % interval of the share that failed: "),
    (r"(\d+ of \d+) short \(too few steps to tell\)", r"\1 runs are too short to tell"),
    (r"^(.+?): (\d+ of \d+ runs (?:got|are|diverged))", r"in the setting \1, \2"),
    (
        r"^(.+) is not above chance: (\w+) from ([\d.]+ %) \(95 %\), chance ([\d.]+ %)",
        r"\2 is not clearly above chance (\4). The 95 % interval starts at: \1 (\3)",
    ),
    (
        r"^(.+): the policy has not moved: its reward's gain is from (\S+) \(95 %\)",
        r"in the setting \1, the reward has not clearly risen (the 95 % interval of the rise starts at \2)",
    ),
    (r"^(?:decided at|this claim needs) scale (\w+): ", r"only --scale \1 can decide this claim, because "),
    (
        r"no run of either diverges at its own best rate",
        "no run of either placement diverges at its best learning rate",
    ),
    (
        r"^a run that does not train keeps its variance for that reason alone",
        "the variance of a run that does not train stays the same with any placement",
    ),
    (r"^diverged: (\S+) (\d+), (\S+) (\d+) runs", r"\2 runs of \1 and \4 runs of \3 diverged"),
    (r"^fewer than 3 pairs of seeds", "the comparison has fewer than 3 pairs of runs"),
    (r"^fewer than 3 seeds with all of (.+)", r"fewer than 3 seeds have runs with all of these values: \1"),
    (
        r"^seeds were added after a look: p corrected over (.*?)( and \d+) looks, (\S+)",
        r"we added seeds after a judgment. Corrected for \1\2 judgments, p is \3",
    ),
    (
        r"^'(.+)' only before Holm's correction over (.+): p (\S+), corrected (\S+)",
        lambda found: (
            f'before Holm\'s correction for {found[2]}, the verdict is "{in_words(found[1])}". The correction raises p '
            f"from {found[3]} to {found[4]}"
        ),
    ),
    (r"( and \d+) looks", r"\1 judgments"),
    (
        r"^arms were tuned over (?:unequal|different) numbers of rates",
        "settings were tuned over different numbers of learning rates",
    ),
    (
        r"^its rates were chosen by seeds that it tests",
        "the learning rates were chosen on the seeds that the test compares",
    ),
    (
        r"^still falling at the end of the warm-up, so tolerates more",
        "the loss still falls at the highest learning rate that we tried, so the limit may be higher",
    ),
    (r"^no run that has learned: (\S+), (\S+)", r"no run of \1 and \2 learned more than token frequencies"),
    (r"runs that failed last", "failed runs ranked last"),
    (r" (\S+) against (\S+): off by at most (\S+ %)", r" \1, expected \2 (at most \3 off)"),
    (r"(?<=\d)%", " %"),
    (r"\bedr\b", "EDR"),
    (r"^the formula takes branches", "the formula assumes branches"),
    (r"^at the start they are smaller$", "before training, the branches are smaller than the skip"),
    (r"\bat (?:init|the start)\b", "before training"),
    (r"\bat end\b", "after training"),
    (r": (falling|rising) with tau\b", r" (\1, by Kendall's tau)"),
    (r"^(\d+ runs) here, (\d+) at gate A", r"\1 of this study and \2 of fused-keel-a"),
    (r"^(\S+) trains at \[(.+)\] rates by seed", r"the setting \1 trains at \2 learning rates (one number per seed)"),
    (r"\bat (\d+)\.0\b", r"at \1"),
    (r"(?<=\d)\.0(?=, | learning rates)", ""),
    (r"^narrow and wide at (.+)", _narrow_and_wide),
    (r"^best rate ", "the best learning rates are "),
    (r"^in them, ", "in these models, "),
    (r"^at a KL of", "the comparison is at a KL of"),
)


def in_todays_words(text: str) -> str:
    """Return a record's text in today's words, not escaped."""
    for recorded, said in _OLDER:
        text = re.sub(recorded, said, text)
    return text


def notes(one: Json) -> list[str]:
    """Return the notes of a verdict, escaped. Notes on several settings' chance are one note."""
    lines: dict[str, list[str]] = {}
    for note in map(in_todays_words, filter(None, str(one.get("note") or "").split("; "))):
        start, by_chance, settings = note.partition(". The 95 % interval starts at: ")
        lines.setdefault(start + by_chance, []).append(settings)
    return [plain(start + ", ".join(filter(None, settings))) for start, settings in lines.items()]


def claimed(one: Json) -> str:
    """Return a claim, escaped."""
    return plain(one.get("says") or one["claim"])


def in_paper(one: Json) -> str:
    """Return what the paper reports, escaped."""
    return plain(one.get("paper") or NONE)


def verdict(one: Json) -> str:
    """The verdict of a claim in the words of the pages."""
    return in_words(one["verdict"])


def is_whole(one: Json) -> bool:
    """Whether a verdict is about a study's main claim, not about a part of it."""
    return "/" not in str(one["claim"])


def is_on_top(one: Json) -> bool:
    """Whether the page's first tables have the claim: a main claim, or a part with a decision."""
    return is_whole(one) or one["verdict"] not in _UNDECIDED


def counts(verdicts: Sequence[Json]) -> list[str]:
    """Count the main claims by verdict, in a table. Each counts once, at the scale where it was decided."""
    words = [verdict(one) for one in best(filter(is_whole, verdicts))]
    counted = [[word, str(words.count(word))] for word in dict.fromkeys(IN_WORDS.values()) if word in words]
    return [table(["verdict", "main claims:"], counted)] if words else []


def sentence(note: str) -> str:
    """Write a note as a sentence: with a capital, unless it begins with a setting's name, and with a full stop."""
    note = re.sub(r"(?<![\w.])-(?=\d)", "−", note)
    first = note[:1] if re.match(r"\w*_|\w+=", note) else note[:1].upper()
    return f"{first}{note[1:]}{'' if note.endswith('.') else '.'}"


def source(text: str) -> str:
    """Say where the claims of a study come from, escaped."""
    parts = text.split("; ")
    for short, full in _SOURCES:
        parts = [re.sub(short, full, part) for part in parts]
    return plain(listed(parts))


def best(verdicts: Iterable[Json]) -> list[Json]:
    """Return one verdict per claim: from the largest scale that decided it, or else the most informative one."""
    order = [*_UNDECIDED, *FAILED, Verdict.HOLDS, Verdict.EXPLAINED, Verdict.HOLDS_AT_ISO_LOSS]
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


def findings(verdicts: Iterable[Json]) -> dict[str, str]:
    """Return a sentence for each claim that was supported or refuted, by the claim's name."""
    sentences = {}
    for one in (one for one in best(verdicts) if one["verdict"] in {Verdict.HOLDS, *FAILED} and one["ours"]):
        verb = "supports this claim" if one["verdict"] == Verdict.HOLDS else "does not support this claim"
        models = "small models" if one["scale"] == "cpu" else f"models of scale {one['scale']}"
        sentences[str(one["claim"])] = f'On {models}, Lamina\'s study {one["claim"]} {verb}: "{one["says"]}".'
    return sentences
