"""How a paper's placement compares with Pre-LN in all studies: the section with which the paper's page begins."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from verdict_words import NONE, code, number, plain, table

from lamina.core.backbone_presets import PRESETS
from lamina.core.json_types import Json
from lamina.lab.papers.dry_run import BYTES
from lamina.lab.papers.engine.plan import Arm, arms
from lamina.lab.papers.judging.checks import lower, optimum, values_of
from lamina.lab.papers.judging.claims import judgeable
from lamina.lab.papers.judging.findings import TOO_FEW, Finding, Verdict
from lamina.lab.papers.judging.trials import NO_ARM, Trials
from lamina.lab.papers.pages.folder import StudyFolder
from lamina.lab.papers.study_catalog import STAGE, StudyDefinition
from lamina.reports.ranking import listed

NAMES = {"fusenorm": "FuseNorm", "keel": "Keel", "mix_ln": "Mix-LN", "peri_ln": "Peri-LN"}
REFERENCE = "pre_ln"
_TEXTS = {"texts/ladder": "books, dictionaries, manuals", "texts/second.txt": "speeches, plays, the Bible"}
_NOVELS = "novels"  # the embedded corpus: Austen and Melville


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The loss of a placement minus the loss of Pre-LN in one setting of a study, paired by seed.

    Attributes:
        setting: the values of the study's other compared settings, or "".
        keys: the keys of all compared runs. Two studies may share runs.
        settings: the settings of Pre-LN's runs.
        parameters: without the embedding of the input.
        rate: the learning rate that both placements share, or None if each trains at its best learning rate.
        learned: whether both losses are below the loss of a bigram table.
    """

    study: str
    setting: str
    placement: str
    keys: frozenset[str]
    settings: Json
    parameters: float
    tokens: float
    rate: float | None
    finding: Finding
    learned: bool

    @property
    def unit(self) -> str:
        return unit_of(self.settings)

    @property
    def side(self) -> str:
        """Where the placement's loss is: lower, higher or cannot tell."""
        return {Verdict.HOLDS: "lower", Verdict.REVERSED: "higher"}.get(self.finding.verdict, "cannot tell")


def unit_of(settings: Mapping[str, object]) -> str:
    """Return the unit of a loss. Without a tokenizer, a token is a byte."""
    return "nats per token" if settings.get("tokenizer") else "nats per byte"


def differences(study: StudyDefinition, folder: StudyFolder) -> list[Difference]:
    """Return the differences to Pre-LN of a study's first job, if its runs train on text."""
    scale, rows = study.scales[folder.scale], folder.first_stage
    if "placement" not in rows or folder.value != "eval_loss" or not rows["bigram_entropy"].notna().any():
        return []
    rows = judgeable(rows, list(scale.axis_names), scale.tuning_seeds, scale.seeds)
    rows = rows[rows["tuned"].astype(bool)]
    others = [axis for axis in folder.axes if axis not in (*NO_ARM, "placement", STAGE)]
    found = []
    for values, group in rows.groupby(others, sort=False) if others else [((), rows)]:
        trials = Trials(group, axes=folder.axes, scale=folder.scale)
        made = [_difference(study, trials, name, arms(scale), dict(zip(others, values, strict=True))) for name in NAMES]
        found += [each for each in made if each is not None]
    return found


