"""An average over the tokens of many sequences of different lengths, with its standard error over sequences."""

from __future__ import annotations

import math

import torch


class Ratio:
    """Sum of totals over sum of counts, one total and one count per sequence, in float64, in one pass.

    The standard error is that of a ratio of two sums over independent sequences (Cochran, Sampling Techniques, Eq
    2.39): sqrt(k / (k - 1) * sum (total - ratio count)^2) / sum count for k sequences. At equal counts it is the
    usual one of the mean over sequences.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._totals = self._squares = self._products = torch.zeros(())
        self._counts = self._counts_squared = 0.0

    def add(self, totals: torch.Tensor, counts: torch.Tensor) -> None:
        """Add ``totals`` [sequences, ...] and ``counts`` [sequences]; sequences with a count of 0 are left out."""
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
        """The ratio; NaN without any counts."""
        return self._totals / (self._counts or math.nan)

    @property
    def standard_error(self) -> torch.Tensor:
        """The standard error of the ratio; infinite for fewer than two sequences."""
        if self.samples < 2:
            return torch.full_like(self._totals, math.inf)
        ratio = self.mean
        squares = self._squares - 2 * ratio * self._products + ratio.square() * self._counts_squared
        return (squares.clamp(min=0) * (self.samples / (self.samples - 1))).sqrt() / self._counts
