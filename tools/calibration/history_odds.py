"""Fit and judge the probabilities that `lamina diagnose` prints for the histories of other tools.

    python -m tools.calibration.alarm_runs RUNS --only +0.parquet     # then the same with +1, for some minutes
    python -m tools.calibration.history_odds RUNS                     # writes lamina/reports/assets/history_signs.json

Each broken run of `alarm_runs.py` gives histories with less information: only the loss, the loss and the model's
gradient norm, or also gradient norms by layer. Each history exists in four versions: with a record at every step, and
with records 5, 10 or 20 steps apart after the break. (Before the break, every step has a record, because the runs are
short.) As in other tools, a record has the mean loss over its steps, and the last gradient norm. Even seeds are fitted,
and odd seeds are judged. Three numbers soften the probabilities: a divisor for related signs, a divisor for all signs,
and a number of runs without evidence to add to each cause. The script chooses the numbers by cross-validation over the
set-ups.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lamina.reports.causes import HISTORIES, NOT_KNOWN, VIEWS, Learned, causes_of, signature
from lamina.reports.causes import LEAST as LEAST_TOLD
from lamina.reports.histories.importing import History, judge
from lamina.reports.loss_course import loss_rise
from lamina.reports.signs import Signs
from lamina.training.monitor.writers import LOSS, NORM
from tools.calibration.alarm_runs import KINDS
from tools.calibration.alarms import Recorded

APART = (1, 5, 10, 20)
RATE = "learning_rate"
TEMPERS, SHARPS = (1.0, 1.5, 2.0, 3.0, 4.0), (1.0, 1.25, 1.5, 2.0, 3.0)
ADDED = (2.0, 4.0)  # runs to add to each cause, because a single run says little
BINS = (LEAST_TOLD, 0.85, 0.95, 1.01)
LEAST = 0.02  # the smallest probability of a right cause in the log loss


@dataclass(frozen=True)
class Derived:
    """A history derived from a broken run. Only histories with a first alarm after the break exist."""

    setup: str
    seed: int
    kind: str
    view: str
    apart: int
    signs: Signs


def derived(run: Recorded) -> Iterator[Derived]:
    values: dict[tuple[tuple[int, str, str], str], dict[int, float]] = defaultdict(dict)
    for _, _, rows in run.calls:
        for step, layer, sublayer, role, index, metric, value in rows:
            if metric in (LOSS, NORM, RATE, "gradient_norm") and not index:
                values[(layer, sublayer, role), metric][step] = value
    losses = values[(-1, "model", "all"), LOSS]
    breaks, last = run.about["breaks"], max(losses, default=0)
    for apart, view in itertools.product(APART, VIEWS):
        ends = [*range(1, breaks), *range(breaks + apart - 1, last + 1, apart)] if breaks > 1 else [*range(1, last + 1)]
        number = {end: at * apart for at, end in enumerate(ends, start=1)}
        history = History(form="derived", clock="step", layers={})
        for key, of in values.items():
            if (key[1] == NORM and view == "loss") or (key[1] == "gradient_norm" and view != "layers"):
                continue
            known: dict[int, float] = {}
            for before, end in itertools.pairwise([0, *ends]):
                inside = [of[step] for step in range(before + 1, end + 1) if step in of]
                if inside:
                    known[number[end]] = float(np.mean(inside)) if key[1] == LOSS else inside[-1]
            if known:
                history.series[key] = (np.array([*known]), np.array([*known.values()]))
        if LOSS not in {metric for _, metric in history.series}:
            continue
        told = sorted(judge(history)[0], key=lambda alarm: alarm.order)
        alarms = tuple(alarm for alarm in told if alarm.rule != "notable")
        signs = Signs(
            alarms=alarms,
            rose=loss_rise(history.values(LOSS), alarms, history.values(RATE)),
            losses=history.values(LOSS),
            rates=history.values(RATE),
            norms=history.values(NORM),
            half=None,
            clock={step: at for at, step in enumerate(history.steps, start=1)},
            view=view,
        )
        if signs.first is not None and signs.first.step >= number.get(breaks + apart - 1, 1):
            yield Derived(run.setup, run.about["seed"], run.kind, view, apart, signs)


def learned_of(histories: list[Derived], temper: float, sharp: float, added: float) -> Learned:
    learned = Learned(temper=temper, sharp=sharp, added=added)
    for one in histories:
        learned.see(KINDS[one.kind].cause[0], signature(one.signs))
    return learned


def log_loss(histories: list[Derived], temper: float, sharp: float, added: float) -> float:
    """Return the mean of -log(probability of the right cause). Each set-up is judged by a fit on the other set-ups."""
    costs = []
    for setup in {one.setup for one in histories}:
        learned = learned_of([one for one in histories if one.setup != setup], temper, sharp, added)
        for one in histories:
            if one.setup == setup:
                odds = learned.odds(signature(one.signs))
                costs.append(-math.log(max(LEAST, sum(odds.get(cause, 0.0) for cause in KINDS[one.kind].cause))))
    return float(np.mean(costs))


def reliability(histories: list[Derived], learned: Learned, *, with_rate: bool) -> dict[str, list[int]]:
    """For each range of probabilities, return how many causes were reported and how many of these were right."""
    ranges = {(low, high): f"{low:.0%} to {min(high, 1.0):.0%}" for low, high in itertools.pairwise(BINS)}
    table = {name: [0, 0] for name in (*ranges.values(), NOT_KNOWN)}
    for one in histories:
        signs = one.signs if with_rate else replace(one.signs, rates={})
        (name, odds), *others = causes_of(signs, learned)
        names = [name]
        if odds < LEAST_TOLD and others:  # the record does not distinguish these two causes, so both count
            names, odds = [name, others[0][0]], 2 * odds
        told = NOT_KNOWN
        if name != NOT_KNOWN:
            told = next(said for (low, high), said in ranges.items() if low <= odds < high)
        table[told][0] += 1
        table[told][1] += any(each in KINDS[one.kind].cause for each in names)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder with the runs of alarm_runs")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--judge", action="store_true", help="judge the committed odds on all runs, and fit nothing")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    every = [run for path in sorted(options.runs.glob("*.parquet")) if (run := Recorded.read(path)).kind]
    histories = [one for run in every for one in derived(run)]
    if options.judge:
        for view in VIEWS:
            told = reliability([one for one in histories if one.view == view], Learned.read(view), with_rate=True)
            print(view, len(every), "runs", json.dumps(told))
        return
    record: dict[str, object] = {}
    for view in VIEWS:
        mine = [one for one in histories if one.view == view]
        fitted, held = ([one for one in mine if one.seed % 2 == odd] for odd in (0, 1))
        costs = {each: log_loss(fitted, *each) for each in itertools.product(TEMPERS, SHARPS, ADDED)}
        temper, sharp, added = min(costs, key=lambda each: costs[each])
        learned = learned_of(fitted, temper, sharp, added)
        tables = {name: reliability(held, learned, with_rate=name == "rate") for name in ("rate", "no rate")}
        print(view, len(fitted), len(held), "temper", temper, "sharp", sharp, "added", added, json.dumps(tables))
        record[view] = {
            "temper": temper,
            "sharp": sharp,
            "added": added,
            "signatures": learned.to_dict(),
            "judged": tables,
        }
    if not options.check:
        runs = {
            "fitted": sum(run.about["seed"] % 2 == 0 for run in every),
            "judged": sum(run.about["seed"] % 2 for run in every),
        }
        HISTORIES.write_text(json.dumps({"runs": runs, "apart": APART, "views": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