def _difference(
    study: StudyDefinition, trials: Trials, name: str, every: Sequence[Arm], setting: Mapping[str, object]
) -> Difference | None:
    rows = trials.rows
    if not {name, REFERENCE} <= set(rows["placement"]):
        return None
    pair = [{"placement": placement} for placement in (name, REFERENCE)]
    rates = [set(rows[rows["placement"] == one["placement"]]["learning_rate"]) for one in pair]
    tuned = study.scales[trials.scale].tuning is not None
    if max(map(len, rates)) > 1:
        try:
            pair = [{**one, "learning_rate": optimum(trials, one["placement"]).trained} for one in pair]
        except ValueError:  # one of them trains at no learning rate
            return None
    losses = [list(values_of(trials, one).values()) for one in pair]
    if min(map(len, losses)) < TOO_FEW:
        return None
    both = rows[rows["placement"].isin((name, REFERENCE))]
    pre = rows[rows["placement"] == REFERENCE]
    settings = next(arm.settings for arm in every if _is_of(arm, {**setting, "placement": REFERENCE}))
    hidden = _size(settings, "hidden_size")
    vocabulary = str(settings.get("tokenizer") or f"bytes:{BYTES}").rpartition(":")[2]
    return Difference(
        study=study.name,
        setting=", ".join(_words(axis, value) for axis, value in setting.items()),
        placement=name,
        keys=frozenset(map(str, both["key"])),
        settings=settings,
        parameters=float(pre["parameters"].median()) - int(vocabulary) * hidden,
        tokens=float(pre["tokens"].median()),
        rate=None if tuned or max(map(len, rates)) > 1 else float(pre["learning_rate"].iloc[0]),
        finding=lower(trials, pair[0], than=pair[1]),
        learned=max(sum(each) / len(each) for each in losses) < both["bigram_entropy"].mean(),
    )


def _size(settings: Json, name: str, field: str = "") -> int:
    """Return a size of the model, from the settings or from the backbone's preset."""
    return cast(int, settings.get(name) or PRESETS[str(settings["backbone"])].fields[field or name])


def _is_of(arm: Arm, values: Mapping[str, object]) -> bool:
    texts = {
        axis: (str(value), f"{value:g}") if isinstance(value, int | float) else (str(value),)
        for axis, value in values.items()
    }
    return all(arm.values.get(axis) in spelled for axis, spelled in texts.items())


def _words(axis: str, value: object) -> str:
    counted = {"num_layers": "layers", "steps": "steps"}
    number_ = isinstance(value, int | float)
    return f"{value:g} {counted.get(axis, axis.replace('_', ' '))}" if number_ else str(value)


def once(found: Sequence[Difference]) -> list[Difference]:
    """Leave out a difference if all its runs are runs of another difference. The largest difference stays."""
    kept: list[Difference] = []
    for each in sorted(found, key=lambda one: -len(one.keys)):
        if not any(each.placement == other.placement and each.keys <= other.keys for other in kept):
            kept.append(each)
    return kept


def section(paper: str, found: Sequence[Difference], links: Mapping[str, str]) -> list[str]:
    """Return the section on a paper's placement, or nothing. ``links``: a study's details, by name."""
    name = NAMES.get(paper, "")
    own = once([one for one in found if one.placement == paper])
    shown = sorted((one for one in own if one.learned), key=lambda one: (-one.tokens / one.parameters, one.study))
    if not shown:
        return []
    count = {side: sum(one.side == side for one in shown) for side in ("lower", "higher", "cannot tell")}
    both = count["lower"] and count["higher"]
    several = len({round(one.parameters, -4) for one in shown if one.side != "cannot tell"}) > 1
    lead = f"**It depends on the {'model and the ' * several}initializer.**" if both else ""
    lead = lead or ("**Yes, in most comparisons.**" if 2 * count["lower"] > len(shown) else "**We cannot tell.**")
    sentences = [
        f"{lead} {name}'s loss is lower than Pre-LN's loss in {_comparisons(count['lower'])}, and higher in "
        f"{_comparisons(count['higher'])}.",
        f"In {_comparisons(count['cannot tell'])}, we cannot tell whether {name}'s loss is lower."
        if count["cannot tell"]
        else "",
        f"The table shows all comparisons of {name} with Pre-LN in our studies in which both losses are below the loss "
        "of a bigram table (how often each token follows another token).",
        f"A negative difference means that {name}'s loss is lower.",
    ]
    beyond = sorted({one.study for one in own if not one.learned})
    left_out = len([one for one in own if not one.learned])
    notes = [
        "- If runs failed, the table shows the median of the paired differences. We did not correct the intervals for "
        "the number of comparisons.",
        "- Parameter counts exclude the input embedding.",
        '- "Std" is the standard deviation of the initial weights. "Scaled branches" means that the last weight matrix '
        "of each branch starts smaller in a deeper model.",
        '- With "best of each", each placement trains at its best learning rate.'
        if any(one.rate for one in shown)
        else "- Each placement trains at its best learning rate.",
        f"- The table leaves out {_comparisons(left_out)}, because one of the losses is above the loss of a bigram "
        f"table. These comparisons come from the studies {_listed(beyond, links)}."
        if left_out
        else "",
        "- The studies `front-page...` and `ladder...` are on the page with [our own comparisons](ours.md).",
    ]
    headings = ["parameters:", "tokens per parameter:", "layers × width", "initial weights", "learning rate", "text"]
    headings = ["study", f"{name}'s loss is", "difference:", "95 % interval", *headings, "pairs:"]
    rows = [_row(one, links) for one in shown]
    used = [at for at, heading in enumerate(headings) if heading != "learning rate" or any(one.rate for one in shown)]
    return [
        f"## Is {name} better than Pre-LN on our models?",
        " ".join(filter(None, sentences)),
        table([headings[at] for at in used], [[row[at] for at in used] for row in rows]),
        "\n".join(filter(None, notes)),
    ]


