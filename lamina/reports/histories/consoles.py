"""Read the lines that trainers print. ``FORMS`` lists the ways to print a step, or pairs of a name and a value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from lamina.reports.histories.names import EPOCH_STEPS, RATE, is_whole_loss, step_rank, whole
from lamina.reports.histories.numbers import NUMBER, WHOLE, number_of

_INSIDE = r"(?:[A-Za-z][\w.]*\(\[?|\{['\"][^'\"]*['\"]:\s*|\[[A-Za-z]+:\s*)?"
"""np.float64(2.3), tensor([2.3]), {'0_default': 2.3}, [local: 2.3]"""
_VALUE = rf"{_INSIDE}(?P<value>{NUMBER})"
_STEP = rf"(?P<step>{WHOLE})"
_WORD = r"[A-Za-z][\w./-]*+"
_PAIR = (
    rf"(?P<name>(?<![\w./-]){_WORD}(?: {_WORD})?(?: ?\([\w ]+\))?)['\]]?(?: so far(?: is)?)?"
    rf"(?:\s*[:=]\s*['\[]?\s*| +\[?|\[)\s*{_VALUE}(?![\d.]*%\|)"
)
"""loss 2.3, train loss 2.3, grad norm = 1.0, Iter(train) [ 10/500], [Loss] 2.3, 'loss': '2.3', loss so far is 2.3"""
_QUOTED = rf"""['"](?P<name>[^'"]+)['"]\s*:\s*['"]?{_VALUE}"""
"""'loss': 2.3, "loss": "2.3" """
_BESIDE = rf"^\s*[|│┃║]\s*(?P<name>[A-Za-z][^|│┃║]*?)\s*[|│┃║]\s*{_VALUE}\s*[|│┃║]"
"""| loss | 2.3 |"""
_ALONE = re.compile(rf"^\W*(?P<name>[A-Za-z][^:=|]*?)\s*[:=|]\s*{_VALUE}(?:\s*\([^()]*\))?\s*$", re.IGNORECASE)
"""  • Loss: 2.3, | > loss: 2.3 (2.4)"""
_WORDS = r"(?i:(?:step|iter(?:ation)?|update|(?:mini)?batch)s?(?:_id|_idx|_num)?|it|up\.)"
_RATED = rf"(?i:\bglobal[ _-]?|\b){_WORDS}"
_TO_STEP = r"""(?: ?\(\w+\))?["']?[ \t.:=#\[(]*"""
_JUDGED = re.compile(
    r"(?i)loss|norm\b|norm[^a-z]|\btrl\b|\bxent\b|\bnll\b|\bcost\b|(?-i:[a-z]Cost)\b|cross[ _-]?entropy"
)
"""At least one name in a record must match this regular expression."""


class Form(NamedTuple):
    """The way in which a trainer prints a record."""

    name: str  # the form, in words
    # a regular expression for the record's first line, with the groups ``step``, ``epoch`` and ``of`` (the number of
    # steps in an epoch) if the line prints them
    line: re.Pattern[str]
    pair: re.Pattern[str]  # a regular expression with the groups ``name`` and ``value``
    more: bool  # whether the record continues on the following lines
    general: bool  # whether ``pair`` is ``_PAIR``, as in most forms


def _form(name: str, line: str, pair: str = _PAIR, more: bool = False) -> Form:
    return Form(name, re.compile(line), re.compile(pair, re.IGNORECASE), more, pair is _PAIR)


FORMS = (
    _form("printed dictionaries", r"""\{\s*['"][^'"{}]+['"]\s*:[^{}]*(?:\}|(?:,[^{},]*){3,}$)""", _QUOTED),
    _form("dictionaries on several lines", r"""^\s*\{\s*(?:['"][^{}]*)?$""", _QUOTED, more=True),
    _form("tables of a name and a value", r"^\W*[-=─━═╌]{8}", _BESIDE, more=True),
    _form(
        "lines with an average loss before its name",
        rf"^\s*{_STEP}: [\d.]+, {NUMBER} avg loss,",
        rf"(?<=, )(?=\S+ (?P<name>avg loss|learning_rate)\b){_VALUE}",
    ),
    _form(
        "lines with a step between a loss and its name",
        rf"(?i:\btrain(?:ing)? loss) {_STEP} (?={NUMBER})",
        rf"(?P<name>train(?:ing)? loss|grad norm)(?: \d+(?= ))? {_VALUE}",
    ),
    _form(
        "lines with an iteration and its epoch",
        rf"\biters: {_STEP}, epoch: (?P<epoch>\d+)",
        rf"(?P<name>\bloss): {_VALUE}",
    ),
    _form(
        "lines with an epoch and a batch",
        rf"\bTRAIN (?:\w+ )?Batch (?P<epoch>\d+)/{_STEP}",
        rf"\b(?P<name>loss\w*|lr) {_VALUE}",
    ),
    _form("lines with a global step", rf"(?i:\bglobal)[ _-]?{_WORDS}{_TO_STEP}{_STEP}"),
    _form(
        "lines with an epoch and its steps",
        r"(?:(?i:\bepoch|\btrain:)(?:\(train\))?|^(?=\W*\[\d+/\d+\]\[\d+/))[\s:\[(=]*(?P<epoch>\d+)(?![\d%])(?:\s*/\s*\d+)?"
        r"(?:(?!loss)[^\n])*?(?P<step>\d+)\s*/\s*(?P<of>\d+)(?![\d/:])",
    ),
    _form("a progress bar's lines", r"(?:^\s*|\b)(?P<step>\d+)/(?P<of>\d+) (?:\[|[━\s]+\d|- \d)"),
    _form("lines with a number of steps", rf"(?:\b(?P<epoch>\d+)epoch\S*?)?\b{_STEP}(?:it|batch)(?:/(?!s)|:)"),
    _form("lines with a step in brackets", rf"(?i:\btrain(?:ing)?)\]?:? *[\[(] *{_STEP} ?/ ?\d+[\])]"),
    _form("lines below a step and a learning rate", rf"^[\w:./-]*\[{_STEP}, \d[\d.]*(?:e-\d+)?\]\s*$"),
    _form(
        "lines with a step",
        rf"(?:\btraining: (?P<epoch>\d+) )?(?<!/)(?<![Tt]otal )(?<![Ee]pisode ){_RATED}{_TO_STEP}{_STEP}",
    ),
    _form(
        "lines that begin with a step",
        rf"(?:^(?:s:|[ |]{{0,3}})|\] )\[? {{0,6}}{_STEP}"
        r"(?:(?: \| [\d.]+)?(?: \||[\]|:,])|\s*/\s*\d+[\],:]?|(?= trl:)| (?= loss))\s",
    ),
    _form(
        "lines with a loss",
        r"(?i)(?:\bepochs?[ .:=#\[(]*(?P<epoch>\d+)(?![\d.]).*?)?loss(?:\b|_)[^\d\n/]{0,12}(?:\d|nan|inf)",
    ),
)
"""The forms of a log's lines, most specific first. If several forms fit equally many lines, Lamina uses the first."""
_HEADER = re.compile(r"(?:\s*/\s*\d+)?(?:,\w+=\w+)*\W*$|[^\n]*\|\s*$")  # the rest of a line above a record
_BAR = re.compile(r"(?P<step>\d+)/\d+ \[\d*\d:\d\d")  # of tqdm, before or between printed dictionaries
_EPOCH = re.compile(  # above the numbers of an epoch
    r"(?i)^(?:[^a-z\n]|INFO|start(?:ing)?|begin(?:ning)?|train(?:ing)?)*"
    r"\bepoch[ :=#]+(?P<epoch>\d+)(?:\s*(?:/|of)\s*\d+)?\W*$"
)
_RATE_ALONE = re.compile(  # Current learning rate: 0.01
    r"(?i)^[^a-z]*(?P<name>(?:(?:current|new) )?(?:learning[ _]rate|lr)\b(?: \w+){0,3})"
    rf" *[:=] *(?P<value>{NUMBER})\s*$"
)
_NOT_FINITE = re.compile(r"(?i)\b(?:nan|inf(?:inity)?)\b")
_RANK = re.compile(r"(?i)\[(?:default|rank)[ _:]?(\d+)\]|\brank[ =:]+(\d+)\b")  # of the process that prints
_BEFORE = re.compile(rf"{_RATED}{_TO_STEP}{_STEP}")  # step 10: {'loss': 2.3}
_OWN = re.compile(r"step|Iteration")  # names of a step beside an epoch's: iter[14/15] [step] 89
_MOVES = re.compile(r"\x1b\[\d*[ABEF]")  # a bar goes to another line, and leaves its text in this one
_DATE = re.compile(r"(?<=\S)\s(?=(?:\d{2,4}[-/])?\d\d[-/]\d\d \d\d:\d\d:\d\d)")  # where a paste has lost a line's end
_BAR_BEGINS = re.compile(r"(?=\b[A-Z]\w*(?: \d+)?: +\d+%\|)|(?<=[^\s:])\s+(?=\d+%\|)")
_NO_VALUE = re.compile(r"(?<=[:=]) *(?:N/A|n/a|None|null)(?=[\s,|]|$)")
_DARKNET = re.compile(r"(?<=\d) rate,(?= [\d.]+ seconds)")  # 5.2 avg loss, 0.001 rate, 2.1 seconds
_MARKED = re.compile(r"(?i)\bnanxxx\b")  # PaddleOCR's way to print NaN
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HELD_OUT = re.compile(
    r"(?i)(?<![\w/-])(?:(?:val|valid|validati(?:on|ng)|eval|evaluati(?:on|ng)|test|testing|dev)\b(?![\w/-])|eval_)"
)
_HEADING = re.compile(rf"{_HELD_OUT.pattern}[^\d\n]*$")  # ***** Eval results *****
_ROUNDING = 1e-3  # between two prints of a number
_BREAKS = 3  # lines without a pair that end a record of several lines
_SPECIAL = 6  # lines of a general form that count as much as one of another form
_LOSSES = 12  # lines with a loss in a record of several lines, at most
_ENOUGH, _TRIED = 200, 2000  # lines that are enough if all are of one form, and lines that are tried
_OURS = "lamina.watch: "  # begins our own lines, after the logger's prefix
_ENDS = "train_runtime"  # Trainer's last dictionary sums the run up


def lines_of(text: str) -> Iterator[str]:
    """Yield a console's lines without color codes. Each state of a progress bar is a separate line."""
    text = (_ANSI.sub("", _MOVES.sub("\n", text)) if "\x1b" in text else text).replace("**", "")  # bold, in pasted text
    text = _MARKED.sub("nan", text) if "xxx" in text else text
    text = _NO_VALUE.sub("", text) if any(word in text for word in ("N/A", "n/a", "None", "null")) else text
    text = _DARKNET.sub(" learning_rate,", text) if " avg loss, " in text else text
    if re.match(r"\W*" + _BESIDE.removeprefix("^"), text, re.IGNORECASE) is not None:
        yield "-" * 8  # above a table's first row, which a paste has lost
    for line in re.split(r"[\r\n]+", text):
        parts = _BAR_BEGINS.split(line) if line.count("%|") > 1 else (line,)  # bars whose returns a paste has lost
        if line.count("loss") > 1 and line.count(":") > 3 and len(parts) == 1:
            parts = _DATE.split(line)
        yield from (part for part in parts if part and not part.isspace() and _OURS not in part)


def form_of(lines: Iterable[str]) -> Form | None:
    """Return the form that fits best at the beginning of the log, or None if no form fits."""
    counts, begun, tried, best = [0] * len(FORMS), [0] * len(FORMS), 0, 0
    weights = [3 - 2 * (form is FORMS[-1]) if form.general else _SPECIAL for form in FORMS]
    for line in lines:
        judged, fitting = _JUDGED.search(line) is not None, False
        if judged and _is_suspect(line) and _BROKEN.search(line) and not re.search(r"\d", line):
            continue  # a sentence without numbers
        for at, form in enumerate(FORMS):
            match = form.line.search(line)
            inline = match is not None and not form.more
            pairs = form.pair.findall(line) if judged and (inline or begun[at]) else []
            if pairs and (form.general or any(whole(name.strip()) for name, _ in pairs)):
                counts[at] += 1
                begun[at] = 0 if inline else begun[at] - 1
                fitting = True
            elif match is not None:
                begun[at] = _LOSSES * (form.more or _is_header(form, match))
        tried += fitting
        best = max(range(len(FORMS)), key=lambda at: counts[at] * weights[at]) if fitting else best
        if tried == _TRIED or (tried == counts[best] == _ENOUGH):
            break
    return FORMS[best] if counts[best] else None


def _is_header(form: Form, match: re.Match[str]) -> bool:
    """Return whether a line has a step but no numbers. The next lines then have the numbers of this step."""
    return form.general and "step" in match.groupdict() and _HEADER.match(match.string, match.end()) is not None


_SAID = (
    r"(?i)\bloss(?:es)?\b.{0,40}\b(?:is|are|was|became|turned)\b.{0,20}?\b(?:nan|inf(?:inite|inity)?|not finite)\b"
    r"|\bloss(?:es)?\b\D{0,20}\bnot finite\b"
)
_BROKEN_WORDS = (" is", " are", " was", "became", "turned", "finite", "diverged", "invalid", "nan loss", "inf loss")
_PAST = re.compile(r" (?:was|were|became|turned)$")  # the loss became infinite: a sentence, not a record
_BROKEN = re.compile(
    rf"{_SAID}|\bdiverged with loss\W+nan\b|(?<!= )(?<!=)(?<!-)\b(?:nan|invalid|non-finite) (?:or inf )?loss\b"
)
"""Loss is nan, stopping training; Model diverged with loss = NaN; Invalid loss, terminating training."""


def _is_suspect(line: str) -> bool:
    """Return whether a line may match ``_BROKEN``. This function is far faster than the pattern."""
    low = line.lower()
    return any(word in low for word in _BROKEN_WORDS)


def records_of(form: Form, lines: Iterable[str]) -> Iterator[Mapping[str, object]]:
    """Yield the records in the lines, with the step if the form has one."""
    kept: Mapping[str, object] = {}
    for record in _without_settings(_printed(form, lines)):
        if kept.get("step") == record.get("step") and _is_same(kept, record):
            # the trainer printed the record twice
            kept = max(kept, record, key=len)
            continue
        if kept:
            yield kept
        kept = record
    if kept:
        yield kept


def _without_settings(records: Iterable[Mapping[str, object]]) -> Iterator[Mapping[str, object]]:
    """Leave out records that only have settings, such as {"dim": 10, "lr": 1} or Namespace(lr=0.1, steps=1000)."""
    rates, first = list[Mapping[str, object]](), True  # the learning rates before the first loss
    for record in records:
        kinds = {known.metric for name in record if (known := whole(name)) is not None}
        if kinds == {RATE}:
            if first:
                rates.append(record)
            elif {"step", "progress bar", "epoch"} & record.keys():
                yield record
            continue
        if first and kinds:
            first, last = False, _step(str(record.get("step")))
            for early in rates:
                step = _step(str(early.get("step")))
                if {"progress bar", "epoch"} & early.keys() if step is None else last is not None and step <= last:
                    yield early
        yield record
    yield from rates if first else ()


def _is_same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return whether two records have the same numbers, apart from rounding and missing names."""
    names, more = sorted((one.keys() - {"progress bar"}, other.keys() - {"progress bar"}), key=len)
    # without steps, two records with the same names count as different
    if one.get("epoch") != other.get("epoch") or not names <= more or ("step" not in names and names == more):
        return False
    pairs = ((number_of(one[name]), number_of(other[name])) for name in names)
    same = all(a is not None and b is not None and math.isclose(a, b, rel_tol=_ROUNDING) for a, b in pairs)
    return same and len(names) > 1 and any(map(is_whole_loss, names))


def _printed(form: Form, lines: Iterable[str]) -> Iterator[Mapping[str, object]]:
    console, ended = _Console(form), ""
    before, last = dict[str, object](), dict[str, object]()
    begins, line, match = form.line.search, "", None
    for line in lines:
        match = begins(line)
        if _is_suspect(line) and _BROKEN.search(line) and not (match and _has_loss_at_step(form, match)):
            ended = line
            continue
        if match is None:
            console.go_on(line)
            continue
        if console.record:
            yield console.record
            before, last = last, console.record
        if last and ended and re.search(_SAID, ended):
            yield _broken(last, last, ended)
        console.begin(line, match)
        console.leave_out_ranks(line)
        ended = ""
    if console.record:
        if match is not None and not form.more and _is_cut(line, console.record, last):
            console.record.popitem()
        lost = any(step_rank(name) is not None and name not in console.record for name in last)
        if not (form.more and lost):  # else the log ends within a record
            yield console.record
            before, last = last, console.record
    if last and ended and any(math.isfinite(number_of(last[name]) or 0.0) for name in filter(is_whole_loss, last)):
        yield _broken(before, last, ended)


def _is_cut(line: str, record: Mapping[str, object], before: Mapping[str, object]) -> bool:
    """Return whether the log ends within a number: the last line has fewer values and digits than the line before."""
    if not record or [*record] != [*before][: len(record)] or len(record) == len(before):
        return False
    name, value = [*record.items()][-1]
    return line[-1:].isdigit() and line.endswith(str(value)) and len(str(value)) < len(str(before[name]))


def _broken(before: Mapping[str, object], last: Mapping[str, object], sentence: str) -> Mapping[str, object]:
    """Return a record for a sentence such as "loss is nan", with the step in the sentence."""
    if (step := _step(str(last.get("step")))) is not None:
        named = re.search(rf"{_RATED}{_TO_STEP}(?P<step>{WHOLE})", sentence)
        earlier = _step(str(before.get("step")))
        # a sentence without a step is one interval after the last record
        apart = max(1, step - earlier) if earlier is not None else 1
        last = {**last, "step": (named and _step(named["step"])) or step + apart}
    return {**last, **dict.fromkeys(filter(is_whole_loss, last), "nan")}


def _has_loss_at_step(form: Form, match: re.Match[str]) -> bool:
    """Return whether a record's first line has a step and a loss, such as "step: 9, loss is nan"."""
    names = (name.strip() for name, _ in form.pair.findall(match.string))
    told = any(is_whole_loss(name) and not _PAST.search(name) for name in names)
    return match.groupdict().get("step") is not None and told


class _Console:
    """The record that Lamina is reading, with the last step and epoch of earlier lines."""

    def __init__(self, form: Form):
        self.form, self.open, self.held_out, self.again = form, int(form.more), False, False
        self.names: dict[str, tuple[str, bool]] = {}
        self.record: dict[str, object] | None = None
        self.bar = self.epoch = ""
        self.ranks: dict[tuple[object, object], str] = {}  # the first process that printed the losses of a step
        self.apart, self.rate = True, dict[str, str]()  # whether an epoch has begun, and a rate above its records

    def go_on(self, line: str) -> None:
        """Read a line that does not begin a record."""
        general, pairs = self.form.general, self.form.pair.findall(line) if self.open or self.held_out else []
        self.held_out = general and ((self.held_out and len(pairs) == 1) or _HEADING.search(line) is not None)
        if (seen := _BAR.search(line)) is not None:
            self.bar = seen["step"]
        elif (seen := _EPOCH.match(line)) is not None:
            self.epoch = seen["epoch"]
            self.apart = True
        elif self.open and self.record is not None and not (general and _is_held_out(line)):
            self._add((general and _ALONE.findall(line)) or pairs)
            self.open -= general and not pairs
        elif general and not self.held_out and not _is_held_out(line):
            self._read_beside(line)

    def _read_beside(self, line: str) -> None:
        """Read a learning rate, or a loss that is not finite, from a line that belongs to no record."""
        if (alone := _RATE_ALONE.match(line)) is not None:
            if self.apart or self.record is None:
                self.rate = {alone["name"]: alone["value"]}
            elif not _has_rate(self.record):
                self.record[alone["name"]] = alone["value"]
        elif self.record and _NOT_FINITE.search(line) is not None:
            if self.again and not any(map(is_whole_loss, self.record)):
                return  # the losses of this step are in the record before
            for name, value in self.form.pair.findall(line):
                if is_whole_loss(name.strip()) and not math.isfinite(number_of(value) or 0.0):
                    known = (of for of, _ in self.names.values() if is_whole_loss(of))
                    names = [*filter(is_whole_loss, self.record)] or [next(known, name.strip())]
                    self.record |= dict.fromkeys(names, value)

    def begin(self, line: str, match: re.Match[str]) -> None:
        """Read the line in which a record begins."""
        groups, before, self.record, general = match.groupdict(), self.record or {}, {}, self.form.general
        self.epoch = groups.get("epoch") or self.epoch
        if self.epoch and (general or "epoch" in groups):
            self.record["epoch"] = self.epoch
        step = _step(groups.get("step"))
        if step is None and match.start() and (seen := _BEFORE.search(line, 0, match.start())) is not None:
            step = _step(seen["step"])
        unnamed = general and not re.search(r"(?i)step|iter \d+$", match[0]) and _OWN.search(line) is not None
        named = self.form.pair.finditer(line) if unnamed else ()
        own = next((part for part in named if _OWN.fullmatch(part["name"].strip())), None)
        if own is not None and not line[own.end() :][:1].isalpha() and _step(own["value"]) is not None:
            self.record["step"] = _step(own["value"])
        elif step is not None:
            self.record["step"] = step
            if groups.get("of"):
                self.record[EPOCH_STEPS] = groups["of"]
        self.again = before.get("step") == self.record.get("step")
        only = step is not None and match.span() == (0, len(line))
        header = not self._add(() if only else self.form.pair.findall(line)) and _is_header(self.form, match)
        if self.form.more:
            return
        self.open, self.held_out = _BREAKS if header and not self.held_out else 0, header and self.held_out
        if general and _is_held_out(line):
            self.record = {f"valid/{name}": value for name, value in self.record.items()}
        elif self.rate and not _has_rate(self.record):
            self.record |= self.rate
        self.apart, self.rate = False, {}
        if step is None and (seen := _BAR.search(line)) is not None:
            self.bar = seen["step"]
        if step is None and self.bar:
            self.record["progress bar"] = self.bar
        if _ENDS in self.record:
            self.record = None

    def leave_out_ranks(self, line: str) -> None:
        """Leave out a record if another process has printed the losses of this step, and these losses are finite."""
        if not self.record or (found := _RANK.search(line)) is None:
            return
        losses = [number_of(value) for name, value in self.record.items() if is_whole_loss(name)]
        key = self.record.get("epoch"), self.record.get("step")
        if losses and self.ranks.setdefault(key, found[1] or found[2]) != (found[1] or found[2]):
            self.record = None if all(loss is None or math.isfinite(loss) for loss in losses) else self.record

    def _add(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Add pairs to the record, and return whether any pair is a loss, a gradient norm or a learning rate."""
        record, judged = self.record, False
        assert record is not None
        for written, value in pairs:
            if (known := self.names.get(written)) is None:
                name = written.strip().removesuffix(" is")
                known = (low if (low := name.lower()) in ("step", "epoch") else name), whole(name) is not None
                self.names[written] = known
            record.setdefault(known[0], value)
            judged |= known[1]
        return judged


def _has_rate(record: Iterable[str]) -> bool:
    return any((known := whole(name)) is not None and known.metric == RATE for name in record)


def _is_held_out(line: str) -> bool:
    """Return whether a line has the loss of an evaluation."""
    low = line.lower()
    if "train" in low or not any(word in low for word in ("val", "test", "dev")):
        return False
    return _HELD_OUT.search(line, 0, low.find("loss") if "loss" in low else len(line)) is not None


def _step(text: str | None) -> int | None:
    number = None if text is None else number_of(text)
    return int(number) if number is not None and number == int(number) else None
