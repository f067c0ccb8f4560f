"""Early alarms: a layer's gradient, update, moment or stream leaves its usual range before the loss does.

Each rule names one sub-layer and one step. Loads no transformers: the pages read alarms.jsonl here.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeAlias

from lamina.core.json_types import Json, RunState
from lamina.jobs.files import write_lines
from lamina.jobs.names import ALARMS
from lamina.jobs.run_folder import parse_lines
from lamina.training.monitor.writers import LOSS, Row

logger = logging.getLogger(__name__)

Series: TypeAlias = tuple[int, str, str, str]
"""layer, sub-layer, role, metric"""
Key: TypeAlias = tuple[str, Series]
"""rule, series"""

# By metric: how many times its recent median a value must be. Healthy training changes each of them too, so the factor
# stands beside a robust deviation, and both must be exceeded.
FACTORS: Mapping[str, float] = {
    "gradient_norm": 6.0,
    "update_norm": 3.0,
    "first_moment": 4.0,
    "hidden_abs_max": 4.0,
    "hidden_variance": 6.0,
    "attention_logit": 3.0,
    "gain_abs_max": 4.0,
    "step_gradient_norm": 6.0,
}
DEVIATIONS = 8.0
WINDOW = 32  # of a series' latest values
FEWEST = {"gradient_norm": 8, "step_gradient_norm": 8}  # values that a series needs to be judged; of every step
RECORDS = 4  # the same for what is measured only where a record is due
LOGIT = 50.0  # attention logits at which ViT-22B diverged (Dehghani et al. 2023, arXiv 2302.05442, Sec 3.1)
# Values below which a rise is none: attention still learns to choose, and a gain that began at 0 grows to its place.
CALM: Mapping[str, float] = {"attention_logit": 10.0, "gain_abs_max": 4.0}
FP16_MAX = 65504.0
PEERS = 30.0  # times the median of the same sub-layers of other layers
WEIGHTS = 6.0  # the same for weights, either way; DeepSeek-V3's experts beside its dense feed-forwards reach 5.3
FEW = 0.25  # of the layers that may be apart in their weights: more of them are another kind, not an exception
RATIO = 0.06  # of an update to its weights; around 0.001 is usual, and tiny models in warm-up reach 0.02
STAYS = 3  # values in a row at which a gradient must stand out
HELD = 8  # steps for which a gradient that stood out once waits for what follows it
EVENT = 20  # steps without an alarm, after which the next one is another event
BEFORE, AFTER = 16, 3  # losses with which others are compared, and how many must lie above them
NATS, NOISES = 0.15, 6.0  # by how much: at least this, and this many times their noise
NOTABLE = "notable"  # no alarm: a batch whose gradient stood out, and that nothing followed
ORDER = ("not_finite", "dead", "apart", "fp16", "rewritten", "logit", "rise", NOTABLE)
"""Rules; of one step the one that explains most first."""
_LOSSES = BEFORE + HELD + AFTER
_GRADIENTS = ("gradient_norm", "step_gradient_norm", "first_moment")


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One series that left its range.

    Attributes:
        step: of the value.
        rule: one of ``ORDER``.
        layer, sublayer, role, metric: the series.
        value, usual: the value, and what it is compared with.
    """

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
    def excess(self) -> float:
        """Return how many times the usual value; infinite if one of the two is not a positive number."""
        return self.value / self.usual if self.usual > 0 and math.isfinite(self.value) else math.inf

    @property
    def order(self) -> tuple[float, ...]:
        """Sorts alarms: oldest first; of one step the one that explains most first.

        Of values that are not finite, the one where they arose: states spread to later layers, gradients to earlier
        ones.
        """
        place = 2 * self.layer + (self.sublayer == "feed_forward")
        forward = self.metric.startswith(("hidden", "attention"))  # these come before the gradients
        arose = [self.layer < 0, self.sublayer == "block", not forward, place if forward else -place]
        return self.step, ORDER.index(self.rule), *(arose if self.rule == "not_finite" else ()), -self.excess


