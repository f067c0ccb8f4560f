"""Fit the monitor's alarms on some runs of `alarm_runs.py`, and judge them on the other runs.

    python -m tools.calibration.alarm_runs RUNS                # trains the runs once: an hour on one core
    python -m tools.calibration.alarms RUNS --fit              # writes lamina/training/monitor/limits.json
    python -m tools.calibration.alarms RUNS --output benchmarks/results/alarms.json
    python -m tools.calibration.alarms RUNS --judged-from 44 --output NEW  # judges the runs of an earlier round again

Lamina measures the loss of each run on a fixed batch. The loss of a broken run has risen when it is not finite, or when
three successive measurements lie 0.15 nats above the healthy twin's loss. An alarm is "before the loss" if its step
lies between the failure and this rise. In a healthy run, an alarm is "in a spike" if the loss lay equally far above its
usual level. Failures without a rise of the loss are counted separately. Set-ups and failures that are not fitted have
different seeds. Nobody looks at runs with these seeds before the rules and limits are final.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from scipy.stats import chi2

from benchmarks.common import settings_of_machine, write_record
from lamina.reports.causes import NOT_KNOWN, Learned, causes_of, signature
from lamina.reports.loss_course import loss_rise
from lamina.reports.signs import Signs
from lamina.training.monitor.alarms import NOTABLE, Alarm, Alarms
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.rules import GRADIENTS, LIMITS, calibration
from lamina.training.monitor.writers import LOSS, NORM, Row
from tools.calibration.alarm_runs import (
    COLUMNS,
    DRAWN,
    FRESH,
    HELD_EVERY,
    KINDS,
    OTHER,
    SEEN,
    SETUPS,
    USUAL,
    path_of,
    wanted,
)

NATS, STAYS = 0.15, 3
RATE = 0.01  # false alarms per healthy run, over all series and rules
CONFIDENCE = 0.8  # that the true tail is not longer than the fitted tail
TAIL = 0.1  # the fraction of runs with scores in the tail
MARGIN = 1.1  # each limit is at least this factor times the highest score of all healthy runs
FLOORS = {"rise": math.log(2.0), "fall": math.log(1.25), "apart": math.log(2.0), "skipped": 6.0, "guess": 1.5}
FLOORS |= dict.fromkeys((f"rise/{metric}" for metric in GRADIENTS), 3.0)  # steps in a row
FLOORS |= {"rise/step_loss": 12.0}  # noises, added up
FLOORS |= {"rewritten/update_ratio": math.log(0.1)}  # Adam at 2e-3 and a standard deviation of 0.02, without gains
FLOORS |= {"rewritten/update_ratio/outside": math.log(0.12)}  # rows of tokens in one batch alone move further
FLOORS |= {"fall/step_loss": 24.0}  # a loss that falls faster is rarely a failure
FLOORS |= {"rise/hidden_abs_max": math.log(3.0), "rise/hidden_variance": 2 * math.log(3.0)}
FLOORS |= {f"fall/{name}/course": math.log(2.0) for name in ("gain_mean", "row_norm_mean")}
FLOORS |= {f"rise/{name}/course": math.log(12.0) for name in ("row_norm_abs_max", "weight_norm")}
FLOORS |= dict.fromkeys(("fall/weight_norm/course", "rise/gain_abs_max/course"), math.log(4.0))
FLOORS |= {"rise/hidden_abs_max/course": math.log(20.0), "rise/hidden_variance/course": 2 * math.log(20.0)}
FLOORS |= {"fall/experts_used": math.log(1.5)}
FLOORS |= {"rise/weight_norm": math.log(1.5), "low": math.log(20.0)}
FLOORS |= {"logit": 0.0}  # times 50
FLOORS |= {"apart/weight_norm": math.log(6.0), "apart/gradient_norm": math.log(6.0)}  # models differ more than here
"""The lowest allowed limits, because smaller changes matter to nobody."""
PARTS = ("fitted", "seen", "judged")
TARGETS = {
    "alarmed_steps_in_10000": 1,
    "diverged_in_200": 1,
    "before_the_loss": 0.85,
    "place": 0.8,
    "cause": 0.75,
}


@dataclass(frozen=True)
class Recorded:
    path: Path
    about: Mapping[str, Any]
    fresh: int = FRESH

    @classmethod
    def read(cls, path: Path, fresh: int = FRESH) -> Recorded:
        return cls(path, json.loads(pq.read_schema(path).metadata[b"about"]), fresh)

    @property
    def kind(self) -> str:
        return self.about["kind"]

    @property
    def setup(self) -> str:
        return self.about["setup"]

    @property
    def part(self) -> str:
        """Return whether the run is fitted, seen or judged.

        Limits are fitted on healthy runs with seeds below ``fresh``. Signs are fitted on failures with seeds below the
        first of ``SEEN``. Some model families are never fitted on.
        """
        seed, apart = self.about["seed"], self.setup.startswith(OTHER) and not SETUPS[self.setup].fitted
        return "judged" if seed >= self.fresh else "seen" if apart or (self.kind and seed >= SEEN[0]) else "fitted"

    @cached_property
    def calls(self) -> list[tuple[float | None, bool, list[Row]]]:
        """Return the calls to the alarms: the learning rate, whether the model is in float16, and the rows."""
        table = pq.read_table(self.path).to_pydict()
        calls, *columns = (table[name] for name in COLUMNS)
        rows = zip(calls, map(Row, *columns), strict=True)
        by_call = {call: [row for _, row in group] for call, group in groupby(rows, key=lambda pair: pair[0])}
        return [(rate, half, by_call.get(call, [])) for call, (rate, half) in enumerate(self.about["calls"])]

    def replay(self, limits: Mapping[str, float] | None = None, heard: list[tuple[int, Alarm]] | None = None) -> Alarms:
        """Pass all rows to new alarms. ``heard`` collects each alarm with the step at which the alarm was raised."""
        alarms = (
            Alarms(vocabulary=self.about["vocabulary"])
            if limits is None
            else Alarms(vocabulary=self.about["vocabulary"], limits=limits)
        )
        for rate, half, rows in self.calls:
            alarms.half = half
            told = alarms.see(rows, rate)
            if heard is not None and told:
                heard += [(max(row.step for row in rows), alarm) for alarm in told]
        alarms.close()
        return alarms

    def by_step(self, metric: str) -> dict[int, float]:
        return {row.step: row.value for _, _, rows in self.calls for row in rows if row.metric == metric}

    @cached_property
    def losses(self) -> dict[int, float]:
        return self.by_step(LOSS)

    def signs(self, alarms: Alarms) -> Signs:
        told = sorted(alarms.told, key=lambda alarm: alarm.order)
        return Signs(
            alarms=tuple(alarm for alarm in told if alarm.rule != NOTABLE),
            rose=loss_rise(self.losses, told),
            losses=self.losses,
            rates=self.by_step("learning_rate"),
            norms=self.by_step(NORM),
            half=bool(self.about["watched"]["half"]) or any(half for _, half, _ in self.calls),
        )

    @property
    def diverged(self) -> int | None:
        """Return the step at which the divergence guard would have stopped the run, or None."""
        guard = DivergenceGuard(margin=1.0, patience=20)
        try:
            for step, loss in sorted(self.losses.items()):
                guard.see_loss(step, loss)
        except Diverged as diverged:
            return diverged.step
        return None

    def spiked(self, step: int) -> bool:
        """Return whether the loss on the fixed batch was higher than before for three measurements around a step."""
        held, at = self.about["held"], step // HELD_EVERY
        usual = statistics.median(held[max(0, at - 15) : max(1, at - 5)] or [math.inf])
        above = [loss > usual + NATS for loss in held[max(0, at - STAYS) : at + 2 * STAYS]]
        return any(above[place : place + STAYS] == [True] * STAYS for place in range(len(above)))

    def rose(self, twin: Recorded) -> int | None:
        """Return the first step at which the loss on the fixed batch lies above the twin's loss, or None."""
        mine, other = self.about["held"], twin.about["held"]
        above = [not math.isfinite(loss) or loss > usual + NATS for loss, usual in zip(mine, other, strict=False)]
        for place, loss in enumerate(mine[: len(above)]):
            if not math.isfinite(loss) or (above[place : place + STAYS] == [True] * STAYS):
                return HELD_EVERY * (place + 1)
        return None


