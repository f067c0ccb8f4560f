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
