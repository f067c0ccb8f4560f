r"""Read the lines that trainers print. ``FORMS`` has one row for each log format.

A row defines which lines are records, and where a record's names and values are. To read another trainer's lines,
add a row before "lines with a global step".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from lamina.reports.histories.names import EPOCH_STEPS, whole
from lamina.reports.histories.numbers import NUMBER, WHOLE, number_of
from lamina.training.monitor.writers import LOSS

_INSIDE = r"(?:[A-Za-z][\w.]*\(\[?|\{['\"][^'\"]*['\"]:\s*|\[[A-Za-z]+:\s*)?"
"""np.float64(2.3), tensor([2.3]), {'0_default': 2.3}, [local: 2.3]"""
_VALUE = rf"{_INSIDE}(?P<value>{NUMBER})"
_STEP = rf"(?P<step>{WHOLE})"
_PIPES = rf"\|\s*(?P<name>[^|:=]*[A-Za-z][^|:=]*?)\s*[:=]\s*{_VALUE}"
"""| lm loss: 7.3E-01 |"""
_NAME = r"(?<![\w./-])[A-Za-z][\w./-]*"
_SIGNED = rf"(?P<name>(?<![\w./-])[A-Za-z][\w./()-]*(?: (?:norm|loss|rate)\b)?)\s*[:=]\s*\[?{_VALUE}"
"""loss: 2.3, grad_norm=1.0, learning rate: 1e-4"""
_SPACED = (
    rf"(?P<name>{_NAME}(?: [A-Za-z][\w./-]*)?(?: ?\(\w+\))?)['\]]?(?: so far(?: is)?)?"
    rf"(?:\s*[:=]\s*['\[]?\s*| +\[?|\[)\s*{_VALUE}"
)
"""loss 2.3, train loss 2.3, grad norm = 1.0, Iter(train) [ 10/500], [Loss] 2.3, 'loss': '2.3', loss so far is 2.3"""
_QUOTED = rf"""['"](?P<name>[^'"]+)['"]\s*:\s*['"]?{_VALUE}"""
"""'loss': 2.3, "loss": "2.3" """
_INDENTED = rf"^\s+(?:Train )?(?P<name>[A-Za-z].*?)\s*(?:=|:(?=\s))\s*{_VALUE}\s*$"
"""a line of its own"""
_BESIDE = rf"^\s*[|│┃║]\s*(?P<name>[A-Za-z][^|│┃║]*?)\s*[|│┃║]\s*{_VALUE}\s*[|│┃║]"
"""| loss | 2.3 |"""
_ALONE = rf"^\W*(?P<name>[A-Za-z][^:=|]*?)\s*[:=|]\s*{_VALUE}(?:\s*\([^()]*\))?\s*$"
"""  • Loss: 2.3, | > loss: 2.3 (2.4)"""
_RATED = r"(?i:(?:\bglobal[ _-]?|\b)(?:step|iter(?:ation)?|update|batch)s?(?:_id|_idx|_num)?)"
_TO_STEP = r"""(?: ?\(\w+\))?["']?[ .:=#\[(]*"""
_JUDGED = r"(?i)loss|norm\b|norm[^a-z]|\btrl\b|\bxent\b|\bnll\b|\bcost\b"
"""At least one name in a record must match this."""


class Form(NamedTuple):
    """The form in which a trainer prints a record.

    Attributes:
        name: the trainer's name, in words.
        line: a regular expression for the line that begins a record, with the group ``step``. If the step restarts in
            each epoch, it has the groups ``epoch`` and ``of``, the number of steps in an epoch.
        pair: a regular expression for a pair in the record, with the groups ``name`` and ``value``.
        more: whether the record continues on the following lines.
    """

    name: str
    line: str
    pair: str
    more: bool = False


FORMS = (
    Form("NeMo's lines", r"Training epoch \d+, iteration (?P<step>\d+)/\d+ \|", _PIPES),
    Form("Megatron's lines", r"iteration[\s:=]+(?P<step>\d+)\s*/\s*\d+ \|", _PIPES),
    Form(
        "Megatron's wrapped lines",
        r"iteration[\s:=]+(?P<step>\d+)\s*/\s*\d+ \|(?![^\n]*(?:loss|norm))",
        rf"(?:^|\|)\s*(?P<name>[^|:=]*[A-Za-z][^|:=]*?)\s*[:=]\s*{_VALUE}",
        more=True,
    ),
    Form("printed dictionaries", r"""\{\s*['"][^'"{}]+['"]\s*:[^{}]*(?:\}|(?:,[^{},]*){3,}$)""", _QUOTED),
    Form("dictionaries on several lines", r"""^\s*\{\s*(?:['"][^{}]*)?$""", _QUOTED, more=True),
    Form("OLMo-core's lines", r"\[step=(?P<step>\d+)/", _INDENTED, more=True),
    Form("Composer's lines", r"\[batch=(?P<step>\d+)(?:/\d+)?\]:", _INDENTED, more=True),
    Form("tables of a name and a value", r"^\W*[-=─━═╌]{8}", _BESIDE, more=True),
    Form("blocks below a step", rf"{_RATED}{_TO_STEP}{_STEP}(?:\s*/\s*\d+)?\W*$", _ALONE, more=True),
    Form("llm.c's lines", r"\bstep\s+(?P<step>\d+)/\d+ \| (?:train )?loss [\d.na+-]+", _SPACED),
    Form("llm.c's log", r"^s:(?P<step>\d+) trl:", _SIGNED),
    Form("nanochat's lines", r"\bstep (?P<step>\d+)(?:/\d+)? \([\d.]+%\) \|", _PIPES),
    Form("nanoGPT's lines", r"\biter (?P<step>\d+): (?:train )?loss", _SPACED),
    Form(
        "litgpt's lines",
        r"Epoch \d+ \| iter \d+ step (?P<step>\d+) \|",
        rf"(?P<name>loss train|train loss)\s*:\s*{_VALUE}",
    ),
    Form("fairseq's lines", r"\bepoch \d+(?: \||:)\s+(?P<step>\d+) / \d+ \S*loss=", _SIGNED),
    Form("verl's lines", r"\bstep:(?P<step>\d+) - ", _SIGNED),
    Form("MaxText's lines", r"completed step: (?P<step>\d+),", _SIGNED),
    Form("torchtitan's lines", r"\bstep:\s*(?P<step>[\d,]+)\s.*?\bloss:", _SIGNED),
    Form("DeepSpeed's lines", r"\bsteps: (?P<step>\d+) loss:", _SIGNED),
    Form("Marian's lines", rf"\bEp\. (?P<epoch>\d+)\S* : Up\. {_STEP} :", rf"(?P<name>Cost|gNorm|L\.r\.) {_VALUE}"),
    Form("ESPnet's lines", r"(?P<epoch>\d+)epoch:train:\d+-(?P<step>\d+)batch", rf"(?P<name>\w+)={_VALUE}"),
    Form("timm's lines", r"\bTrain: (?P<epoch>\d+) \[\s*(?P<step>\d+)/(?P<of>\d+) ", _SIGNED),
    Form("llama2.c's lines", r"^(?P<step>\d+) \| loss ", _SPACED),
    Form("Levanter's lines", rf"Progress on:\s*train {_STEP}it/", _SIGNED),
    Form("lines with a global step", rf"(?i:\bglobal)[ _-]?{_RATED}{_TO_STEP}{_STEP}", _SPACED),
    Form(
        "lines with an epoch and its steps",
        r"(?i:\bepoch|\btrain:)(?:\(train\))?[\s:\[(=]*(?P<epoch>\d+)(?![\d%])(?:\s*/\s*\d+)?"
        r"(?:(?!loss)[^\n])*?(?P<step>\d+)\s*/\s*(?P<of>\d+)(?![\d/:])",
        _SPACED,
    ),
    Form("Keras' lines", r"^\s*(?P<step>\d+)/(?P<of>\d+) (?:\[[=>.]+\]|[━\s]+\d|- \d)", _SPACED),
    Form("a progress bar's lines", rf"\b{_STEP}/(?P<of>\d+) \[", _SPACED),
    Form("lines with a step", rf"{_RATED}{_TO_STEP}{_STEP}", _SPACED),
    Form("lines that begin with a step", rf"(?:^|\] )\[?{_STEP}(?:(?: \| [\d.]+)?[\]|:,]|\s*/\s*\d+,?)\s", _SPACED),
    Form("lines with a loss", r"(?i)loss\b[^\d\n]{0,12}(?:\d|nan|inf)", _SPACED),
)
"""The forms, the most specific form first. If several forms fit equally many lines, Lamina takes the first of them."""
GENERAL = FORMS[[form.name for form in FORMS].index("lines with a global step") :]
"""Forms that no particular trainer prints."""
_BAR = re.compile(r"(?P<step>\d+)/\d+ \[\d*\d:\d\d")  # of tqdm, before or between printed dictionaries
_EPOCH = re.compile(r"^\s*Epoch[ :]+(?P<epoch>\d+)(?:\s*/\s*\d+)?\s*$")  # Keras prints it above the steps
_BEFORE = re.compile(rf"{_RATED}{_TO_STEP}{_STEP}")  # step 10: {'loss': 2.3}
_OWN = re.compile(r"step|Iteration")  # names of a step beside an epoch's: iter[14/15] [step] 89
_MOVES = re.compile(r"\x1b\[\d*[ABEF]")  # a bar goes to another line, and leaves its text in this one
_BAR_BEGINS = re.compile(r"(?=\b[A-Z]\w*(?: \d+)?: +\d+%\|)|(?<=[^\s:])\s+(?=\d+%\|)")
_NO_VALUE = re.compile(r"(?<=[:=]) *(?:N/A|n/a|None|null)(?=[\s,|]|$)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HELD_OUT = re.compile(
    r"(?i)(?<![\w/-])(?:(?:val|valid|validati(?:on|ng)|eval|evaluati(?:on|ng)|test|testing|dev)\b(?![\w/-])|eval_)"
)
_SPECIAL = 5  # lines of no special form that count as much as one of a trainer's
_ENOUGH, _TRIED = 200, 2000  # lines of a trainer's form that are enough to choose it, and lines that are tried
_ENDS = "train_runtime"  # Trainer's last dictionary sums the run up


def lines_of(text: str) -> Iterator[str]:
    """Yield a console's lines without colors. A text that a progress bar has overwritten is also a line."""
    text = (_ANSI.sub("", _MOVES.sub("\n", text)) if "\x1b" in text else text).replace("**", "")  # bold, in pasted text
    for line in re.split(r"[\r\n]+", text):
        parts = _BAR_BEGINS.split(line) if line.count("%|") > 1 else (line,)  # bars whose returns a paste has lost
        yield from (_NO_VALUE.sub("", part) for part in parts if part and not part.isspace())


def form_of(lines: Iterable[str]) -> Form | None:
    """Return the form that fits most of the first lines that may be records; None if no form fits."""
    counts, tried = dict.fromkeys(FORMS, 0), 0
    begun = dict.fromkeys((form for form in FORMS if form.more), False)
    for line in lines:
        fits = re.search(_JUDGED, line) is not None
        for form in begun:
            if begun[form] and fits and any(whole(pair["name"]) for pair in _pairs(form, line)):
                counts[form] += 1
                begun[form] = False
            elif re.search(form.line, line) is not None:
                begun[form] = True
        if not fits:
            continue
        fitting = [form for form in counts if not form.more and re.search(form.line, line) is not None]
        for form in fitting:
            counts[form] += form in GENERAL or any(whole(pair["name"]) for pair in _pairs(form, line))
        tried += bool(fitting)
        if tried == _TRIED or any(count >= _ENOUGH for form, count in counts.items() if form not in GENERAL):
            break
    best = max(counts, key=lambda form: counts[form] * (_SPECIAL if form not in GENERAL else 1 + ("step" in form.line)))
    return best if counts[best] else None


def _pairs(form: Form, line: str) -> Iterator[re.Match[str]]:
    return re.finditer(form.pair, line, re.IGNORECASE)


_SAID = (
    r"(?i)\bloss(?:es)?\b.{0,40}\b(?:is|are|was|became|turned)\b.{0,20}?\b(?:nan|inf(?:inite|inity)?|not finite)\b"
    r"|\bloss(?:es)?\b\D{0,20}\bnot finite\b"
)
_BROKEN = re.compile(rf"{_SAID}|\bdiverged with loss\W+nan\b|\b(?:nan|invalid|non-finite) (?:or inf )?loss\b")
"""Loss is nan, stopping training; Model diverged with loss = NaN; Invalid loss, terminating training."""


def records_of(form: Form, lines: Iterable[str]) -> Iterator[Mapping[str, object]]:
    """Yield the records in the lines, with the step if the form has one.

    If the trainer printed a sentence that the loss was not finite, Lamina adds a record for this sentence.
    """
    console, ended = _Console(form), ""
    before, last = dict[str, object](), dict[str, object]()
    begins, line, match = re.compile(form.line).search, "", None
    for line in lines:
        match, low = begins(line), line.lower()
        suspect = any(word in low for word in ("nan", "inf", "finite", "invalid"))  # far faster than the pattern
        if suspect and _BROKEN.search(line) and not (match and _has_loss_at_step(form, match)):
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
        ended = ""
    if console.record:
        if match is not None and not form.more and _is_cut(line, console.record, last):
            console.record.popitem()
        yield console.record
        before, last = last, console.record
    if last and ended:
        yield _broken(before, last, ended)


def _is_cut(line: str, record: Mapping[str, object], before: Mapping[str, object]) -> bool:
    """Return whether a log ends within a number: with fewer values than the line before, and fewer digits."""
    if not record or [*record] != [*before][: len(record)] or len(record) == len(before):
        return False
    name, value = [*record.items()][-1]
    return line[-1:].isdigit() and line.endswith(str(value)) and len(str(value)) < len(str(before[name]))


def _broken(before: Mapping[str, object], last: Mapping[str, object], sentence: str) -> Mapping[str, object]:
    """Return the record of a sentence that says that the loss is not finite: at the step that it names, or as far after
    the last record as that is after the one before.
    """
    losses = [name for name in last if (known := whole(name)) is not None and known.metric == LOSS]
    if (step := _step(str(last.get("step")))) is not None:
        named = re.search(rf"{_RATED}{_TO_STEP}(?P<step>{WHOLE})", sentence)
        earlier = _step(str(before.get("step")))
        apart = max(1, step - earlier) if earlier is not None else 1
        last = {**last, "step": (named and _step(named["step"])) or step + apart}
    return {**last, **dict.fromkeys(losses, "nan")}


def _has_loss_at_step(form: Form, match: re.Match[str]) -> bool:
    """Return whether a line that begins a record has a step and a loss: step: 9, loss is nan."""
    names = (part["name"].strip() for part in _pairs(form, match.string))
    losses = ((known := whole(name)) is not None and known.metric == LOSS for name in names)
    return match.groupdict().get("step") is not None and any(losses)


class _Console:
    """A console's record, and what the lines before it said of its step and epoch."""

    def __init__(self, form: Form):
        self.form, self.general = form, form in GENERAL
        self.pairs = re.compile(form.pair, re.IGNORECASE).finditer
        self.record: dict[str, object] | None = None
        self.bar = self.epoch = ""

    def go_on(self, line: str) -> None:
        """Read a line that begins no record."""
        if self.form.more and self.record is not None:
            self._add_pairs(line)
        elif (seen := _BAR.search(line)) is not None:
            self.bar = seen["step"]
        elif (seen := _EPOCH.match(line)) is not None:
            self.epoch = seen["epoch"]

    def begin(self, line: str, match: re.Match[str]) -> None:
        """Read the line in which a record begins."""
        groups, self.record = match.groupdict(), {}
        self.epoch = groups.get("epoch") or self.epoch
        if self.epoch and (self.general or "epoch" in groups):
            self.record["epoch"] = self.epoch
        step = _step(groups.get("step"))
        if step is None and match.start() and (seen := _BEFORE.search(line, 0, match.start())) is not None:
            step = _step(seen["step"])
        named = self.pairs(line) if self.general and "step" not in match[0].lower() and _OWN.search(line) else ()
        own = next((part for part in named if _OWN.fullmatch(part["name"].strip())), None)
        if own is not None and not line[own.end() :][:1].isalpha() and _step(own["value"]) is not None:
            self.record["step"] = _step(own["value"])
        elif step is not None:
            self.record["step"] = step
            if groups.get("of"):
                self.record[EPOCH_STEPS] = groups["of"]
        self._add_pairs(line)
        if self.form.more:
            return
        if self.general and _is_held_out(line):
            self.record = {f"valid/{name}": value for name, value in self.record.items()}
        if step is None and (seen := _BAR.search(line)) is not None:
            self.bar = seen["step"]
        if step is None and self.bar:
            self.record["progress bar"] = self.bar
        if _ENDS in self.record:
            self.record = None

    def _add_pairs(self, line: str) -> None:
        """Add a line's pairs; of a name that comes twice, the first value holds."""
        record = self.record
        assert record is not None
        for part in self.pairs(line):
            name = part["name"].strip()
            record.setdefault(low if (low := name.lower()) in ("step", "epoch") else name, part["value"])


def _is_held_out(line: str) -> bool:
    """Return whether a line has the loss of an evaluation."""
    low = line.lower()
    return "train" not in low and _HELD_OUT.search(line, 0, max(0, low.find("loss"))) is not None


def _step(text: str | None) -> int | None:
    """Return the step in a text; None if it is no whole number."""
    number = None if text is None else number_of(text)
    return int(number) if number is not None and number == int(number) else None