Scores = Mapping[str, float]


def worst_of(run: Recorded) -> Scores:
    """Return the highest score for each limit in a run."""
    return run.replay(defaultdict(lambda: math.inf)).worst


def fitted_limits(worst: Sequence[Scores]) -> dict[str, float]:
    """Fit each limit on the highest scores of healthy runs.

    The scores in the upper tenth are modeled by an exponential tail. The scale of the tail is the upper end of its
    confidence interval. With these limits, a healthy run passes any limit with the probability ``RATE``.
    """
    names = sorted({name for one in worst for name in one})
    limits = {}
    for name in names:
        values = [one[name] for one in worst if math.isfinite(one.get(name, math.inf))] or [0.0]
        begin, highest = sorted(values)[int((1 - TAIL) * len(values))], max(values)
        above = [value - begin for value in values if value >= begin]
        scale = 2 * sum(above) / float(chi2.ppf(1 - CONFIDENCE, 2 * len(above)))
        if scale and all(value == int(value) for value in values):  # steps in a row: a geometric tail
            scale = 1 / math.log1p(1 / scale)
        tail = begin + scale * math.log(TAIL * len(names) / RATE)
        floor = FLOORS.get(name, FLOORS.get(name.partition("/")[0], -math.inf))
        limits[name] = max(tail, highest + (MARGIN - 1) * abs(highest), floor)
    return limits


