"""Read the learned gains of each layer's norms, and the learned scales of its skips and branches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

import numpy as np
import pandas as pd
import torch
from torch import nn

from lamina.core.frames import Frame
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.registry import COLUMNS, Probe, Sample, probe
from lamina.probes.structure.sites import LayerSite

METRICS = ("gain_mean", "gain_std", "gain_rms", "gain_min", "gain_max")


@probe
class Gains(Probe):
    """Read the gain of every norm and the learned scales of the layers from the weights.

    A norm's gain is the norm's learned weight vector. A learned scale is a parameter with one value, or with one value
    per channel. Biases and the parameters of norms are not learned scales.

    The column ``role`` holds the norm's position (pre_norm, out_norm, post_norm, inner_norm, embedding_norm,
    final_norm) or the scale's name (such as skip_scale, or lambda in LayerScale). The column ``path`` holds the path of
    the module. If a sub-layer has several parameters with the same role, such as query and key norms, the column
    ``index`` numbers these parameters. The embedding's norm and the final norm have layer -1 and sublayer "model".

    The metrics gain_mean, gain_std (population), gain_rms, gain_min and gain_max summarize each vector in float64.
    Gemma's checkpoints store the gain minus 1, but Lamina shows the factor that the norm applies. Norms without a gain
    have no rows. This probe reads no text, so the values have no standard error.
    """

    name = "gains"
    title = "Norm gains"
    summary = "mean, spread and range of every norm's gain and of the learned scales, by depth"
    source = "Peri-LN Fig 9b (the output norm's gain by depth)"
    of_streams = True
    over_steps = ("gain_mean",)

    def finish(self, context: Context) -> pd.DataFrame:
        rows: list[tuple] = []
        places: Counter[tuple[int, str, str]] = Counter()
        for layer, sublayer, role, path, gain in _gains(context):
            key = (layer, sublayer, role)
            x = gain.detach().double().flatten()
            values = (x.mean(), x.std(correction=0), x.square().mean().sqrt(), x.min(), x.max())
            for metric, value in zip(METRICS, map(float, values), strict=True):
                rows.append((*key, places[key], metric, value, math.nan, path))
            places[key] += 1
        if not rows:
            context.notes.append("gains: the model's norms have no learned gain")
        return pd.DataFrame(rows, columns=[*COLUMNS, "path"])

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        layers = frame[frame["layer"] >= 0]
        number = np.where(layers["index"] > 0, " " + (layers["index"] + 1).astype(str), "")
        layers = layers.assign(norm=layers["sublayer"] + ", " + layers["role"] + number)
        caption = "Mean or largest value of each norm's gain and of each learned scale."
        for metric, title in (("gain_mean", "Mean gain by depth"), ("gain_max", "Largest gain by depth")):
            yield from chart(layers[layers["metric"] == metric], title, metric.replace("_", " "), caption, color="norm")

    def measured(self, context: Context) -> Sample:
        return Sample(0, 0)  # the probe reads only weights

    def sentences(self, frame: Frame) -> Iterator[str]:
        means = frame[frame["metric"] == "gain_mean"]
        layers = means[means["layer"] >= 0]
        for (sublayer, role, index), part in layers.groupby(["sublayer", "role", "index"], sort=False):
            part = part.set_index("layer")["value"].sort_index()
            number = f" {index + 1}" if index else ""
            if f"{part.min():.3g}" == f"{part.max():.3g}":
                yield f"The mean gain of the {sublayer}'s {role}{number} is {part.max():.3g} in every layer."
                continue
            yield (
                f"The mean gain of the {sublayer}'s {role}{number} goes from {part.iloc[0]:.3g} in layer "
                f"{part.index[0]} to {part.iloc[-1]:.3g} in layer {part.index[-1]} (smallest {part.min():.3g} in "
                f"layer {part.idxmin()}, largest {part.max():.3g} in layer {part.idxmax()})."
            )
        for row in means[means["layer"] < 0].itertuples():
            yield f"The {row.role}'s mean gain is {row.value:.3g}."


def _gains(context: Context) -> Iterator[tuple[int, str, str, str, torch.Tensor]]:
    """Yield (layer, sublayer, role, path, values) of every norm with a gain, and of every learned scale."""
    structure = context.structure
    norms = list(structure.norms())
    modules = {id(norm.module) for _, _, norm in norms}
    for layer, sublayer, norm in norms:
        gain = norm.gain
        if gain is not None:
            yield layer, sublayer, norm.role, norm.path, gain
    # Learned scales: parameters with one value or one value per channel, outside norms and modules with a matrix.
    for site in structure.layers:
        for path, module in site.module.named_modules(prefix=site.path):
            parameters = dict(module.named_parameters(recurse=False))
            if id(module) in modules or isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
                continue
            if any(p.squeeze().ndim >= 2 for p in parameters.values()):
                continue
            for name, parameter in parameters.items():
                if parameter.numel() in (1, structure.hidden_size) and "bias" not in name:
                    yield site.index, _sublayer_of(site, path), name, path, parameter.detach()


def _sublayer_of(site: LayerSite, path: str) -> str:
    """Return the kind of the sub-layer that contains a module path, or "block"."""
    parts = path.split(".")
    best, kind = len(site.path.split(".")), "block"
    for sublayer in site.sublayers:
        for other, _ in sublayer.modules:
            pairs = zip(parts, other.split("."), strict=False)
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if shared > best:
                best, kind = shared, sublayer.kind
    return kind
