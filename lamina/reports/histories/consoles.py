r"""The lines that trainers print: one row of ``FORMS`` for each form.

A row defines which lines are records, and where a record's names and values are. To read another trainer's lines,
add a row before "lines with a step".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"
_VALUE = rf"(?P<value>{NUMBER})"
_PIPES = rf"\|\s*(?P<name>[^|:]*[A-Za-z][^|:]*?)\s*:\s*{_VALUE}"
"""| lm loss: 7.3E-01 |"""
_SIGNED = rf"(?P<name>[A-Za-z][\w./()-]*(?: (?:norm|loss|rate)\b)?)\s*[:=]\s*\[?{_VALUE}"
"""loss: 2.3, grad_norm=1.0, learning rate: 1e-4"""
_SPACED = rf"(?P<name>[A-Za-z][\w./-]*(?: [A-Za-z][\w./-]*)?)[ :=]+{_VALUE}"
"""loss 2.3, train loss 2.3, grad norm = 1.0"""
_QUOTED = rf"""['"](?P<name>[^'"]+)['"]\s*:\s*['"]?(?:tensor\()?(?P<value>{NUMBER})"""
"""'loss': 2.3, "loss": "2.3" """
_INDENTED = rf"^\s+(?:Train )?(?P<name>[A-Za-z].*?)\s*(?:=|:(?=\s))\s*{_VALUE}\s*$"
"""a line of its own"""


class Form(NamedTuple):
    """How a trainer prints a record.

    Attributes:
        name: of the trainer, in words.
        line: a regular expression for the line that begins a record, with the group ``step``. If the step restarts in
            each epoch, it has the groups ``epoch`` and ``of``, the number of steps in an epoch.
        pair: a regular expression for each pair in that line, with the groups ``name`` and ``value``.
        more: whether the following lines hold the pairs.
    """

    name: str
    line: str
    pair: str
    more: bool = False


FORMS = (
    Form("NeMo's lines", r"Training epoch \d+, iteration (?P<step>\d+)/\d+ \|", _PIPES),
    Form("Megatron's lines", r"iteration\s+(?P<step>\d+)/\s*\d+ \|", _PIPES),
    Form("printed dictionaries", r"""\{\s*['"][^'"{}]+['"]\s*:[^{}]*\}""", _QUOTED),
    Form("OLMo-core's lines", r"\[step=(?P<step>\d+)/", _INDENTED, more=True),
    Form("Composer's lines", r"\[batch=(?P<step>\d+)(?:/\d+)?\]:", _INDENTED, more=True),
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
    Form("timm's lines", r"\bTrain: (?P<epoch>\d+) \[\s*(?P<step>\d+)/(?P<of>\d+) ", _SIGNED),
    Form("llama2.c's lines", r"^(?P<step>\d+) \| loss ", _SPACED),
    Form("a progress bar's lines", r"(?:Epoch (?P<epoch>\d+).*?)?\b(?P<step>\d+)/(?P<of>\d+) \[.*=", _SIGNED),
    Form(
        "lines with a step",
        r"(?i)\b(?:global[_ ]?)?(?:step|iter(?:ation)?|update|batch)s?\b[\"']?[ .:=#\[(]*(?P<step>\d[\d,]*)"
        r".*(?:loss|norm)",
        _SPACED,
    ),
    Form("lines with a loss", r"(?i)\bloss\b[^\d\n]{0,12}\d", _SPACED),
)
"""Forms, the more special ones first: of those that fit most lines of a file, the first is taken."""
_BAR = re.compile(r"(?P<step>\d+)/\d+ \[\d*\d:\d\d")  # of tqdm, before or between printed dictionaries
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SPECIAL = 5  # lines of no special form that count as much as one of a trainer's
_TRIED = 4000  # lines by which a file's form is chosen
_ENDS = "train_runtime"  # Trainer's last dictionary sums the run up


def lines_of(text: str) -> Iterator[str]:
    """Yield a console's lines without colors; what a progress bar overwrote is a line, too."""
    yield from (line for line in re.split(r"[\r\n]+", _ANSI.sub("", text)) if line.strip())


def form_of(lines: Iterable[str]) -> Form | None:
    """Return the form that fits most of the first lines; None if none fits."""
    tried = [line for _, line in zip(range(_TRIED), lines, strict=False)]
    counts = {form: sum(1 for line in tried if _fits(form, line)) for form in FORMS}
    best = max(counts, key=lambda form: counts[form] * (1 if form in FORMS[-2:] else _SPECIAL))
    return best if counts[best] else None


def _fits(form: Form, line: str) -> bool:
    if (match := re.search(form.line, line)) is None:
        return False
    return form.more or re.search(r"(?i)loss|norm|trl", line[match.start() :]) is not None


def records_of(form: Form, lines: Iterable[str]) -> Iterator[Mapping[str, object]]:
    """Yield the records of lines, with the step where the form has one."""
    begins, pair = re.compile(form.line), re.compile(form.pair, re.IGNORECASE)
    record: dict[str, object] | None = None
    bar = ""
    for line in lines:
        if (match := begins.search(line)) is None:
            if form.more and record is not None and (inside := pair.search(line)) is not None:
                record[inside["name"]] = inside["value"]
            elif (seen := _BAR.search(line)) is not None:
                bar = seen["step"]
            continue
        if record:
            yield record
        groups = match.groupdict()
        step = int(groups["step"].replace(",", "")) if groups.get("step") else None
        if step is not None and groups.get("of") and groups.get("epoch"):
            step += int(groups["epoch"]) * int(groups["of"])
        record = {} if step is None else {"step": step}
        if not form.more:
            record = {**{part["name"].strip(): part["value"] for part in pair.finditer(line)}, **record}
            if step is None and (seen := _BAR.search(line) or None) is not None:
                bar = seen["step"]
            record |= {"progress bar": bar} if step is None and bar else {}
            if _ENDS in record:
                record = None
    if record:
        yield record
