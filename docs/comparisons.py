"""The comparisons behind verdicts, read from the lines of the records, as tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import verdict_words as said
from verdict_words import NONE, code, table

from lamina.core.json_types import Json
from lamina.lab.papers.judging.findings import IN_WORDS, Verdict

_VERDICT = re.compile(rf"^({'|'.join(map(re.escape, IN_WORDS))}): ")
_CLAIMED = re.compile(r"(?:, claimed | \(claimed: )(?P<claimed>[^()]+?)\)?$")
_TESTED = re.compile(r" \((?:95 % (?P<interval>\S+ to [^,]+), )?(?P<seeds>\d+) seeds?(?:, p (?P<p>[^()]+))?\)$")
_NUMBER = r"-?(?:\d\S*|inf)"
_FORMS = tuple(
    re.compile(form)
    for form in (  # the longer forms first
        rf"^(?P<what>.+ is lower in .+ pairs), (?P<kind>median) difference (?P<value>{_NUMBER})$",
        rf"^(?P<what>.+): difference (?P<value>{_NUMBER})$",
        rf"^(?P<what>.+: Kendall's tau)(?: (?P<value>{_NUMBER})) over (?P<settings>\d+) arms$",
        r"^(?P<what>.+): (?P<value>\d+ of \d+) seeds (?P<how>did not train|trained) \((?P<kind>.+)\), "
        r"share 95 % (?P<interval>.+)$",
        r"^(?P<what>.+ does not train \(.+\)) \((?P<test>Fisher's exact test) [^:]+: p (?P<p>.+)\)$",
        r"^(?P<what>.+): means (?P<value>\S+) apart, (?P<test>Welch's t test) p (?P<p>\S+)$",
        rf"^(?P<what>.+) (?P<value>{_NUMBER}), expected (?P<claimed>\S+) \((?P<kind>at most \S+ % off)\)$",
        r"^(?P<what>.+?):?(?: in)? (?P<value>\d+ of \d+)$",
        rf"^(?P<what>(?!.* vs ).+?)(?<!,):? (?P<value>{_NUMBER})$",
    )
)
_LABELS = {  # of older records, and today's labels for the same
    "keel: product": "keel: product of the Jacobians after the first block",
    "Post-LN's log of the path over FuseNorm's": "log of Post-LN's path, divided by the log of FuseNorm's path",
    "log10 of the first state's gradient over the last's, ": "log10(first state's gradient / last state's gradient): ",
    "|log10 of deep over shallow| at": "absolute log10 of the gradient ratio (deep to first layers) at learning rate",
    "log10 of deep over shallow at": "log10 of the gradient ratio (deep to first layers) at learning rate",
    "log10 of Post-LN's median layer over its last": "log10(median layer's gradient / last layer's gradient), Post-LN",
    "log10 of the shallow gradient norm,": "log10 of the first layers' gradient norm, initializer",
    "trains at more rates": "trains at more learning rates",
    "and at a higher one": "seeds for which FuseNorm trains at a higher learning rate",
    "largest over median": "the largest eigenvalue divided by the median",
    "median over the tail": "the median eigenvalue divided by a small eigenvalue",
    "rates at which narrow and wide agree": "learning rates at which the narrow and the wide model agree",
    "log2 of one best rate over the other, by seed": "|log2(narrow model's best learning rate / wide model's)|",
    ": logarithm over the formula's": ": logarithm, divided by the formula's logarithm",
    "reach of the loss: Peri-LN": "range of the loss over initializers: Peri-LN",
    "reach of Peri-LN's loss": "range of Peri-LN's loss over initializers",
    "gradient spikes a seed": "gradient spikes per seed",
    "left over right of the worst token": "left side / right side of the worst token",
    "left over right": "left side / right side",
    "powers of ten, last over first": "log10(last layers' gradient / first layers' gradient)",
    "layers where Mix-LN turns more": "layers that change the direction more in Mix-LN",
    "ratio of both sides": "ratio",
    "condition number, up, deepest third": "condition number of up-projections in the last third of the layers",
    "condition number, down, both ends": "condition number of down-projections in the first and last layers",
    "condition number, up": "condition number of up-projections",
    "gap in the deepest third": "difference in the last third of layers",
    "deepest third": "last third of layers",
    "its first third": "its first third of layers",
    "log2 of the best rate of Post-LN": "log2 of the best learning rate: Post-LN",
    " vs of Pre-LN": " vs Pre-LN",
    "growth over added variance": "growth of the variance, divided by the added variance",
    "share of lost runs": "share of failed runs",
    "spread of log10": "standard deviation of log10",
}
_REPEATED = (  # both names as LEFT|RIGHT, and the second name in full
    (r"(.+?)'s (.+)\|(.+)'s$", r"\3's \2"),
    (r"(.+?)'s .+\|its (.+)", r"\1's \2"),
    (r"log of (.+?)'s (.+)\|log of (.+)'s$", r"log of \3's \2"),
    (r"(R\^2) of .+\|(of .+)", r"\1 \2"),
    (r"(.+) trained\|(before training)", r"\1 \2"),
    (r"(deep layers' angle), .+\|(learned)", r"\1, gains \2"),
    (r"difference in .+\|in all$", r"difference in all layers"),
    (r"(gain) (after \d+) steps\|after (\d+)$", r"\1 after \3 steps"),
    (r"(gain) at [\d.]+ (\w+)\|at ([\d.]+)$", r"\1 at \3 \2"),
    (r".+\|exactly$", r"exact value"),
    (r".+\|none$", r"no difference between layers"),
)
_VALUES_AT = re.compile(rf"^(.+?),? ((?:{_NUMBER}, )+{_NUMBER}) at ([\d., ]+?)( \(.+\))?$")
_LIST = re.compile(rf"({_NUMBER}), (?:{_NUMBER}, ){{8,}}({_NUMBER})")
_HOW_RUNS_ENDED = re.compile(r"\d+ of \d+ runs |\S+ failed more often \(")
_NOTHING = "not measured"
_AS_A_LINE = re.compile(
    r"^(?:in (?:them|these models), |(?P<where>without layer 0), the verdict is \"(?P<verdict>[^\"]+)\": )(?P<line>.+)$"
)
_LIMIT = re.compile(r"so (?:the limit may be higher: |tolerates more: )(.+)$")
_QUANTITIES = (  # the measured quantity of a claim whose study does not name it, by the words of the claim
    (r"solves more of GSM-8K", "score in arithmetic (%)"),
    (r"\b(?:accuracy|score)\b", "mean score over all tasks (%)"),
    (r"\breward\b", "reward"),
    (r"\bloss(?:es)?\b", "loss"),
)
_NO_QUANTITY = re.compile(
    r"seeds|runs? |does not train|spikes|tau|^gain|mean gain|[Ll]og|R\^2|: (?!difference|\S.* is lower in)"
)
_COLUMNS = ("difference or value:", "claimed", "95 % interval", "seeds:", "p:", "verdict")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One line of a record: what is compared, and the cells of ``_COLUMNS``, each escaped; "" for a cell without text.

    Attributes:
        is_difference: whether ``value`` is the difference of the numbers in ``what``.
    """

    what: str
    cells: tuple[str, ...]
    is_difference: bool

    @property
    def short(self) -> str:
        """What is compared, with the value unless it follows from the compared numbers."""
        return self.what if self.is_difference or not self.cells[0] else f"{self.what}: {self.cells[0]}"


