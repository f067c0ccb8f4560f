"""Raise alarms for unusual gradients, updates, optimizer moments or hidden states, often before the loss rises."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from lamina.core.json_types import Json, RunState
from lamina.jobs.files import write_lines
from lamina.jobs.names import ALARMS, NOTABLE_BATCHES
from lamina.jobs.run_folder import parse_lines
from lamina.training.monitor.pasts import Judgment
from lamina.training.monitor.rules import GRADIENTS, STAYS, Rules, Series, series_of
from lamina.training.monitor.writers import LOSS, NORM, RATE, Location, Row

logger = logging.getLogger(__name__)

Key: TypeAlias = tuple[str, Series]  # a rule, and the series that it judges

HELD = 8  # steps for which an isolated gradient outlier waits for another alarm
FOLLOWS = 4  # steps within which another alarm confirms a gradient outlier
MARKED = 6.0  # a gradient outlier of one step is reported if it is this many times its usual value
EVENT = 20  # after this many steps without an alarm, the next alarm begins another event
_STEP = attrgetter("step")
NOTABLE = "notable"  # not an alarm: the batch of an isolated gradient outlier
ORDER = (
    "not_finite", "skipped", "guess", "kept", "dead", "unmoved", "forgotten", "written", "repeated", "equal", "fall",
    "fp16", "apart", "low", "rewritten", "logit", "rise", "drift", "collapse", "cut", NOTABLE,
)  # fmt: skip
"""The alarm rules. If a step has several alarms, Lamina lists them in this order."""
HARD = ("skipped", "guess", "kept", "dead", "unmoved", "forgotten", "written", "repeated", "equal")
PLACED = ("not_finite", "guess", "dead", "unmoved", "written", "low")
PARAMETERS = (
    "weight_norm", "update_ratio", "rate_ratio", "gain_abs_max", "gain_mean", "row_norm_abs_max", "row_norm_mean"
)  # fmt: skip
"""``PLACED`` and ``PARAMETERS`` are rules and metrics that show in which layer a failure is.

Outliers in the residual stream or in gradients spread to other layers, so they do not show the failed layer.
"""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A measurement outside its usual range. The field ``usual`` is the value that the rule expects."""

    step: int
    rule: str
    layer: int
    sublayer: str
    role: str
    metric: str
    value: float
    usual: float

    def __str__(self) -> str:
        return describe(self)

    @property
    def location(self) -> Location:
        return self.layer, self.sublayer, self.role

    @property
    def excess(self) -> float:
        """``value / usual``, or infinity if ``usual`` is not positive or ``value`` is not finite."""
        return self.value / self.usual if self.usual > 0 and math.isfinite(self.value) else math.inf

    @property
    def distance(self) -> float:
        """abs(log(value / usual)), or infinity if this logarithm does not exist."""
        return abs(math.log(self.excess)) if 0 < self.excess < math.inf else math.inf

    @property
    def order(self) -> tuple[float, ...]:
        """The sort key: the step, then how close the alarm is to the cause."""
        rank = 2 * self.layer + (self.sublayer == "feed_forward")
        forward = self.metric.startswith(("hidden", "attention"))  # computed before the gradients
        weights = self.metric == "weight_norm"  # not finite already before the step
        # a forward pass spreads NaN to later layers, a backward pass to earlier layers
        arose = [not weights, self.layer < 0, self.sublayer == "block", not forward, rank if forward else -rank]
        late = self.metric == LOSS  # the loss shows a problem last
        return self.step, late, ORDER.index(self.rule), *(arose if self.rule == "not_finite" else ()), -self.distance


