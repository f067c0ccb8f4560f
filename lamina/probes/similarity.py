"""Measure the cosine between the hidden states of all pairs of layers, and before and after each layer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.probes.engine.context import Context
from lamina.probes.engine.directions import DirectionsProbe, ratio_rows
from lamina.probes.engine.figures import Figure, chart, heat_map
from lamina.probes.engine.registry import probe
from lamina.probes.engine.statistics import Ratio


@probe
class Similarity(DirectionsProbe):
    """Measure the cosine between the hidden states of any two layers.

    The hidden state x^l is the residual stream before layer l. The last hidden state, x^N, is the residual stream after
    the last layer and before the final norm.

    ``cosine``: the cosine of x^i and x^j, with ``start`` = i and ``size`` = j - i.
    ``cosine_by_distance``: the mean cosine of the outputs of all pairs of layers that are ``size`` layers apart
        (FuseNorm Fig 12). The embedding x^0 does not count, because x^0 is not the output of a layer.
    ``block_influence``: 1 minus the cosine of x^l and x^(l+1), with ``start`` = l and ``size`` = 1 (ShortGPT).

    Lamina averages the cosine over all tokens, without padding. Lamina does not subtract the mean of the hidden states.
    If all tokens share a direction, this direction increases all cosines. Lamina computes standard errors over
    sequences.

    Options:

    ``tokens``: the tokens at which Lamina compares hidden states: "all" (default), or only the "last" or "first" token
        of each sequence.
    ``tokens_per_batch``: the largest number of tokens per batch to compare if ``tokens`` is "all". For your own text,
        the default is all tokens. For Lamina's embedded corpus, and during training, the default is as many tokens as
        fit in a quarter of the memory of the model's weights (at least 64 MiB).
    """

    name = "similarity"
    title = "Similarity of the layers"
    summary = (
        "cosine between the hidden states of all pairs of layers, mean cosine by distance, and each layer's block "
        "influence"
    )
    source = "FuseNorm Fig 12 (by distance); ShortGPT (block influence)"
    over_steps = ("cosine_by_distance", "block_influence")

    def __init__(self, tokens: str = "all", tokens_per_batch: int | None = None):
        super().__init__(tokens, tokens_per_batch)
        self._by_distance = Ratio()

    def compare(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cosines()

    def begin(self, context: Context) -> None:
        super().begin(context)
        self.note_streams(context)

    def add(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        super().add(sums, counts)
        if len(self._states) > 2:
            first, second = (torch.from_numpy(index) for index in self._pairs)
            outputs = first > 0
            distance = (second - first)[outputs] - 1
            each = torch.bincount(distance).to(sums.dtype)
            by_distance = sums.new_zeros(len(sums), len(each)).index_add_(1, distance, sums[:, outputs])
            self._by_distance.add(by_distance / each, counts)

    def standard_error(self) -> float | None:
        # Return the absolute error, because no error is small relative to a mean near 0.
        return float((self._by_distance if len(self._states) > 2 else self.by_pair).standard_error.max())

    def finish(self, context: Context) -> pd.DataFrame:
        cosines: Frame = self.pair_rows("cosine")
        frames = [cosines]
        if len(self._states) > 2:
            frames.append(ratio_rows(-1, np.arange(1, len(self._states) - 1), "cosine_by_distance", self._by_distance))
        neighbors = cosines[cosines["size"] == 1]
        frames.append(neighbors.assign(metric="block_influence", value=1.0 - neighbors["value"]))
        return pd.concat(frames, ignore_index=True)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        cosines = frame[frame["metric"] == "cosine"]
        square = cosines.assign(end=cosines["start"] + cosines["size"])
        yield from chart(
            frame[frame["metric"] == "cosine_by_distance"],
            *("Cosine similarity by layer distance", "mean cosine"),
            "Mean cosine between the outputs of all pairs of layers at this distance (FuseNorm's Figure 12, "
            "without the embedding). A flat line means that each layer changes the residual stream little.",
            x="size",
            x_title="distance between the layers",
        )
        yield (
            heat_map(square, "start", "end", "value", title="Cosine between states", x_title="state", y_title="state"),
            "Cosine between the hidden states before each pair of layers, averaged over tokens.",
        )
        yield from chart(
            frame[frame["metric"] == "block_influence"],
            *("Block influence", "1 - cosine between the residual stream before and after the layer"),
            "Block influence (ShortGPT): a layer with a small value changes the direction of the residual stream "
            "little.",
            x="start",
        )

    def sentences(self, frame: Frame) -> Iterator[str]:
        curve = frame[frame["metric"] == "cosine_by_distance"].set_index("size")["value"]
        influence = frame[frame["metric"] == "block_influence"].set_index("start")["value"].dropna()
        farthest = int(curve.index.max()) if len(curve) else 0
        if farthest > 1:
            middle = farthest // 2
            over = f" to {curve[middle]:.2f} at a distance of {middle} layers, and" if middle > 1 else ""
            yield (
                f"The cosine between two layers' outputs goes from {curve[1]:.2f} for neighbors{over} to "
                f"{curve[farthest]:.2f} between the first and the last layer."
            )
        if len(influence) > 1:
            count = max(1, round(len(influence) / 10))
            least, most = influence.nsmallest(count), influence.nlargest(1)
            layers = ranges([int(layer) for layer in least.index])
            yield (
                f"Layer{f's {layers} change' if count > 1 else f' {layers} changes'} the residual stream's direction "
                f"least (block influence at most {least.max():.3f}), and layer {int(most.index[0])} changes the "
                f"direction most ({most.iloc[0]:.3f})."
            )
