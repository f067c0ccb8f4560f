"""Measure how much worse a model is without each of its layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.core.values import number, one_of, switch, whole_number
from lamina.errors import UserError
from lamina.evaluation.harness import Runner
from lamina.evaluation.squad import f1_scores, read_questions
from lamina.evaluation.task_files import Tasks
from lamina.modeling.parts import temporary_hooks, uncompiled
from lamina.probes.angular_distance import AngularDistance
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.registry import Probe, Sample, check_most, probe, sample_of
from lamina.probes.engine.statistics import free_layers, ranking, tied
from lamina.probes.structure.hooks import (
    Args,
    Kwargs,
    Output,
    argument_of,
    forward,
    forwards,
    intercept,
    observe,
    refill,
    stream_of,
    with_argument,
)
from lamina.probes.structure.sites import LayerSite, Point

REMOVE, BRANCH = "remove", "branch"
MEANINGS = (REMOVE, BRANCH)
_MEANT = {REMOVE: "the layer skipped", BRANCH: "attention and feed-forward set to zero, but not the norms"}
Forward: TypeAlias = Callable[..., Output]
METRICS = ("loss", "perplexity")
_MIN_SEQUENCES = 16
_SEQUENCES = 4  # of a corpus, by default
_PRECISION = 0.05  # likewise
_MORE = 16  # times as much text, for a quarter of the standard error


@probe
class LayerDrop(Probe):
    """Measure how much worse a model is without each layer, or without a block of consecutive layers.

    A positive value means that the model is worse without the layers. All other layers keep their weights and scales.
    In each row, ``layer`` is the first dropped layer, and ``size`` is the number of dropped layers. (Sources: Mix-LN
    Fig 2, 3 and 6b, Keel's dPPL, Gromov et al. 2024.)

    The column ``meaning`` tells how Lamina drops a layer:

    "remove": the layer returns its input. In a model with several residual streams, the layer returns all streams
        unchanged.
    "branch": the attention and the feed-forward add zero, but skips, skip scales and post-norms stay. In a model with
        several residual streams, the layer still mixes the streams. If no norm acts on the residual stream, as in
        Pre-LN, "branch" gives the same result as "remove".

    Each row has one of these metrics:

    ``loss_increase``: the increase of the loss in nats per predicted token.
    ``perplexity_increase``: the increase of exp(loss).
    ``accuracy_drop``: the decrease of the model's score on an lm-eval task. The standard error assumes that the scores
        with and without the layers are independent, so the standard error is usually too large.
    ``score_drop``: the decrease of your own score. If a lower score is better, score_drop is the increase.
    ``angular_distance``: the angle between the hidden states before and after the layers (see the probe
        angular_distance).
    ``loss``, ``perplexity``, ``accuracy``, ``score`` (layer -1, size 0): the loss, perplexity, accuracy or score of the
        whole model.

    Options:

    ``block``: the number of consecutive layers to drop together (default: 1).
    ``meaning``: how to drop a layer: "remove", "branch", or "all" for both (default).
    ``metric``: "loss", "perplexity", or "all" for both (default).
    ``task``: a task of lm-evaluation-harness to use instead of the loss (pip install lm-eval).
    ``include_path``: a folder with the task's YAML file. This file can contain code, so also set run_code.
    ``run_code``: whether Lamina may run code in task files and code that the model generates.
    ``task_metric``: the name of the task's metric (default: acc).
    ``limit``: the largest number of documents to read from the task, or of questions to read from the SQuAD file.
    ``squad``: a file in SQuAD v1.1's format. Lamina then measures the F1 of the model's question-answering head instead
        of the loss.
    ``score``: a Python function that takes the model and returns a number, to use instead of the loss.
    ``higher_is_better``: whether a higher score is better.
    ``standard_error``: the target for the relative standard error of the loss increases. Lamina measures more text
        until every layer reaches the target. To measure all text, set 0. For an increase below 0.1 nats, Lamina divides
        the standard error by 0.1 nats. The default is the value of --tolerance. Without --tolerance, the default is 0
        if you give your own text or set a number of sequences. Otherwise, the default is 0.05.
    ``sequences``: the largest number of sequences for the loss (0 for all). The default is 0 if you give your own text
        or set --sequences or --tolerance. Otherwise, the default is 4.
    """

    name = "layer_drop"
    title = "Dropping layers"
    summary = "how much the loss, the perplexity or a task's score worsens without each layer (or block)"
    source = "Mix-LN Fig 2, 3, 6b; KEEL (dPPL); Gromov et al. 2024"
    of_streams = True

    def __init__(
        self,
        block: int = 1,
        meaning: str = "all",
        metric: str = "all",
        task: str | None = None,
        include_path: str | None = None,
        run_code: bool = False,
        task_metric: str = "acc",
        limit: int | None = None,
        squad: str | None = None,
        score: Callable[[nn.Module], float] | None = None,
        higher_is_better: bool = True,
        standard_error: float | None = None,
        sequences: int | None = None,
    ):
        if score is not None and not callable(score):
            raise UserError(f"score: {score!r} is not a function. In Python, give a function of the model.")
        if sum(each is not None for each in (score, task, squad)) > 1:
            raise UserError("score, squad and task are alternatives. Give only one of these options.")
        self.block = whole_number("block", block)
        self._wants_all = one_of("meaning", meaning, (*MEANINGS, "all")) == "all"
        self.meanings = MEANINGS if self._wants_all else (meaning,)
        self.metrics = METRICS if one_of("metric", metric, (*METRICS, "all")) == "all" else (metric,)
        self.score, self.higher_is_better, self.tolerance = score, higher_is_better, standard_error
        if standard_error is not None:
            number("standard_error", standard_error, 0, 1, open_high=True)
        self.sequences = check_most(self.name, "sequences", sequences)
        self._read: list[Mapping[str, torch.Tensor]] = []
        self._guessing, self._remedy = "", ""  # sentences about the text, once it is measured
        self.task: HarnessTask | SquadFile | None = None if squad is None else SquadFile(squad, limit=limit)
        if task is not None:
            folder = {"include_path": include_path, "run_code": switch("run_code", run_code)}
            self.task = HarnessTask(str(task), metric=task_metric, limit=limit, **folder)

    def cost(self, context: Context) -> float:
        tokens = context.tokens(context.most_sequences(self.sequences, _SEQUENCES))
        return 0.8 * context.structure.num_layers * len(self.meanings) ** 0.5 * tokens

    def begin(self, context: Context) -> None:
        if self.score is None:
            context.check_head()
        count = context.structure.num_layers
        if count < 2:
            raise UserError("layer_drop: the model has a single layer. Choose a model with 2 layers or more.")
        if self.block >= count:
            raise UserError(f"block: {self.block} is too large for {count} layers. Choose at most {count - 1}.")
        bare = [site.index for site in context.structure.layers if not site.sublayers]
        if bare and BRANCH in self.meanings:
            if not self._wants_all:
                raise UserError(
                    f"meaning: Lamina did not find the sub-layers of layer {ranges(bare)}, which 'branch' needs. Set "
                    "meaning to remove."
                )
            self.meanings = (REMOVE,)
            context.notes.append(
                "layer_drop: Lamina only removed whole layers (meaning 'remove'), because it did not find the "
                f"sub-layers of layer {ranges(bare)}."
            )

    def measured(self, context: Context) -> Sample | None:
        return sample_of(self._read) if self._read else None  # a score's and a task's texts are their own

    def finish(self, context: Context) -> pd.DataFrame:
        self._read = []
        starts = range(context.structure.num_layers - self.block + 1)
        with torch.no_grad():
            rows = self._scored(context, starts) if self.score or self.task else self._losses(context, starts)
        return pd.DataFrame(rows, columns=["layer", "size", "meaning", "metric", "value", "standard_error"])

    def _losses(self, context: Context, starts: range) -> list[tuple]:
        whole: list[float] = []
        dropped: dict[tuple[int, str], list[float]] = {(s, m): [] for s in starts for m in self.meanings}
        angles = AngularDistance()
        angles.begin(context)
        batches = context.first(context.most_sequences(self.sequences, _SEQUENCES))
        counted = context.whole or context.requested or self.sequences is not None
        standard = context.tolerance if context.tolerance is not None else 0.0 if counted else _PRECISION
        precision = standard if self.tolerance is None else self.tolerance
        for done, batch in enumerate(batches):
            inputs = context.on_device(batch)
            losses_of = partial(context.token_losses, inputs)
            with PassesWithoutLayers(context, lambda losses=losses_of: losses().double().mean(1)) as passes:
                with observe(context.structure.states(), angles.see, root=context.model):
                    whole += passes.full().tolist()
                angles.end_batch(inputs, None)
                for start in starts:
                    context.progress(done * len(starts) + start, len(batches) * len(starts), f"without layer {start}")
                    plain = passes.without(start, self.block)
                    bare = passes.without_branches(start, self.block) if BRANCH in self.meanings else None
                    for meaning in self.meanings:
                        result = bare if meaning == BRANCH and bare is not None else plain
                        dropped[start, meaning] += result.tolist()
            self._read = batches[: done + 1]
            if len(whole) >= _MIN_SEQUENCES and precision > 0:
                increases = [loss_increase(whole, losses) for losses in dropped.values()]
                if all(error <= precision * max(abs(value), 0.1) for value, error in increases):
                    break
        self._guessing = context.no_better_than_guessing(float(np.mean(whole)))
        longer = context.whole and not context.requested and self.sequences is None
        option = "the option sequences=" if self.sequences is not None else "--sequences "
        more = "give a longer --corpus" if longer else f"add {option}{_MORE * len(whole)}"
        self._remedy = f" To measure more text, {more}."
        rows: list[tuple] = []
        for metric in self.metrics:
            level, rise = (mean_loss, loss_increase) if metric == "loss" else (perplexity, perplexity_increase)
            rows.append((-1, 0, "", metric, *level(whole)))
            for (start, meaning), losses in dropped.items():
                rows.append((start, self.block, meaning, f"{metric}_increase", *rise(whole, losses)))
        distances: Any = angles.pair_rows("angular_distance").itertuples()
        for row in distances:
            if row.size == self.block:
                rows.append((row.start, row.size, "", row.metric, row.value, row.standard_error))
        return rows

    def _scored(self, context: Context, starts: range) -> list[tuple]:
        name = "score" if self.task is None else "accuracy" if self.task.metric.startswith("acc") else self.task.metric
        sign = 1.0 if (self.higher_is_better if self.task is None else self.task.higher_is_better) else -1.0
        context.progress(0, len(starts) + 1, f"{name} of the whole model")
        base, base_error = self._measure(context)
        rows: list[tuple] = [(-1, 0, "", name, base, base_error)]
        same = set()  # where both meanings agree: the layers return their input once they add nothing to it
        if len(self.meanings) > 1:
            inputs = context.on_device(context.batches[0], 1)
            with PassesWithoutLayers(context, lambda: stream_of(forward(context.base, inputs))) as passes:
                passes.full()
                for start in starts:
                    passes.without(start, self.block)
                    if passes.without_branches(start, self.block) is None:
                        same.add(start)
        for start in starts:
            context.progress(start + 1, len(starts) + 1, f"{name} without layer {start}")
            result = (math.nan, math.nan)
            for meaning in self.meanings:
                if meaning == self.meanings[0] or start not in same:
                    with removed(context, range(start, start + self.block), meaning):
                        result = self._measure(context)
                harm = (sign * (base - result[0]), math.hypot(base_error, result[1]))
                rows.append((start, self.block, meaning, f"{name}_drop", *harm))
        return rows

    def _measure(self, context: Context) -> tuple[float, float]:
        if self.score is not None:
            return float(self.score(context.model)), math.nan
        assert self.task is not None
        return self.task.measure(context)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        for metric, group in _harm(frame).groupby("metric", sort=False):
            several, size = _differ(group), int(group["size"].iloc[0])
            yield from chart(
                group if several else group[group["meaning"] == group["meaning"].iloc[0]],
                f"{_words(metric).capitalize()} without {'each layer' if size == 1 else f'{size} layers'}",
                _words(metric),
                "Positive is harm. Bars are standard errors, if known.",
                color="meaning" if several else None,
                x_title="layer dropped" if size == 1 else "first layer dropped",
                band="standard_error",
            )

    def sentences(self, frame: Frame) -> Iterator[str]:
        if self._guessing:
            yield self._guessing
        harm = _harm(frame)
        harm = harm[harm["metric"] == harm["metric"].iloc[0]]
        metric = str(harm["metric"].iloc[0])
        whole = float(frame.loc[frame["layer"] == -1, "value"].iloc[0])
        unit = " nats" if metric == "loss_increase" else ""
        several = _differ(harm)
        for meaning, group in harm.groupby("meaning", sort=False):
            if meaning != harm["meaning"].iloc[0] and not several:
                continue
            group = group.dropna(subset="value").sort_values("value")
            if not len(group):
                yield f"The {_words(metric)} is NaN for every layer."
                continue
            meant = f" ({_MEANT[str(meaning)]})" if several else ""
            yield self._least(group.set_index("layer"), metric, unit, meant, whole)
            yield from _could_go(group, whole, unit) if int(group["size"].iloc[0]) == 1 else []
        yield from _agreement(frame, harm)

    def _least(self, group: Frame, metric: str, unit: str, meant: str, whole: float) -> str:
        """Name the layers whose removal harms least and most, or the layers that the errors cannot tell apart."""
        values, errors, size = group["value"], group["standard_error"], int(group["size"].iloc[0])
        free = free_layers(values, errors) if metric.endswith("_increase") else []
        first, most = ranking(values, errors, free)[0], values.idxmax()
        others = tied(values, errors, [first], free)

        def number(layer: int) -> str:
            error = f" ± {errors[layer]:.2g}" if math.isfinite(errors[layer]) else ""
            return f"{values[layer]:.3g}{error}{unit}"

        text = f" on {group['tokens'].iloc[0]:,} tokens" if "tokens" in group else ""
        worst = f"removing {_which(most, size)} harms most ({number(most)}){meant}"
        if values[most] - values[first] < 1e-5 * abs(whole):
            dropped = "any one layer" if size == 1 else f"any {size} layers in a row"
            return f"Removing {dropped} harms equally ({_words(metric)} {number(first)}{text}){meant}."
        if first in free:
            names = f"layer {free[0]}" if len(free) == size == 1 else f"layers {ranges(free)}"
            names = names if size == 1 else " and ".join(_which(layer, size) for layer in free)
            verb = "is" if len(free) == size == 1 else "are"
            return f"{names.capitalize()} {verb} free to remove: no loss changes{text}. In contrast, {worst}."
        least = f"removing {_which(first, size)} harms least ({_words(metric)} {number(first)}{text * (not others)})"
        if others:
            of = "Layers" if size == 1 else f"The blocks of {size} layers from layers"
            names = f"{of} {ranges([first, *others])}"
            return f"{names} cannot be told apart{text}: {least}, and {worst}.{self._remedy}"
        unknown = f" The standard error of one sequence is unknown.{self._remedy}" * math.isinf(errors[first])
        return f"{least[0].upper()}{least[1:]}, and {worst}.{unknown}"


def _could_go(group: Frame, whole: float, unit: str) -> list[str]:
    """Name the layers whose removal costs less than 1 % of the whole model's value, or than two standard errors."""
    errors = group["standard_error"].replace(math.inf, math.nan)  # of one sequence it is unknown
    border = (2 * errors.fillna(0.0)).clip(lower=0.01 * abs(whole))
    harmless = group[group["value"] < border]
    if not len(harmless):
        return [
            "Every layer matters: removing any one layer worsens the result by more than 1 % and by more than two "
            "standard errors."
        ]
    limit = f"(worse by less than 1 % of the whole model's {whole:.3g}{unit}, or by less than two standard errors)"
    if len(harmless) == len(group):
        short = not (2 * errors <= 0.01 * abs(whole)).all()
        reason = "The text is too short to tell" if short else "The model hardly uses its depth"
        return [f"Removing any one layer does little harm {limit}. {reason}."]
    one_of = "one of the layers" if len(harmless) > 1 else "layer"
    return [f"You can remove {one_of} {ranges([int(layer) for layer in harmless['layer']])} {limit}."]


def _harm(frame: Frame) -> Frame:
    return frame[frame["metric"].str.endswith(("_increase", "_drop"))]


def _words(metric: str) -> str:
    return str(metric).replace("_", " ")


def _differ(harm: Frame) -> bool:
    wide = harm.pivot_table(index=["metric", "layer"], columns="meaning", values="value")
    return len(wide.columns) > 1 and bool((wide.nunique(axis=1) > 1).any())


def _which(layer: float, size: int) -> str:
    first = int(layer)
    return f"layer {first}" if size == 1 else f"layers {first} to {first + size - 1}"


def _agreement(frame: Frame, harm: Frame) -> list[str]:
    angles = frame[frame["metric"] == "angular_distance"].set_index("layer")["value"]
    first = harm[harm["meaning"] == harm["meaning"].iloc[0]].set_index("layer")
    values, errors = first["value"].dropna(), first["standard_error"]
    paired: Frame = pd.concat([angles, values], axis=1, keys=["angle", "harm"]).dropna()
    if len(paired) < 4 or paired.nunique().min() < 2:
        return []
    size = int(harm["size"].iloc[0])
    agreement = float(paired["angle"].rank().corr(paired["harm"].rank()))
    free = free_layers(values, errors) if str(harm["metric"].iloc[0]).endswith("_increase") else []
    turned, missed = paired["angle"].idxmin(), ranking(values, errors, free)[0]
    rank = f"over all layers, angle and measured harm have the Spearman correlation {agreement:.2f}"
    if turned == missed:
        return [f"The angular distance agrees that {_which(turned, size)} matters least ({rank})."]
    by_angle = f"By angular distance, {_which(turned, size)} matters least"
    if turned in tied(values, errors, [missed]):
        return [f"{by_angle}, and its measured harm is too close to {_which(missed, size)} to tell ({rank})."]
    return [
        f"{by_angle}, but removing {_which(missed, size)} harms least ({rank}). Trust the measured harm, because the "
        "angle is only a prediction."
    ]


def mean_loss(losses: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the mean loss over sequences of one length, and its standard error (infinity for a single sequence)."""
    values = np.asarray(losses)
    return float(values.mean()), _error(values)


def loss_increase(whole: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the mean increase of the loss over paired sequences, and its standard error."""
    return mean_loss(np.asarray(other) - np.asarray(whole))


def perplexity(losses: Sequence[float]) -> tuple[float, float]:
    """Return exp(mean loss), and the first-order estimate of its standard error."""
    value, error = mean_loss(losses)
    estimate = _exp(value)
    return estimate, estimate * error


def perplexity_increase(whole: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the increase of exp(mean loss) over paired sequences, and an estimate of its standard error."""
    a, b = np.asarray(whole), np.asarray(other)
    first, second = _exp(a.mean()), _exp(b.mean())
    return second - first, _error(second * (b - b.mean()) - first * (a - a.mean()))


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf


class _Unchanged(Exception):
    """Raised to stop the forward pass if a layer without its sub-layers returns its input unchanged."""


class PassesWithoutLayers(ExitStack):
    """Run forward passes of one batch without some layers.

    Drop the layers in ascending order. Lamina stores the input of the first dropped layer, so each pass computes only
    the later layers. On average, a pass costs half of a whole pass. If the model changes the residual stream between
    layers, Lamina runs whole passes.
    """

    def __init__(self, context: Context, run: Callable[[], torch.Tensor]):
        super().__init__()
        self.context, self.run = context, run
        self.sites = {(id(site.module), site.call): site for site in context.structure.layers}
        self.chained = not context.structure.carries_more
        self._mode, self._start, self._size = "full", 0, 1
        self._calls: dict[int, int] = {}
        self._refill: dict[int, Callable[[torch.Tensor], Output]] = {}
        self._before: dict[int, Counter[nn.Module]] = {}  # by layer: how often modules had run
        self._counts: Counter[nn.Module] = Counter()
        self._state = self._next = self._last = torch.zeros(0)
        self._changed = False

    def full(self) -> torch.Tensor:
        self._mode, self._counts = "full", Counter()
        modules = {s.contribution.module for site in self.context.structure.layers for s in site.sublayers}

        def count(module: nn.Module, args: Args) -> None:
            self._counts[module] += 1

        try:
            with temporary_hooks() as hooks:
                hooks += [m.register_forward_pre_hook(count) for m in modules]
                return self.run()
        finally:
            self._last = torch.zeros(0)

    def without(self, start: int, size: int) -> torch.Tensor:
        """Return the result without ``size`` layers from ``start`` on. Call this method with start = 0, 1, 2, ..."""
        if not self.chained:
            return self._hooked(start, size, REMOVE)
        assert start in (0, self._start + 1)
        if start:
            self._state = self._next
        self._mode, self._start, self._size = REMOVE, start, size
        return self.run()

    def without_branches(self, start: int, size: int) -> torch.Tensor | None:
        """Return the result if the sub-layers add zero, or None if the layers' output then equals their input."""
        if not self.chained:
            return self._hooked(start, size, BRANCH)
        assert start == self._start
        self._mode, self._size, self._changed = BRANCH, size, False
        try:
            return self.run()
        except _Unchanged:
            return None

    def _hooked(self, start: int, size: int, meaning: str) -> torch.Tensor:
        self._mode = "plain"
        with removed(self.context, range(start, start + size), meaning):
            return self.run()

    def __enter__(self) -> PassesWithoutLayers:
        self.enter_context(uncompiled(self.context.model))
        modules = {site.module for site in self.context.structure.layers}
        self.enter_context(forwards({m: partial(self._call, m, m.forward) for m in modules}))
        hooks = self.enter_context(temporary_hooks())
        for root in self.context.roots:
            hooks.append(root.register_forward_pre_hook(lambda *_: self._calls.clear()))
        return self

    def _call(self, module: nn.Module, original: Forward, *args: object, **kwargs: object) -> Output:
        number = self._calls.get(id(module), 0)
        self._calls[id(module)] = number + 1
        site = self.sites.get((id(module), number))
        if site is None or self._mode == "plain":
            return original(*args, **kwargs)
        stream = argument_of(args, kwargs, site.argument)
        if self._mode == "full":
            return self._record(site, stream, original, args, kwargs)
        if site.index < self._start:
            return self._refill[site.index](stream)
        if site.index >= self._start + self._size:
            return original(*args, **kwargs)
        if self._mode == BRANCH:
            stream = self._state.clone() if site.index == self._start else stream
            return self._bare(site, stream, original, args, kwargs)
        if site.index > self._start:
            return self._refill[site.index](stream)
        if site.index == 0:
            self._state = stream.clone()
        # Computed for the next start; its other outputs are the model's own.
        args, kwargs = with_argument(args, kwargs, site.argument, self._state.clone())
        output = original(*args, **kwargs)
        self._next = stream_of(output)
        return refill(output)(self._state.clone())

    def _record(self, site: LayerSite, stream: torch.Tensor, original: Forward, args: Args, kwargs: Kwargs) -> Output:
        if self.chained and site.index and (self._last.shape != stream.shape or not torch.equal(self._last, stream)):
            self.chained = False
        self._before[site.index] = Counter(self._counts)
        output = original(*args, **kwargs)
        self._refill[site.index] = refill(output)
        self._last = stream_of(output)
        return output

    def _bare(self, site: LayerSite, stream: torch.Tensor, original: Forward, args: Args, kwargs: Kwargs) -> Output:
        args, kwargs = with_argument(args, kwargs, site.argument, stream)
        before = stream.clone()
        # calls are counted from those before the layer in a whole pass: the layers before it did not run
        with intercept(_contributions(site), _zeros, calls=self._before[site.index]):
            output = original(*args, **kwargs)
        self._changed = self._changed or not torch.equal(stream_of(output), before)
        if site.index == self._start + self._size - 1 and not self._changed:
            raise _Unchanged
        return output


class HarnessTask:
    """A task of lm-eval. Raises UserError if lm-eval is missing, the task is unknown, or a task file needs run_code."""

    def __init__(
        self,
        name: str,
        *,
        include_path: str | None = None,
        run_code: bool = False,
        metric: str = "acc",
        limit: int | None = None,
    ):
        if include_path is not None and not Path(include_path).is_dir():
            raise UserError(f"include_path: {include_path!r} is not a folder. Give a folder with YAML task files.")
        if limit is not None:
            whole_number("limit", limit)
        self.name, self.metric, self.limit, self.run_code, self.higher_is_better = name, metric, limit, run_code, True
        try:
            folders = [Path(include_path)] if include_path is not None else []
            self._tasks = Tasks.find(None, *folders, run_code=run_code)
            self._tasks.require([name], source="*.yaml in include_path")
            self._tasks.build(name)
        except UserError as error:
            reason = str(error).removeprefix("tasks: ").replace("--run-code", "run_code=true")
            raise UserError(f"task: {reason}") from None

    def measure(self, context: Context) -> tuple[float, float]:
        """Return the task's metric and its standard error (NaN if unknown) for the present model."""
        if context.tokenizer is None:
            raise UserError(f"task: {self.name!r} needs a tokenizer. Name a tokenizer with --tokenizer.")
        assert isinstance(context.model, PreTrainedModel)
        rows = len(context.batches[0]["input_ids"])
        options = {"batch_size": rows, "limit": self.limit, "run_code": self.run_code}
        runner = Runner(model=context.model, tokenizer=context.tokenizer, **options)
        output, _ = runner.run(self._tasks.build(self.name), None)
        results = output["results"][self.name]
        key = next((k for k in results if k.split(",")[0] == self.metric), None)
        if key is None:
            metrics = sorted(
                {k.split(",")[0] for k, v in results.items() if isinstance(v, float) and "stderr" not in k}
            )
            raise UserError(f"task_metric: {self.name!r} has no {self.metric!r} (allowed: {', '.join(metrics)})")
        self.higher_is_better = bool(output.get("higher_is_better", {}).get(self.name, {}).get(self.metric, True))
        error = results.get(f"{self.metric}_stderr,{key.partition(',')[2]}")
        return float(results[key]), float(error) if isinstance(error, int | float) else math.nan


class SquadFile:
    """A file in SQuAD's format. Raises UserError for any other file."""

    metric, higher_is_better = "f1", True

    def __init__(self, path: str, *, limit: int | None = None):
        self.questions = read_questions(Path(path))[: None if limit is None else whole_number("limit", limit)]

    def measure(self, context: Context) -> tuple[float, float]:
        """Return the mean F1, from 0 to 1, and its standard error over the questions."""
        if context.tokenizer is None or not context.tokenizer.is_fast:
            raise UserError("squad: the checkpoint has no fast tokenizer. Name a tokenizer with --tokenizer.")
        if "QuestionAnswering" not in type(context.model).__name__:
            name = type(context.model).__name__
            raise UserError(f"squad: {name} has no question-answering head. Choose a model with this head.")
        return mean_loss(f1_scores(context.model, context.tokenizer, self.questions))


@contextmanager
def removed(context: Context, layers: Sequence[int], meaning: str = REMOVE) -> Iterator[None]:
    """Skip the layers with the given indices in every forward pass.

    With ``remove``, a layer returns its input. With ``branch``, attention and feed-forward add zero, but skips, skip
    scales and post-norms stay. The model still computes the layer, so a key-value cache stays complete.
    """
    roots = context.roots
    with uncompiled(context.model), ExitStack() as stack:
        for index in layers:
            site, kept = context.structure.layers[index], {}

            def change(key: str, tensor: torch.Tensor, kept: dict[str, torch.Tensor] = kept) -> torch.Tensor | None:
                if key == "output":
                    x = kept.pop("input")  # the first block makes several streams of one
                    return x if x.shape == tensor.shape else x.unsqueeze(-2).expand_as(tensor)
                kept["input"] = stream_of(tensor).clone()  # a layer may add to it in place
                return None

            if meaning == REMOVE:
                stack.enter_context(intercept({"input": site.input, "output": site.output}, change, roots=roots))
            else:
                stack.enter_context(intercept(_contributions(site), _zeros, roots=roots))
        yield


def _contributions(site: LayerSite) -> dict[int, Point]:
    if not site.sublayers:
        raise UserError(
            f"meaning: Lamina did not find the sub-layers of layer {site.index}, which 'branch' needs. Set meaning "
            "to remove."
        )
    return {index: sublayer.contribution for index, sublayer in enumerate(site.sublayers)}


def _zeros(key: object, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)  # times zero would keep NaN
