"""What judged.json holds as the tables of docs/preflight.md."""

from __future__ import annotations

import textwrap
from typing import Any

from lamina.preflights.rules import VERDICTS

TITLES = {
    "reviewed": "Judged on: what a review found called fine at low rates, at three lengths",
    "unseen": "Judged on: low rates and long runs, of other depths, half of them on another corpus, drawn at random",
    "default": "Judged on: the recipe of `lamina compare` (32 layers × 48 wide, 5e-3) and 20 layers at 1.2e-2",
    "held_out": "Judged on: other depths, rates, initializers, warm-ups, widths and another seed, drawn at random",
    "other depths": "Judged on: the studies' trials at depths that were not fitted on",
    "other text": "Judged on: the studies' settings on another corpus (Python code)",
    "trials": "Fitted on: the studies' trials with 12, 24 and 32 blocks",
    "grid": "Fitted on: the grid",
    "more": "Fitted on: a random draw",
    "slow": "Fitted on: low rates and long runs, drawn at random",
}


def tables(made: dict[str, Any]) -> str:
    """Return how often verdicts were right by group, for the page, as Markdown."""
    return "\n".join([*_groups(made), *_deciding(made["deciding"]), *_trivial(made["beside trivial rules"])])


def details(made: dict[str, Any]) -> str:
    """Return the counts of each set of runs, the mistakes and the reviewed runs, as Markdown."""
    lines = ["# Preflight's verdicts, set by set", ""]
    for name in TITLES:
        if counts := made["confusion"].get(name):
            total = sum(sum(row.values()) for row in counts.values())
            lines += [f"**{TITLES[name]}** ({total} runs)", ""]
            lines += [f"| the run | {' | '.join(VERDICTS)} |", f"|---|{'---:|' * len(VERDICTS)}"]
            lines += [f"| {o} | {' | '.join(str(row[v]) for v in VERDICTS)} |" for o, row in counts.items()]
            lines.append("")
    lines += ["Mistakes among the runs it was judged on (fine, but it did not train; or the other way round):", ""]
    lines += _runs(made["wrong"]) if made["wrong"] else ["None."]
    lines += ["", "The runs that a review had found called fine:", "", *_runs(made["reviewed"]), ""]
    return "\n".join(lines)


def _groups(made: dict[str, Any]) -> list[str]:
    rule = "below a constant prediction after the burn-in"
    lines = ["Of the runs that no rule was fitted on, right of how many (95 % interval):", ""]
    lines += [
        "| runs | | trained | fine | will not train | left open | a rule of one number |",
        "|---|---:|---:|---|---|---:|---|",
    ]
    for name, found in made["groups"].items():
        cells = [name, found["runs"], found["trained"], _share(found["fine"]), _share(found["will not train"])]
        lines.append(f"| {' | '.join(map(str, [*cells, found['left open'], _share(found[rule])]))} |")
    badly = made["groups"]["all that were not fitted on"]["fine, trained badly"]
    return [
        *lines,
        "",
        _wrapped(
            f"Of the runs called fine {badly} trained badly. The rule of one number, for comparison: fine where the "
            "held-out loss is below a constant prediction's after the first burn-in."
        ),
        "",
    ]


def _trivial(made: dict[str, Any]) -> list[str]:
    low, high = made["rates"]
    words = (
        "Beside two rules that need no burn-in, fitted on the same runs: right of how many. By rate: it trains if its "
        f"learning rate is from {low:g} to {high:g}. By name: it trains if half of the fitted runs of its placement "
        "did. The preflight leaves runs open, the rules never do."
    )
    lines = [
        _wrapped(words),
        "",
        "| runs | | decided | the preflight, on these | by rate | by name | by rate, on all | by name, on all |",
        f"|---|{'---:|' * 7}",
    ]
    for name, row in made["groups"].items():
        cells = [row["runs"], row["decided"], row["preflight"]]
        cells += [row["rules"][rule][runs] for runs in ("of the decided", "of all") for rule in ("rate", "name")]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return [*lines, ""]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _share(found: list[Any]) -> str:
    right, number, low, high = found
    return f"{right} of {number} ({100 * low:.0f} to {100 * high:.0f} %)" if number else "none"


def _deciding(found: dict[str, int]) -> list[str]:
    return [
        _wrapped(
            f"Undecided were {found['undecided']}; {found['told a step']} of them were told a step before their last "
            f"that should decide. Of these {found['trained']} trained, and {found['shown by it']} had shown it by that "
            "step."
        ),
        "",
    ]


def _runs(found: list[dict[str, Any]]) -> list[str]:
    lines = ["| placement | layers × width | init | rate | warm-up | steps | verdict | status | loss over unigram |"]
    lines += ["|---|---:|---|---:|---:|---:|---|---|---:|"]
    for w in found:
        size = f"{w['num_layers']} × {w['hidden_size']}"
        cells = [w["placement"], size, w["init"], f"{w['learning_rate']:g}", f"{w['warmup']:g}", w["steps"]]
        lines.append(f"| {' | '.join(map(str, [*cells, w['verdict'], w['status'], w['excess']]))} |")
    return lines
