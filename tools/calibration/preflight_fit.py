"""Fit the rules of `lamina preflight` on recorded runs and burn-ins, and make tables for docs/evidence/preflight.md."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamina.preflights.burn_in import rates_until
from lamina.preflights.verdict import (
    CLEAR,
    VERDICTS,
    Features,
    VerdictWord,
    collapsed,
    deciding_share,
    learns,
    learns_frequencies,
    progress,
    verdict_of,
)
from lamina.training.settings import PretrainSettings, RunSettings

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "lamina" / "preflights" / "calibration.json"
PAGE = ROOT / "docs" / "evidence" / "preflight.md"
JUDGED = ROOT / "benchmarks" / "results" / "preflight" / "judged.json"
FITTED = ("grid", "more", "slow", "trials")
JUDGED_ON = ("default", "held_out", "unseen", "reviewed", "other depths", "other text")
MARGIN = RunSettings.stuck_margin
BARELY, SPIKE, BACKSLIDE = 0.05, 0.5, 0.1
OUTCOMES = ("trained", "trained badly", "did not train")
SIGNS = {"context": 1.0, "excess": -1.0, "projected": -1.0, "left": 1.0, "jacobian": 1.0}
SOFTNESS, PENALTY = 0.03, 0.002
TYPICAL_ERROR = 0.02  # nats: the standard error of the excess near 0, in the measurements
START, END = "<!-- the tables: tools/calibration/preflight_calibration.py judge -->", "<!-- end of the tables -->"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A case with the outcome of the run, and the features of every measurement in the burn-in."""

    number: int
    set: str
    case: dict[str, Any]
    status: str
    excess: float
    outcome: str
    evaluations: list[tuple[int, float]]
    courses: list[Features]

    def last(self, fitted: dict[str, Any]) -> Features:
        """Return the features that `lamina preflight` would judge: the first decisive measurement, or the last one."""
        for seen in self.courses[1:]:  # the first measurement is in the middle of the burn-in
            if verdict_of(seen, fitted) in ("fine", "will not train"):
                return seen
        return self.courses[-1]

    def verdict(self, fitted: dict[str, Any]) -> VerdictWord:
        return verdict_of(self.last(fitted), fitted)

    def spent(self, step: float) -> float:
        """Return the sum of the learning rates up to a step, as a fraction of the sum over the whole run."""
        run = PretrainSettings(steps=self.case["steps"], warmup=self.case["warmup"])
        return rates_until(run, math.ceil(step)) / rates_until(run, run.steps)

    def shown(self, margin: float) -> float:
        """Return the fraction of summed learning rates after which the loss was clearly below the unigram entropy."""
        border, before = -margin - CLEAR * TYPICAL_ERROR, (0, math.inf)
        for step, excess in self.evaluations:
            if excess < border:
                (first, high), way = before, 1.0
                if math.isfinite(high):
                    way = (high - border) / (high - excess)
                return self.spent(first + way * (step - first))
            before = (step, excess)
        return math.inf


def records(runs: list[dict[str, Any]], measured: list[dict[str, Any]]) -> Iterator[Record]:
    """Yield runs with their burn-ins. Runs without a burn-in, and runs that were too short to tell, are left out."""
    courses = {json.dumps(m["case"], sort_keys=True): m["result"]["features"] for m in measured}
    for number, run in enumerate(runs):
        if run["result"]["status"] == "short":  # too short to tell
            continue
        result, key = run["result"], json.dumps(run["case"], sort_keys=True)
        if key in courses:
            entropy = result["unigram_entropy"] or math.nan
            evaluations = [(step, loss - entropy) for step, loss in result["eval_losses"]]
            yield Record(
                number=number,
                set=run["set"],
                case=run["case"],
                status=result["status"],
                excess=min((excess for _, excess in evaluations), default=math.inf),
                outcome=outcome(result),
                evaluations=evaluations,
                courses=[_features(course) for course in courses[key]],
            )


def _features(course: dict[str, Any]) -> Features:
    known = Features.__dataclass_fields__  # older measurements have more fields
    return Features(**{n: math.nan if value is None else value for n, value in course.items() if n in known})


