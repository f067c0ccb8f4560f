"""Plan a study: list the runs that the study still needs.

A study may first search for learning rates. If the best learning rate is the lowest or highest, Lamina adds a more
extreme learning rate. Lamina then trains each configuration with the study's seeds at the configuration's best learning
rate. Some studies also train a configuration at another configuration's best learning rate. The plan depends only on
the results so far, so resuming needs no stored state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import stdev

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.settings import Settings
from lamina.jobs.status import ENDED, severity
from lamina.lab.papers.study_catalog import ENGINE, STAGE, Rule, Scale, Stage, Tuning
from lamina.lab.papers.trials import measures
from lamina.lab.papers.trials.trial import StudyTrial, make_chained, make_trial


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A configuration: the label of each compared setting (axis), and the resulting settings of the first job."""

    values: Mapping[str, str]
    settings: Json

    def trial(self, scale: Scale, learning_rate: float | None, seed: int) -> Settings:
        varied: Json = {} if learning_rate is None else {"learning_rate": learning_rate}
        if scale.tuning is not None and seed in scale.tuning_seeds:
            varied |= scale.tuning.settings
        return scale.record.settings_class().from_dict({**self.settings, **varied, "seed": seed})


def arms(scale: Scale, changes: Json | None = None) -> list[Arm]:
    """Return the configurations of a study. ``changes`` replaces settings of the study."""
    made = []
    for labels in product(*(scale.axes[axis] for axis in scale.axes)):
        values = dict(zip(scale.axes, labels, strict=True))
        if any(matches(values, pattern) for pattern in scale.skip):
            continue
        settings = {**scale.settings, **(changes or {})}
        for axis, label in values.items():
            settings |= scale.axes[axis][label]
        placement = str(settings.get("placement", ""))
        if placement.startswith("./"):  # relative to the study's file
            settings["placement"] = str(scale.folder / placement[2:])
        made.append(Arm(values=values, settings=settings))
    if not made:
        raise UserError(
            f"skip: this entry leaves out all combinations of the scale {scale.name}. Skip fewer combinations."
        )
    return made


def refuse_without_effect(scale: Scale, changes: Json) -> None:
    """Raise UserError if the user changes a setting that the study decides."""
    decided: dict[str, str] = {**ENGINE, "seed": "--seeds"}
    if scale.rates or scale.tuning is not None:
        decided["learning_rate"] = "a copy of the study with other learning rates"
    every = [set.intersection(*({*point} for point in points.values())) for points in scale.axes.values()]
    decided |= {name: "a copy of the study with another axis" for names in every for name in names}
    for name in changes:
        if name in decided:
            raise UserError(
                f"set.{name}: this setting has no effect, because the study or its engine sets the value. "
                f"Use {decided[name]}."
            )


def matches(values: Mapping[str, str], pattern: Json) -> bool:
    """Return whether a configuration has the labels of a pattern, such as an entry of "skip"."""
    listed = {axis: label if isinstance(label, list) else [label] for axis, label in pattern.items()}
    return all(values[axis] in map(str, labels) for axis, labels in listed.items())


Results = Callable[[StudyTrial], Json | None]