def noise_of(losses: Sequence[float]) -> float:
    """Return the standard deviation of losses around their course, whatever it is; 0 for fewer than two."""
    moved = [abs(later - earlier) for earlier, later in pairwise(losses)]
    return 1.4826 * statistics.median(moved) / math.sqrt(2) if moved else 0.0


def risen(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether all losses ``after`` lie above the lower of the medians of 16 and of 5 losses ``before``."""
    finite = [loss for loss in before[-BEFORE:] if math.isfinite(loss)]
    if len(finite) < BEFORE // 2 or len(after) < AFTER:
        return False
    usual = min(statistics.median(finite), statistics.median(finite[-5:]))  # a falling loss is below its median
    return min(after) > usual + max(NATS, NOISES * noise_of(finite))


@dataclass(kw_only=True)
class Alarms:
    """Reads the rows of one step after the other and tells what leaves; each series alarms once until it is back.

    A gradient that stands out is told once it has done so three times in a row, or once the loss or another series
    follows it; else the step is a notable batch.

    Args:
        half: whether the model computes in float16, whose largest number is 65504.
        folder: of the run, whose alarms.jsonl gets a line for each alarm, oldest first; None: no file is written.

    Attributes:
        told: alarms and notable batches so far, oldest first.
        marked: the steps at which something stood out in the last call.
        news: what the last call has to tell: the first alarm of an event, as a sentence without its end.
    """

    half: bool = False
    folder: Path | None = None
    window: int = WINDOW
    told: list[Alarm] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    news: str = ""
    _recent: dict[Series, deque[float]] = field(default_factory=dict)
    _out: set[Key] = field(default_factory=set)
    _high: dict[Key, list[Alarm]] = field(default_factory=dict)  # gradients that stood out where they were last seen
    _single: list[Alarm] = field(default_factory=list)  # those that are back
    _losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LOSSES))

    def see(self, rows: Iterable[Row], rate: float | None = None) -> list[Alarm]:
        """Return and write the alarms of new rows; ``rate``: the learning rate by which updates are divided."""
        by_step: dict[int, list[Row]] = {}
        for row in rows:
            by_step.setdefault(row[0], []).append(row)
        alarms: list[Alarm] = []
        self.marked = set()
        for step, group in sorted(by_step.items()):
            found = [alarm for row in group if row[5] in _JUDGED for alarm in self._judge(row, rate)]
            found += self._compare(group)
            self._losses += [(step, row[6]) for row in group if row[5] == LOSS]
            followed = self._followed(step, found=any(alarm.step == step for alarm in found))  # by what did not wait
            alarms += [*followed, *found]
        return self._tell(alarms)

    def first(self, rose: float) -> Alarm | None:
        """Return ``first_before`` of all that has stood out so far."""
        return first_before([*self.told, *chain(*self._high.values()), *self._single], rose)

    def close(self) -> None:
        """Write what stood out and waits for what follows it: nothing comes any more."""
        self._single += chain(*self._high.values())
        self._high = {}
        self._tell(self._followed(math.inf, found=False))

    def _tell(self, alarms: Sequence[Alarm]) -> list[Alarm]:
        """Write alarms and notable batches; return the alarms."""
        alarms = sorted(alarms, key=lambda alarm: alarm.order)
        told = [alarm for alarm in alarms if alarm.rule != NOTABLE]
        last = max((alarm.step for alarm in self.told if alarm.rule != NOTABLE), default=-math.inf)
        self.news = describe(told[0]) if told and told[0].step > last + EVENT else ""
        self.marked |= {alarm.step for alarm in told}
        known = {(alarm.step, _key(alarm)) for alarm in self.told}  # a resumed run tells what it had told
        if new := [alarm for alarm in alarms if (alarm.step, _key(alarm)) not in known]:
            self.told = sorted([*self.told, *new], key=lambda alarm: alarm.step)
            self._write()
        return told

    def _write(self) -> None:
        if self.folder is not None and (self.told or (self.folder / ALARMS).exists()):
            write_lines(self.folder / ALARMS, list(map(asdict, self.told)))

    def state_dict(self) -> Json:
        """Return the history of the series, for a checkpoint."""
        state = {
            "recent": [[*series, list(values)] for series, values in self._recent.items()],
            "out": sorted([rule, *series] for rule, series in self._out),
            "waiting": [[rule, *series, [*map(asdict, high)]] for (rule, series), high in self._high.items()],
            "back": list(map(asdict, self._single)),
            "losses": list(self._losses),
        }
        return {"alarms": state}

    def load_state_dict(self, state: RunState) -> None:
        """Resume with the history from a checkpoint, and with what the folder holds up to its step."""
        seen = {"recent": [], "out": [], "waiting": [], "back": [], "losses": [], **state.get("alarms", {})}
        self._recent = {
            (layer, sublayer, role, metric): deque(values, maxlen=1 if metric == "update_ratio" else self.window)
            for layer, sublayer, role, metric, values in seen["recent"]
        }
        self._out = {(rule, (layer, sub, role, metric)) for rule, layer, sub, role, metric in seen["out"]}
        self._high = {
            (rule, (layer, sub, role, metric)): [Alarm(**one) for one in values]
            for rule, layer, sub, role, metric, values in seen["waiting"]
        }
        self._single = [Alarm(**one) for one in seen["back"]]
        self._losses = deque(((step, loss) for step, loss in seen["losses"]), maxlen=_LOSSES)
        if self.folder is not None and "step" in state:
            waiting = {alarm.step for alarm in (*chain(*self._high.values()), *self._single)}
            told = [alarm for alarm in read_alarms(self.folder) if alarm.step <= state["step"]]
            self.told = [alarm for alarm in told if alarm.rule != NOTABLE or alarm.step not in waiting]
            self._write()

    def _judge(self, row: Row, rate: float | None) -> Iterable[Alarm]:
        _, layer, sublayer, _, _, metric, value = row
        series = _series(row)
        if not math.isfinite(value):
            yield from self._once("not_finite", row, 0.0, left=True)
            return
        if metric == "attention_logit":
            yield from self._once("logit", row, LOGIT, left=value > LOGIT)
        if metric == "hidden_abs_max" and self.half:
            yield from self._once("fp16", row, FP16_MAX, left=value > FP16_MAX / 4)
        if metric == "update_ratio":
            before = self._recent.setdefault(series, deque(maxlen=1))  # Adam's first step is as large as they get
            left = bool(before) and value > RATIO and layer >= 0 and sublayer != "block"
            yield from self._once("rewritten", row, RATIO, left=left)
            before.append(value)
        if metric in FACTORS:
            scaled = value / rate if metric == "update_norm" and rate else value
            recent = self._recent.setdefault(series, deque(maxlen=self.window))
            usual, left = _leaves(scaled, recent, FACTORS[metric], FEWEST.get(metric, RECORDS))
            left = left and value > CALM.get(
                metric, self._share(metric) if metric in _GRADIENTS and layer >= 0 else 0.0
            )
            yield from self._once("rise", row, usual * (value / scaled if scaled else 1.0), left=left)
            recent.append(scaled)

    def _share(self, metric: str) -> float:
        """Return the model's usual gradient, or moment: a sub-layer's of less changes nothing of the model's.

        In healthy training, a sub-layer with a small part of it can go up tenfold, for a step or for good.
        """
        parts = [
            statistics.median(recent)
            for (layer, sublayer, role, name), recent in self._recent.items()
            if name == metric and sublayer == "block" and (layer < 0 or role == "all") and recent
        ]
        return math.hypot(*parts)

    def _compare(self, rows: Sequence[Row]) -> list[Alarm]:
        """Name sub-layers whose gradient is zero, or whose gradient or weights are far from their peers'.

        Peers are the same sub-layers of other layers; the first layer's gradient is of its own kind in most models.
        """
        alarms: list[Alarm] = []
        for members in _peers(rows, "weight_norm"):
            usual = statistics.median(row[6] for row in members)
            apart = {row[1] for row in members if not usual / WEIGHTS <= row[6] <= usual * WEIGHTS}
            if len(members) >= 3 and usual > 0 and len(apart) <= max(1, FEW * len(members)):
                for row in members:
                    alarms += self._once("apart", row, usual, left=row[1] in apart)
        groups = list(_peers(rows, "gradient_norm"))
        lowest = min((row[1] for members in groups for row in members), default=0)
        for members in groups:
            usual = statistics.median(row[6] for row in members)
            for row in members:
                others = [other[6] for other in members if other is not row]
                alarms += self._once("dead", row, usual, left=row[6] == 0.0 and max(others, default=1.0) > 0.0)
            peers = [row for row in members if row[1] > lowest]
            usual = statistics.median([row[6] for row in peers] or [0.0])
            for row in peers if len(peers) >= 3 and usual > 0 else ():
                others = statistics.median(other[6] for other in peers if other is not row)
                alarms += self._once("apart", row, usual, left=row[6] > PEERS * max(others, usual))
        return alarms

    def _followed(self, step: float, found: bool) -> list[Alarm]:
        """Return what stood out and the loss or another series (``found``) follows; what nothing follows is notable."""
        told: list[Alarm] = []
        high = [(key, values[0]) for key, values in self._high.items()]
        for key, alarm in [*high, *((None, alarm) for alarm in self._single)]:
            before = [loss for at, loss in self._losses if at < alarm.step]
            after = [loss for at, loss in self._losses if alarm.step < at <= alarm.step + HELD]
            broken = not all(map(math.isfinite, after))
            if broken or (found and alarm.step <= step <= alarm.step + HELD) or risen(before, after[-AFTER:]):
                told.append(alarm)
                if key is not None:
                    self._out.add(key)
                    del self._high[key]
        self._single = [alarm for alarm in self._single if alarm not in told]
        over = [alarm for alarm in self._single if alarm.step + HELD < step]
        self._single = [alarm for alarm in self._single if alarm not in over]
        last = max((alarm.step for alarm in self.told if alarm.rule != NOTABLE), default=-math.inf)
        steps = {alarm.step for alarm in over if alarm.step > last + EVENT}  # else it belongs to what went on
        for at in sorted(steps - {alarm.step for alarm in self.told}):
            largest = max((alarm for alarm in over if alarm.step == at), key=lambda alarm: alarm.excess)
            told.append(replace(largest, rule=NOTABLE))
        return told

    def _once(self, rule: str, row: Row, usual: float, *, left: bool) -> list[Alarm]:
        """Return the alarm of a series that has left and was not out; a gradient's waits for its next two values."""
        step, layer, sublayer, role, _, metric, value = row
        key = (rule, _series(row))
        if not left:
            self._out.discard(key)
            self._single += self._high.pop(key, [])
        elif key not in self._out:
            self.marked.add(step)
            place = {"layer": layer, "sublayer": sublayer, "role": role, "metric": metric}
            high = self._high.setdefault(key, [])
            high.append(Alarm(step=step, rule=rule, **place, value=value, usual=usual))
            if rule not in ("rise", "apart") or metric not in _GRADIENTS or len(high) == STAYS:
                self._out.add(key)
                return self._high.pop(key)[:1]
        return []


_JUDGED = {*FACTORS, "update_ratio"}


def _peers(rows: Sequence[Row], metric: str) -> Iterable[list[Row]]:
    """The rows of a metric by kind of sub-layer."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row[5] == metric and row[1] >= 0 and row[2] != "block" and row[3] == "all":
            groups.setdefault(row[2], []).append(row)
    return groups.values()


def _key(alarm: Alarm) -> Key:
    return alarm.rule, (alarm.layer, alarm.sublayer, alarm.role, alarm.metric)


def _series(row: Row) -> Series:
    """Return a row's series; several norms of one role, as of queries and keys, are a series each."""
    _, layer, sublayer, role, index, metric, _ = row
    return layer, sublayer, f"{role} {index + 1}" if index else role, metric


def _leaves(value: float, recent: Sequence[float], factor: float, fewest: int) -> tuple[float, bool]:
    """Return the median of the recent values, and whether ``value`` lies above both limits."""
    if len(recent) < fewest:
        return math.nan, False
    usual = statistics.median(recent)
    if not (usual > 0 and value > factor * usual):
        return usual, False
    logs = [math.log(max(x, 1e-30)) for x in recent]
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in logs)
    return usual, math.log(value) - middle > DEVIATIONS * spread