def outcome(result: dict[str, Any]) -> str:
    """Return the outcome of a run.

    "did not train": the status is stuck, diverged or failed. "trained badly": the run finished, but the loss was less
    than 0.05 nats below the border to stuck, rose by more than 0.5 nats above its minimum, or ended more than 0.1 nats
    above the best evaluation.
    """
    if result["status"] != "finished":
        return "did not train"
    evaluated = [loss for _, loss in result["eval_losses"]]
    best, rise = math.inf, 0.0
    for _, loss in result["losses"]:
        rise, best = max(rise, loss - best), min(best, loss)
    barely = min(evaluated) > result["unigram_entropy"] - MARGIN - BARELY
    return "trained badly" if barely or rise > SPIKE or evaluated[-1] > min(evaluated) + BACKSLIDE else "trained"


def fit(runs: list[dict[str, Any]], measured: list[dict[str, Any]]) -> None:
    known = [r for r in records(runs, measured) if r.set in FITTED]
    collapse = fit_collapse(known)
    fitted: dict[str, Any] = {"bands": [0.25, 0.75], "collapse": collapse, "evidence": fit_evidence(known)}
    fitted["progress"] = fit_progress(known, collapse)
    fitted["deciding"] = fit_deciding(known, fitted)
    made = {
        "provenance": {
            "made by": "tools/calibration/preflight_calibration.py fit",
            "date": datetime.date.today().isoformat(),
            "fitted on": {name: sum(r.set == name for r in known) for name in FITTED},
            "trained, trained badly, did not train": [sum(r.outcome == o for r in known) for o in OUTCOMES],
        },
        **fitted,
    }
    TARGET.write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(made, indent=2))
    print("on what it was fitted on:", confusion(known, fitted))


def fit_collapse(known: list[Record]) -> dict[str, float]:
    """Fit the gain below which no run trained, among runs in which the context reduces the loss by almost nothing.

    The border lies halfway between the smallest gain of a run that trained and the next smaller gain of a run that did
    not train, but at 1e-3 at most. Adam evens out three orders of magnitude, and some runs above this border recovered.
    """
    limit = 0.002
    ends = [(_end(r), r) for r in known]
    low = [(seen.jacobian, r.status == "finished") for seen, r in ends if seen.finite and seen.context < limit]
    alive = min((gain for gain, trained in low if trained), default=0.0)
    dead = max((gain for gain, trained in low if not trained and gain < min(alive, -1.0)), default=-6.0)
    return {"jacobian": round(max(-6.0, min((alive + dead) / 2, -3.0)), 2), "context": limit}


def fit_evidence(known: list[Record]) -> dict[str, float]:
    """Fit how far the held-out loss must lie below a constant prediction's loss, in addition to two standard errors.

    The margin is 0.01 nats larger than the largest value in any measurement of a run that did not train. Runs near the
    border to stuck (0.03 nats) are left out, because these runs were learning.
    """
    lost = [r for r in known if r.outcome == "did not train" and r.excess > SOFTNESS - MARGIN]
    failed = [seen for r in lost for seen in r.courses if seen.finite]
    lowest = min(seen.excess + CLEAR * seen.excess_error for seen in failed)
    return {"margin": round(max(0.0, math.ceil(-100 * lowest)) / 100 + 0.01, 2)}


def fit_deciding(known: list[Record], fitted: dict[str, Any]) -> dict[str, float]:
    """Fit when a run that trains shows this, as the 0.8 quantile over measurements that did not show it yet.

    ``slowing``: the actual wait divided by the wait at the measured pace, if the loss was still falling.
    ``times``: the summed learning rates at that time, divided by the sum at the measurement, if the loss was near a
    constant prediction's loss.
    """
    margin = fitted["evidence"]["margin"]
    slowing, times = [], []
    for record, seen in _open(known, fitted):
        shown = record.shown(margin)
        if not learns_frequencies(seen):
            times.append(shown / seen.spent)
        elif seen.pace > 0:
            slowing.append((shown - seen.spent) / ((seen.excess + CLEAR * seen.excess_error + margin) / seen.pace))
    return {name: round(float(np.quantile(found, 0.8)), 2) for name, found in (("slowing", slowing), ("times", times))}