@dataclass
class StudyPlan:
    """The runs that a study still needs."""

    scale: Scale
    changes: Json = field(default_factory=dict)  # settings that replace the study's settings
    # each configuration's chosen learning rate, by the configuration's index
    chosen: dict[int, float] = field(default_factory=dict)
    # whether the best learning rate is the lowest or highest that ran, by the configuration's index
    at_edge: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arms = arms(self.scale, self.changes)
        self._measures = measures.names(self.scale.measures)
        self._made: dict[tuple[int, float | None, int, bool | str], StudyTrial] = {}

    def dry(self) -> dict[str, dict[str, Settings]]:
        """Return the settings of every run, by the configuration's name and the run's name.

        Each tuning seed has a run at every learning rate. Each remaining seed has one run. If tuning uses different
        settings, the runs with tuning seeds are a separate configuration.
        """
        scale, trials = self.scale, {}
        sweep = scale.seeds if scale.tuning is None else scale.tuning_seeds
        rates = (scale.rates if scale.tuning is None else scale.tuning.rates) or (None,)
        for seed in dict.fromkeys((*sweep, *scale.seeds)):
            row = ", sweep" if scale.tuning is not None and scale.tuning.settings and seed in sweep else ""
            for arm in self.arms:
                for rate in rates if seed in sweep else rates[:1]:
                    words = [*arm.values.values(), *([] if rate is None else [f"lr {rate:g}"]), f"seed {seed}"]
                    trials.setdefault(_label(arm, scale) + row, {})[", ".join(words)] = arm.trial(scale, rate, seed)
        return trials

    def stages(self) -> dict[str, int]:
        """Return the number of runs of each job after the first job."""
        every = set(range(len(self.arms)))
        arms, counts = {self.scale.job: every}, dict[str, int]()
        for stage in self.scale.stages:
            arms_left = {n for n in every if not any(matches(self.arms[n].values, pattern) for pattern in stage.skip)}
            arms_left = arms_left.intersection(*(arms.get(source, every) for source in stage.inputs.values()))
            one = {n for n in arms_left if all(self.arms[n].values[axis] == value for axis, value in stage.of.items())}
            counts[stage.name] = len(one)
            arms[stage.name] = every if stage.of and one else one  # later stages of all arms use the model of this arm
        trials = len(self.scale.seeds) * (1 if self.scale.tuning is not None else len(self.scale.rates or (None,)))
        return {name: count * trials for name, count in counts.items()}

    def wanted(self, result: Results) -> list[StudyTrial]:
        """Return the runs that the study needs, given the results so far. Updates ``chosen`` and ``at_edge``."""
        scale, wanted = self.scale, []
        if scale.tuning is None:
            for seed, number, rate in product(scale.seeds, range(len(self.arms)), scale.rates or (None,)):
                wanted += self._chain(number, rate, seed)
            return list({(trial.key, *trial.values.values()): trial for trial in wanted}.values())
        seeds = scale.tuning_seeds
        rates = [self._rates(scale.tuning, number, seeds, result) for number, _ in enumerate(self.arms)]
        for seed in seeds:
            for number, (tried, _) in enumerate(rates):
                wanted += [self._trial(number, rate, seed, measured=False) for rate in tried]
        swept = {number: (tried, best) for number, (tried, best) in enumerate(rates) if best is not None}
        self.at_edge = {number: best.lowest in (tried[0], tried[-1]) for number, (tried, best) in swept.items()}
        self.chosen = {number: best.chosen for number, (_, best) in swept.items()}
        partners = self._others(scale.tuning)
        for seed in scale.seeds:
            for number, rate in self.chosen.items():
                wanted += self._chain(number, rate, seed)
            for number, rate in partners.items():
                wanted.append(self._trial(number, rate, seed, measured=False))
        return list({(trial.key, trial.measures, *trial.values.values()): trial for trial in wanted}.values())

    def is_tuned(self, trial: StudyTrial) -> bool:
        """Return whether a run has a seed of the study and the chosen learning rate (True without a search)."""
        if self.scale.tuning is None:
            return True
        return trial.seed in self.scale.seeds and self.chosen.get(self._number(trial)) == trial.learning_rate

    def places(self, trial: StudyTrial) -> Json:
        """Return a run's values in the columns "tuned" and "at_edge" of the results."""
        edge = {} if self.scale.tuning is None else {"at_edge": self.at_edge.get(self._number(trial))}
        return {"tuned": self.is_tuned(trial), **edge}

    def _number(self, trial: StudyTrial) -> int:
        stage = {STAGE: self.scale.job} if self.scale.stages else {}
        return next(n for n, arm in enumerate(self.arms) if {**arm.values, **stage} == trial.first.values)

    def _others(self, tuning: Tuning) -> dict[int, float]:
        """For each configuration in a pair of "also", return the learning rate of the pair's other configuration."""
        numbers = {tuple(arm.values.items()): number for number, arm in enumerate(self.arms)}
        pairs = ((number, tuning.other(arm.values)) for number, arm in enumerate(self.arms))
        partners = {number: numbers.get(tuple(other.items()), -1) for number, other in pairs if other is not None}
        return {number: self.chosen[other] for number, other in partners.items() if other in self.chosen}

    def _chain(self, number: int, rate: float | None, seed: int) -> list[StudyTrial]:
        """Return a configuration's first run, and the runs of later jobs that Lamina can already plan."""
        stages = (self._staged(stage, number, rate, seed) for stage in self.scale.stages)
        return [self._trial(number, rate, seed, measured=True), *(trial for trial in stages if trial is not None)]

    def _staged(self, stage: Stage, number: int, rate: float | None, seed: int) -> StudyTrial | None:
        """Return the run of a later job. Returns None if the job is skipped or the learning rate is unknown."""
        if stage.of:
            values = {**self.arms[number].values, **stage.of}
            number = next((n for n, arm in enumerate(self.arms) if arm.values == values), -1)
            rate = rate if self.scale.tuning is None else self.chosen.get(number)
            if number < 0 or (rate is None and self.scale.tuning is not None):
                return None
        arm, key = self.arms[number], (number, rate, seed, stage.name)
        if any(matches(arm.values, pattern) for pattern in stage.skip):
            return None
        if key in self._made:
            return self._made[key]
        earlier = {each.name: each for each in self.scale.stages}
        root = self._trial(number, rate, seed, measured=True)
        inputs: dict[str, StudyTrial] = {}
        for name, source in stage.inputs.items():
            trial = self._staged(earlier[source], number, rate, seed) if source in earlier else root
            if trial is None:
                return None
            inputs[name] = trial
        values, settings = {**arm.values, STAGE: stage.name}, stage.trial(seed)
        self._made[key] = make_chained(stage.job, values, settings, stage.measures, inputs=inputs, root=root)
        return self._made[key]

    def _trial(self, number: int, rate: float | None, seed: int, *, measured: bool) -> StudyTrial:
        key = (number, rate, seed, measured)
        if key not in self._made:
            arm: Arm = self.arms[number]
            taken = self._measures if measured else ()
            values = {**arm.values, **({STAGE: self.scale.job} if self.scale.stages else {})}
            self._made[key] = make_trial(self.scale.job, values, arm.trial(self.scale, rate, seed), taken)
        return self._made[key]

    def _rates(
        self, tuning: Tuning, number: int, seeds: tuple[int, ...], result: Results
    ) -> tuple[list[float], Best | None]:
        """Return the learning rates to try, and the best learning rate if all results are known."""
        rates = sorted(tuning.rates)
        for widening in range(tuning.widen + 1):
            results_by_rate: dict[float, list[Json]] = {}
            for rate in rates:
                results = (result(self._trial(number, rate, seed, measured=False)) for seed in seeds)
                results_by_rate[rate] = [each for each in results if each is not None]
            if any(len(results) < len(seeds) for results in results_by_rate.values()):
                return rates, None
            best = best_rate(results_by_rate, tuning.rule)
            nothing = all(math.isinf(_rank(results)[0]) for results in results_by_rate.values())  # no trial ended
            inside = best.lowest not in (rates[0], rates[-1])
            if nothing or len(rates) == 1 or inside or widening == tuning.widen:
                return rates, best
            # Continue with the ratio of the two outer learning rates, rounded to four digits.
            down = best.lowest == rates[0]
            beyond = rates[0] / (rates[1] / rates[0]) if down else rates[-1] * (rates[-1] / rates[-2])
            rates = sorted([*rates, float(f"{beyond:.4g}")])
        raise AssertionError("the loop returns")


