"""Items that are changed at random when they are drawn, in a way that their position in the run decides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch

from lamina.data.blocks import ItemSource, PartShare, shuffled

T = TypeVar("T")
EVAL_SEED = 20_260_101
"""The seed of what is drawn for held-out items: the same in every run, so that their losses compare."""
_SEEDS = 2**63 - 1


class DrawnItems(ItemSource[T]):
    """Items of another source, each changed with random numbers that belong to its position.

    The random numbers are a function of the seed and the position alone. So a resumed run, a run after a rollback, and
    a run of several processes draw what an undisturbed run draws.

    Args:
        source: the items before the change.
        seed: of the order and of the changes.
        training: the items in the order of a run, reshuffled after each pass and endless; otherwise in the source's.
        repeats: how many positions in a row draw the same item.
    """

    def __init__(self, source: ItemSource[T], seed: int = EVAL_SEED, *, training: bool = False, repeats: int = 1):
        self.source, self.seed, self.training, self.repeats = source, seed, training, repeats
        self.in_order = training

    @abstractmethod
    def change(self, item: T, generator: torch.Generator) -> T:
        """The item as it is drawn; all its random numbers come from ``generator``."""

    def generator(self, position: int) -> torch.Generator:
        """The random numbers of a position."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + position * 7_919 + 17) % _SEEDS)

    def number(self, position: int) -> int:
        """The number in the source of the item that is drawn at a position."""
        if not self.training or self.source.in_order:
            return position
        turn, place = divmod(position // self.repeats, len(self.source))
        return int(shuffled(len(self.source), self.seed + turn)[place])

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> T:
        return self.change(self.source[self.number(index)], self.generator(index))

    def sample(self, count: int) -> torch.Tensor:
        return self.source.sample(count)

    def realized(self, spans: Sequence[tuple[int, int]]) -> dict[str, PartShare]:
        return self.source.realized(spans)

    def state_dict(self, index: int) -> object:
        return self.source.state_dict(index)

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        self.source.load_state_dict(state, verbose=verbose)
