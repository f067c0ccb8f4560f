"""Find a loss's targets from the gradient of the loss at the logits, for any implementation of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

_FITS = 0.1  # the relative error that label smoothing and a penalty on logits may cause
_MOST = 0.95  # the fraction of positions that must fit
SAME = 0.99  # the fraction of labels that must equal tokens
_MOST_OF_STEP = 0.75  # a micro-batch has at most this fraction of the step's labels
_SAME_LOSS = 1e-3  # the relative difference of two computations of a loss
_POSITIONS = 256  # the number of positions in one computation


@dataclass(frozen=True)
class Targets:
    """The targets of a softmax loss."""

    classes: torch.Tensor  # the target class at each position of the logits
    weights: torch.Tensor  # the factor of each position's cross-entropy. A negative factor makes the class less likely
    count: int  # the number of classes
    loss: float  # the mean cross-entropy of the positions with a factor other than 0

    @property
    def counted(self) -> torch.Tensor:
        return self.weights != 0


def targets_of(logits: torch.Tensor, gradient: torch.Tensor) -> Targets | None:
    """Return the targets, or None if the loss is not a cross-entropy.

    The loss's gradient at the logits [..., classes] is a weight times (probabilities - one-hot target). At the target
    class, the gradient is therefore as large as at all other classes together. With two classes, Lamina returns the
    class that the loss makes more likely.
    """
    pieces = (tensor.detach().flatten(0, -2).split(_POSITIONS) for tensor in (logits, gradient))
    found = [_of_positions(*piece) for piece in zip(*pieces, strict=True)]  # copies are small
    classes, weights, fits, losses = (torch.cat(each).view(logits.shape[:-1]) for each in zip(*found, strict=True))
    counted = weights != 0
    known = logits.shape[-1] > 1 and bool(counted.any()) and float(fits[counted].float().mean()) >= _MOST
    return Targets(classes, weights, logits.shape[-1], float(losses[counted].mean())) if known else None


def _of_positions(logits: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits, gradient = logits.float(), gradient.float()
    least, most = gradient.min(-1, keepdim=True), gradient.max(-1, keepdim=True)
    asked = -least.values >= (1 - _FITS) * most.values  # of two classes, the gradients are equally large
    at = torch.where(asked, least.indices, most.indices)
    peak, size = gradient.gather(-1, at)[..., 0], gradient.abs().sum(-1)
    total = logits.logsumexp(-1)
    losses = total - logits.gather(-1, at)[..., 0]
    likely = (-losses).exp()
    of_logits = (size - 2 * peak.abs()).abs() <= _FITS * size
    of_logarithms = (size - peak.abs() <= _FITS * size) & (total.abs() < _FITS)
    weights = torch.where(of_logits, -peak / (1 - likely).clamp(min=1e-6), -peak)
    return at[..., 0], weights, of_logits | of_logarithms, losses


def is_own_mean(loss: object, logits: object, labels: object, count: float) -> bool:
    """Return whether a cross-entropy is the mean over its own labels, although the step has ``count`` labels.

    Args:
        loss: the loss of a micro-batch.
        logits: the logits [batch, tokens, classes].
        labels: the labels [batch, tokens], of the same or the next token. Negative labels do not count.
    """
    if not isinstance(loss, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return False
    if not isinstance(logits, torch.Tensor) or type(logits) is not torch.Tensor:  # such as a sharded DTensor
        return False
    value, logits, labels = float(loss.detach()), logits.detach(), labels.detach().to(logits.device)
    if logits.shape[:-1] != labels.shape or labels.ndim != 2 or int(labels.max()) >= logits.shape[-1]:
        return False
    for shift in (0, 1):
        there, total = labels[:, shift:], 0.0
        for row, of in zip(logits[:, : there.shape[1]], there, strict=True):  # copies of a row are small
            total += float(functional.cross_entropy(row[of >= 0].float(), of[of >= 0].long(), reduction="sum"))
        own = int((there >= 0).sum())
        if 0 < own < _MOST_OF_STEP * count and abs(total / own - value) < _SAME_LOSS * abs(value):
            return True
    return False


def offset_of(tokens: torch.Tensor, labels: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return a mask of the labels to count, and the labels' offset. Return None if labels are not the row's tokens."""
    length = labels.shape[1]
    if tokens.shape[1] < 4 or not tokens.shape[1] - 2 <= length <= tokens.shape[1]:
        return None
    wide = functional.pad(tokens, (1, 3), value=-1)
    for offset in (1, 0, 2, -1):
        known = wide[:, offset + 1 : offset + 1 + length]
        counted = there & (known >= 0)
        if counted.sum() > 3 and float((known == labels)[counted].float().mean()) >= SAME:
            return counted, offset
    return None