@dataclass(kw_only=True)
class Alarms(Rules):
    """Raise alarms for unusual measurements. A metric raises its next alarm only after it was normal again.

    An unusual gradient becomes an alarm if it stays unusual, or if another metric, such as the loss, soon becomes
    unusual. If the gradient becomes usual again and no other metric is unusual, Lamina records the step's batch as
    notable.
    """

    folder: Path | None = None  # the run's folder, for alarms.jsonl and notable.jsonl. None means no files
    told: list[Alarm] = field(default_factory=list)  # all alarms and notable batches so far, oldest first
    marked: set[int] = field(default_factory=set)  # the steps in which the last call of ``see`` found unusual values
    news: str = ""  # the text of the first alarm of a new event, or ""
    paths: Mapping[int, str] = field(default_factory=dict)  # the known module paths, by layer number
    _out: set[Key] = field(default_factory=set)
    _high: dict[Key, list[Alarm]] = field(default_factory=dict)  # gradients that are unusual now
    _single: list[Alarm] = field(default_factory=list)  # gradients that were unusual and are normal again
    _independent_at: int = -1  # the step of the last independent alarm
    _scores: dict[Key, list[float]] = field(default_factory=dict)  # the last scores of metrics that must stay unusual

    def see(self, rows: Iterable[Row], rate: float | None = None) -> list[Alarm]:
        """Check, write and return new alarms. Lamina divides updates by the learning rate ``rate``."""
        by_step: dict[int, list[Row]] = {}
        for row in rows:
            by_step.setdefault(row.step, []).append(row)
        alarms: list[Alarm] = []
        self.marked = set()
        for step, group in sorted(by_step.items()):
            judgments = self.judge(step, group, rate, latest=step == max(by_step))
            told = [alarm for judgment in judgments for alarm in self._once(judgment)]
            soft = [alarm.step for alarm in told if not is_independent(alarm)]
            self._independent_at = max(
                [alarm.step for alarm in told if is_independent(alarm)], default=self._independent_at
            )
            alarms += [*self._followed(step, begun=min(soft, default=math.inf)), *told]
        return self._tell(alarms)

    @property
    def so_far(self) -> list[Alarm]:
        """The alarms so far, including unusual gradients that may still become alarms."""
        every = [*self.told, *chain(*self._high.values()), *self._single]
        return sorted((alarm for alarm in every if alarm.rule != NOTABLE), key=lambda alarm: alarm.order)

    def close(self) -> None:
        """Decide which of the last unusual gradients are alarms. Call this after the last measurements."""
        self._single += chain(*self._high.values())
        self._high = {}
        self._tell(self._followed(math.inf, begun=math.inf))

    def _tell(self, alarms: Sequence[Alarm]) -> list[Alarm]:
        self.news = ""
        if not alarms:
            return []
        alarms = sorted(alarms, key=lambda alarm: alarm.order)
        told = [alarm for alarm in alarms if alarm.rule != NOTABLE]
        self.news = describe(told[0], self.paths) if told and told[0].step > self._last + EVENT else ""
        self.marked |= {alarm.step for alarm in told}
        since = bisect_left(self.told, alarms[0].step, key=_STEP)
        told_keys = {(alarm.step, _key(alarm)) for alarm in self.told[since:]}  # a resumed run tells what it had told
        if new := [alarm for alarm in alarms if (alarm.step, _key(alarm)) not in told_keys]:
            self.told[since:] = sorted([*self.told[since:], *new], key=_STEP)
            self._write()
        return told

    @property
    def _last(self) -> float:
        """The step of the last alarm, without notable batches."""
        return next((alarm.step for alarm in reversed(self.told) if alarm.rule != NOTABLE), -math.inf)

    def _write(self) -> None:
        if self.folder is not None:
            write_alarms(self.folder, self.told)

    def state_dict(self) -> Json:
        state = {
            **super().state_dict(),
            "out": sorted([rule, *series] for rule, series in self._out),
            "waiting": [[rule, *series, [*map(asdict, high)]] for (rule, series), high in self._high.items()],
            "back": list(map(asdict, self._single)),
            "hard": self._independent_at,
        }
        return {"alarms": state}

    def load_state_dict(self, state: RunState) -> None:
        """Restore the state from a checkpoint, and read the folder's alarms up to the checkpoint's step."""
        seen = {"out": [], "waiting": [], "back": [], **state.get("alarms", {})}
        super().load_state_dict(seen)
        self._out = {(rule, (layer, sub, role, metric)) for rule, layer, sub, role, metric in seen["out"]}
        self._high = {
            (rule, (layer, sub, role, metric)): [Alarm(**one) for one in values]
            for rule, layer, sub, role, metric, values in seen["waiting"]
        }
        self._single, self._independent_at = [Alarm(**one) for one in seen["back"]], seen.get("hard", -1)
        if self.folder is not None and "step" in state:
            waiting = {alarm.step for alarm in (*chain(*self._high.values()), *self._single)}
            told = [alarm for alarm in read_alarms(self.folder) if alarm.step <= state["step"]]
            self.told = [alarm for alarm in told if alarm.rule != NOTABLE or alarm.step not in waiting]
            self._write()

    def _followed(self, step: float, begun: float) -> list[Alarm]:
        """Return new notable batches, and the unusual gradients that a new alarm confirms."""
        told: list[Alarm] = []
        if not (self._high or self._single):
            return told
        high = [(key, values[0]) for key, values in self._high.items()]
        for key, alarm in [*high, *((None, alarm) for alarm in self._single)]:
            if key is None and alarm.step < self._independent_at <= begun:
                continue  # the independent alarm in between explains the new alarm better
            if begun <= alarm.step + FOLLOWS and alarm.step <= step <= alarm.step + HELD:
                told.append(alarm)
                if key is not None:
                    self._out.add(key)
                    del self._high[key]
        over = [alarm for alarm in self._single if alarm.step + HELD < step and alarm not in told]
        self._single = [alarm for alarm in self._single if alarm not in (*told, *over)]
        steps = {alarm.step for alarm in over if alarm.step > self._last + EVENT}  # else outliers of an event
        since = bisect_left(self.told, min(steps), key=_STEP) if steps else len(self.told)
        for at in sorted(steps - {alarm.step for alarm in self.told[since:]}):
            largest = max((alarm for alarm in over if alarm.step == at), key=lambda alarm: alarm.excess)
            told.append(replace(largest, rule=NOTABLE))
        return told

    def _once(self, judgment: Judgment) -> list[Alarm]:
        """Return an alarm if a metric leaves its usual range, or if a gradient stays outside for several steps."""
        if not (judgment.unusual or judgment.name or self._out):
            return []
        rule, row, metric = judgment.rule, judgment.row, judgment.row.metric
        key = (rule, series_of(row))
        waits = rule in ("rise", "apart", "low") and metric in GRADIENTS
        lasts = waits and rule == "rise"
        if lasts:
            self.note_score(judgment.name, len(self._high.get(key, ())) + judgment.unusual)
        elif judgment.name:
            scores = self._scores.setdefault(key, []) if waits else []
            scores.append(judgment.score)
            if len(scores) == STAYS or not waits:
                self.note_score(judgment.name, min(scores))
            del scores[: len(scores) - STAYS + 1]
        if not judgment.unusual:
            self._out.discard(key)
            self._single += [alarm for alarm in self._high.pop(key, []) if alarm.excess > MARKED]
        elif key not in self._out:
            location = {"layer": row.layer, "sublayer": row.sublayer, "role": row.role, "metric": metric}
            high = self._high.setdefault(key, [])
            high.append(Alarm(step=row.step, rule=rule, **location, value=row.value, usual=judgment.usual))
            if high[-1].excess > MARKED or not waits:
                self.marked.add(row.step)
            if not waits or (len(high) > self.limits[judgment.name] if lasts else len(high) == STAYS):
                self._out.add(key)
                return self._high.pop(key)[:1]
        return []


