"""The alarm rules. A rule compares each metric of a layer with a reference, and limits the difference.

The file limits.json contains the limits. The script tools/calibration/alarms.py fits the limits to recorded runs.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

from lamina.core.json_types import Json
from lamina.jobs.files import read_json
from lamina.training.monitor.idle_parts import IdleParts
from lamina.training.monitor.loss_chart import LossChart
from lamina.training.monitor.pasts import (
    COURSES,
    EVERY_STEP,
    INTERVAL,
    PACES,
    PASTS,
    RECORDS,
    SOON,
    WINDOW,
    Judgment,
    Past,
    earlier_peak,
    leaving,
    pace_of,
)
from lamina.training.monitor.policy_signs import METRICS as POLICY
from lamina.training.monitor.policy_signs import PolicyCourse
from lamina.training.monitor.writers import BETWEEN, LOSS, MODEL, NORM, RATE, Location, Row
from lamina.training.monitor.written_weights import HANDS, LastWeights, WrittenWeights

Series: TypeAlias = tuple[int, str, str, str]
"""A layer, a sub-layer, a role and a metric."""
LIMITS = Path(__file__).parent / "limits.json"
LOGIT = 50.0  # an attention logit of this size makes all others negligible
FROM_FIRST = 8.0  # times a layer's first logit, which is large under query and key norms without a scale (Gemma 4)
FP16_MAX = 65504.0
FEW = 0.25  # share of the layers whose weights may stand apart; more of them are another kind of layer
BEGINS = 10.0  # near chance, a sub-layer's gradient may rise to this multiple of the model's usual gradient
CERTAIN, ZEROS = 1e-7, 5  # zero gradients are no chance below this probability, with at least so many in a row
LEFTOVER = 0.1  # share of a gradient that earlier steps left in it
RECENT, SAME_WAY = 10, 5  # a course is judged by so many records, so many of which must go the same way
GROWS = 1.1  # an optimizer's own estimate of its rate still grows if it does by this factor between two records
RAISED = 4.0  # multiple of a schedule's highest rate,
LEVEL = 32  # which the schedule has reached after so many steps without a rise
HIGH_RATE = 16.0  # multiple of the others' rate; LoRA+ (arXiv 2402.12354) uses up to this on purpose
MATCH, NO_MATCH = 0.99, 0.95  # share of labels that equal the batch's tokens: while they fit, and once they do not
REPEATS = 6  # steps with the same batch that are too many: GRPO and PPO take fewer
STAYS = 3  # a gradient must stand apart for so many values in a row; the first so many values are the start
STANDS_OUT = math.log(2.0)  # a gradient stands out from this score; its limit is how often in a row it may
GRADIENTS = ("gradient_norm", "step_gradient_norm", "first_moment")


JUDGED = {
    *PASTS, "update_ratio", "rate_ratio", "expert_load", "batch_repeats", "label_match", "kept_gradient", LOSS, *HANDS
}  # fmt: skip
_LAGS = ("gradient_norm", "update_norm")
_UPDATES = ("update_norm", "update_ratio", "weight_norm", "unmoved_parameters", "without_gradient")
_OF_WEIGHTS = {*_UPDATES, "gain_mean", "gain_abs_max", "row_norm_mean", "row_norm_abs_max"}
_IDLE = ("gradient_norm", "update_norm", "update_ratio")  # zero where a step does not call a layer
_MOVES = ("gradient_norm", "update_norm", "first_moment", "second_moment")
_EVERY_STEP = {metric for metric, past in PASTS.items() if past.fewest == EVERY_STEP}
_STILL = {*_MOVES, *_IDLE, NORM, "unmoved_parameters"}  # not judged while equal rewards give no gradient
ESTIMATES = (
    "the optimizer raises its own estimate of the learning rate. Until the estimate stays level, Lamina "
    "does not compare weights, updates and hidden states with earlier steps"
)
RATES = (
    "some parts of the model have a separate learning rate. Lamina raises no alarm for this difference unless "
    "another value of these parts is unusual"
)
_WHOLE = ("all", "embedding", "readout")  # the roles of parameters whose updates are judged


@dataclass
class ZeroRun:
    """The gradients of exactly 0 of a part of the model."""

    run: int = 0  # the number of zeros in a row up to now
    begun: int = 0  # the first step of this run, or the last step
    before: int = 0  # the number of earlier zeros
    count: int = 0  # the number of earlier gradients

    def see(self, row: Row) -> Self:
        if row.value != 0.0:
            self.before, self.count, self.run = self.before + self.run, self.count + self.run + 1, 0
        self.begun = self.begun if self.run else row.step
        self.run += row.value == 0.0
        return self


class Peak(NamedTuple):
    """The learning rate's highest value, and the step at which the rate rose to this value."""

    before: float = 0.0  # the highest value before the latest rise, or 0 during the warm-up
    highest: float = 0.0
    step: int = 0


