"""Spectra: covariances gathered from a stream of activations, and how evenly their eigenvalues are spread."""

from __future__ import annotations

import math

import torch

FLOOR = 1e-12  # eigenvalues below it are rounding


class Covariance:
    """The centered covariance of samples [n, channels] added batch by batch: one matrix of channels x channels.

    Each batch's products are formed in float32 at least, about the first batch's mean, so a channel with a massive mean
    costs the others no digits; they are summed in float64.
    """

    def __init__(self) -> None:
        self.count = 0
        self._shift = torch.zeros(())
        self._sum = torch.zeros(())
        self._products = torch.zeros(())

    def add(self, samples: torch.Tensor) -> None:
        """Add samples [..., channels]."""
        samples = samples.detach().flatten(0, -2)
        samples = samples.to(torch.promote_types(samples.dtype, torch.float32))
        if not len(samples):
            return
        if not self.count:
            channels, device = samples.shape[-1], samples.device
            self._shift = samples.mean(0)
            self._sum = torch.zeros(channels, dtype=torch.float64, device=device)
            self._products = torch.zeros(channels, channels, dtype=torch.float64, device=device)
        samples = samples - self._shift
        self._sum += samples.sum(0, dtype=torch.float64)
        self._products += samples.T @ samples
        self.count += len(samples)

    def matrix(self) -> torch.Tensor:
        """The sample covariance, divisor n - 1, [channels, channels] in float64. Needs two samples."""
        if self.count < 2:
            raise ValueError(f"a covariance of {self.count} samples (needed: at least 2)")
        mean = self._sum / self.count
        return (self._products - self.count * torch.outer(mean, mean)) / (self.count - 1)

    def eigenvalues(self) -> torch.Tensor:
        """Descending, clamped at 1e-12, float64 on the CPU."""
        return torch.linalg.eigvalsh(self.matrix()).flip(0).clamp(min=FLOOR).cpu()


def hard_rank(eigenvalues: torch.Tensor) -> float:
    """The participation ratio (sum l)^2 / sum l^2 over the number of eigenvalues D: from 1 / D to 1."""
    values = eigenvalues.double()
    return float(values.sum().square() / values.square().sum() / len(values))


def soft_rank(eigenvalues: torch.Tensor) -> float:
    """Shannon's rank exp(-sum p ln p), p = l / sum l, over the number of eigenvalues D: from 1 / D to 1."""
    shares = eigenvalues.double() / eigenvalues.double().sum()
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()) / len(shares))


def effective_dimension_ratio(hard: float, soft: float) -> float:
    """200 h s / (h + s), a hundred times the harmonic mean of both ranks: our definition, the paper's isn't known."""
    return 200 * hard * soft / (hard + soft)


def early_enrichment(eigenvalues: torch.Tensor) -> float:
    """EEE = 2 / D sum_k (C_k - k / D), C_k the share of the k largest: 0 where all are equal, 1 - 1 / D with one alone.

    Our definition of the spectral concentration, after Marbut et al. 2023; the paper's isn't known.
    """
    values = eigenvalues.double().sort(descending=True).values
    number = len(values)
    cumulated = values.cumsum(0) / values.sum()
    return float(2 / number * (cumulated - torch.arange(1, number + 1, dtype=torch.float64) / number).sum())


def spectral_utilisation(eigenvalues: torch.Tensor) -> dict[str, float]:
    """hard_rank, soft_rank, edr and eee of a covariance's eigenvalues."""
    hard, soft = hard_rank(eigenvalues), soft_rank(eigenvalues)
    edr = effective_dimension_ratio(hard, soft)
    return {"hard_rank": hard, "soft_rank": soft, "edr": edr, "eee": early_enrichment(eigenvalues)}


def condition_number(weight: torch.Tensor) -> float:
    """s_max / s_min of a matrix, over its min(rows, columns) singular values in float64; inf where it is singular."""
    weight = weight.detach().double()
    # The smaller Gram matrix's eigenvalues are the squares: many times faster, and exact enough far from 1 / eps.
    weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
    squares = torch.linalg.eigvalsh(weight @ weight.T)
    least, most = float(squares[0]), float(squares[-1])
    if least > 1e-10 * most:
        return math.sqrt(most / least)
    values = torch.linalg.svdvals(weight)
    smallest = float(values[-1])
    tiny = max(weight.shape) * torch.finfo(torch.float64).eps * float(values[0])
    return math.inf if smallest <= tiny else float(values[0]) / smallest


def row_covariance_eigenvalues(weight: torch.Tensor, rows: int = 8192) -> torch.Tensor:
    """Eigenvalues of the covariance of a matrix' rows, centered, divisor n - 1: descending, float64; by chunks."""
    weight = weight.detach()
    total = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for chunk in weight.split(rows):
        total += chunk.double().sum(0)
    mean = total / len(weight)
    products = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    for chunk in weight.split(rows):
        centered = chunk.double() - mean
        products += centered.T @ centered
    return torch.linalg.eigvalsh(products / (len(weight) - 1)).flip(0).cpu()