def is_hard(alarm: Alarm) -> bool:
    """Return whether an alarm shows a fault of the training code or settings instead of an outlier."""
    return alarm.rule in HARD or alarm.metric in ("rate_ratio", "label_match", RATE)


def is_independent(alarm: Alarm) -> bool:
    """Return whether an alarm cannot come from a gradient: a hard alarm, or a fall of weights or moments."""
    return is_hard(alarm) or (alarm.rule == "fall" and alarm.metric != LOSS)


def outlasts_spikes(alarm: Alarm) -> bool:
    """Return whether an earlier spike cannot explain an alarm. For example, a spike does not explain NaN."""
    return is_independent(alarm) or alarm.rule == "not_finite"


def is_spike(alarms: Sequence[Alarm]) -> bool:
    """Return whether alarms show only a spike: unusual gradients, or a risen loss with unusual hidden states."""
    rose = any(alarm.metric == LOSS and alarm.rule == "rise" for alarm in alarms)
    of_loss = [alarm for alarm in alarms if alarm.metric not in GRADIENTS]
    return not any(map(outlasts_spikes, alarms)) and all(
        rose and (alarm.metric == LOSS or alarm.metric.startswith("hidden")) for alarm in of_loss
    )


def _key(alarm: Alarm) -> Key:
    return alarm.rule, (*alarm.location, alarm.metric)