_OUTSIDE = {"embedding": "the embedding", "readout": "the readout", "other": "the other layers"}
_NAMES = {
    "gain_abs_max": "a norm's largest gain",
    "hidden_variance": "variance of the stream",
    "hidden_abs_max": "largest |x| of the stream",
    "attention_logit": "largest attention logit",
    "step_gradient_norm": "gradient norm",
}


def describe(alarm: Alarm) -> str:
    """An alarm as a sentence without its end."""
    outside = _OUTSIDE.get(alarm.role, "the model")
    where = outside if alarm.layer < 0 else f"layer {alarm.layer} ({alarm.sublayer.replace('_', '-')})"
    name = _NAMES.get(alarm.metric, alarm.metric.replace("_", " "))
    words = {
        "not_finite": f"{name} is not finite",
        "rise": f"{name} is {alarm.excess:.3g} times its recent median",
        "logit": f"the largest attention logit is {alarm.value:.3g} (above {alarm.usual:g}, attention saturates)",
        "fp16": f"the largest |x| is {alarm.value:.3g}, and float16 ends at {alarm.usual:g}",
        "dead": "its gradient is zero",
        "apart": f"{name} is {alarm.excess:.3g} times the other layers' median",
        NOTABLE: f"{name} was {alarm.excess:.3g} times its usual value, and nothing followed",
        "rewritten": f"one step changes {alarm.value:.0%} of its weights' norm",
    }
    return f"step {alarm.step}, {where}: {words[alarm.rule]}"