@cache
def calibration() -> Json:
    """Read limits.json: the fitted limits, and how they were fitted."""
    return read_json(LIMITS)


def limits() -> Mapping[str, float]:
    """Return the fitted limits by rule and metric."""
    return calibration()["limits"]


def series_of(row: Row) -> Series:
    """Return the layer, sub-layer, role and metric of a measurement. Query and key norms get separate roles."""
    role = f"{row.role} {row.number + 1}" if row.number else row.role
    return row.layer, row.sublayer, role, row.metric


@dataclass(kw_only=True)
class Rules:
    """Judge a run's measurements, one step after another."""

    half: bool = False  # whether the model computes in float16 (largest number 65504)
    # the first layer of each further stack, such as a decoder. Lamina compares layers only within a stack
    starts: Sequence[int] = ()
    # each layer's kind, such as its attention type. Lamina compares only layers of the same kind
    kinds: Mapping[int, str] = field(default_factory=dict)
    vocabulary: int | None = None  # the number of tokens in the vocabulary, or None if unknown
    limits: Mapping[str, float] = field(default_factory=limits)  # the fitted limits by rule and metric
    worst: dict[str, float] = field(default_factory=dict)  # the highest score so far for each fitted limit
    notes: list[str] = field(default_factory=list)  # observations that are not alarms
    _recent: dict[Series, deque[float]] = field(default_factory=dict)
    _last_steps: dict[Series, tuple[int, int]] = field(default_factory=dict)  # the steps of a series' last two values
    _weights: dict[Location, LastWeights] = field(default_factory=dict)
    _loss_chart: LossChart = field(default_factory=LossChart)
    _logits: dict[int, float] = field(default_factory=dict)  # each layer's first attention logit
    _skipped: int = 0  # steps in a row that a loss scaler left out
    _writes: WrittenWeights = field(default_factory=WrittenWeights)
    _peak: Peak = field(default_factory=Peak)
    _estimate: tuple[float, int] = (0.0, -INTERVAL)  # the highest rate that an optimizer estimated, and when it grew
    _changed: dict[Location, int] = field(default_factory=dict)  # the last step at which others were trained
    _harmful: set[Location] = field(default_factory=set)  # parts whose own learning rate did harm
    _policy: PolicyCourse = field(default_factory=PolicyCourse)
    _idle: IdleParts = field(default_factory=IdleParts)
    _random_depth: bool = False  # whether a step may skip layers, so that the stream varies more
    # records in a row with the metric "without_gradient", and the first of these steps
    _silent: dict[Location, tuple[int, int]] = field(default_factory=dict)
    _zeros: dict[Location, ZeroRun] = field(default_factory=dict)

    def judge(self, step: int, rows: Sequence[Row], rate: float | None, *, latest: bool) -> Iterator[Judgment]:
        """Judge the measurements of a step. Lamina divides updates by ``rate``, the latest learning rate."""
        found = list(self._judgments(step, rows, rate, latest))
        yield from found
        yield from self._rates(rows, found)

    def _judgments(self, step: int, rows: Sequence[Row], rate: float | None, latest: bool) -> Iterator[Judgment]:
        policy = [row for row in rows if row.metric in POLICY]
        yield from self._rewarded(step, policy)
        if policy and len(policy) == len(rows):
            return
        if self._policy.idle:
            rows = [row for row in rows if row.metric not in _STILL or not math.isfinite(row.value)]
        if changed := {row.location for row in rows if row.metric == "trained_changed"}:
            self._changed |= dict.fromkeys(changed, step)
            self._restart(changed)
        yield from self._schedule(step, rate if latest else None)
        new = {owner for owner, at in self._changed.items() if step < at + INTERVAL}  # Adam's first steps are large
        starts = self._estimated(step, rows)
        rows = [row for row in rows if row.metric != "update_ratio" or not (starts or row.location in new)]
        left_out = {row.layer for row in rows if row.metric == "not_called"}
        self._random_depth |= bool(left_out)
        rows = [row for row in rows if row.value != 0.0 or row.layer not in left_out or row.metric not in _IDLE]
        rows = [*rows, *_experts_used(step, rows)]
        compares = bool(self._weights) or any(row.sublayer != "model" for row in rows)
        if compares:
            yield from self._written(step, rows, rate if latest else None)
        for row in rows:
            if row.metric in PACES:
                yield from self._pace(row)
            if row.metric not in JUDGED or row.metric == "expert_load":
                continue
            if not math.isfinite(row.value):
                yield Judgment("not_finite", row, 0.0, unusual=True)
                continue
            yield Judgment("not_finite", row, 0.0, unusual=False)
            yield from self._fixed_limits(row)
            if (past := PASTS.get(row.metric)) is not None:
                yield from self._past(row, past, rate)
        if compares:
            yield from self._peers(rows)
            yield from self._dead(rows)
            yield from self._updates(step, rows)
        yield from self._batch(rows)
        for row in rows:
            if row.metric == LOSS and math.isfinite(row.value):
                yield from self._loss(row)
        yield from self._scaler(rows)
        groups = [members for metric in _LAGS for members in self._groups(rows, metric)] if compares else []
        self.notes += self._idle.see(step, groups, (row for row in rows if row.metric == "expert_load"), self._recent)

    def _rewarded(self, step: int, rows: Sequence[Row]) -> Iterator[Judgment]:
        """Judge a policy's logged numbers. Forget past gradients once all rewards are equal and gradients vanish."""
        was_idle = self._policy.idle
        for sign in self._policy.see(step, {row.metric: row.value for row in rows}) if rows else ():
            yield Judgment(sign.rule, Row(sign.step, *MODEL, 0, sign.metric, sign.value), sign.usual, sign.unusual)
        if self._policy.idle and not was_idle:
            self._zeros = {}
            self._forget(lambda series: series[3] in _STILL)

    def _estimated(self, step: int, rows: Iterable[Row]) -> bool:
        """Return whether an optimizer's estimate of its learning rate has grown in the last 20 steps."""
        value = max((row.value for row in rows if row.metric == "rate_estimate"), default=0.0)
        highest, grew = self._estimate
        if value > GROWS * highest > 0:
            # Prodigy and D-Adaptation begin with a far too low estimate
            grew = step
            self._forget(lambda series: series[3] in PASTS and series[3] not in _EVERY_STEP)
            self._note(step, ESTIMATES)
        self._estimate = max(value, highest), grew
        return step < grew + INTERVAL

    def _schedule(self, step: int, rate: float | None) -> Iterator[Judgment]:
        """Compare the learning rate with its highest value so far. The learning rate's first rise is the warm-up."""
        if not rate or self._estimate[0]:
            return
        before, highest, at = self._peak
        if rate > highest:
            highest, at = rate, step
        elif rate < highest or step >= at + LEVEL:
            before = highest
        self._peak = Peak(before, highest, at)
        row = Row(step, *MODEL, 0, RATE, rate)
        yield Judgment("rise", row, before, unusual=0 < RAISED * before < rate)

    def _restart(self, owners: Collection[Location]) -> None:
        """Forget past measurements of the whole model, and of parts with a change in the trained parameters."""
        # if many parts have changed, Lamina forgets everything
        several = len(set(owners)) > max(1, FEW * len(self._weights))
        blocks = {(layer, "block") for layer, _, _ in owners if layer >= 0}

        def restarts(series: Series) -> bool:
            owned, metric = series[:3] in owners, series[3]
            mine = owned or series[:2] in blocks or series[1] == "model"
            moves = metric == NORM or metric in _MOVES or (metric in _OF_WEIGHTS and owned)
            return (mine and moves) or (several and metric != "written_ratio")

        self._forget(restarts)
        for owner in owners:
            self._weights.pop(owner, None)
            self._zeros.pop(owner, None)
        if several:
            self._loss_chart, self._peak = LossChart(), Peak()

    def _forget(self, which: Callable[[Series], bool]) -> None:
        for series in [*filter(which, self._recent)]:
            del self._recent[series]
            self._last_steps.pop(series, None)

    def _recent_of(self, row: Row) -> deque[float]:
        return self._recent.setdefault(series_of(row), deque(maxlen=WINDOW))

    def note_score(self, name: str, score: float) -> None:
        """Store a measurement's score, if the score is the highest so far for the fitted limit ``name``."""
        self.worst[name] = max(self.worst.get(name, -math.inf), score)

    def _note(self, step: int, text: str, more: str = "") -> None:
        if not any(text in note for note in self.notes):
            self.notes.append(f"step {step}: {text}{more}")

    def _fitted(self, rule: str, row: Row, usual: float, score: float, part: str = "") -> Judgment:
        name = f"{rule}/{row.metric}{part}"
        return Judgment(rule, row, usual, unusual=score > self.limits[name], name=name, score=score)

    def _fixed_limits(self, row: Row) -> Iterator[Judgment]:
        if row.metric == "attention_logit":
            limit = LOGIT * math.exp(self.limits["logit/attention_logit"])
            first = self._logits.setdefault(row.layer, row.value)
            above = max(1.0, FROM_FIRST * first / limit) if first <= limit else 1.0
            yield self._fitted("logit", row, above * limit, math.log(max(row.value, 1e-30) / above / LOGIT))
        if row.metric == "hidden_abs_max" and self.half:
            yield Judgment("fp16", row, FP16_MAX, unusual=row.value > FP16_MAX / 4)
        if row.metric == "kept_gradient":
            yield Judgment("kept", row, 0.0, unusual=row.value > LEFTOVER)

    def _past(self, row: Row, past: Past, rate: float | None) -> Iterator[Judgment]:
        step, metric, value = row.step, row.metric, row.value
        scaled = value / rate if metric == "update_norm" and rate else value
        recent = self._recent_of(row)
        before, last = self._last_steps.get(series_of(row), (step - 2, step - 1))
        gaps = max(1.0, (step - last) / max(1, last - before))  # a history may have a step twice
        warms_up = self._peak.before == 0 and self._peak.step >= last
        for rule, sign in (("rise", 1.0), ("fall", -1.0)):
            if not (past.rises if rule == "rise" else past.falls) or len(recent) < past.fewest:
                continue
            shrinks = rule == "fall" and metric in _OF_WEIGHTS
            usual, score = leaving(scaled, recent, sign, gaps if past.fewest == RECORDS else 0.0, shrinks)
            if self._random_depth and metric.startswith(("hidden", "update_norm")):  # what ran before differs
                usual = max(usual, earlier_peak(recent))
                score = min(score, max(0.0, math.log(max(scaled, 1e-30) / max(usual, 1e-30))) / 2)
            score /= max(1.0, (step - last) / INTERVAL)
            if score and rule == "rise" and value <= self._calm(row, past):
                score = 0.0
            if warms_up and rule == "rise" and metric.startswith(("hidden", "row_norm", "weight_norm")):
                score = 0.0  # weights and the stream grow with the rate: their courses judge them
            judgment = self._fitted(rule, row, usual * (value / scaled if scaled else 1.0), score)
            if metric in COURSES and (course := self._course(rule, row, sign)) is not None:
                self.note_score(course.name, course.score)
                judgment = course if course.unusual and not judgment.unusual else judgment
            if metric in GRADIENTS and rule == "rise":  # its limit is how often in a row it may stand out
                judgment = Judgment(rule, row, judgment.usual, score > STANDS_OUT, judgment.name, judgment.score)
            yield judgment
        recent.append(scaled)
        self._last_steps[series_of(row)] = last, step

    def _pace(self, row: Row) -> Iterator[Judgment]:
        """Judge how fast a value moves between two records. Changed weights may do harm before the next record."""
        metric = row.metric.removeprefix(BETWEEN)
        past, key = PASTS[metric], (*series_of(row)[:3], metric)
        recent, (before, last) = self._recent.get(key, deque[float]()), self._last_steps.get(key, (0, 0))
        steps = row.step - last
        if len(recent) < past.fewest or steps < SOON:
            return
        rule, sign = ("rise", 1.0) if row.value > recent[-1] else ("fall", -1.0)
        if not (past.rises if rule == "rise" else past.falls):
            return
        usual, score = pace_of(row.value, recent, sign, steps, last - before)
        # row norms of embeddings grow with the learning rate
        warms_up = self._peak.before == 0 and self._peak.step >= last
        if rule == "rise" and (warms_up or row.value <= max(past.calm, COURSES[metric])):
            score = 0.0
        found = self._fitted(rule, row._replace(metric=metric), usual, score, "/pace")
        if found.unusual:
            yield found
        else:  # only a record shows that the series is back in its usual range
            self.note_score(found.name, found.score)

    def _course(self, rule: str, row: Row, sign: float) -> Judgment | None:
        """Judge how far a metric has moved in one direction over its last records."""
        recent = [*self._recent[series_of(row)]]
        # a rise from 0 may be healthy
        if len(recent) < SAME_WAY or (rule == "rise" and 0.0 in recent):
            return None
        recent = recent[-RECENT:]
        begin = min(range(len(recent)), key=lambda at: sign * recent[at])
        course, least = [*recent[begin:], row.value], COURSES[row.metric] if rule == "rise" else 0.0
        back = sum(sign * (later - earlier) <= 0 for earlier, later in pairwise(course))
        back += SAME_WAY if len(course) < SAME_WAY else 0
        usual = max(least, recent[begin])
        _, last = self._last_steps.get(series_of(row), (row.step - 2, row.step - 1))
        away = sign * math.log(max(row.value, 1e-30) / usual) if usual > 0 and back <= 1 else 0.0
        return self._fitted(rule, row, usual, max(0.0, away) / max(1.0, (row.step - last) / INTERVAL), "/course")

    def _calm(self, row: Row, past: Past) -> float:
        """Return the value that a rise must exceed to count.

        For gradients and moments, the value is the whole model's usual norm. A far smaller norm of a sub-layer can rise
        tenfold without an effect. If the model skips layers at random, a gradient must also exceed its earlier peak.
        Near the loss of guessing, a gradient may rise to 10 times the usual norm, because learning begins.
        """
        if row.metric not in GRADIENTS:
            return past.calm
        earlier = earlier_peak(self._recent_of(row)) if self._random_depth else 0.0
        if row.sublayer == "model":
            return earlier
        parts = [
            statistics.median(recent)
            for (layer, sublayer, role, name), recent in self._recent.items()
            if name == row.metric and sublayer == "block" and (layer < 0 or role == "all") and recent
        ]
        near = self._loss_chart.is_near(math.log(self.vocabulary or math.inf))
        return max(earlier, math.hypot(*parts) * (BEGINS if near else 1.0))

    def _rates(self, rows: Sequence[Row], found: Sequence[Judgment]) -> Iterator[Judgment]:
        """Judge parts of the model with a far higher learning rate than other parts.

        In a few layers, a high learning rate is an alarm. In many layers or outside the layers, a high learning rate
        may be intentional (muP, Muon, fine-tuning). An alarm then needs unusual values in these parts, and usual
        weights in all other parts.
        """
        rates = [row for row in rows if row.metric == "rate_ratio"]
        if not rates:
            return
        high = [row for row in rates if row.value > HIGH_RATE]
        layers = {row.layer for row in rows if row.metric in _MOVES and row.layer >= 0}
        several = len({row.layer for row in high if row.layer >= 0}) > max(1, FEW * len(layers))
        unusual = [each.row for each in found if each.unusual and each.row.metric not in GRADIENTS]
        on_purpose = [row for row in high if row.layer < 0 or several]
        owners = {row.location for row in high}
        weights = {row.location for row in unusual if row.metric in _OF_WEIGHTS}
        if weights <= owners:  # else the rate is not what they share
            self._harmful |= owners & {row.location for row in unusual}
        for row in rates:
            alarming = row.value > HIGH_RATE and (row not in on_purpose or row.location in self._harmful)
            yield Judgment("apart", row, 1.0, unusual=alarming)
        if on_purpose:
            largest = f"{max(row.value for row in high):.3g} times the other parts' learning rate"
            self._note(high[0].step, RATES, f". The learning rates are up to {largest}")

    def _peers(self, rows: Sequence[Row]) -> Iterator[Judgment]:
        """Compare sub-layers with sub-layers of the same kind in other layers."""
        for members in self._groups(rows, "weight_norm"):
            usual = statistics.median(row.value for row in members)
            if len(members) < 3 or not usual > 0:
                continue
            courses = [
                self._fitted("apart", row, usual, abs(math.log(max(row.value, 1e-30) / usual))) for row in members
            ]
            few = sum(course.unusual for course in courses) <= max(1, FEW * len(members))
            yield from (course if few else course._replace(unusual=False, score=0.0) for course in courses)
        groups = list(self._groups(rows, "gradient_norm"))
        for members in groups:
            if len(members) > 2 and len(self._recent.get(series_of(members[0]), ())) <= STAYS:
                yield from self._low(members)
        left_out = {row.location for row in rows if row.metric == "gradient_norm" and row.value == 0.0}
        ratios = self._groups((row for row in rows if row.location not in left_out), "update_ratio")
        lowest = min((row.layer for members in (*groups, *ratios) for row in members), default=0)
        for members in (*groups, *ratios):
            # the first layer's gradients and updates differ in most models
            peers = [row for row in members if row.layer > lowest and row.layer not in self.starts]
            usual = statistics.median([row.value for row in peers] or [0.0])
            for row in peers if len(peers) >= 3 and usual > 0 else ():  # who is above it leaves it no higher
                yield self._fitted("apart", row, usual, math.log(max(row.value, 1e-30) / usual))

    def _dead(self, rows: Sequence[Row]) -> Iterator[Judgment]:
        """Judge gradients that stay 0 in a sub-layer. The limit depends on how often gradients were 0 so far."""
        if not any(row.metric == "gradient_norm" and row.value > 0 for row in rows):
            return  # a loss that is the same whatever the weights are: there is nothing to learn at this step
        groups, dead = list(self._groups(rows, "gradient_norm")), list[tuple[Row, float, bool]]()
        for members in groups:
            usual = statistics.median(row.value for row in members)
            seen = {row: self._zeros.setdefault(row.location, ZeroRun()).see(row) for row in members}
            self._random_depth |= any(zeros.before for zeros in seen.values())
            before = sum(zeros.before for zeros in seen.values())
            chance = (before + 1) / (sum(zeros.count for zeros in seen.values()) + 2)
            for row, zeros in seen.items():
                own = max(chance, (zeros.before + 2 * chance) / (zeros.count + 2))
                sure = zeros.run >= ZEROS and zeros.run * math.log(own) < math.log(CERTAIN)
                dead.append((row._replace(step=zeros.begun) if sure else row, usual, sure))
        many = sum(sure for _, _, sure in dead) > len(dead) / 2 and len(dead) > 2
        if dead:
            first = min((row.step for row, _, sure in dead if sure), default=rows[0].step)
            yield Judgment("dead", Row(first, *MODEL, 0, "gradient_norm", 0.0), 0.0, unusual=many)
        yield from (Judgment("dead", row, usual, unusual=sure and not many) for row, usual, sure in dead)

    def _low(self, members: Sequence[Row]) -> Iterator[Judgment]:
        """Compare each layer's gradient with the gradients of the two neighboring layers."""
        for index in range(1, len(members)):
            beside = (index - 1, index + 1) if index + 1 < len(members) else (index - 2, index - 1)
            usual, row = min(members[at].value for at in beside), members[index]
            if usual > 0 and row.value > 0:
                yield self._fitted("low", row, usual, math.log(usual / row.value))

    def _updates(self, step: int, rows: Sequence[Row]) -> Iterator[Judgment]:
        """Judge a recorded step's updates: updates that are too large or 0, and parameters without a gradient."""
        places: dict[Location, dict[str, Row]] = {}
        for row in rows if any(row.metric in _UPDATES for row in rows) else ():
            inside = row.layer >= 0 and row.sublayer != "block"
            if (inside or row.role in _WHOLE[1:]) and row.role in _WHOLE and math.isfinite(row.value):
                places.setdefault(row.location, {})[row.metric] = row
        updates = [of["update_norm"].value for of in places.values() if "update_norm" in of]
        moving = sum(update > 0 for update in updates) > len(updates) / 2
        for location, of in places.items():
            before = self._weights.get(location)
            born = 0.0 not in self._recent.get((*location, "weight_norm"), ())  # else a gain about 1, or LoRA's B
            ratio = of.get("update_ratio")
            if ratio is not None and before is not None and born:  # Adam's first step is the largest
                part = "" if ratio.layer >= 0 else "/outside"
                limit = self.limits[f"rewritten/update_ratio{part}"]
                yield self._fitted("rewritten", ratio, math.exp(limit), math.log(max(ratio.value, 1e-30)), part)
            if (update := of.get("update_norm")) is not None:
                moved = update.value > 0 or (before is not None and before.update > 0)
                yield Judgment("unmoved", update, 0.0, unusual="unmoved_parameters" in of and (moved or moving))
                run, begun = self._silent.get(location, (0, step))
                run, begun = (run + 1, begun if run else step) if "without_gradient" in of else (0, step)
                self._silent[location] = run, begun
                silent = Row(begun, *location, 0, "without_gradient", of.get("without_gradient", update).value)
                yield Judgment("dead", silent, 0.0, unusual=run >= STAYS)
            if (weights := of.get("weight_norm")) is not None:
                self._weights[location] = LastWeights(step, weights.value, 0.0 if update is None else update.value)

    def _written(self, step: int, rows: Sequence[Row], rate: float | None) -> Iterator[Judgment]:
        """Judge changes to weights and moments that no optimizer made."""
        judge = self._writes
        several = max(1, FEW * len(self._weights))
        yield from judge.see(step, rows, self._weights, self._recent_of, several, rate)
        if judge.elsewhere:
            self._forget(lambda series: series[3] != "written_ratio")
            self._loss_chart = LossChart()
        if judge.note:
            self._note(step, judge.note)

    def _batch(self, rows: Sequence[Row]) -> Iterator[Judgment]:
        """Judge how often a batch repeats, and whether labels no longer match the batch's tokens."""
        again = next((row.value for row in rows if row.metric == "batch_repeats"), 0.0)
        for row in rows:
            if row.metric == "label_match":
                past = self._recent_of(row)
                usual = statistics.median(past or [0.0])
                unusual = len(past) >= EVERY_STEP and usual > MATCH and row.value < NO_MATCH
                yield Judgment("fall", row, usual, unusual)
                past.append(row.value)
            elif row.metric == LOSS:
                repeats = Row(row.step, *row.location, row.number, "batch_repeats", again)
                yield Judgment("repeated", repeats, 0.0, unusual=again >= REPEATS)

    def _loss(self, row: Row) -> Iterator[Judgment]:
        """Judge the first loss, and the loss's rises and falls."""
        if self._skipped:
            return
        guess = math.log(self.vocabulary or math.inf)
        if not self._loss_chart.losses and self.vocabulary and row.step <= STAYS:  # the readout makes too large logits
            yield self._fitted("guess", row._replace(sublayer="block", role="readout"), guess, row.value / guess)
        learns = row.step < max(self._changed.values(), default=-2 * WINDOW) + 2 * WINDOW
        varies = self._random_depth or self._writes.means > 0
        charts = self._loss_chart.see(row.value, self.limits, guess, varies=varies, learns=learns)
        for rule, usual, total, unusual in charts:
            yield Judgment(rule, row, usual, unusual, f"{rule}/{LOSS}", total)

    def _scaler(self, rows: Sequence[Row]) -> Iterator[Judgment]:
        """Count consecutive steps that a loss scaler skipped. Skipped steps have a loss but no gradient."""
        loss = next((row for row in rows if row.metric == LOSS), None)
        if any(row.metric == NORM for row in rows):
            self._skipped = 0
        elif loss is not None and self.half:
            self._skipped += 1
        if loss is not None and self.half:
            row = loss._replace(metric="skipped_steps", value=float(self._skipped))
            yield self._fitted("skipped", row, self.limits["skipped/skipped_steps"], self._skipped)

    def _groups(self, rows: Iterable[Row], metric: str) -> list[list[Row]]:
        """Group a metric's finite values by kind of sub-layer, stack of layers, and kind of layer."""
        groups: dict[tuple[str, int, str], list[Row]] = {}
        for row in (row for row in rows if row.metric == metric):
            if row.layer >= 0 and row.sublayer != "block" and row.role == "all" and math.isfinite(row.value):
                key = row.sublayer, bisect_right(self.starts, row.layer), self.kinds.get(row.layer, "")
                groups.setdefault(key, []).append(row)
        return list(groups.values())

    def state_dict(self) -> Json:
        return {
            "recent": [[*series, list(values)] for series, values in self._recent.items()],
            "seen": [[*series, *steps] for series, steps in self._last_steps.items()],
            "weights": [[*location, list(values)] for location, values in self._weights.items()],
            "course": [*self._loss_chart.state(), self._skipped],
            "changed": [[*location, step] for location, step in self._changed.items()],
            "ways": [
                self._random_depth,
                self._writes.means,
                self._writes.total,
                self._writes.rate,
                self._writes.restarts,
            ],
            "carried": [[*location, way] for location, way in self._writes.carried.items()],
            "harmful": sorted(map(list, self._harmful)),
            "estimate": list(self._estimate),
            "peak": list(self._peak),
            "idle": self._idle.state_dict(),
            "silent": [[*location, *counts] for location, counts in self._silent.items()],
            "policy": self._policy.state_dict(),
            "zeros": [[*location, *astuple(zeros)] for location, zeros in self._zeros.items()],
            "logits": list(map(list, self._logits.items())),
        }

    def load_state_dict(self, state: Json) -> None:
        self._recent = {
            (layer, sublayer, role, metric): deque(values, maxlen=WINDOW)
            for layer, sublayer, role, metric, values in state.get("recent", [])
        }
        self._last_steps = {
            (layer, sublayer, role, metric): (before, last)
            for layer, sublayer, role, metric, before, last in state.get("seen", [])
        }
        self._weights = {
            (layer, sublayer, role): LastWeights(int(step), norm, update)
            for layer, sublayer, role, (step, norm, update) in state.get("weights", [])
        }
        self._changed = {(layer, sublayer, role): at for layer, sublayer, role, at in state.get("changed", [])}
        self._random_depth, self._writes.means, self._writes.total, *rest = state.get("ways", (False, 0, 0.0))
        if rest:  # older checkpoints lack them
            self._writes.rate, self._writes.restarts = rest
        self._writes.carried = {(layer, sublayer, role): way for layer, sublayer, role, way in state.get("carried", [])}
        zeros = state.get("zeros", [])
        self._zeros = {(layer, sublayer, role): ZeroRun(*of) for layer, sublayer, role, *of in zeros}
        self._harmful = {(layer, sublayer, role) for layer, sublayer, role in state.get("harmful", [])}
        silent = state.get("silent", [])
        self._silent = {(layer, sublayer, role): (run, begun) for layer, sublayer, role, run, begun in silent}
        self._logits = dict(state.get("logits", []))
        highest, grew = state.get("estimate", self._estimate)
        self._estimate, self._policy = (highest, grew), PolicyCourse(**state.get("policy", {}))
        self._peak = Peak(*state.get("peak", Peak()))
        self._idle.load_state_dict(state.get("idle", {}))
        losses, sums, self._skipped = state.get("course", [[], {}, 0])
        self._loss_chart.load_state(losses, sums)


def _experts_used(step: int, rows: Iterable[Row]) -> list[Row]:
    """Return each layer's effective number of experts: the exponential of the entropy of the experts' loads."""
    loads: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        if row.metric == "expert_load" and math.isfinite(row.value):
            loads.setdefault((row.layer, row.sublayer), []).append(row.value)
    used: list[Row] = []
    for (layer, sublayer), values in loads.items():
        if total := sum(values):
            entropy = -sum(value / total * math.log(value / total) for value in values if value > 0)
            used.append(Row(step, layer, sublayer, "all", 0, "experts_used", math.exp(entropy)))
    return used