def _open(known: list[Record], fitted: dict[str, Any]) -> Iterator[tuple[Record, Features]]:
    """Yield the measurements of runs that trained, from the end of the burn-in until the run clearly learned."""
    for record in known:
        shown = record.shown(fitted["evidence"]["margin"])
        if record.outcome != "did not train" and math.isfinite(shown):
            yield from (
                (record, s) for s in record.courses[1:] if s.finite and not learns(s, fitted) and s.spent < shown
            )


def _end(record: Record) -> Features:
    return record.courses[min(1, len(record.courses) - 1)]


def fit_progress(known: list[Record], collapse: dict[str, float]) -> dict[str, Any]:
    """Fit a penalized logistic regression on all measurements. The sign of each coefficient is fixed.

    The target is soft: 0.5 for a run that ended on the border to stuck, and 0.27 or 0.73 for a run 0.03 nats away.
    """
    rows, targets, weights = [], [], []
    for record in known:
        seen = [s for s in record.courses if s.step >= 16 and s.finite and not collapsed(s, {"collapse": collapse})]
        for course in seen:
            rows.append(list(progress(course).values()))
            soft = 1.0 / (1.0 + math.exp(min(50.0, (record.excess + MARGIN) / SOFTNESS)))
            targets.append(soft if record.status in ("finished", "short", "stuck") else 0.0)
            weights.append(1.0 / len(seen))
    x, y, w = np.array(rows), np.array(targets), np.array(weights)
    center, scale = x.mean(0), x.std(0) + 1e-6
    z, signs = (x - center) / scale, np.array(list(SIGNS.values()))
    beta, intercept = np.zeros(z.shape[1]), 0.0
    for _ in range(6000):
        p = 1.0 / (1.0 + np.exp(-np.clip(z @ beta + intercept, -50, 50)))
        error = w * (p - y)
        beta = beta - 0.5 * (z.T @ error / w.sum() + PENALTY * beta)
        beta = np.where(beta * signs > 0, beta, 0.0)
        intercept -= 0.5 * error.sum() / w.sum()
    slopes = beta / scale
    names = list(SIGNS)
    return {
        "intercept": round(float(intercept - slopes @ center), 4),
        "weights": {name: round(float(slope), 4) for name, slope in zip(names, slopes, strict=True)},
    }


def judge(runs: list[dict[str, Any]], measured: list[dict[str, Any]]) -> None:
    """Count the verdicts for each outcome and set. Write judged.json, tables.md and the tables on the page."""
    made = judged(runs, measured, json.loads(TARGET.read_text()))
    JUDGED.write_text(json.dumps(made, indent=2) + "\n")
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    PAGE.write_text(f"{before}{START}\n\n{tables(made)}\n{END}{rest.partition(END)[2]}")
    JUDGED.with_name("tables.md").write_text(details(made))
    print(tables(made))


def judged(runs: list[dict[str, Any]], measured: list[dict[str, Any]], fitted: dict[str, Any]) -> dict[str, Any]:
    """Return the counts for each set, the right verdicts for each group, and the runs with a wrong verdict."""
    known = list(records(runs, measured))
    unseen = [r for r in known if r.set in JUDGED_ON]
    sets = {name: [r for r in known if r.set == name] for name in (*JUDGED_ON, *FITTED)}
    wrong = [r for r in unseen if (r.verdict(fitted), r.status == "finished") in WRONG]
    return {
        "confusion": {name: confusion(found, fitted) for name, found in sets.items() if found},
        "groups": {name: counts([r for r in unseen if chosen(r)], fitted) for name, chosen in GROUPS.items()},
        "wrong": [told(r, fitted) for r in wrong],
        "reviewed": [told(r, fitted) for r in unseen if r.set == "reviewed"],
        "deciding": deciding(unseen, fitted),
        "beside trivial rules": beside_trivial_rules(known, fitted),
    }


