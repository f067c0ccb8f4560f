"""What something else than the optimizer writes: a fixed sample of weights and moments, at a step's end and the next's.

Between the two nothing changes in a healthy training, so that no limit needs fitting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lamina.training.checkpointing.sharding import local_part
from lamina.training.monitor.writers import Row

if TYPE_CHECKING:
    from lamina.training.monitor.parameter_measures import GradientNorms

SIZE, FEWEST = 256, 8  # elements of a sub-layer, and of each of its tensors at least
_START = 7919  # of the sample: the same in every run
Optimizers = Sequence[torch.optim.Optimizer]


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
        self.groups, counts = groups, Counter(groups.groups)
        self._sizes = [max(FEWEST, SIZE // counts[group]) for group in groups.groups]
        by_size = sorted(range(len(self._sizes)), key=lambda place: groups.parameters[place].numel())
        self._seen = sorted({groups.groups[place]: place for place in by_size}.values())  # one of each, for moments
        self._keys: list[tuple[int, str]] = []  # of these moments: the parameter's place, and the key in its state
        self._tensors: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None
        self._drift: torch.Tensor | None = None
        self._begun = False

    def before_step(self, optimizers: Optimizers) -> None:
        """Compare with the end of the last step."""
        self._begun = True
        if self._last is None:
            self.resumed &= not any(len(optimizer.state) for optimizer in optimizers)
            return
        now = self._take({(place, key): value for place, key, value in self._moments(optimizers)})
        if now is not None and now.shape == self._last.shape and not _same(now, self._last):
            self._drift = now - self._last if self._drift is None else self._drift + (now - self._last)

    def after_step(self, optimizers: Optimizers) -> None:
        """Keep what the optimizers have left, if they took the step."""
        if not self._begun:
            return
        moments = {(place, key): value for place, key, value in self._moments(optimizers)}
        self._drift = self._drift if [*moments] == self._keys else None
        self._keys, self._begun = [*moments], False
        self._last = self._take(moments)
        if self.resumed and moments and self._last is not None:
            count = sum(map(len, self._views[: len(self._sizes)]))
            self._drift = torch.cat([torch.zeros_like(self._last[:count]), self._last[count:]])
        self.resumed &= not moments

    def _moments(self, optimizers: Optimizers) -> Iterator[tuple[int, str, torch.Tensor]]:
        for place in self._seen:
            parameter = self.groups.parameters[place]
            state = next((one.state[parameter] for one in optimizers if parameter in one.state), {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    yield place, key, local_part(value)

    def _take(self, moments: dict[tuple[int, str], torch.Tensor]) -> torch.Tensor | None:
        """Return the sample of weights and moments, zeros for lost ones; None if some are on another device now."""
        weights = [local_part(parameter) for parameter in self.groups.parameters]
        kept = [moments[key] if key in moments else torch.zeros_like(weights[key[0]]) for key in self._keys]
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
        drift, count, last = self._drift, len(self._sizes), self._last
        self._drift = None if recorded else drift
        if last is None or (drift is None and not self.groups.sharded):
            return []
        both = [torch.zeros_like(last) if drift is None else drift, last]
        lengths = [len(view) for view in self._views]
        norms = torch.stack([part.double().norm() for one in both for part in one.split(lengths)]).view(2, -1)
        scale = [tensor.numel() / max(1, length) for tensor, length in zip(self._tensors, lengths, strict=True)]
        squares = (norms**2 * torch.tensor(scale, device=norms.device))[:, :count]
        sums = self.groups.over_processes(torch.stack([self.groups.summed(part) for part in squares]))
        lost = torch.zeros_like(sums[0])
        owners = torch.tensor([self.groups.groups[place] for place, _ in self._keys], device=norms.device).long()
        lost.scatter_reduce_(0, owners, norms[0, count:] / norms.amax(0)[count:].clamp(min=1e-30), "amax")
        found = {"written_ratio": (sums[0] / sums[1]).sqrt().tolist(), "forgotten_share": lost.tolist()}
        return [
            (step, *owner, 0, metric, value)
            for metric, values in found.items()
            for owner, value in zip(self.groups.keys, values, strict=True)
            if 0 < value < math.inf
        ]


def _spread(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return a view of ``size`` elements, or of all; none of a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        return tensor.new_empty(0)
    stride = max(1, tensor.numel() // size)
    stride -= stride > 2 and stride % 2 == 0  # else they could all be of few columns
    return tensor.view(-1)[_START % stride :: stride][:size]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two samples are the same, as far as that is known without waiting for a device."""
    return one.device.type == "cpu" and torch.equal(one, other)
