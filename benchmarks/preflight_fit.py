"""From recorded runs and burn-ins to the rules' numbers, and from others to the tables of docs/preflight.md."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamina.preflights.features import Features
from lamina.preflights.verdict import VERDICTS, chance, collapsed, kind_of, progress
from lamina.training.settings import RunSettings

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "lamina" / "preflights" / "calibration.json"
PAGE = ROOT / "docs" / "preflight.md"
JUDGED = Path(__file__).parent / "results" / "preflight" / "judged.json"
FITTED, JUDGED_ON = ("grid", "more"), ("default", "held_out")
MARGIN = RunSettings.stuck_margin
BARELY, SPIKE, BACKSLIDE = 0.05, 0.5, 0.1
OUTCOMES = ("trained", "trained badly", "did not train")
SIGNS = {"context": 1.0, "excess": -1.0, "projected": -1.0, "remaining": 1.0, "jacobian": 1.0}
SOFTNESS, PENALTY = 0.03, 0.002
START, END = "<!-- the tables: benchmarks/preflight_calibration.py judge -->", "<!-- end of the tables -->"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A case: what its run came to and what its burn-in measured, at every measurement."""

    set: str
    case: dict[str, Any]
    status: str
    excess: float
    outcome: str
    courses: list[Features]

    def last(self, fitted: dict[str, Any]) -> Features:
        """What `lamina preflight` would judge: the burn-in's end, or a later measurement while it is undecided."""
        low, high = fitted["bands"]
        for seen in self.courses[1:]:  # the first is half-way
            if not low <= chance(seen, fitted) < high:
                return seen
        return self.courses[-1]


def records(runs: list[dict[str, Any]], measured: list[dict[str, Any]]) -> Iterator[Record]:
    """Runs joined with their burn-ins; a run that has none yet is left out."""
    courses = {json.dumps(m["case"], sort_keys=True): m["result"]["features"] for m in measured}
    for run in runs:
        result, key = run["result"], json.dumps(run["case"], sort_keys=True)
        if key in courses:
            best = min((loss for _, loss in result["eval_losses"]), default=math.inf)
            yield Record(
                set=run["set"],
                case=run["case"],
                status=result["status"],
                excess=best - (result["unigram_entropy"] or math.nan),
                outcome=outcome(result),
                courses=[_features(course) for course in courses[key]],
            )


def _features(course: dict[str, Any]) -> Features:
    known = {"excess_error": None} | course  # not in the first measurements
    return Features(**{name: math.nan if value is None else value for name, value in known.items()})


def outcome(result: dict[str, Any]) -> str:
    """What a run came to.

    "did not train": its status is stuck, diverged or failed. "trained badly": it finished, but less than 0.05 nats
    beyond the border to stuck, or its loss rose by more than 0.5 nats above its best, or it ended more than 0.1 nats
    above its best evaluation.
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
    """Fit both rules on the sets `grid` and `more`, and write calibration.json."""
    known = [r for r in records(runs, measured) if r.set in FITTED]
    collapse = fit_collapse(known)
    fitted = {"bands": [0.25, 0.75], "collapse": collapse, "progress": fit_progress(known, collapse)}
    made = {
        "provenance": {
            "made by": "benchmarks/preflight_calibration.py fit",
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
    """The gain below which no run trained whose input was worth next to nothing, with room on both sides.

    The border stands half-way between the smallest gain of one that trained and the next smaller one of those that did
    not, at 1e-3 at most: Adam evens out three orders of magnitude, and such runs were seen to come back.
    """
    limit = 0.002
    ends = [(_end(r), r) for r in known]
    low = [(seen.jacobian, r.status == "finished") for seen, r in ends if seen.finite and seen.context < limit]
    alive = min((gain for gain, trained in low if trained), default=0.0)
    dead = max((gain for gain, trained in low if not trained and gain < min(alive, -1.0)), default=-6.0)
    return {"jacobian": round(max(-6.0, min((alive + dead) / 2, -3.0)), 2), "context": limit}


def _end(record: Record) -> Features:
    return record.courses[min(1, len(record.courses) - 1)]


def fit_progress(known: list[Record], collapse: dict[str, float]) -> dict[str, Any]:
    """A logistic regression, penalised and with the signs that the features must have, on every measurement.

    The target is soft: a run that ended on the border to stuck counts half, one 0.03 nats off it three quarters or one.
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
    for _ in range(20000):
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