def left_out(worst: Mapping[tuple[str, int], Scores]) -> dict[str, Any]:
    """For each set-up, fit the limits on the other set-ups. Return the healthy runs that raise an alarm."""
    rings: dict[str, list[str]] = {}
    for setup in {name for name, _ in worst}:
        limits = fitted_limits([one for (name, _), one in worst.items() if name != setup])
        for (name, seed), one in worst.items():
            if name == setup and (names := [each for each, score in one.items() if score > limits.get(each, math.inf)]):
                rings[f"{name} {seed}"] = names
    return {"runs": len(worst), "rang": dict(sorted(rings.items()))}


def right_place(run: Recorded, first: Alarm | None) -> bool | None:
    """Return whether the first alarm names the layer or part that was broken (None: the whole model was broken)."""
    where, layer = KINDS[run.kind].where, run.about["layer"]
    if where is None:
        return None
    if first is None:
        return False
    if where in ("embedding", "readout"):
        return first.role == where or (first.role == "embedding" and run.setup.startswith(("gpt2", "qwen3")))
    if where == "norms":
        return first.metric.startswith("gain")
    layers = {"swapped": {layer, layer - 1}, "experts": set(range(SETUPS[run.setup].layers))}.get(run.kind, {layer})
    return first.layer in layers and (where == "layer" or first.sublayer in (where, "mixer"))


