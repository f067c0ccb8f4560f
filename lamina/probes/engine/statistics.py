"""Averages over a stream of text, with their standard error."""

from __future__ import annotations

import math

import torch


class Running:
    """Mean and standard error of a tensor's values over independent samples (sequences), in float64, in one pass.

    ``add`` takes [samples, ...]; the remaining shape is that of the mean. Welford's update in Chan's form for
    batches, so large means lose nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())

    def add(self, samples: torch.Tensor) -> None:
        """Add one batch's values, [samples, ...]."""
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
        """The standard error of the mean; infinite for fewer than two samples."""
        if self.count < 2:
            return torch.full_like(self.mean, math.inf)
        return (self._squares / (self.count - 1) / self.count).sqrt()

    def relative_error(self, floor: float = 0.0) -> float:
        """The largest standard error over |mean|, where |mean| is at least ``floor``; 0 without values."""
        error, mean = self.standard_error, self.mean.abs()
        chosen = mean > floor
        if not self.count or math.isinf(float(error.max())):
            return math.inf
        return float((error[chosen] / mean[chosen]).max()) if bool(chosen.any()) else 0.0


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
