"""What a model loses without each of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pandas as pd
import torch
from torch import nn

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.errors import UserError
from lamina.probes import harm, paired
from lamina.probes.angular_distance import AngularDistance
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure
from lamina.probes.engine.registry import Probe, Sample, check_most, probe, sample_of
from lamina.probes.engine.removal import BRANCH, MEANINGS, REMOVE, removed
from lamina.probes.structure.forward import forward
from lamina.probes.structure.hooks import watch
from lamina.probes.structure.outputs import stream_of
from lamina.probes.suffixes import Suffixes

METRICS = ("loss", "perplexity")
_MIN_SEQUENCES = 16
_SEQUENCES = 4  # of a corpus, by default
_PRECISION = 0.05  # likewise


@probe
class LayerDrop(Probe):
    """The harm of dropping each layer, or each stretch of ``block`` consecutive layers; positive numbers are harm.

    Mix-LN Fig 2, 3, 6b (performance drop), KEEL (dPPL of each layer), Gromov et al. 2024 (consecutive layers). The
    other layers do not change: kinds, scales (LayerNorm Scaling's l, Keel's alpha) and first-layer exceptions stay with
    the layer; dropping the first layer of such a placement drops its exception, too.

    One row per measurement: ``layer`` the first layer dropped, ``size`` how many, and

    - ``meaning``: "remove": the layer returns its input. "branch": its sub-layers add zero, but its skips, their
      scales and post-norms stay. Where no norm sits on the stream (Pre-LN, Peri-LN) the two are the same.
    - ``loss_increase``: nats per predicted token; ``perplexity_increase``: exp(loss) without the layer minus exp(loss)
      of the whole model. Standard errors are over sequences, of the paired difference.
    - ``accuracy_drop`` (of an lm-eval task): whole minus dropped; ``score_drop`` (of your own score): so that harm is
      positive. The standard error of the former treats the two as independent, which they are not: as a rule it
      is an upper bound.
    - ``angular_distance`` (meaning ""): d(l, l + size) of the same text, see the probe of that name.
    - layer -1, size 0: the whole model's ``loss``, ``perplexity``, ``accuracy`` or ``score``.

    Args:
        block: how many layers are dropped together, at every start.
        meaning: remove, branch, or "all" (default).
        metric: loss, perplexity or "all" (default).
        task: an lm-evaluation-harness task in place of the loss (pip install lm-eval).
        include_path: a folder of the task's own YAML.
        task_metric: which of the task's metrics (default acc).
        limit: the task's first so many documents.
        score: your own measure in place of the loss (Python only): a callable from the model to a number.
        higher_is_better: whether a higher score is better.
        standard_error: text is added until each layer's standard error is at most this share of its loss increase, or
            of 0.1 nats where that is more (0: all text; by default all of your own, 0.05 for a corpus).
        sequences: at most how many the loss is measured on (0: all; by default all of your own text, 4 of a corpus);
            each costs half a pass per layer.
    """

    name = "layer_drop"
    title = "Dropping layers"
    summary = "how much worse the model is without each layer (or block), in loss, perplexity or a task's score"
    source = "Mix-LN Fig 2, 3, 6b; KEEL (dPPL); Gromov et al. 2024"

    def __init__(
        self,
        block: int = 1,
        meaning: str = "all",
        metric: str = "all",
        task: str | None = None,
        include_path: str | None = None,
        task_metric: str = "acc",
        limit: int | None = None,
        score: Callable[[nn.Module], float] | None = None,
        higher_is_better: bool = True,
        standard_error: float | None = None,
        sequences: int | None = None,
    ):
        if not isinstance(block, int) or isinstance(block, bool) or block < 1:
            raise UserError(f"block: {block!r} (allowed: a number of layers, 1 or more)")
        if meaning not in (*MEANINGS, "all"):
            raise UserError(f"meaning: {meaning!r} (allowed: {', '.join(MEANINGS)}, all)")
        if metric not in (*METRICS, "all"):
            raise UserError(f"metric: {metric!r} (allowed: {', '.join(METRICS)}, all)")
        if score is not None and not callable(score):
            raise UserError(f"score: {score!r} (allowed, in Python: a callable that takes the model)")
        if score is not None and task is not None:
            raise UserError("score: cannot be combined with task (allowed: one of them)")
        if standard_error is not None and (not isinstance(standard_error, int | float) or not 0 <= standard_error < 1):
            raise UserError(f"standard_error: {standard_error!r} (allowed: a share from 0 to below 1)")
        self.block, self.metrics = block, METRICS if metric == "all" else (metric,)
        self.meanings, self._wants_all = MEANINGS if meaning == "all" else (meaning,), meaning == "all"
        self.score, self.higher_is_better, self.tolerance = score, higher_is_better, standard_error
        self.sequences = check_most(self.name, "sequences", sequences)
        self._read: list[Mapping[str, torch.Tensor]] = []
        self.task = None
        if task is not None:
            from lamina.probes.tasks import Task

            self.task = Task(str(task), include_path=include_path, metric=task_metric, limit=limit)

    def cost(self, context: Context) -> float:
        return (
            0.8
            * context.structure.num_layers
            * len(self.meanings) ** 0.5
            * context.tokens(context.most(self.sequences, _SEQUENCES))
        )

    def begin(self, context: Context) -> None:
        if self.score is None:
            context.check_head()
        count = context.structure.num_layers
        if count < 2:
            raise UserError(
                "layer_drop: without its one layer there is no model (allowed: a model of 2 layers or more)"
            )
        if self.block >= count:
            raise UserError(f"block: {self.block} of {count} layers leaves none (allowed: up to {count - 1})")
        bare = [site.index for site in context.structure.layers if not site.sublayers]
        if bare and BRANCH in self.meanings:
            if not self._wants_all:
                raise UserError(
                    f"meaning: 'branch' needs the sub-layers of each layer, those of {ranges(bare)} were not found "
                    "(allowed: remove)"
                )
            self.meanings = (REMOVE,)
            context.notes.append(f"layer_drop: only 'remove', the sub-layers of {ranges(bare)} were not found.")

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
        prepare_loss(context)
        batches = context.first(context.most(self.sequences, _SEQUENCES))
        precision = self.tolerance if self.tolerance is not None else 0.0 if context.whole else _PRECISION
        for number, batch in enumerate(batches):
            inputs = {name: tensor.to(context.device) for name, tensor in batch.items()}
            with Suffixes(context, partial(self._sequences, context, inputs)) as passes:
                with watch(context.structure.states(), angles.see, root=context.model):
                    whole += passes.full().tolist()
                angles.end_batch(inputs, None)
                for start in starts:
                    finished = number * len(starts) + start
                    context.progress(finished, len(batches) * len(starts), f"without layer {start}")
                    plain = passes.without(start, self.block)
                    bare = passes.without_branches(start, self.block) if BRANCH in self.meanings else None
                    for meaning in self.meanings:
                        result = bare if meaning == BRANCH and bare is not None else plain
                        dropped[start, meaning] += result.tolist()
            self._read = batches[: number + 1]
            if len(whole) >= _MIN_SEQUENCES and _precise(whole, dropped, precision):
                break
        rows: list[tuple] = []
        for metric in self.metrics:
            level, rise = (
                (paired.mean, paired.increase) if metric == "loss" else (paired.perplexity, paired.perplexity_increase)
            )
            rows.append((-1, 0, "", metric, *level(whole)))
            for (start, meaning), losses in dropped.items():
                rows.append((start, self.block, meaning, f"{metric}_increase", *rise(whole, losses)))
        frame: Frame = angles.finish(context)
        frame = frame[(frame["metric"] == "angular_distance") & (frame["size"] == self.block)]
        distances = frame.assign(meaning="")[["start", "size", "meaning", "metric", "value", "standard_error"]]
        return rows + list(distances.itertuples(index=False, name=None))

    @staticmethod
    def _sequences(context: Context, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean loss of each sequence [batch]."""
        return context.token_losses(inputs).double().mean(1)

    def _scored(self, context: Context, starts: range) -> list[tuple]:
        name = "score" if self.task is None else "accuracy" if self.task.metric.startswith("acc") else self.task.metric
        sign = 1.0 if (self.higher_is_better if self.task is None else self.task.higher_is_better) else -1.0
        context.progress(0, len(starts) + 1, f"{name} of the whole model")
        base, base_error = self._measure(context)
        rows: list[tuple] = [(-1, 0, "", name, base, base_error)]
        same = _same_meanings(context, starts, self.block) if len(self.meanings) > 1 else set()
        for start in starts:
            context.progress(start + 1, len(starts) + 1, f"{name} without layer {start}")
            result = (math.nan, math.nan)
            for meaning in self.meanings:
                if meaning == self.meanings[0] or start not in same:
                    with removed(context, range(start, start + self.block), meaning):
                        result = self._measure(context)
                value, error = result
                rows.append(
                    (start, self.block, meaning, f"{name}_drop", sign * (base - value), math.hypot(base_error, error))
                )
        return rows

    def _measure(self, context: Context) -> tuple[float, float]:
        if self.task is not None:
            return self.task.measure(context)
        assert self.score is not None
        return float(self.score(context.model)), math.nan

    def figures(self, frame: Frame) -> Sequence[tuple[Figure, str]]:
        return harm.figures(frame)

    def sentences(self, frame: Frame) -> Sequence[str]:
        return harm.sentences(frame)


def _precise(whole: list[float], dropped: Mapping[tuple[int, str], list[float]], precision: float) -> bool:
    pairs = [paired.increase(whole, losses) for losses in dropped.values()]
    return precision > 0 and all(error <= precision * max(abs(value), 0.1) for value, error in pairs)


def prepare_loss(context: Context) -> None:
    """Decide the model's kind of loss before hooks watch it: this takes forward passes of its own."""
    inputs = {name: tensor[:1].to(context.device) for name, tensor in context.batches[0].items()}
    context.token_losses(inputs)


def _same_meanings(context: Context, starts: range, size: int) -> set[int]:
    """The starts at which the two meanings agree: the layers return their input once they add nothing to it."""
    inputs = {name: tensor[:1].to(context.device) for name, tensor in context.batches[0].items()}
    same = set()
    with Suffixes(context, lambda: stream_of(forward(context.base, inputs))) as passes:
        passes.full()
        for start in starts:
            passes.without(start, size)
            if passes.without_branches(start, size) is None:
                same.add(start)
    return same
