"""What something else than the optimizer writes: a fixed sample of weights and moments, at a step's end and the next's.

Between the two nothing changes in a healthy training, so that no limit needs fitting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lamina.training.checkpointing.sharding import local_part
from lamina.training.monitor.writers import Row

if TYPE_CHECKING:
    from lamina.training.monitor.parameter_measures import GradientNorms

SIZE, FEWEST = 256, 8  # elements of a sub-layer, and of each of its tensors at least
_START = 7919  # of the sample: the same in every run


class Samples:
    """Compares the weights and the optimizers' moments at the end of a step with those before the next one.

    Metrics: ``written_ratio``, the norm of what was changed there since the last record, over the weights';
    ``forgotten_share``, the most that was changed of a tensor of the optimizer's, over its norm: 1 where it is lost.

    Nothing waits for the device before ``rows``. A sample is of this session: the first step has none before it.

    Attributes:
        resumed: whether steps were done before: then an optimizer without a state has lost it.
    """

    resumed = False

    def __init__(self, groups: GradientNorms):
        self.groups = groups
        counts, places = Counter(groups.groups), range(len(groups.groups))
        self._sizes = [max(FEWEST, SIZE // counts[group]) for group in groups.groups]
        by_size = sorted(places, key=lambda place: groups.parameters[place].numel())
        self._seen = sorted({groups.groups[place]: place for place in by_size}.values())  # one of each, for moments
        self._keys: list[tuple[int, str]] = []  # of these moments: the parameter's place, and the key in its state
        self._tensors: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None
        self._drift: torch.Tensor | None = None
        self._begun = False

    def before_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Compare with the end of the last step."""
        self._begun = True
        if self._last is None:
            self.resumed &= not any(len(optimizer.state) for optimizer in optimizers)
            return
        states = {place: self._state(optimizers, place) for place in self._seen}
        now = self._take([states[place].get(key) for place, key in self._keys])
        if now is None or now.shape != self._last.shape or (not now.is_cuda and torch.equal(now, self._last)):
            return
        self._drift = now - self._last if self._drift is None else self._drift + (now - self._last)

    def after_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Keep what the optimizers have left, if they took the step."""
        if not self._begun:
            return
        found = [
            (place, key, value)
            for place in self._seen
            for key, value in self._state(optimizers, place).items()
            if isinstance(value, torch.Tensor) and value.shape == self.groups.parameters[place].shape
        ]
        keys, self._begun = [(place, key) for place, key, _ in found], False
        self._drift, self._keys = self._drift if keys == self._keys else None, keys
        self._last = self._take([value for *_, value in found])
        if self.resumed and keys and self._last is not None:
            count = sum(map(len, self._views[: len(self._sizes)]))
            self._drift = torch.cat([torch.zeros_like(self._last[:count]), self._last[count:]])
        self.resumed &= not keys

    def _state(self, optimizers: Sequence[torch.optim.Optimizer], place: int) -> Mapping[str, object]:
        parameter = self.groups.parameters[place]
        return next((optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state), {})

    def _take(self, moments: Sequence[object]) -> torch.Tensor | None:
        """Return the sample of the weights and moments; None if some are on another device now."""
        weights = [local_part(parameter) for parameter in self.groups.parameters]
        pairs = zip(self._keys, moments, strict=True)
        kept = [local_part(m) if isinstance(m, torch.Tensor) else torch.zeros_like(weights[at]) for (at, _), m in pairs]
        tensors = [*weights, *kept]
        if any(tensor.device != tensors[0].device for tensor in tensors):
            return None
        if [t.data_ptr() for t in tensors] != [t.data_ptr() for t in self._tensors]:  # else the views are right
            sizes = [*self._sizes, *[SIZE] * len(kept)]
            self._tensors, self._views = tensors, list(map(_spread, tensors, sizes))
        return torch.cat(self._views).float()

    def rows(self, step: int, *, recorded: bool) -> list[Row]:
        """The tidy rows since the last record: none where nothing but the optimizers wrote. ``recorded``: this is one.

        Where the weights are sharded, all processes call it.
        """
        drift, count = self._drift, len(self._sizes)
        self._drift = None if recorded else drift
        if self._last is None or (drift is None and not self.groups.sharded):
            return []
        both = [torch.zeros_like(self._last) if drift is None else drift, self._last]
        lengths = [len(view) for view in self._views]
        norms = torch.stack([part.double().norm() for one in both for part in one.split(lengths)]).view(2, -1)
        taken = [tensor.numel() / max(1, length) for tensor, length in zip(self._tensors, lengths, strict=True)]
        squares = norms**2 * torch.tensor(taken, dtype=norms.dtype, device=norms.device)
        sums = torch.stack([self.groups.summed(part[:count]) for part in squares])
        changed, whole = self.groups.over_processes(sums).sqrt().tolist()
        rows = [
            (step, *owner, 0, "written_ratio", part / weight)
            for owner, part, weight in zip(self.groups.keys, changed, whole, strict=True)
            if 0 < part < math.inf and 0 < weight < math.inf
        ]
        lost: dict[int, float] = {}
        for (place, _), part, left in zip(self._keys, *norms[:, count:].tolist(), strict=True):
            group = self.groups.groups[place]
            lost[group] = max(lost.get(group, 0.0), part / max(part, left) if part > 0 else 0.0)
        return rows + [(step, *self.groups.keys[g], 0, "forgotten_share", of) for g, of in lost.items() if of > 0]


def _spread(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return a view of ``size`` elements, or of all; none of a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        return tensor.new_empty(0)
    stride = max(1, tensor.numel() // size)
    stride -= stride > 2 and stride % 2 == 0  # else they could all be of few columns
    return tensor.view(-1)[_START % stride :: stride][:size]
