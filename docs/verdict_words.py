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


_RECORDED = re.compile(rf"^({'|'.join(map(re.escape, IN_WORDS))}): ")
_NOTED = (  # the words of records' notes and comparisons, and the pages'
    (r"not past the loss of a table of bigrams \(in brackets\)", "no lower loss than a bigram table (in parentheses)"),
    (r"(?:(?<=; )|^)([^;]+?): (\d+ of \d+) short \(too few steps to tell\)", r"\2 runs with \1 were too short to tell"),
    (
        r"(?:(?<=; )|^)([^;]+?): (\d+ of \d+) stuck \(share that failed: 95 % (\d+)% to (\d+)%\)",
        r"\2 runs with \1 got stuck (95 % interval of this share: \3 % to \4 %)",
    ),
    (r"share 95 % (\d+)% to (\d+)%", r"95 % interval of this share: \1 % to \2 %"),
    (r"score(_\w+)? from ([\d.]+) % \(95 %\), chance", r"the score's 95 % interval starts at \2 %, chance is"),
    (r"\(95 % (?=[-\d])", "(95 % interval "),
    (r"\barms were tuned over unequal numbers of rates", "settings were tuned over unequal numbers of learning rates"),
    (r"its rates were chosen by seeds that it tests", "the test uses seeds on which the learning rates were chosen"),
    (r"after a look: p corrected over", "after a first judgment: p corrected for"),
    (r"correction over", "correction for"),
    (r"(\d+) looks", r"\1 judgments"),
    (
        r"still falling at the end of the warm-up, so tolerates more",
        "the loss still fell at the end of the warm-up, so the setting tolerates a higher learning rate, in runs with",
    ),
    (r"no run that has learned", "no run has learned with"),
    (r"runs that failed last", "with failed runs ranked last"),
    (r"the formula takes branches", "the formula assumes branches"),
    (r"at the start they are smaller", "at the start the branches are smaller"),
    (r"\bedr\b", "effective dimension ratio"),
)


def _said(text: object, words: Sequence[tuple[str, str]]) -> str:
    shown = str(text)
    for recorded, said in words:
        shown = re.sub(recorded, said, shown)
    return shown


def worded(text: object) -> str:
    """Escape a record's text, with the verdict at its beginning and its notes in the words of the pages."""
    return plain(_said(in_words(text), _NOTED))