def confusion(known: list[Record], fitted: dict[str, Any]) -> dict[str, dict[str, int]]:
    """How many runs of each outcome got each verdict."""
    counts = {o: dict.fromkeys(VERDICTS, 0) for o in OUTCOMES}
    for record in known:
        counts[record.outcome][kind_of(chance(record.last(fitted), fitted), fitted)] += 1
    return counts


def judge(runs: list[dict[str, Any]], measured: list[dict[str, Any]]) -> None:
    """Count verdicts against outcomes for each set, and write judged.json and the page's tables."""
    made = judged(runs, measured, json.loads(TARGET.read_text()))
    JUDGED.write_text(json.dumps(made, indent=2) + "\n")
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    PAGE.write_text(f"{before}{START}\n\n{tables(made)}\n{END}{rest.partition(END)[2]}")
    print(tables(made))


def judged(runs: list[dict[str, Any]], measured: list[dict[str, Any]], fitted: dict[str, Any]) -> dict[str, Any]:
    """The confusion of each set and the runs that were called wrongly, of what is judged on."""
    known = list(records(runs, measured))
    wrong = []
    for record in known:
        sure = chance(record.last(fitted), fitted)
        given = kind_of(sure, fitted)
        if record.set in JUDGED_ON and (given, record.status == "finished") in (
            ("fine", False),
            ("will not train", True),
        ):
            case = {k: record.case[k] for k in ("placement", "num_layers", "init", "learning_rate", "warmup", "steps")}
            wrong.append({**case, "verdict": given, "status": record.status, "excess": round(record.excess, 3)})
    sets = {name: [r for r in known if r.set == name] for name in (*JUDGED_ON, *FITTED)}
    return {"confusion": {n: confusion(rs, fitted) for n, rs in sets.items() if rs}, "wrong": wrong}


_TITLES = {
    "default": "Judged on: the recipe of `lamina compare` (32 layers × 48 wide, 5e-3) and 20 layers at 1.2e-2",
    "held_out": "Judged on: other depths, rates, initialisers, warm-ups, widths and another seed, drawn at random",
    "grid": "Fitted on: the grid",
    "more": "Fitted on: a random draw",
}


def tables(made: dict[str, Any]) -> str:
    """The confusion tables and the list of mistakes as Markdown."""
    lines = []
    for name, counts in made["confusion"].items():
        total = sum(sum(row.values()) for row in counts.values())
        lines += [f"**{_TITLES[name]}** ({total} runs)", ""]
        lines += [f"| the run | {' | '.join(VERDICTS)} |", f"|---|{'---:|' * len(VERDICTS)}"]
        lines += [f"| {o} | {' | '.join(str(row[v]) for v in VERDICTS)} |" for o, row in counts.items()]
        lines.append("")
    lines += ["Mistakes among the runs it was judged on (fine, but it did not train; or the other way round):", ""]
    lines += ["| placement | layers | init | rate | warm-up | steps | verdict | status | loss over unigram |"]
    lines += ["|---|---:|---|---:|---:|---:|---|---|---:|"]
    for w in made["wrong"]:
        cells = [w["placement"], w["num_layers"], w["init"], f"{w['learning_rate']:g}", f"{w['warmup']:g}", w["steps"]]
        lines.append(f"| {' | '.join(map(str, [*cells, w['verdict'], w['status'], w['excess']]))} |")
    return "\n".join(lines) + "\n"
