"""Order the training blocks endlessly, in the same order for any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from lamina.data.blocks import ItemSource, shuffled
from lamina.training.settings import PretrainSettings

STRETCH = 50  # the number of micro-batches that are sorted by length together, as in Trainer
Skip = tuple[int, int]  # (step, the number of steps of data that the order has skipped after this step)


class TrainOrder(Sampler[list[int]]):
    """Yield the block indices of one process's micro-batches.

    The order shuffles the blocks again after each pass. In each step, all processes together train on the same blocks
    as a single process would.

    Args:
        blocks: the number of blocks.
        batch_size: the number of blocks in a micro-batch, over all processes.
        gradient_accumulation: the number of micro-batches in a step.
        skips: the skipped data, as pairs (step, ahead). A step n after ``step`` trains on the data of step n + ahead.
        done: the number of steps already trained.
        rank: the rank of this process.
        size: the number of processes, which must divide the batch size.
        lengths: the number of tokens in each block, to put blocks of similar length into a micro-batch. Lamina sorts
            the blocks of ``STRETCH`` micro-batches at a time by length.
        shuffled: False for blocks that already come in an endless order, such as the blocks of a mix.
    """

    def __init__(
        self,
        blocks: int,
        *,
        steps: int,
        batch_size: int,
        gradient_accumulation: int = 1,
        seed: int = 0,
        skips: Sequence[Skip] = (),
        done: int = 0,
        rank: int = 0,
        size: int = 1,
        lengths: Sequence[int] | None = None,
        shuffled: bool = True,
    ):
        assert blocks > 0
        assert batch_size % size == 0
        self.blocks, self.steps, self.done, self.seed, self.skips = blocks, steps, done, seed, tuple(skips)
        self.batch_size, self.gradient_accumulation = batch_size, gradient_accumulation
        self.lengths, self.shuffled = lengths, shuffled
        self._by_length = -1, torch.empty(0)  # the current epoch, and the order of its blocks
        self.share = slice(rank * (batch_size // size), (rank + 1) * (batch_size // size))

    def __len__(self) -> int:
        return self.steps * self.gradient_accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.done + 1, self.steps + 1):
            for micro_batch in range(self.gradient_accumulation):
                yield self.micro_batch(step, micro_batch)[self.share]

    def data_step(self, step: int) -> int:
        """Return the step that would train on the same data if no data had been skipped. Steps count from 1."""
        return step + ahead(self.skips, step)

    def start(self, step: int) -> int:
        """Return the position of a step's first block in the training order, counted from 0."""
        return (self.data_step(step) - 1) * self.gradient_accumulation * self.batch_size

    def spans(self, steps: int) -> list[tuple[int, int]]:
        """Return the ranges of positions in the training order that the first ``steps`` steps use."""
        spans, done, skipped, size = [], 0, 0, self.batch_size * self.gradient_accumulation
        later = [after for after, _ in self.skips[1:]]
        valid = [skip for i, skip in enumerate(self.skips) if all(skip[0] < after for after in later[i:])]
        for after, ahead in [*valid, (steps, 0)]:
            upto = min(after, steps)
            if upto > done:
                spans.append(((done + skipped) * size, (upto + skipped) * size))
            done, skipped = max(done, upto), ahead
        return spans

    def total(self, values: np.ndarray, steps: int) -> int:
        """Sum ``values``, one entry per block, over the blocks of the first ``steps`` steps. Repeated blocks count
        again.
        """
        whole = int(values.sum())

        def upto(position: int) -> int:
            turn, first = divmod(position, self.blocks)
            return turn * whole + (int(values[self.turn(turn)[:first].numpy()].sum()) if first else 0)

        return sum(upto(end) - upto(start) for start, end in self.spans(steps))

    def micro_batch(self, step: int, micro_batch: int) -> list[int]:
        """Return the block indices of a micro-batch, for all processes together."""
        start = self.start(step) + micro_batch * self.batch_size
        end, indices = start + self.batch_size, []
        if not self.shuffled:
            return list(range(start, end))
        while start < end:
            turn, first = divmod(start, self.blocks)
            indices += self.turn(turn)[first : first + end - start].tolist()
            start = min(end, (turn + 1) * self.blocks)
        return indices

    def turn(self, turn: int) -> torch.Tensor:
        """Return the order of the blocks in an epoch. Epochs count from 0."""
        if self.lengths is None:
            return shuffled(self.blocks, self.seed + turn)
        if self._by_length[0] != turn:
            self._by_length = turn, torch.tensor(self._sorted_by_length(turn, self.lengths))
        return self._by_length[1]

    def _sorted_by_length(self, turn: int, lengths: Sequence[int]) -> list[int]:
        mixed, size = shuffled(self.blocks, self.seed + turn).tolist(), self.batch_size
        begun = -turn * self.blocks % size  # the items that complete the last micro-batch of the previous epoch
        ordered = mixed[:begun]
        for first in range(begun, len(mixed), size * STRETCH):
            stretch = sorted(mixed[first : first + size * STRETCH], key=lengths.__getitem__)
            whole = len(stretch) // size
            for batch in shuffled(whole, self.seed + turn).tolist():
                ordered += stretch[batch * size : (batch + 1) * size]
            ordered += stretch[whole * size :]
        return ordered


def ahead(skips: Sequence[Skip], step: int) -> int:
    """Return how many steps of data the training order has skipped before a step."""
    return next((skipped for after, skipped in reversed(skips) if step > after), 0)


def order_of(
    settings: PretrainSettings,
    items: ItemSource,
    *,
    skips: Sequence[Skip] = (),
    done: int = 0,
    rank: int = 0,
    size: int = 1,
) -> TrainOrder:
    return TrainOrder(
        len(items),
        steps=settings.steps,
        batch_size=settings.batch_size,
        gradient_accumulation=settings.gradient_accumulation,
        seed=settings.seed,
        skips=skips,
        done=done,
        rank=rank,
        size=size,
        shuffled=not items.in_order,
    )
