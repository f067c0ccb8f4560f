"""Measure the angle between the residual stream at one layer and at another layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.probes.engine.context import Context
from lamina.probes.engine.directions import DirectionsProbe
from lamina.probes.engine.figures import Figure, heat_map
from lamina.probes.engine.registry import probe
from lamina.probes.engine.statistics import tied

WHOSE = {
    "last": "each sequence's last token (Gromov et al. 2024)",
    "first": "each sequence's first token",
    "all": "all tokens (Mix-LN Eq 8)",
}


@probe
class AngularDistance(DirectionsProbe):
    """Measure the angle between the hidden states before and after each block of consecutive layers.

    The hidden state x^l is the residual stream before layer l. The last hidden state, x^N, is the residual stream after
    the last layer and before the final norm. Lamina divides each angle by pi, so 0 means equal directions and 1/2 means
    a right angle. Lamina averages the angles over tokens and sequences (Gromov et al. 2024; Mix-LN Eq 8, Fig 5).

    The column ``start`` holds the number of the block's first layer, and ``size`` holds the block's number of layers.
    For each block size, the metric ``best_start`` is the first layer of the block with the smallest angle. This block
    is the best block of this size to remove. If norms act on the residual stream (Post-LN, HybridNorm), Lamina adds a
    note to the report.

    Options:

    ``tokens``: the tokens at which Lamina compares hidden states: "last", "first" or "all". The default is "last" for a
        model that reads text, and "all" for images and during training. "last" is the last token that is not padding,
        which may be a separator (Gromov et al.). "first" is the class token of most encoders and vision models.
    ``tokens_per_batch``: the largest number of tokens per batch to compare if ``tokens`` is "all". For your own text,
        the default is all tokens. For Lamina's embedded corpus, and during training, the default is as many tokens as
        fit in a quarter of the memory of the model's weights (at least 64 MiB).
    """

    name = "angular_distance"
    title = "Angular distance between layers"
    summary = "angle between the hidden states before and after each block of layers, and the best block to drop"
    source = "Gromov et al. 2024; Mix-LN Eq 8, Fig 5"
    over_steps = ("angular_distance",)

    def __init__(self, tokens: str | None = None, tokens_per_batch: int | None = None):
        super().__init__(tokens, tokens_per_batch)

    def compare(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.angles()

    def begin(self, context: Context) -> None:
        super().begin(context)
        self._whose = WHOSE[str(self.tokens)]
        context.note(f"The angular distances use {self._whose}.")
        self.note_streams(context)

    def standard_error(self) -> float | None:
        return float(self.by_pair.standard_error.max() / self.by_pair.mean.max().clamp(min=1e-12))

    def finish(self, context: Context) -> pd.DataFrame:
        frame = self.pair_rows("angular_distance")
        return pd.concat([frame, best_blocks(frame)], ignore_index=True)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        distances = frame[frame["metric"] == "angular_distance"]
        tokens = getattr(self, "_whose", "")
        axes = {"x_title": "first layer l of the block", "y_title": "number n of layers in the block"}
        axes["scale"] = "Viridis_r"  # light colors for small angles, as in the papers
        for table, title, caption in (
            (
                scaled_rows(distances),
                "Angular distance, scaled for each block size",
                "Angular distance d(l, l + n) between the hidden states before and after the n layers that start at "
                "layer l. As in Mix-LN's Figure 5, each row has its own color scale. The lightest block of a row has "
                "the smallest angle.",
            ),
            (
                distances,
                "Angular distance",
                "This figure shows the unscaled distances. 0 means equal directions, and 0.5 means a right angle.",
            ),
        ):
            figure = heat_map(table, "start", "size", "value", title=title, **axes)
            yield (figure, f"{caption} The angles use {tokens}." if tokens else caption)

    def sentences(self, frame: Frame) -> Iterator[str]:
        distances = frame[frame["metric"] == "angular_distance"]
        num_layers = int(distances["size"].max())
        by_block = distances.set_index(["size", "start"])["value"]
        best = frame[frame["metric"] == "best_start"].set_index("size")["value"].dropna().astype(int)
        if not len(best):
            yield "No angle is finite, because the states hold NaN or infinite values."
            return
        powers = [2**k for k in range(num_layers.bit_length()) if 2**k <= max(1, num_layers // 2)]
        sizes = [size for size in powers if size < num_layers and size in best.index]
        if not sizes:
            yield f"The only layer changes the hidden states' direction by {by_block[1, 0]:.3f} (0.5 is a right angle)."
            return
        blocks = [
            f"layer{f' {best[size]}' if size == 1 else f's {best[size]} to {best[size] + size - 1}'} (angle "
            f"{by_block[size, best[size]]:.3f})"
            for size in sizes
        ]
        yield f"These blocks have the smallest angle, so try to remove them first: {'; '.join(blocks)}."
        single = distances[distances["size"] == 1].set_index("start").dropna(subset="value")
        near = tied(single["value"], single["standard_error"], [best[1]]) if 1 in best.index else []
        if near:
            count = f" on {single['sequences'].iloc[0]:,} sequences" if "sequences" in single else ""
            yield f"Two standard errors cannot tell the angles of layers {ranges([best[1], *near])} apart{count}."
        yield from _early_or_deep(by_block[1].to_numpy())


def best_blocks(frame: Frame) -> pd.DataFrame:
    """Return one row per block size: the first layer of the block with the smallest angle (metric ``best_start``)."""
    rows = []
    for size, group in frame.groupby("size"):
        measured = group.dropna(subset="value")
        start = int(measured.loc[measured["value"].idxmin(), "start"]) if len(measured) else -1
        rows.append((start, size, "best_start", float(start) if len(measured) else math.nan, math.nan))
    return pd.DataFrame(rows, columns=list(frame.columns))


def scaled_rows(distances: Frame) -> pd.DataFrame:
    """Clip each block size's angles to the 1st and 99th percentile, and scale these angles to [0, 1]."""

    def scale(values: Frame) -> Frame:
        low, high = values.quantile(0.01), values.quantile(0.99)
        return (values.clip(low, high) - low) / (high - low) if high > low else values * 0.0

    return distances.assign(value=distances.groupby("size")["value"].transform(scale))


def _early_or_deep(turns: np.ndarray) -> list[str]:
    if len(turns) < 4 or not np.isfinite(turns).all():
        return []
    half = len(turns) // 2
    early, deep = float(np.median(turns[:half])), float(np.median(turns[-half:]))
    numbers = f"the median angle is {deep:.3f} in the deeper half of the layers and {early:.3f} in the earlier half"
    if max(early, deep) < 1.2 * min(early, deep):
        return [f"Early and deep layers change the residual stream's direction by similar angles: {numbers}."]
    similar, other = ("deep", "early") if deep < early else ("early", "deep")
    return [
        f"The {similar} layers change the residual stream's direction less than the {other} layers: {numbers}. Mix-LN "
        "finds small angles for deep layers in Pre-LN models, and for early layers in Post-LN models."
    ]
