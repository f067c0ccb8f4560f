"""Early alarms: a layer's gradient, update, moment or stream leaves its usual range before the loss does.

Each rule names one sub-layer and one step. Loads no torch: the pages read alarms.jsonl here.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

from lamina.core.json_types import Json
from lamina.jobs.files import write_lines
from lamina.jobs.names import ALARMS
from lamina.jobs.run_folder import parse_lines
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.monitor.writers import Row

Series: TypeAlias = tuple[int, str, str, str]
"""layer, sub-layer, role, metric"""

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
SHARE = 1.0  # of the layers' usual gradient, which a sub-layer's must reach to be told at its first step
RATIO = 0.06  # of an update to its weights; around 0.001 is usual, and tiny models in warm-up reach 0.02


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One series that left its range.

    Attributes:
        step: of the value.
        rule: not_finite | rise | logit | fp16 | dead | apart | rewritten.
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

    @property
    def excess(self) -> float:
        """Return how many times the usual value; infinite if one of the two is not a positive number."""
        return self.value / self.usual if self.usual > 0 and math.isfinite(self.value) else math.inf


@dataclass(kw_only=True)
class Alarms:
    """Reads the rows of one step after the other and tells what leaves; each series alarms once until it is back.

    Args:
        half: whether the model computes in float16, whose largest number is 65504.
        folder: of the run, whose alarms.jsonl gets a line for each alarm, oldest first; None: there is not a file.
    """

    half: bool = False
    folder: Path | None = None
    window: int = WINDOW
    lines: list[Json] = field(default_factory=list)
    _recent: dict[Series, deque[float]] = field(default_factory=dict)
    _out: set[tuple[str, Series]] = field(default_factory=set)
    _high: set[Series] = field(default_factory=set)  # gradients that were high at the step before

    def see(self, rows: Iterable[Row], rate: float | None = None) -> list[Alarm]:
        """Return the alarms of new rows, and write them; ``rate``: the learning rate by which updates are divided."""
        alarms: list[Alarm] = []
        by_step: dict[int, list[Row]] = {}
        for row in rows:
            by_step.setdefault(row[0], []).append(row)
        for _, group in sorted(by_step.items()):
            alarms += [alarm for row in group if row[5] in _JUDGED for alarm in self._judge(row, rate)]
            alarms += self._compare(group)
        self.lines += [asdict(alarm) for alarm in alarms]
        if alarms:
            self._write()
        return alarms

    def _write(self) -> None:
        if self.folder is not None and (self.lines or (self.folder / ALARMS).exists()):
            write_lines(self.folder / ALARMS, self.lines)

    def state_dict(self) -> Json:
        """Return the history of the series, for a checkpoint."""
        state = {
            "recent": [[*series, list(values)] for series, values in self._recent.items()],
            "out": sorted([rule, *series] for rule, series in self._out),
            "high": sorted(map(list, self._high)),
        }
        return {"alarms": state}

    def load_state_dict(self, state: RunState) -> None:
        """Resume with the history from a checkpoint."""
        seen = state.get("alarms", {"recent": [], "out": [], "high": []})
        self._recent = {
            (layer, sublayer, role, metric): deque(values, maxlen=1 if metric == "update_ratio" else self.window)
            for layer, sublayer, role, metric, values in seen["recent"]
        }
        self._out = {(rule, (layer, *names)) for rule, layer, *names in seen["out"]}
        self._high = {(layer, *names) for layer, *names in seen["high"]}
        if self.folder is not None and "step" in state:
            self.lines = [line for line in read_alarms(self.folder) if line["step"] <= state["step"]]
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
            left = left and value > CALM.get(metric, 0.0)
            if metric in ("gradient_norm", "first_moment"):
                left = self._counts(series, value, left)
            yield from self._once("rise", row, usual * (value / scaled if scaled else 1.0), left=left)
            recent.append(scaled)

    def _counts(self, series: Series, value: float, left: bool) -> bool:
        """Return whether to raise an alarm for a gradient: at once if the model's gradient would show it, or once it
        stays up.

        In healthy training a sub-layer with a small part of the model's gradient has a tenfold one for a single step,
        once in some hundred steps, and the model does not notice.
        """
        layer, _, _, metric = series
        stays = series in self._high
        (self._high.add if left else self._high.discard)(series)
        if not left or stays or layer < 0:
            return left
        blocks = [
            recent for key, recent in self._recent.items() if (key[1], key[3]) == ("block", metric) and key[0] >= 0
        ]
        return not blocks or value > SHARE * math.hypot(*(statistics.median(recent) for recent in blocks))

    def _compare(self, rows: Sequence[Row]) -> list[Alarm]:
        """Name sub-layers whose gradient is zero, or whose gradient or weights are far from their peers'.

        Peers are the same sub-layers of other layers.
        """
        alarms: list[Alarm] = []
        for members in _peers(rows, "weight_norm"):
            usual = statistics.median(row[6] for row in members)
            apart = {row[1] for row in members if not usual / WEIGHTS <= row[6] <= usual * WEIGHTS}
            if len(members) >= 3 and usual > 0 and len(apart) <= max(1, FEW * len(members)):
                for row in members:
                    alarms += self._once("apart", row, usual, left=row[1] in apart)
        for members in _peers(rows, "gradient_norm"):
            usual = statistics.median(row[6] for row in members)
            for row in members:
                others = [other[6] for other in members if other is not row]
                alarms += self._once("dead", row, usual, left=row[6] == 0.0 and max(others, default=1.0) > 0.0)
                if len(members) >= 3 and usual > 0:
                    limit = PEERS * max(statistics.median(others), usual)
                    alarms += self._once("apart", row, usual, left=row[6] > limit)
        return alarms

    def _once(self, rule: str, row: Row, usual: float, *, left: bool) -> list[Alarm]:
        step, layer, sublayer, role, _, metric, value = row
        key = (rule, _series(row))
        if not left:
            self._out.discard(key)
            return []
        if key in self._out:
            return []
        self._out.add(key)
        alarm = Alarm(
            step=step, rule=rule, layer=layer, sublayer=sublayer, role=role, metric=metric, value=value, usual=usual
        )
        return [alarm]


_JUDGED = {*FACTORS, "update_ratio"}


def _peers(rows: Sequence[Row], metric: str) -> Iterable[list[Row]]:
    """The rows of a metric by kind of sub-layer."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row[5] == metric and row[1] >= 0 and row[2] != "block" and row[3] == "all":
            groups.setdefault(row[2], []).append(row)
    return groups.values()


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
        "rewritten": f"one step changes {alarm.value:.0%} of its weights' norm",
    }
    return f"step {alarm.step}, {where}: {words[alarm.rule]}"


def describe_worst(alarms: Sequence[Alarm]) -> str:
    """Describe the alarm that exceeds its usual value most, without a final period, and count the alarms."""
    worst = max(alarms, key=lambda alarm: alarm.excess)
    return describe(worst) + (f" ({len(alarms)} alarms)" if len(alarms) > 1 else "")


def read_alarms(folder: Path) -> list[Json]:
    """Read the alarms of a run, oldest first; none if the file is missing."""
    alarms = parse_lines(folder / ALARMS)[0]
    for alarm in alarms:
        alarm |= {name: math.nan for name in ("value", "usual") if alarm.get(name, 0.0) is None}  # JSON has no NaN
    return alarms