def beside_trivial_rules(known: list[Record], fitted: dict[str, Any]) -> dict[str, Any]:
    """Compare the verdicts with two rules that need no burn-in, for each group of runs that were not fitted."""
    seen = [r for r in known if r.set in FITTED]
    unseen = [r for r in known if r.set in JUDGED_ON]
    chosen = {name: [r for r in unseen if group(r)] for name, group in GROUPS.items()}
    groups = {name: compared(group, seen, lambda r: r.verdict(fitted)) for name, group in chosen.items() if group}
    return {"rates": list(rate_bounds(seen)), "groups": groups}


LOOKED_AT = 114  # number of runs at the time when the form of the rules was chosen
WRONG = (("fine", False), ("will not train", True))
GROUPS: dict[str, Callable[[Record], bool]] = {
    "all that were not fitted on": lambda record: True,
    "run after the rules' form was chosen": lambda record: record.number >= LOOKED_AT,
    "rates below 1e-3": lambda record: record.case["learning_rate"] < 1e-3,
    "200 planned steps or more": lambda record: record.case["steps"] >= 200,
    "another corpus (Python code)": lambda record: "corpus" in record.case,
    "the studies' trials": lambda record: record.set in ("other depths", "other text"),
    "6 to 20 layers": lambda record: record.case["num_layers"] <= 20,
    "30 to 64 layers": lambda record: record.case["num_layers"] >= 30,
}


GROUP_TITLES = {  # where the records' names are too short for a page
    "all that were not fitted on": "all runs that we did not use to fit the rules",
    "run after the rules' form was chosen": "runs that we trained after we had chosen the form of the rules",
    "rates below 1e-3": "runs with learning rates below 1e-3",
    "200 planned steps or more": "runs with 200 planned steps or more",
    "another corpus (Python code)": "runs on another corpus (Python code)",
    "the studies' trials": "runs (trials) of the studies",
    "6 to 20 layers": "runs with 6 to 20 layers",
    "30 to 64 layers": "runs with 30 to 64 layers",
}


def confusion(known: list[Record], fitted: dict[str, Any]) -> dict[str, dict[VerdictWord, int]]:
    counts = {o: dict.fromkeys(VERDICTS, 0) for o in OUTCOMES}
    for record in known:
        counts[record.outcome][record.verdict(fitted)] += 1
    return counts


def counts(known: list[Record], fitted: dict[str, Any]) -> dict[str, Any]:
    """Count right verdicts and the right answers of a trivial rule, with 95 % intervals. Also count undecided runs."""
    said = [(record.verdict(fitted), record.outcome) for record in known]
    below = [record.outcome for record in known if record.courses[min(1, len(record.courses) - 1)].excess < 0]
    fine = [outcome for verdict, outcome in said if verdict == "fine"]
    lost = [outcome for verdict, outcome in said if verdict == "will not train"]
    trained = [outcome for _, outcome in said if outcome != "did not train"]
    return {
        "runs": len(known),
        "trained": len(trained),
        "fine": share(sum(o != "did not train" for o in fine), len(fine)),
        "fine, trained badly": fine.count("trained badly"),
        "will not train": share(lost.count("did not train"), len(lost)),
        "left open": sum(verdict in ("risky", "undecided") for verdict, _ in said),
        "below a constant prediction after the burn-in": share(sum(o != "did not train" for o in below), len(below)),
    }


def share(right: int, number: int) -> list[Any]:
    """Return [right, number, low, high]. ``low`` and ``high`` are Wilson's 95 % interval (None if the number is 0)."""
    if not number:
        return [0, 0, None, None]
    z, p = 1.96, right / number
    middle, half = p + z * z / (2 * number), z * math.sqrt(p * (1 - p) / number + z * z / (4 * number * number))
    scale = 1 + z * z / number
    return [right, number, round((middle - half) / scale, 3), round((middle + half) / scale, 3)]


