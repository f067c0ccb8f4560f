"""Two rules that look at no burn-in, to set the preflight's verdicts beside: the learning rate's, the placement's name.

Both are fitted on the runs that the preflight is fitted on, and both decide every run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preflight_fit import Record

Rule = Callable[["Record"], bool]
LOST = "did not train"


def rules(known: Sequence[Record]) -> dict[str, Rule]:
    """The two rules by name: each says whether a run trains."""
    low, high = rate_bounds(known)
    chances = shares_by_name(known)
    overall = sum(trains(r) for r in known) / max(len(known), 1)
    return {
        "rate": lambda r: low <= r.case["learning_rate"] <= high,
        "name": lambda r: chances.get(name_of(r), overall) >= 0.5,
    }


def trains(record: Record) -> bool:
    """Whether the run trained, well or badly."""
    return record.outcome != LOST


def name_of(record: Record) -> str:
    """The placement without its options."""
    return record.case["placement"].partition("(")[0]


def rate_bounds(known: Sequence[Record]) -> tuple[float, float]:
    """The interval of learning rates that calls most of the runs rightly; of equals the first."""
    rates = sorted({r.case["learning_rate"] for r in known})
    pairs = itertools.combinations_with_replacement(rates, 2)
    return max(pairs, key=lambda pair: sum((pair[0] <= r.case["learning_rate"] <= pair[1]) == trains(r) for r in known))


def shares_by_name(known: Sequence[Record]) -> dict[str, float]:
    """By placement the share of its runs that trained."""
    by_name: dict[str, list[bool]] = defaultdict(list)
    for record in known:
        by_name[name_of(record)].append(trains(record))
    return {name: sum(found) / len(found) for name, found in by_name.items()}


def compared(unseen: Sequence[Record], known: Sequence[Record], verdict: Callable[[Record], str]) -> dict[str, Any]:
    """[right, of how many] of the rules on all runs and on those that the preflight decides, and of the preflight."""
    decided = [r for r in unseen if verdict(r) in ("fine", "will not train")]
    made: dict[str, Any] = {
        "runs": len(unseen),
        "decided": len(decided),
        "preflight": sum((verdict(r) == "fine") == trains(r) for r in decided),
    }
    made["rules"] = {
        name: {
            "of all": sum(rule(r) == trains(r) for r in unseen),
            "of the decided": sum(rule(r) == trains(r) for r in decided),
        }
        for name, rule in rules(known).items()
    }
    return made