def judged(run: Recorded, twin: Recorded | None, learned: Learned | None) -> dict[str, Any]:
    """Compare the alarms and the diagnosis of a run with what was really broken."""
    heard: list[tuple[int, Alarm]] = []
    alarms = run.replay(heard=heard)
    signs, breaks = run.signs(alarms), run.about["breaks"]
    steps = sorted({alarm.step for alarm in signs.alarms})
    about = {"setup": run.setup, "kind": run.kind or "healthy", "strength": run.about["strength"]}
    row: dict[str, Any] = {**about, "seed": run.about["seed"], "part": run.part, "steps": run.about["steps"]}
    if not run.kind:
        notable = sum(alarm.rule == NOTABLE for alarm in alarms.told)
        spikes = [step for step in steps if run.spiked(step)]
        return {**row, "alarmed": steps, "in_spikes": spikes, "notable": notable, "diverged": run.diverged}
    assert twin is not None
    first, causes = signs.first, causes_of(signs, learned)
    named = causes[0][0] if causes else None
    return {
        **row,
        "breaks": breaks,
        "rose": run.rose(twin),
        "first": min((step for step in steps if step >= breaks), default=None),
        "heard": min((at for at, alarm in heard if alarm.step >= breaks), default=None),
        "what": None if first is None else f"{first.rule}/{first.metric}",
        "place": right_place(run, signs.place),
        "causes": [[name, round(odds, 2)] for name, odds in causes],
        "right": named in KINDS[run.kind].cause,
        "named": named not in (None, NOT_KNOWN),
        "alarmed_before": [step for step in steps if step < breaks],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    healthy = [row for row in rows if row["kind"] == "healthy"]
    broken = [row for row in rows if row["kind"] != "healthy"]
    rose = [row for row in broken if row["rose"] is not None and row["rose"] > row["breaks"] + 1]
    told = [row for row in broken if row["first"] is not None]
    placed = [row for row in broken if row["place"] is not None]
    leads = [row["rose"] - row["first"] for row in rose if row["first"] is not None and row["first"] < row["rose"]]
    return {
        "healthy_runs": len(healthy),
        "healthy_steps": sum(row["steps"] for row in healthy),
        "alarmed_steps": sum(len(row["alarmed"]) for row in healthy),
        "in_spikes": sum(len(row["in_spikes"]) for row in healthy),
        "notable_batches": sum(row["notable"] for row in healthy),
        "diverged": sum(row["diverged"] is not None for row in healthy),
        "failures": len(broken),
        "told": len(told),
        "rose": len(rose),
        "before": len(leads),
        "heard_before": sum(row["heard"] is not None and row["heard"] < row["rose"] for row in rose),
        "median_lead": int(statistics.median(leads)) if leads else None,
        "placed": len(placed),
        "place": sum(row["place"] for row in placed),
        "cause": sum(row["right"] for row in broken),
        "wrong_cause": sum(row["named"] and not row["right"] for row in broken),
    }


def corpus(folder: Path, fresh: int = FRESH) -> tuple[list[Recorded], dict[tuple[str, int], Recorded]]:
    runs = [Recorded.read(path, fresh) for path in sorted(path_of(folder, run) for run in wanted()) if path.exists()]
    return runs, {(run.setup, run.about["seed"]): run for run in runs if not run.kind}


def fit(runs: list[Recorded], twins: Mapping[tuple[str, int], Recorded], provenance: Mapping[str, Any]) -> None:
    """Write the limits to limits.json, and then the signatures that these limits give."""
    worst = {key: worst_of(run) for key, run in twins.items() if run.part == "fitted"}
    limits, others = fitted_limits(list(worst.values())), left_out(worst)
    print(json.dumps(others, indent=1))
    what = {"rate": RATE, "confidence": CONFIDENCE, "runs": len(worst), "rang_where_left_out": len(others["rang"])}
    record: dict[str, Any] = {"provenance": {**provenance, **what}, "limits": limits}
    write_record(LIMITS, record)
    learned = Learned()
    for run in runs:
        if run.part == "fitted" and run.kind and (run.setup, run.about["seed"]) in twins:
            signs = run.signs(run.replay(limits))  # other bad batches have their own labels, or none
            signs = replace(signs, alarms=tuple(each for each in signs.alarms if each.metric != "label_match"))
            if signs.first is not None and signs.first.step >= run.about["breaks"]:
                learned.see(KINDS[run.kind].cause[0], signature(signs))
    write_record(LIMITS, {**record, "signatures": learned.to_dict()})


def add(runs: list[Recorded], provenance: Mapping[str, Any]) -> None:
    """Fit only the limits that limits.json lacks, and add the folder's failures to the signatures."""
    record = dict(calibration())
    worst = [worst_of(run) for run in runs if run.part == "fitted" and not run.kind]
    limits = {**fitted_limits(worst), **record["limits"]}
    learned, count = Learned.read(), 0
    for run in runs:
        if run.part == "fitted" and run.kind:
            signs = run.signs(run.replay(limits))
            if signs.first is not None and signs.first.step >= run.about["breaks"]:
                learned.see(KINDS[run.kind].cause[0], signature(signs))
                count += 1
    added = {name: provenance[name] for name in ("date", "revision")} | {"healthy": len(worst), "failures": count}
    record["provenance"] = {**record["provenance"], "added": added}
    write_record(LIMITS, {**record, "limits": dict(sorted(limits.items())), "signatures": learned.to_dict()})


def by(rows: Iterable[dict[str, Any]], name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    many = {each: each.partition("-")[0] for each in about if each.startswith((DRAWN, OTHER, USUAL))}
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[many.get(row[name], row[name])].append(row)
    about = {many.get(group, group): one for group, one in about.items()}
    return {
        group: {"what": getattr(about[group], "what", ""), "fitted": about[group].fitted, **summary(groups[group])}
        for group in about
        if group in groups
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder with the runs of alarm_runs")
    parser.add_argument("--fit", action="store_true", help="write limits.json")
    parser.add_argument("--add", action="store_true", help="fit only limits that limits.json lacks, on these runs")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="groups of runs to judge")
    parser.add_argument(
        "--judged-from", type=int, default=FRESH, help="first seed of judged runs (default: %(default)s)"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    runs, twins = corpus(options.runs, options.judged_from)
    where = settings_of_machine()
    if options.add:
        add(runs, where)
        return
    if options.fit:
        fit(runs, twins, where)
        return
    rows = []
    for run in runs:
        twin = twins.get((run.setup, run.about["seed"]))
        if twin is not None and run.part in options.parts:
            rows.append(judged(run, twin, None))
            print(json.dumps(rows[-1]), flush=True)
    parts = {name: [row for row in rows if row["part"] == name] for name in options.parts}
    record = {
        "benchmark": "alarms",
        "what": "alarms of the layer monitor in healthy runs, and in the same ones broken",
        "targets": TARGETS,
        "parts": {name: summary(these) for name, these in parts.items()},
        "setups": by((row for row in rows if row["part"] == "judged" and row["kind"] == "healthy"), "setup", SETUPS),
        "kinds": by((row for row in rows if row["part"] == "judged" and row["kind"] != "healthy"), "kind", KINDS),
        "runs": rows,
        **where,
    }
    print(json.dumps(record["parts"], indent=1))
    if options.output:
        write_record(options.output, record)


if __name__ == "__main__":
    main()