def _label(arm: Arm, scale: Scale) -> str:
    """Return a configuration's name, such as "keel, num_layers=8"."""
    plain = {axis for axis in scale.axes if axis == "placement" or axis not in scale.axes[axis][arm.values[axis]]}
    named = [label if axis in plain else f"{axis}={label}" for axis, label in arm.values.items()]
    return ", ".join(named) or str(arm.settings.get("placement", "all trials"))


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best learning rate of a search (``lowest``), and the learning rate that the study uses (``chosen``)."""

    lowest: float
    chosen: float


def best_rate(known: Mapping[float, list[Json]], rule: Rule) -> Best:
    """Choose a learning rate from the results of a search. ``known`` is sorted by learning rate.

    The rule "best" chooses the learning rate with the fewest failed seeds. If several learning rates tie, the lowest
    mean loss decides. A seed fails if its run diverges or gets stuck. The rule "one-se" chooses the lowest learning
    rate that is about as good: equally few failed seeds, and a mean loss within one standard error of the best.
    "one-se" averages only over runs that learned.
    """
    if rule == "one-se":
        known = {
            rate: [
                result if severity(str(result["status"])) <= severity("short") else {**result, "eval_loss": None}
                for result in part
            ]
            for rate, part in known.items()
        }
    ranks = {rate: _rank(results) for rate, results in known.items()}
    lowest = min(ranks, key=lambda rate: ranks[rate])
    losses = [float(result["eval_loss"]) for result in known[lowest] if result.get("eval_loss") is not None]
    if rule == "best" or len(losses) < 2:
        return Best(lowest=lowest, chosen=lowest)
    share, mean = ranks[lowest]
    limit = mean + stdev(losses) / math.sqrt(len(losses))
    return Best(lowest=lowest, chosen=min(rate for rate, rank in ranks.items() if rank <= (share, limit)))


def _rank(results: list[Json]) -> tuple[float, float]:
    """Return the sort key (fraction of failed runs, mean loss). Both numbers are infinite if no run has ended."""
    ended = [result for result in results if result["status"] in ENDED]
    if not ended:
        return math.inf, math.inf
    bad = sum(severity(str(result["status"])) > severity("short") for result in ended)
    losses = [float(result["eval_loss"]) for result in ended if result.get("eval_loss") is not None]
    return bad / len(ended), sum(losses) / len(losses) if losses else math.inf
