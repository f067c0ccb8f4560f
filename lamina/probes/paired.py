"""The change of loss and perplexity between two models on the same sequences, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def mean(losses: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean loss over sequences of one length, with its standard error (inf for fewer than two)."""
    values = np.asarray(losses)
    return float(values.mean()), _error(values)


def increase(whole: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Mean of other - whole over the same sequences: what makes a text easy or hard for both drops out."""
    return mean(np.asarray(other) - np.asarray(whole))


def perplexity(losses: Sequence[float]) -> tuple[float, float]:
    """exp(mean loss), its error to first order."""
    value, error = mean(losses)
    estimate = _exp(value)
    return estimate, estimate * error


def perplexity_increase(whole: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """exp(mean of other) - exp(mean of whole), its error to first order with the two's covariance."""
    a, b = np.asarray(whole), np.asarray(other)
    first, second = _exp(a.mean()), _exp(b.mean())
    return second - first, _error(second * (b - b.mean()) - first * (a - a.mean()))


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf
