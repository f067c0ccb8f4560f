"""Statistics of a tensor of hidden states, exact, in as few passes over it as possible."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Tokens:
    """A tensor of the forward pass as [sequences, tokens, channels], and which tokens are text.

    ``x`` is float32 (float64 where the model is), 0 in padding; ``valid`` [sequences, tokens] is None where all are.
    """

    x: torch.Tensor
    valid: torch.Tensor | None


def as_tokens(value: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Tokens:
    """The watched tensor of a batch by sequence and token, with padding zeroed.

    Takes [batch, tokens, channels], with heads before or behind the tokens (a norm of queries: each head's part counts
    as one token), with rows and columns (vision), or flattened to [batch * tokens, channels] (experts). A tensor that
    fits none of these is one sequence.
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
        return Tokens(x.reshape(1, -1, x.shape[-1]), None)
    if valid is not None and tokens not in x.shape[1:-1]:
        valid = None
    if valid is not None:
        shape = [batch] + [tokens if i == x.shape[1:-1].index(tokens) else 1 for i in range(x.ndim - 2)]
        valid = valid.reshape(shape).expand(x.shape[:-1]).flatten(1)
        x = x.flatten(1, -2)
        return Tokens(x.masked_fill(~valid.unsqueeze(-1), 0.0), valid)
    return Tokens(x.flatten(1, -2), None)


@dataclass(frozen=True)
class Moments:
    """Of each token, over its channels, in float64, [sequences, tokens]; variance is the population's.

    ``valid`` as in Tokens.
    """

    valid: torch.Tensor | None
    mean: torch.Tensor
    mean_square: torch.Tensor
    variance: torch.Tensor
    abs_mean: torch.Tensor | None = None
    abs_max: torch.Tensor | None = None


def moments(tokens: Tokens, magnitude: torch.Tensor | None = None) -> Moments:
    """Of all its tokens, padding's too; the last two where ``magnitude`` (|x|) is given.

    Sums are float32's vectorized ones. Where E[x^2] - E[x]^2 would lose digits (a mean far above the deviation) or a
    square overflows, that token is computed again in float64.
    """
    x = tokens.x
    channels = x.shape[-1]
    mean = x.sum(-1).double() / channels
    mean_square = torch.linalg.vector_norm(x, 2, -1).double().square() / channels
    variance = mean_square - mean.square()
    again = ~(variance > 0.01 * mean_square)
    if bool(again.any()):
        rows = x[again].double()
        mean[again], mean_square[again] = rows.mean(-1), rows.square().mean(-1)
        variance[again] = rows.var(-1, correction=0)
    if magnitude is None:
        return Moments(tokens.valid, mean, mean_square, variance)
    abs_mean = magnitude.sum(-1).double() / channels
    return Moments(tokens.valid, mean, mean_square, variance, abs_mean, magnitude.amax(-1).double())


def medians(tokens: Tokens, magnitude: torch.Tensor) -> torch.Tensor:
    """The exact median of ``magnitude`` in each sequence, float64: the lower of the two in the middle, as torch.median.

    Selected, not sorted. On the CPU in place: ``magnitude`` is out of order afterwards (each sequence in its own rows).
    """
    each = list(magnitude)
    if tokens.valid is not None:
        each = [m[v] for m, v in zip(magnitude, tokens.valid, strict=True)]
    if magnitude.device.type != "cpu":
        return torch.tensor([float(m.flatten().median()) if m.numel() else math.nan for m in each]).double()
    arrays = [m.reshape(-1).numpy() for m in each]
    if torch.get_num_threads() < 2:
        return torch.tensor([_lower_median(array) for array in arrays], dtype=torch.float64)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy selects without holding the lock
        return torch.tensor(list(pool.map(_lower_median, arrays)), dtype=torch.float64)


def _lower_median(values: np.ndarray) -> float:
    if not len(values):
        return math.nan
    middle = (len(values) - 1) // 2
    values.partition(middle)
    highest = values[middle:].max()  # NaN sorts last, so it would go unnoticed
    return float(values[middle]) if highest == highest else math.nan


def largest(x: torch.Tensor, abs_max: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest |x| of each sequence, descending, [sequences, count].

    They lie in the ``count`` tokens whose largest |x| is largest, so only those are searched.
    """
    tokens = abs_max.topk(min(count, abs_max.shape[1]), dim=1).indices
    rows = x.gather(1, tokens.unsqueeze(-1).expand(-1, -1, x.shape[-1])).abs().flatten(1)
    return rows.topk(min(count, rows.shape[1]), dim=1).values


class Seen:
    """The results for the tensors of one forward pass: one tensor is often watched at several points.

    A layer's output is the next one's input and that of its first norm. Recognized by identity and version, without
    keeping the tensor alive.
    """

    def __init__(self) -> None:
        self._results: dict[int, tuple[weakref.ref[torch.Tensor], int, Moments]] = {}

    def get(self, value: torch.Tensor) -> Moments | None:
        """The result that ``put`` stored for this tensor; None if the tensor is another, or has changed since."""
        reference, version, result = self._results.get(id(value), (None, 0, None))
        if reference is None or reference() is not value or version != _version(value):
            return None
        return result

    def put(self, value: torch.Tensor, result: Moments) -> None:
        """Store the result for as long as the tensor lives unchanged.

        No longer: anything held between short-lived activations would fragment their memory.
        """
        number, results = id(value), self._results
        reference = weakref.ref(value, lambda _: results.pop(number, None))
        results[number] = (reference, _version(value), result)

    def clear(self) -> None:
        """Forget all, at the end of a forward pass."""
        self._results.clear()


def _version(value: torch.Tensor) -> int:
    return 0 if value.is_inference() else value._version