def _comparisons(count: int) -> str:
    return f"{count or 'no'} comparison{'' if count == 1 else 's'}"


def _listed(studies: Sequence[str], links: Mapping[str, str]) -> str:
    return listed([f"[{study}]({links[study]})" for study in studies])


def _row(one: Difference, links: Mapping[str, str]) -> list[str]:
    settings, finding = one.settings, one.finding
    layers, width = _size(settings, "num_layers", "num_hidden_layers"), _size(settings, "hidden_size")
    interval = NONE if finding.interval is None else " to ".join(number(end, "+.3f") for end in finding.interval)
    corpus = settings.get("corpus")
    setting = f" ({plain(one.setting)})" if one.setting else ""
    return [
        f"[{one.study}]({links[one.study]}){setting}",
        f"**{one.side}**",
        f"{number(finding.margin, '+.3f')} {one.unit}{' (median)' if finding.interval is None else ''}",
        interval,
        f"{one.parameters / 1e6:.2f}M",
        f"{float(f'{one.tokens / one.parameters:.1g}'):g}",
        f"{layers} × {width}",
        _weights(str(settings.get("init")), width),
        "best of each" if one.rate is None else f"{one.rate:g} for both",
        _NOVELS if corpus is None else _TEXTS.get(str(corpus), plain(corpus)),
        str(finding.seeds),
    ]


def _weights(init: str, width: int) -> str:
    """Say how an initializer draws the weights."""
    if found := re.fullmatch(r"(normal|scaled)\(std=(.+)\)", init):
        return f"std {float(found[2]):.2g}{', scaled branches' * (found[1] == 'scaled')}"
    stds = {"small_scaled": f"std {math.sqrt(2 / (5 * width)):.2g}, scaled branches", "normal": "std 0.02"}
    return {**stds, "scaled": "std 0.02, scaled branches"}.get(init, code(init))


def sentences(study: str, found: Sequence[Difference]) -> Iterator[str]:
    """Yield how the losses of a study compare, for a study whose claims are about something other than the loss."""
    for one in found:
        if one.study != study or not one.learned:
            continue
        name = NAMES[one.placement]
        where = f'In the setting "{plain(one.setting)}"' if one.setting else "In these models"
        if one.side == "cannot tell":
            yield f"{where}, we cannot tell whether {name}'s loss is lower than Pre-LN's loss."
        else:
            amount = f"{number(abs(one.finding.margin or 0.0), '.2g')} {one.unit}"
            yield f"{where}, {name}'s loss is {amount} {one.side} than Pre-LN's loss."