_OUTSIDE = {"embedding": "the embedding", "readout": "the output head", "other": "the other layers"}
_NAMES = {
    "gain_abs_max": "a norm's largest gain",
    "gain_mean": "a norm's mean gain",
    "row_norm_abs_max": "the largest row norm",
    "row_norm_mean": "the mean row norm",
    "experts_used": "the number of experts in use",
    "hidden_variance": "the residual stream's variance",
    "hidden_abs_max": "the residual stream's largest |x|",
    "attention_logit": "the largest attention logit",
    NORM: "the gradient norm",
    LOSS: "the loss",
    "update_ratio": "the update's norm relative to the weights' norm",
    "rate_ratio": "its learning rate",
    RATE: "the learning rate",
    "label_match": "the fraction of labels that equal the input's tokens",
}


def place_in_words(location: Location) -> str:
    layer, sublayer, role = location
    return _OUTSIDE.get(role, "the model") if layer < 0 else f"layer {layer} ({sublayer.replace('_', '-')})"


def in_words(metric: str) -> str:
    return _NAMES.get(metric, f"the {metric.replace('_', ' ')}")


def describe(alarm: Alarm, paths: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return an alarm as a sentence without the final period. If ``paths`` has the layer, append the layer's path."""
    name = in_words(alarm.metric)
    others = "the other layers' median" if alarm.layer >= 0 else "the layers' median"
    words = {
        "not_finite": f"{name} is not finite",
        "skipped": f"the loss scaler skipped {alarm.value:g} steps in a row",
        "guess": f"the first loss is {alarm.value:.3g}, but guessing among all tokens gives {alarm.usual:.3g}",
        "kept": (
            f"{alarm.value:.0%} of the gradient is left from earlier steps, because your code did not set the "
            "gradient to zero"
        ),
        "unmoved": "parameters get a gradient but do not change" if alarm.value else "the weights do not change",
        "forgotten": f"{alarm.value:.0%} of the optimizer's moments were lost or overwritten between two steps",
        "written": f"code other than the optimizer changed the weights by {alarm.value:.0%} of their norm",
        "repeated": f"the batch is the same as in the previous {alarm.value:g} steps",
        "equal": f"for {alarm.value:g} steps, all rewards of each group have been equal, so there is no gradient",
        "collapse": (
            f"the policy's entropy fell from {alarm.usual:.3g} to {alarm.value:.2g} nats, so the completions "
            "hardly vary"
        ),
        "drift": f"the policy's KL from its reference went from {alarm.usual:.2g} to {alarm.value:.3g} nats per token",
        "cut": f"{alarm.value:.0%} of the completions end at the length limit (at first, {alarm.usual:.0%})",
        "fall": f"{name} is {alarm.excess:.2g} times its recent median",
        "rise": f"{name} is {alarm.excess:.3g} times its recent median",
        "logit": f"the largest attention logit is {alarm.value:.3g} (above {alarm.usual:g}, attention saturates)",
        "fp16": f"the largest |x| is {alarm.value:.3g}, and float16's limit is {alarm.usual:g}",
        "dead": "the gradient is zero"
        if alarm.layer >= 0
        else "no layer gets a gradient, although other parts of the model do",
        "apart": f"{name} is {alarm.excess:.3g} times {others}",
        "low": f"{name} is {alarm.excess:.2g} times the neighboring layers' value",
        NOTABLE: f"{name} was {alarm.excess:.3g} times its usual value, and nothing went wrong afterward",
        "rewritten": f"one step changes its weights by {alarm.value:.0%} of their norm",
    }
    if alarm.metric == "without_gradient":
        words["dead"] = (
            f"{alarm.value:g} of the layer's parameters get no gradient, though most other layers' parameters do"
        )
    if alarm.metric == LOSS and alarm.rule in ("rise", "fall"):
        words[alarm.rule] = f"the loss went from {alarm.usual:.3g} to {alarm.value:.3g}, a larger change than usual"
    if alarm.metric == RATE:
        words["rise"] = f"the learning rate is {alarm.excess:.3g} times its highest value so far"
    path = paths.get(alarm.layer)
    return f"step {alarm.step}, {place_in_words(alarm.location)}: {words[alarm.rule]}{f' ({path})' if path else ''}"


def events(alarms: Iterable[Alarm]) -> list[list[Alarm]]:
    """Group alarms into events, oldest first. An alarm soon after an event's last alarm joins the event."""
    groups: list[list[Alarm]] = []
    for alarm in sorted((alarm for alarm in alarms if alarm.rule != NOTABLE), key=lambda alarm: alarm.order):
        far = alarm.metric == LOSS or (groups and groups[-1][-1].metric == RATE)
        if not groups or alarm.step > groups[-1][-1].step + (3 * EVENT if far else EVENT):
            groups.append([])
        groups[-1].append(alarm)
    return groups


def first_before(alarms: Iterable[Alarm], rose: float | None) -> Alarm | None:
    """Return the first alarm of the last event that began before the step ``rose``, or else of the first event."""
    groups = events(alarms)
    before = [group for group in groups if rose is not None and group[0].step <= rose]
    return before[-1][0] if before else groups[0][0] if groups else None


def says_where(alarm: Alarm) -> bool:
    """Return whether an alarm shows in which layer a failure is."""
    return alarm.rule in PLACED or (alarm.metric in PARAMETERS and alarm.rule != "rewritten")


def place_of(alarms: Iterable[Alarm], first: Alarm) -> Alarm:
    """Return the first alarm within ``EVENT`` steps that shows the failed layer, or else any part of the model."""
    if is_hard(first) and (first.sublayer, first.role) == ("model", "all"):
        return first  # a fault of the whole training
    # later alarms count, because Lamina takes most measurements only at some steps
    near = [alarm for alarm in alarms if first.step <= alarm.step <= first.step + EVENT]
    within = [alarm for alarm in near if alarm.layer >= 0 or alarm.role != "all"] or [first]
    return next(filter(says_where, within), first if first in within else within[0])


def write_alarms(folder: Path, told: Iterable[Alarm]) -> None:
    """Write alarms to alarms.jsonl and notable batches to notable.jsonl. Delete a file without alarms."""
    lines: dict[str, list[Json]] = {ALARMS: [], NOTABLE_BATCHES: []}
    for alarm in told:
        lines[NOTABLE_BATCHES if alarm.rule == NOTABLE else ALARMS].append(asdict(alarm))
    for name, records in lines.items():
        if records:
            write_lines(folder / name, records)
        else:
            (folder / name).unlink(missing_ok=True)


def read_alarms(folder: Path) -> list[Alarm]:
    """Read a run's alarms and notable batches, oldest first. Lamina skips damaged lines."""
    lines = [line for name in (ALARMS, NOTABLE_BATCHES) for line in parse_lines(folder / name)[0]]
    lines, names = sorted(lines, key=lambda line: line["step"]), {each.name for each in fields(Alarm)}
    for line in lines:
        line |= {name: math.nan for name in ("value", "usual") if line.get(name, 0.0) is None}  # JSON has no NaN
    alarm_lines = [line for line in lines if line.get("rule") in ORDER and line.keys() == names]
    if unknown_rules := [str(line.get("rule")) for line in lines if line not in alarm_lines]:
        words = ", ".join(repr(rule) for rule in sorted(set(unknown_rules)))
        logger.warning(
            "%s: this version of Lamina skips %d alarms with rules that it does not know (%s)",
            ALARMS,
            len(unknown_rules),
            words,
        )
    return [Alarm(**line) for line in alarm_lines]
