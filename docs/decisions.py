"""Writes docs/which-placement.md from docs/decisions.yaml and the verdicts of the studies: ``python docs/results.py``.

Each sentence of advice names the claims that it rests on, and is on the page only while all of them have the verdict
that it is written for; a link leads to each. So a new record changes the page, an
old sentence cannot outlive its verdict, and none stands beside the verdict of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import yaml
from verdict_words import best

from lamina.core.json_types import Json
from lamina.lab.papers.judging.findings import FAILED, Verdict

HERE = Path(__file__).resolve().parent
PAGE = HERE / "which-placement.md"
Question: TypeAlias = Json
_WRITTEN_FOR = {  # the sentence of a rule that a verdict puts on the page
    Verdict.HOLDS: "holds",
    Verdict.HOLDS_AT_ISO_LOSS: "holds",
    Verdict.EXPLAINED: "explained",
    **dict.fromkeys(FAILED, "fails"),
}
_OPEN = "What we cannot tell yet"
_UNDECIDED = (  # where no sentence is decided
    ("A lower loss of pretraining explains the effect. ", (Verdict.EXPLAINED,)),
    ("", (Verdict.INCONCLUSIVE, Verdict.NEEDS_SCALE)),
    ("We have not tried it yet. ", (Verdict.NOT_RUN,)),
)
_FRONT_PAGE = """## What learns fastest with which initializer?

The table shows each placement at its best learning rate. "Std" is the weights' initial standard deviation. At width
48, use an std of about 0.09. `small_scaled` has this std and scales branches by depth. `normal(std=0.0924)` does
not scale branches. An std of 0.02 (`scaled`) is 4.5 times too small.

<!-- front-page -->
<!-- /front-page -->

Our longer runs (20 tokens per parameter) rank the placements [differently](results/ours.md#ladder). Their models have 6
or 8 blocks and read BPE tokens instead of bytes, so we cannot tell why. If your model has 6 to 12 blocks, the longer
runs are closer to your model."""
_GENERATED = "<!-- Made from docs/decisions.yaml and studies/records by `make results-docs`. -->"


def page(verdicts: list[Json], scale: str, links: Mapping[str, str]) -> str:
    """The page of advice, the decided questions first; ``scale``: the models' sizes, ``links``: a study's details."""
    known = {str(one["claim"]): {**one, "link": links[one["study"]]} for one in best(verdicts)}
    questions: list[Question] = yaml.safe_load((HERE / "decisions.yaml").read_text(encoding="utf-8"))
    advised = [(question, _advice(question, known)) for question in questions]
    sections = [_section(*each) for each in advised if each[1]]
    open_ = [_undecided(question, known) for question, advice in advised if not advice]
    sections += ["\n".join([f"## {_OPEN}\n", *open_])] if open_ else []
    return "\n\n".join([_GENERATED, _introduction(scale), *sections, _FRONT_PAGE]) + "\n"


def _introduction(scale: str) -> str:
    return f"""# Which placement?

Choose which placements (positions of the norms) to compare, then compare them on your own text:

```bash
lamina compare --corpus my_texts/ --placements pre_ln,peri_ln,keel,fusenorm --learning-rates 1e-3,3e-3,1e-2
```

Use this advice to decide what to compare, not what to ship. {scale} The papers' models are
hundreds to thousands of times larger ([methods](evidence/methods.md)). Do not compare losses per byte with losses
per token."""


def _advice(question: Question, known: dict[str, Json]) -> list[str]:
    """The sentences whose claims have the verdict that they are written for, each with its link."""
    sentences = []
    for rule in question["rules"]:
        if text := _sentence(rule, claims := _claims(rule, known)):
            sentences.append(f"{text} ({_evidence(claims)})")
    return sentences


def _claims(rule: Json, known: dict[str, Json]) -> list[Json]:
    """The claims that a rule's sentences rest on: one, or several that must have the same verdict."""
    names = rule["claim"] if isinstance(rule["claim"], list) else [rule["claim"]]
    return [known[name] for name in names]


def _sentence(rule: Json, claims: list[Json]) -> str:
    """What a rule says for the verdict of its claims: under the verdict's own name, or a kind of verdict's."""
    said = {rule.get(one["verdict"], rule.get(_WRITTEN_FOR.get(one["verdict"], ""), "")) for one in claims}
    return said.pop() if len(said) == 1 else ""


def _section(question: Question, advice: list[str]) -> str:
    sentences = "\n".join(f"- {sentence}" for sentence in advice)
    return "\n\n".join(filter(None, [f"## {question['if']}", question.get("models"), sentences]))


def _undecided(question: Question, known: dict[str, Json]) -> str:
    claims = [one for rule in question["rules"] for one in _claims(rule, known)]
    open_ = [(head, [one for one in claims if one["verdict"] in verdicts]) for head, verdicts in _UNDECIDED]
    told = [f"{head}({_evidence(here)})" for head, here in open_ if here]
    return " ".join([f"- **{question['if']}**", question["else"], *told])


def _evidence(claims: list[Json]) -> str:
    """A link to each study that the claims are about. Several links have the studies' names."""
    links = list(dict.fromkeys(str(one["link"]) for one in claims))
    if len(links) == 1:
        return f"[evidence]({links[0]})"
    return "evidence: " + ", ".join(f"[{link.rpartition('#')[2]}]({link})" for link in links)
