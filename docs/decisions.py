"""Writes docs/which-placement.md from docs/decisions.yaml and the verdicts of the studies: ``python docs/results.py``.

Each sentence of advice names the claims that it rests on, and is on the page only while all of them have the verdict
that it is written for; each of these verdicts stands behind it, with its claim. So a new record changes the page, an
old sentence cannot outlive its verdict, and none stands beside the verdict of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import yaml
from verdict_words import best, number, plain

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
_UNDECIDED = (
    ("Seen, but explained by a lower loss of pretraining", (Verdict.EXPLAINED,)),
    ("Tried, and still open", (Verdict.INCONCLUSIVE,)),
    ("Not decidable by these models", (Verdict.NEEDS_SCALE,)),
    ("Not tried yet", (Verdict.NOT_RUN,)),
)
_FRONT_PAGE = """## How much the initializer decides

One comparison of five placements, with three initializers and on two texts. Each placement has its own best learning
rate in each column. The first column was
[registered](../studies/preregistration/front-page.md) before its trials.

<!-- front-page -->
<!-- /front-page -->

- **Branches scaled by depth** (`small_scaled`): FuseNorm (SpanNorm) is below Pre-LN on both texts. Keel and Peri-LN are
  above Pre-LN. The last matrix of each branch starts smaller by the root of twice the number of blocks.
- **No branch scaled** (`normal(std=0.0924)`, [registered](../studies/preregistration/front-page-unscaled.md)): all
  four placements are below Pre-LN. Peri-LN's norms on the branches' outputs undo such a scaling in the forward pass.
- **A standard deviation of 0.02** (`scaled`), 4.5 times too small for this width: Keel is below Pre-LN, and Mix-LN and
  Peri-LN are above. One of FuseNorm's runs got stuck.

A comparison at one initializer therefore says as much about the initializer, so tune both. All of this is one shape and
one length of training: it says how fast models of this shape start to learn. After 20 tokens per parameter, in
shallower models, the order is another one ([the ladder](results/ours.md#ladder)). There, parameters are counted
without the embeddings."""
_GENERATED = "<!-- Made from docs/decisions.yaml and studies/records by `make results-docs`. -->"


def page(verdicts: list[Json], scale: str, links: Mapping[str, str]) -> str:
    """The page of advice, the decided questions first; ``scale``: the models' sizes, ``links``: a study's details."""
    known = {str(one["claim"]): {**one, "link": links[one["study"]]} for one in best(verdicts)}
    questions: list[Question] = yaml.safe_load((HERE / "decisions.yaml").read_text(encoding="utf-8"))
    advised = [(question, _advice(question, known)) for question in questions]
    sections = [_section(*each, known) for each in sorted(advised, key=lambda each: not each[1])]
    return "\n\n".join([_GENERATED, _introduction(scale), *sections, _FRONT_PAGE]) + "\n"


def _introduction(scale: str) -> str:
    return f"""# Which placement should I use?

Each piece of advice is written for one [verdict](methods.md), and stands here only while the records give it;
[the results](results/ours.md) have every claim. {scale} Take the advice as what to compare first, not as what to ship:
run [`lamina compare`](compare.md) or one of these [studies](studies.md) on your own text."""


def _advice(question: Question, known: dict[str, Json]) -> list[str]:
    """The sentences whose claims have the verdict that they are written for, each with its link."""
    sentences = []
    for rule in question["rules"]:
        if text := _sentence(rule, claims := _claims(rule, known)):
            sentences.append(f"{text} ({'; '.join(map(_evidence, claims))})")
    return sentences


def _claims(rule: Json, known: dict[str, Json]) -> list[Json]:
    """The claims that a rule's sentences rest on: one, or several that must have the same verdict."""
    names = rule["claim"] if isinstance(rule["claim"], list) else [rule["claim"]]
    return [known[name] for name in names]


def _sentence(rule: Json, claims: list[Json]) -> str:
    """What a rule says for the verdict of its claims: under the verdict's own name, or a kind of verdict's."""
    said = {rule.get(one["verdict"], rule.get(_WRITTEN_FOR.get(one["verdict"], ""), "")) for one in claims}
    return said.pop() if len(said) == 1 else ""


def _section(question: Question, advice: list[str], known: dict[str, Json]) -> str:
    parts = [f"## {question['if']}"]
    parts += ["\n".join(f"- {sentence}" for sentence in advice)] if advice else [question["else"]]
    ruled = [(rule, _claims(rule, known)) for rule in question["rules"]]
    claims = [one for rule, claims in ruled if not _sentence(rule, claims) for one in claims]
    for head, verdicts in _UNDECIDED:
        if here := [one for one in claims if one["verdict"] in verdicts]:
            parts.append(f"{head}: {'; '.join(map(_open, here))}.")
    return "\n\n".join(parts)


def _evidence(one: Json) -> str:
    """The verdict as a link, and what it rests on."""
    facts = [f"[{one['verdict']}]({one['link']})", f"`{one['claim']}`"]
    interval, parts = one.get("interval"), one.get("parts") or []
    if interval and len(parts) == 1:  # of several parts the margin is the closest one's
        compared, _, more = str(parts[0]).partition(": difference")
        low, high = (number(end, ".2g") for end in interval)
        margin = f"difference {number(one['margin'], '.2g')}, 95 % {low} to {high}"
        facts += [plain(compared), margin] if more else []
    facts += [f"{one['seeds']} seeds"] if one.get("seeds") else []
    return ", ".join(facts)


def _open(one: Json) -> str:
    return f"[`{one['claim']}`]({one['link']})"