_REPORTED = (
    (
        r"Pre-LN passes it within 0.5B tokens, Peri-LN stays below",
        "Pre-LN exceeds 65504 within 0.5B tokens, Peri-LN does not",
    ),
)
_CLAIMED = (  # the records' words, and the pages'
    (r"\bturn(s?) the stream", r"change\1 the hidden states' direction"),
    (r"(?<!learning )\brate", "learning rate"),
    (r"(?<!residual )\bstream", "residual stream"),
    (r"\bat (an|that) initializer", r"with \1 initializer"),
    (r"\b([Aa])t init\b", r"\1t initialization"),
    (
        "One of FuseNorm, Keel, Mix-LN and Peri-LN has a lower loss than each of the others and Pre-LN",
        "A single best placement: one of FuseNorm, Keel, Mix-LN and Peri-LN has a lower loss than the other three, and "
        "also than Pre-LN",
    ),
    (
        r"In Pre-LN a token's gradient of the last down-projection is exactly \|\|h\|\| times the output's gradient",
        "In Pre-LN, one token's gradient of the last down-projection's weights has exactly ||h|| times the norm of the "
        "gradient at the projection's output (h: the projection's input)",
    ),
    (
        "cosine stays above 0.5 at all distances, FuseNorm's falls to a lower one",
        "cosine similarity stays above 0.5 at all distances between layers. FuseNorm's falls to a lower cosine",
    ),
    (r"^FuseNorm's are below Pre-LN's, more so in", "FuseNorm's condition numbers are below Pre-LN's, and more so in"),
    (
        r"^It is flatter than Pre-LN's at the head",
        "FuseNorm's spectrum of the embedding is flatter than Pre-LN's at its head",
    ),
    (
        r"^Mix-LN's head is flatter than Pre-LN's as FuseNorm's is, but its tail",
        "The spectrum's head is flatter with Mix-LN and with FuseNorm than with Pre-LN, but Mix-LN's tail",
    ),
    (
        r"^FuseNorm's curve falls further than Pre-LN's, and nearly straight",
        "FuseNorm's cosine similarity falls further with distance than Pre-LN's, and along a nearly straight line",
    ),
    (r"farthest blocks have a cosine of", "farthest blocks have a cosine similarity of"),
    (r"^With and without width scaling FuseNorm is level", "FuseNorm has the same loss with width scaling and without"),
    (
        r"and one that trains there trains here",
        "and a learning rate that trains the narrow model trains the wide model",
    ),
    (r"fails on the narrow model fails on the wide one", "fails on the narrow model fails on the wide model"),
    (r"with the plain one they do not", "with the plain initializer they do not"),
    (r"with the scaled one it trains with all three", "with the scaled initializer it trains with all three depths"),
    (
        r"^With 48 blocks it collapses with the plain initializer and trains with the scaled one",
        "With 48 blocks, FuseNorm collapses with the plain initializer and trains with the scaled initializer",
    ),
    (r"and not with the scaled one\b", "but not with the scaled initializer"),
    (
        r"stay below Eq 19, and below the chain rule behind it",
        "stay below the bound of Eq 19, and below the chain rule's bound",
    ),
    (r"above it with the scaled one\b", "above Pre-LN's with the scaled initializer"),
    (r"^In ViT-Tiny the two are level", "In ViT-Tiny, Mix-LN and Pre-LN have the same accuracy"),
    (
        r"^Mix-LN stays below Pre-LN at each of the three",
        "With each of the three initializers, Mix-LN's loss is below Pre-LN's",
    ),
    (
        r"^Scaled Embed on top of it raises the loss of both",
        "Scaled Embed, added to Scaled Initialization, raises the loss of Pre-LN and of Mix-LN",
    ),
    (
        r"^It does so in Post-LN, where its inverse is multiplied over the layers",
        "In Post-LN, the standard deviation at the norms' inputs grows above 1 (the layers "
        "multiply the gradient by its inverse)",
    ),
    (
        r"^A quarter beats a sixth and a third",
        "A quarter of the layers as Post-LN gives a lower loss than a sixth or a third",
    ),
    (r"^(Half of the layers as Post-LN) is worse than none", r"\1 give a higher loss than none"),
    (r"than dropping those at the other end", "than dropping layers at the model's other end"),
    (
        r"^It holds with shorter texts, a longer warm-up and another budget too",
        "Peri-LN's loss stays at most Pre-LN's with shorter texts, a longer warm-up and another budget",
    ),
    (
        r"^It is the warm-up's length in steps: a longer one saves small budgets, and a shorter one loses large ones",
        "The warm-up's length in steps decides: a longer warm-up saves runs with small budgets, "
        "and a shorter warm-up loses runs with large budgets",
    ),
    (
        r"^The smaller the model, the more it lowers the loss",
        "The smaller the model, the more a norm on Peri-LN's embedding lowers the loss",
    ),
    (r"^SGD is worse than AdamW with both", "SGD gives a higher loss than AdamW, with Pre-LN and with Peri-LN"),
    (
        r"is below that of norms at A \+ C, and that is below Post-LN's \(C\)",
        "is below the loss with norms at A + C, which is below Post-LN's loss (C)",
    ),
    (
        r"^QK-norm on top of Peri-LN is level with it within 0.02, or better",
        "Peri-LN with QK-norm has a loss within 0.02 of Peri-LN's, or a lower loss",
    ),
    (r"is better than N\(0, 0.02\^2\) for both", "gives a lower loss than N(0, 0.02^2), with Pre-LN and with Peri-LN"),
    (
        r"^With the gains fixed at 1 there are fewer gradient spikes than in Pre-LN",
        "With the output norms' gains fixed at 1, Peri-LN has fewer gradient spikes than Pre-LN",
    ),
    (
        r"the loss is already below Pre-LN's, and learned gains are no worse \(lower, or level within 0.02\)",
        "Peri-LN's loss is already below Pre-LN's, and learned gains give a loss that is lower, or "
        "higher by at most 0.02",
    ),
    (r", Peri-LN's the reverse$", ". Peri-LN's variance grows rather linearly"),
    (
        r"No seed of Peri-LN diverges, and some of Pre-LN do",
        "No seed of Peri-LN diverges, but some seeds of Pre-LN diverge",
    ),
    (
        r"FP16's limit of 65504 during training, Peri-LN's never do",
        "FP16's limit of 65504 during training, but Peri-LN's never do",
    ),
    (
        r"^At its own best learning rate, Keel's loss is below Pre-LN's at its own",
        "With each placement at its best learning rate, Keel's loss is below Pre-LN's",
    ),
    (
        r"^Both steps have a higher loss than Keel: the inner norm is what they lack",
        "Both steps toward Keel (scale, and scale with a gain) lack the inner norm and have a higher loss than Keel",
    ),
    (
        r"^Both steps have a higher loss than Pre-LN",
        "Both steps toward Keel (scale, and scale with a gain) have a higher loss than Pre-LN",
    ),
    (
        r"^With as many parameters, deep Keel's loss is below that of deep and of wide Pre-LN",
        "With equally many parameters, deep Keel's loss is below deep Pre-LN's and below wide Pre-LN's",
    ),
    (
        r"^Measured, Keel's is 1 within 5 %",
        "Measured by autograd, Keel's residual path has a Jacobian of 1, within 5 %,",
    ),
    (r"^Measured, Post-LN's falls as", "Measured by autograd, the Jacobian of Post-LN's residual path falls as"),
    (
        r"^Without one of the layers of the deeper half, Keel's loss rises more than Pre-LN's, on average",
        "If one layer of the deeper half is removed, Keel's loss rises more than Pre-LN's, on average",
    ),
    (r"^It has no loss spike", "A sandwich with output gains that start at 1/sqrt(N) has no loss spike"),
    (
        r"a sandwich has no loss spike and a lower loss than without",
        "a sandwich (norms before and after each sub-layer) has no loss spike, and a lower loss "
        "than with gains that start at 1",
    ),
    (
        r"^Its loss is below Peri-LN's, whose embedding",
        "The scaled sandwich's loss is below Peri-LN's, whose embedding",
    ),
    (r"^Its loss is below Pre-LN's", "The scaled sandwich's loss is below Pre-LN's"),
    (r"^Its mean accuracy over all tasks", "Keel's mean accuracy over all tasks"),
    (r"^Its mean accuracy over six tasks", "FuseNorm's mean accuracy over six tasks"),
    (
        r"has a lower loss than both with more steps, too",
        "has a lower loss than FuseNorm and than Keel with more steps, too",
    ),
    (
        r"^The ranking at the small size is not that of the larger one",
        "The ranking of placements at the small size differs from the ranking at the larger size",
    ),
    (
        r"^Mix-LN's loss is below each of the others'",
        "Mix-LN's loss is below Group-LN's, Sandwich-LN's, Pre-LN's and Admin's",
    ),
    (r"Mix-LN's is above Pre-LN's at equal KL, too", "Mix-LN's reward is above Pre-LN's at equal KL, too"),
)


def claimed(one: Json) -> str:
    """Return a claim in the words of the pages, escaped."""
    return plain(_said(one.get("says") or one["claim"], _CLAIMED))


def in_paper(one: Json) -> str:
    """Return what the paper reports, in the words of the pages, escaped."""
    return plain(_said(one.get("paper") or NONE, _REPORTED))


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
    return worded(re.split(r": difference | \(95 %", first)[0]) + more


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
        in_paper(one),
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