def quantity_of(one: Json) -> tuple[str, bool]:
    """Return the quantity that a claim compares, and whether the study names the quantity."""
    if one.get("quantity"):
        return str(one["quantity"]), True
    says = str(one.get("says"))
    return next((name for words, name in _QUANTITIES if re.search(words, says)), ""), False


def read(line: str, quantity: str = "", *, named: bool = True) -> Comparison:
    """Read a line of a record.

    Args:
        quantity: the measured quantity, of which the line may give values alone.
        named: whether the study names the quantity. Otherwise, some lines are about another quantity.
    """
    found, rest = _VERDICT.match(line), _todays(_VERDICT.sub("", line))
    fields: dict[str, str] = {"verdict": IN_WORDS[found[1]] if found else ""}
    for pattern in (_CLAIMED, _TESTED):
        if match := pattern.search(rest):
            fields |= {name: text for name, text in match.groupdict().items() if text}
            rest = rest[: match.start()]
    quantity = "" if not named and _NO_QUANTITY.search(rest) else quantity
    match = next(filter(None, (form.match(rest) for form in _FORMS)), None)
    fields |= {name: text for name, text in match.groupdict().items() if text} if match else {"what": rest}
    more = [f"seeds that {fields['how']}"] if "how" in fields else []
    more += [f"over {fields['settings']} settings"] if "settings" in fields else []
    more += [fields["test"]] if "test" in fields else []
    separator = ": " if " vs " in fields["what"] and ": " not in fields["what"] else ", "
    what = ", ".join([separator.join(filter(None, [quantity, fields["what"]])), *more])
    value = _minus(fields.get("value", "")) + (f" ({fields['kind']})" if "kind" in fields else "")
    value = re.sub(r"\(at most (\S+ %) off\)", r"(largest error \1)", value)
    cells = (value, _minus(fields.get("claimed", "")), _minus(fields.get("interval", "")), fields.get("seeds", ""))
    what = re.sub(r"(^|<br>)gain (?=\(|after|at)", r"\1Pre-LN's loss minus Keel's loss ", _by_line(said.plain(what)))
    return Comparison(
        what=re.sub(r"(?<=: )-(?=\d)", "−", what),
        cells=tuple(map(said.plain, (*cells, fields.get("p", ""), fields["verdict"]))),
        is_difference=bool(match and re.search(r" vs |: .+ pairs$", fields["what"])),
    )