def events(alarms: Iterable[Alarm]) -> list[list[Alarm]]:
    """Group alarms by event, first one first: the alarms of an event follow one another within 20 steps."""
    groups: list[list[Alarm]] = []
    for alarm in sorted((alarm for alarm in alarms if alarm.rule != NOTABLE), key=lambda alarm: alarm.order):
        if not groups or alarm.step > groups[-1][-1].step + EVENT:
            groups.append([])
        groups[-1].append(alarm)
    return groups


def first_before(alarms: Iterable[Alarm], rose: float | None) -> Alarm | None:
    """Return the first alarm of the last event before the loss rose: an earlier event belongs to something else.

    Of the first event, if the loss did not rise or nothing left before it did.
    """
    groups = events(alarms)
    before = [group for group in groups if rose is not None and group[0].step <= rose]
    return before[-1][0] if before else groups[0][0] if groups else None


def read_alarms(folder: Path) -> list[Alarm]:
    """Read the alarms and the notable batches of a run, oldest first; none if the file is missing.

    Another version's, or damaged ones, are left out with one warning.
    """
    lines, names = parse_lines(folder / ALARMS)[0], {each.name for each in fields(Alarm)}
    for line in lines:
        line |= {name: math.nan for name in ("value", "usual") if line.get(name, 0.0) is None}  # JSON has no NaN
    known = [line for line in lines if line.get("rule") in ORDER and line.keys() == names]
    if others := [str(line.get("rule")) for line in lines if line not in known]:
        words = ", ".join(repr(rule) for rule in sorted(set(others)))
        logger.warning("%s: alarms left out that this version does not know: %d (%s)", ALARMS, len(others), words)
    return [Alarm(**line) for line in known]