def deciding(known: list[Record], fitted: dict[str, Any]) -> dict[str, int]:
    """Count the undecided runs, the runs with a deciding step, and the runs that had learned by the deciding step."""
    margin, found = fitted["evidence"]["margin"], {"undecided": 0, "told a step": 0, "trained": 0, "shown by it": 0}
    for record in known:
        if record.verdict(fitted) == "undecided":
            found["undecided"] += 1
            step = deciding_share(record.last(fitted), fitted)
            if step < 1.0:
                found["told a step"] += 1
                found["trained"] += record.outcome != "did not train"
                found["shown by it"] += record.outcome != "did not train" and record.shown(margin) <= step
    return found


def told(record: Record, fitted: dict[str, Any]) -> dict[str, Any]:
    names = ("placement", "num_layers", "hidden_size", "init", "learning_rate", "warmup", "steps")
    return {name: record.case[name] for name in names} | {
        "verdict": record.verdict(fitted),
        "status": record.status,
        "excess": round(record.excess, 3),
    }


Rule = Callable[["Record"], bool]
LOST = "did not train"


def rules(known: Sequence[Record]) -> dict[str, Rule]:
    """Return the two trivial rules by name. Each rule predicts whether a run trains."""
    low, high = rate_bounds(known)
    chances = shares_by_name(known)
    overall = sum(trains(r) for r in known) / max(len(known), 1)
    return {
        "rate": lambda r: low <= r.case["learning_rate"] <= high,
        "name": lambda r: chances.get(name_of(r), overall) >= 0.5,
    }


def trains(record: Record) -> bool:
    return record.outcome != LOST


def name_of(record: Record) -> str:
    return record.case["placement"].partition("(")[0]


def rate_bounds(known: Sequence[Record]) -> tuple[float, float]:
    """Return the first interval of learning rates that predicts the largest number of outcomes correctly."""
    rates = sorted({r.case["learning_rate"] for r in known})
    pairs = itertools.combinations_with_replacement(rates, 2)
    return max(pairs, key=lambda pair: sum((pair[0] <= r.case["learning_rate"] <= pair[1]) == trains(r) for r in known))


def shares_by_name(known: Sequence[Record]) -> dict[str, float]:
    by_name: dict[str, list[bool]] = defaultdict(list)
    for record in known:
        by_name[name_of(record)].append(trains(record))
    return {name: sum(found) / len(found) for name, found in by_name.items()}


def compared(unseen: Sequence[Record], known: Sequence[Record], verdict: Callable[[Record], str]) -> dict[str, Any]:
    """Count the right answers of the preflight and the rules, on all runs and on runs that the preflight decides."""
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
    return "\n".join([*_groups(made), *_deciding(made["deciding"])])


def details(made: dict[str, Any]) -> str:
    """Return the counts of each set of runs, the mistakes and the reviewed runs, as Markdown."""
    lines = ["# Preflight's verdicts, set by set", "", *_trivial(made["beside trivial rules"])]
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
    lines = [
        "The table counts right verdicts on runs that we did not use for the fit (with confidence intervals):",
        "",
    ]
    lines += [
        "| runs | number of runs | runs that trained | `fine`: right | `will not train`: right | `undecided` | "
        "simpler rule: right |",
        "|---|---:|---:|---|---|---:|---|",
    ]
    for name, found in made["groups"].items():
        cells = [
            GROUP_TITLES.get(name, name),
            found["runs"],
            found["trained"],
            _share(found["fine"]),
            _share(found["will not train"]),
        ]
        lines.append(f"| {' | '.join(map(str, [*cells, found['left open'], _share(found[rule])]))} |")
    badly = made["groups"]["all that were not fitted on"]["fine, trained badly"]
    return [
        *lines,
        "",
        _wrapped(
            f"Of the runs with the verdict `fine`, {badly} trained badly. For comparison, the last column shows a "
            "simpler rule: a run is `fine` if its held-out loss after the first burn-in is below a constant "
            "prediction's loss."
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
            f"{found['undecided']} runs were undecided. For {found['told a step']} of these runs, the named step is "
            f"before the planned end. {found['trained']} of the {found['told a step']} runs trained in the end, and "
            f"{found['shown by it']} had learned by the named step."
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