def _by_line(what: str) -> str:
    """Put the measured quantity and both compared settings on lines of their own."""
    if (listed := _VALUES_AT.match(what)) and listed[2].count(",") == listed[3].count(","):
        pairs = zip(listed[3].split(", "), listed[2].split(", "), strict=True)
        return "<br>".join([f"{listed[1]}{listed[4] or ''}", *(f"at {at}: {value}" for at, value in pairs)])
    what = re.sub(r"^(?:(.+), )?(.+?) vs (.+): \2 is lower in (.+)$", _lower_in_pairs, what)
    sides = re.match(rf"^(?:(.+): )?(.+?),? ({_NUMBER}) vs (.+?),? ({_NUMBER}|0)$", what)
    if sides is None:
        return what
    quantity, left, first, right, second = sides.groups()
    names = left.removesuffix("'s"), _whole(left, right)
    return "<br>".join(filter(None, [quantity, f"{names[0]}: {first}", f"{names[1]}: {second}"]))


def _whole(left: str, right: str) -> str:
    """Repeat in the second setting's name the words that a record writes only in the first setting's name."""
    for form, written in _REPEATED:
        if match := re.match(form, f"{left}|{right}"):
            return match.expand(written)
    return right


def _lower_in_pairs(found: re.Match[str]) -> str:
    quantity, left, right, pairs = found.groups()
    return "<br>".join(filter(None, [quantity, f"{left} is lower than {right} in {pairs}"]))


def deciding(one: Json) -> Comparison:
    """Return the comparison that decided a claim: the comparison with the claim's margin, or else the first."""
    lines, margin = _lines(one), one.get("margin")
    shown = [] if margin is None else [line for line in lines if re.search(rf" {re.escape(f'{margin:.3g}')}[ ,]", line)]
    quantity, named = quantity_of(one)
    return read((shown or lines)[0], quantity, named=named)


def in_short(one: Json) -> str:
    """Say what we found in one line: the values that decided, or why they cannot."""
    if one["verdict"] == Verdict.NOT_RUN:
        return code(said.command(one["study"], one["scale"]))
    if one["verdict"] == Verdict.NEEDS_SCALE:
        return "losses above a bigram table" if "bigram" in str(one.get("note")) else _joined(one)
    limits = [found[1] for found in map(_LIMIT.search, map(said.in_todays_words, _notes(one))) if found]
    reached = f"<br>runs at the highest learning rate that we tried: {limits[0]}" if limits else ""
    notes = filter(None, map(_AS_A_LINE.match, map(said.in_todays_words, _notes(one))))
    opposite = "".join(f"<br>{note['where']}: {said.in_words(note['verdict'])}" for note in notes if note["verdict"])
    return deciding(one).short + reached + opposite


