"""Compute averages over a stream of text, and the averages' standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lamina.core.frames import Frame


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """Return the mean of independent samples and its standard error (NaN for a single sample)."""
    error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else math.nan
    return float(values.mean()), error


def free_layers(values: Frame, errors: Frame) -> list[int]:
    """Return the layers (the index) without effect on any sequence's loss: an increase of 0 without any error."""
    return [int(layer) for layer in values.index[(values == 0) & ~((errors > 0) & np.isfinite(errors))]]


def ranking(values: Frame, errors: Frame, free: Sequence[int] = ()) -> list[int]:
    """Return the layers (the index) from the lowest value up, but first the layers in ``free`` within two standard
    errors.
    """
    best = values.idxmin()
    error = float(errors[best])
    noise = 2 * error if math.isfinite(error) else math.inf
    first = [layer for layer in free if values[layer] - values[best] <= noise]
    return first + [int(layer) for layer in values.sort_values(kind="stable").index if layer not in first]


def tied(values: Frame, errors: Frame, chosen: Sequence[int], free: Sequence[int] = ()) -> list[int]:
    """Return the other layers that two standard errors cannot tell apart from the highest chosen layer."""
    # An increase of exactly 0 needs no comparison, and an unknown error allows none.
    compared = [layer for layer in chosen if layer not in free]
    if not compared:
        return []
    highest = values[compared].idxmax()
    noise = 2 * np.hypot(errors, errors[highest])
    near = (values - values[highest] < noise) & np.isfinite(noise)
    return [int(layer) for layer in values.index[near] if layer not in chosen]


class Running:
    """The mean and standard error of a tensor over independent samples (sequences), in float64 and in one pass.

    Welford's update, in Chan's form for batches, loses no digits for large means.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())

    def add(self, samples: torch.Tensor) -> None:
        """Add a batch [samples, ...]."""
        samples = samples.detach().to("cpu", torch.float64)
        count = len(samples)
        if not count:
            return
        mean = samples.mean(0)
        squares = (samples - mean).square().sum(0)
        if not self.count:
            self.count, self.mean, self._squares = count, mean, squares
            return
        total = self.count + count
        difference = mean - self.mean
        self._squares = self._squares + squares + difference.square() * (self.count * count / total)
        self.mean = self.mean + difference * (count / total)
        self.count = total

    @property
    def standard_error(self) -> torch.Tensor:
        """The standard error of the mean, or infinity for fewer than two samples."""
        if self.count < 2:
            return torch.full_like(self.mean, math.inf)
        return (self._squares / (self.count - 1) / self.count).sqrt()

    def relative_error(self) -> float:
        """Return the largest relative standard error over nonzero means, or infinity for fewer than two samples."""
        error, mean = self.standard_error, self.mean.abs()
        positive = mean > 0
        if not self.count or math.isinf(float(error.max())):
            return math.inf
        return float((error[positive] / mean[positive]).max()) if bool(positive.any()) else 0.0


class Ratio:
    """The mean per token over all sequences, with its standard error, in float64 and in one pass.

    Each sequence has a total (its sum over tokens) and a count (its number of tokens). The mean is the sum of the
    totals divided by the sum of the counts. The standard error follows Cochran, Sampling Techniques, Eq 2.39.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._totals = self._squares = self._products = torch.zeros(())
        self._counts = self._counts_squared = 0.0

    def add(self, totals: torch.Tensor, counts: torch.Tensor) -> None:
        """Add totals [sequences, ...] and counts [sequences]. Sequences with a count of 0 have no effect."""
        totals, counts = totals.detach().to("cpu", torch.float64), counts.detach().to("cpu", torch.float64)
        totals, counts = totals[counts > 0], counts[counts > 0]
        if not len(counts):
            return
        self.samples += len(counts)
        self._counts += float(counts.sum())
        self._counts_squared += float(counts.square().sum())
        self._totals = self._totals + totals.sum(0)
        self._squares = self._squares + totals.square().sum(0)
        self._products = self._products + torch.tensordot(counts, totals, dims=1)

    @property
    def mean(self) -> torch.Tensor:
        """The mean per token, or NaN without tokens."""
        return self._totals / (self._counts or math.nan)

    @property
    def standard_error(self) -> torch.Tensor:
        """The standard error of the mean, or infinity for fewer than two sequences."""
        if self.samples < 2:
            return torch.full_like(self._totals, math.inf)
        ratio = self.mean
        squares = self._squares - 2 * ratio * self._products + ratio.square() * self._counts_squared
        return (squares.clamp(min=0) * (self.samples / (self.samples - 1))).sqrt() / self._counts


@dataclass(frozen=True)
class TokenStates:
    """A tensor of the forward pass as [sequences, tokens, channels], with a mask of the tokens that are text.

    Attributes:
        x: the tensor in float32, or in float64 for a float64 tensor. Padding is 0.
        valid: the mask, [sequences, tokens], or None if all tokens are text.
    """

    x: torch.Tensor
    valid: torch.Tensor | None


def as_tokens(value: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> TokenStates:
    """Reshape a tensor of a batch to [sequences, tokens, channels], and set padding to 0.

    The tensor may be [batch, tokens, channels] or, in experts, [batch * tokens, channels]. A vision tensor may have
    axes of rows and columns. If the tensor has an axis of heads, each head's part counts as a token. Any other tensor
    counts as one sequence.
    """
    x = value.detach()
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    main_input = next(iter(inputs.values()))
    batch = len(main_input)
    mask = inputs.get("attention_mask")
    valid = None if mask is None or bool(mask.all()) else mask.bool().to(x.device)
    tokens = main_input.shape[1] if main_input.ndim == 2 else -1
    if x.ndim == 2 and len(x) == batch * tokens:
        x = x.unflatten(0, (batch, tokens))
    if x.ndim < 3 or len(x) != batch:
        return TokenStates(x.reshape(1, -1, x.shape[-1]), None)
    flat = x.flatten(1, -2)
    if valid is None or tokens not in x.shape[1:-1]:
        return TokenStates(flat, None)
    shape = [batch] + [tokens if i == x.shape[1:-1].index(tokens) else 1 for i in range(x.ndim - 2)]
    valid = valid.reshape(shape).expand(x.shape[:-1]).flatten(1)
    return TokenStates(flat.masked_fill(~valid.unsqueeze(-1), 0.0), valid)


def stream_figures(streams: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine of two streams, then each stream's mean square: [..., n, width] to [..., 1 + n]."""
    n = streams.shape[-2]
    together = torch.nn.functional.normalize(streams, dim=-1, eps=1e-30).sum(-2).square().sum(-1)  # n + all cosines
    return torch.cat([((together - n) / (n * (n - 1))).unsqueeze(-1), streams.square().mean(-1)], dim=-1)
