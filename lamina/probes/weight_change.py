"""Measure how far each layer's weights have moved from the initial weights."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import pandas as pd
import torch
from torch import nn

from lamina.core.frames import Frame
from lamina.errors import UserError
from lamina.modeling.checkpoint import load
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.registry import COLUMNS, Probe, Sample, probe
from lamina.probes.gradients import places

Weights = dict[str, torch.Tensor]
_first: weakref.WeakKeyDictionary[nn.Module, Weights] = weakref.WeakKeyDictionary()


@probe
class WeightChange(Probe):
    """Measure how far the weights have moved from the initial weights (FuseNorm Eq 12).

    ``change_norm``: the L2 norm of the difference between the current weights and the initial weights.
    ``change_ratio``: change_norm divided by the L2 norm of the initial weights. If all initial weights are 0,
        change_ratio is NaN.

    The column ``role`` names the parameters of a row, as in the probe ``gradients``. Role ``all`` covers all parameters
    of a sub-layer, of a whole layer (sublayer ``block``) or of the whole model (layer -1).

    The option ``reference`` names a checkpoint of the same architecture with the initial weights. During training, the
    default is the weights before the first step.
    """

    name = "weight_change"
    title = "Weight change"
    summary = "size of each layer's total weight change since initialization, relative to the initial weights"
    source = "FuseNorm (SpanNorm, arXiv 2601.22580) Eq 12"
    over_steps = ("change_ratio",)
    of_streams = True

    def __init__(self, reference: str | None = None):
        self.reference = reference

    def begin(self, context: Context) -> None:
        """Find the initial weights. Raises UserError if the weights are unknown or have other shapes."""
        now: Weights = {name: p.detach() for name, p in context.model.named_parameters()}
        if self.reference is not None:
            self._initial = {name: p.detach() for name, p in load(self.reference).model.named_parameters()}
        elif context.state.get("step") == 0 and "run" not in context.state:
            self._initial = _first[context.model] = {name: p.cpu().clone() for name, p in now.items()}
        elif context.model in _first:
            self._initial = _first[context.model]
        else:
            raise UserError(
                "weight_change: the initial weights are unknown. Pass reference=CHECKPOINT, or measure in a run "
                "from its first step on."
            )
        for name, p in now.items():
            if name not in self._initial or self._initial[name].shape != p.shape:
                raise UserError(
                    f"weight_change: {name!r} is not in the reference, or has another shape. Give a reference of "
                    "the same architecture."
                )

    def measured(self, context: Context) -> Sample:
        return Sample(0, 0)  # the probe reads only weights

    def finish(self, context: Context) -> pd.DataFrame:
        squares: dict[tuple[int, str, str], tuple[float, float]] = {}
        place_by_name = places(context.model, context.structure)
        for name, p in context.model.named_parameters():
            layer, sublayer, role = place_by_name[name]
            old = self._initial[name].double()
            both = float((p.detach().cpu().double() - old).square().sum()), float(old.square().sum())
            keys = {(layer, sublayer, role), (-1, "model", "all")}
            keys |= {(layer, "block", "all"), (layer, sublayer, "all")} if layer >= 0 else set()
            for key in keys:
                before = squares.get(key, (0.0, 0.0))
                squares[key] = before[0] + both[0], before[1] + both[1]
        rows = []
        for key, (change, start) in sorted(squares.items()):
            ratio = math.sqrt(change / start) if start else math.nan
            for metric, value in (("change_norm", math.sqrt(change)), ("change_ratio", ratio)):
                rows.append((*key, 0, metric, value, math.nan))
        return pd.DataFrame(rows, columns=COLUMNS)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        rows = frame[(frame["layer"] >= 0) & (frame["role"] == "all") & (frame["metric"] == "change_ratio")]
        caption = "Norm of the total change of a layer's weights, divided by the norm of the initial weights."
        yield from chart(rows, "Weight change by layer", "|dW| / |W_init|", caption, color="sublayer")

    def sentences(self, frame: Frame) -> Iterator[str]:
        rows = frame[(frame["role"] == "all") & (frame["metric"] == "change_ratio")]
        whole = rows.loc[rows["layer"] < 0, "value"].iloc[0]
        layers = rows[rows["sublayer"] == "block"].set_index("layer")["value"].dropna()
        yield f"All weights together have changed by {whole:.1%} of the initial norm."
        if len(layers):
            least, most = layers.idxmin(), layers.idxmax()
            yield (
                f"Layer {most} has changed most ({layers[most]:.1%}), and layer {least} has changed least "
                f"({layers[least]:.1%})."
            )