def claims(verdicts: Sequence[Json]) -> str:
    """Return the table of a study's claims. It repeats no claim of the page's first tables."""
    rows = [
        [
            code(one["claim"]) if said.is_on_top(one) else f"{said.claimed(one)} ({code(one['claim'])})",
            f"**{said.verdict(one)}**",
            said.in_paper(one),
            said.number(one.get("p_holm", one.get("p")), ".2g"),
        ]
        for one in verdicts
    ]
    return table(["claim", "verdict", "in the paper", "p (Holm):"], rows)


def compared(verdicts: Sequence[Json]) -> str:
    """Return the table of the claims' comparisons, or ""."""
    rows = []
    for one in verdicts:
        undecided, (quantity, named) = one["verdict"] == Verdict.NEEDS_SCALE, quantity_of(one)
        lines = [] if one["verdict"] == Verdict.NOT_RUN else _lines(one)
        found = [read(line, quantity, named=named) for line in lines if line not in (_NOTHING, NONE)]
        verdicts_here = [said.verdict(one) if len(found) == 1 or undecided else each.cells[-1] for each in found]
        for note in filter(None, map(_AS_A_LINE.match, map(said.in_todays_words, _notes(one)))):
            line = read(note["line"], quantity, named=named)
            where = f"{note['where']}<br>" if note["where"] else ""
            found.append(replace(line, what=where + line.what))
            verdicts_here.append(said.in_words(note["verdict"]) if note["verdict"] else said.verdict(one))
        for comparison, own in zip(found, verdicts_here, strict=True):
            rows.append([code(one["claim"]), comparison.what, *comparison.cells[:-1], own])
    headings = ["claim", "comparison", *_COLUMNS]
    used = [at for at in range(len(headings)) if any(row[at] for row in rows)]
    claims_of = dict[tuple[str, ...], list[str]]()
    for name, *cells in rows:
        claims_of.setdefault(tuple(cells), []).append(name)
    rows = [["<br>".join(dict.fromkeys(names)), *cells] for cells, names in claims_of.items()]
    return table([headings[at] for at in used], [[row[at] or NONE for at in used] for row in rows]) if rows else ""


def noted(verdicts: Sequence[Json]) -> str:
    """Return the notes on verdicts as a table, each note once and with the claims that it is about.

    The table of settings says how runs ended, and the table of comparisons has the comparisons, so no note says either.
    """
    about: dict[str, list[str]] = {}
    for one in verdicts:
        for note in said.notes(one) if one["verdict"] != Verdict.NOT_RUN else []:
            if _HOW_RUNS_ENDED.search(note) or _AS_A_LINE.match(note):
                continue
            names = about.setdefault(said.sentence(note), [])
            names += [code(one["claim"])] if code(one["claim"]) not in names else []
    return table(["claim", "note"], [["<br>".join(names), note] for note, names in about.items()]) if about else ""


def _notes(one: Json) -> list[str]:
    return [note for note in str(one.get("note") or "").split("; ") if note]


def _joined(one: Json) -> str:
    return "<br>".join(map(said.sentence, said.notes(one))) or NONE


def _todays(line: str) -> str:
    """Return a line in today's words. A long list shows only its first and last entry."""
    for recorded, label in _LABELS.items():
        line = line.replace(recorded, label)
    line = re.sub(r"^(.+?) (?:-, )+- at (.+)$", r"\1 at \2: not measured", line)
    line = _LIST.sub(r"\1, …, \2", said.in_todays_words(line))
    return re.sub(r"^(.+?) vs (.+), failed runs ranked last: lower in", r"\1 vs \2: \1 is lower in", line)


def _lines(one: Json) -> list[str]:
    return [str(line) for line in one.get("parts") or [one.get("ours") or NONE]]


def _minus(text: str) -> str:
    return re.sub(r"(?<!\w)-(?=\d|inf)", "−", text)
