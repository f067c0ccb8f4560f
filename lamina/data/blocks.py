"""Items by number, the source of all training data; token blocks in a file, in memory, in a stream, or mixed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Generic, NotRequired, TypedDict, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from lamina.data.token_counts import count_tokens, smoothed

T = TypeVar("T")


class Block(TypedDict):
    """One block: ``input_ids`` LongTensor [sequence_length], and ``labels``, the same tensor: models shift labels."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class PartShare(TypedDict):
    """The contribution of one corpus to a mix; ``epochs`` is absent where its text is streamed."""

    wanted: float
    share: float
    blocks: int
    epochs: NotRequired[float]


class ItemSource(Dataset[T], Generic[T], ABC):
    """Items by number. Item ``i`` is a mapping from the model's arguments to tensors.

    Attributes:
        in_order: whether item ``i`` is the i-th item that a run trains on, endlessly (a stream, a mix). Otherwise the
            items are a finite set, which the run shuffles.
    """

    in_order: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> T: ...

    @abstractmethod
    def sample(self, count: int) -> torch.Tensor:
        """The model's main input for up to ``count`` items, spread evenly and always the same: [items, ...]."""

    def for_run(self, seed: int) -> ItemSource[T]:
        """The items in the form that a run with this seed draws them from."""
        return self

    def realized(self, spans: Sequence[tuple[int, int]]) -> dict[str, PartShare]:
        """The contribution of each corpus to the items in ``spans`` (start, end); empty where there is only one."""
        return {}

    def state_dict(self, index: int) -> object:
        """The state from which item ``index`` can be read, of JSON's types; None for a source without state."""
        return None

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        """Continue from a ``state_dict``; None starts at the beginning.

        ``verbose``: log where the corpus ends and is read again.
        """


class BlockSource(ItemSource[Block], ABC):
    """Token blocks by number. Item ``i`` is a :class:`Block`; a sample is a LongTensor [blocks, sequence_length].

    Attributes:
        parts: the sources of a mix, each with its share; the source itself where there is only one corpus.
    """

    @property
    def parts(self) -> Sequence[tuple[Fraction, BlockSource]]:
        return ((Fraction(1), self),)

    @abstractmethod
    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each id occurs in the text (of a stream, in a part of it), [vocab_size]."""

    def frequencies(self, vocab_size: int, count: int) -> np.ndarray:
        """The add-one smoothed frequency of each id in a sample of ``count`` blocks per corpus, [vocab_size].

        In a mix, each corpus has the weight of its share.
        """
        total = np.zeros(vocab_size)
        for share, part in self.parts:
            total = total + float(share) * smoothed(count_tokens(part.sample(count).numpy(), vocab_size))
        return total

    def for_run(self, seed: int) -> BlockSource:
        return self

    @abstractmethod
    def rows(self, indices: Sequence[int]) -> np.ndarray:
        """The token ids of these blocks, each once, [blocks, sequence_length]; of a stream, its known text instead.

        A stream that has been read is not read again.
        """


class ArrayBlocks(BlockSource):
    """Token blocks in memory, [num_blocks, sequence_length] of unsigned integers."""

    def __init__(self, array: np.ndarray):
        self._array: np.ndarray | None = array

    @property
    def array(self) -> np.ndarray:
        """The token ids, [num_blocks, sequence_length]."""
        assert self._array is not None
        return self._array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Block:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Block]:
        """Several items at once, as the DataLoader asks for them: one copy."""
        rows = torch.from_numpy(self.array[np.asarray(indices, dtype=np.int64)].astype(np.int64))
        return [{"input_ids": row, "labels": row} for row in rows]

    def sample(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.array[spread(len(self), count)].astype(np.int64))

    def token_counts(self, vocab_size: int) -> np.ndarray:
        return count_tokens(self.array, vocab_size)

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        return self.array[np.unique(np.asarray(indices, dtype=np.int64))]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The numbers of a pair of splits.

    Attributes:
        unigram_entropy: cross-entropy of the eval split's targets (tokens or classes) under the train split's add-one
            smoothed frequencies, in nats: the loss of a model that has learned nothing but how often each occurs.
        fingerprint: a hash of the data and of the settings that decide its items.
    """

    unigram_entropy: float
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class BlockStats(Stats):
    """The numbers of two splits of text. Tokens and bytes are counted in whole blocks, without the remainders.

    Attributes:
        train_bytes, eval_bytes: UTF-8 bytes of text. End-of-text tokens count as none; the dropped remainder is assumed
            to have as many bytes per token as the rest.
        documents: the number of documents in the whole corpus.
    """

    train_tokens: int
    eval_tokens: int
    train_bytes: int
    eval_bytes: int
    vocab_size: int
    sequence_length: int
    documents: int

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token of the eval split."""
        return self.eval_bytes / self.eval_tokens


@dataclass(frozen=True, kw_only=True)
class Splits(Generic[T]):
    """The two splits of a corpus or an image set, and their numbers.

    Attributes:
        second: items of a second corpus to evaluate on, if there is one.
    """

    train: ItemSource[T]
    eval: ItemSource[T]
    stats: Stats
    second: ItemSource[T] | None = None


@dataclass(frozen=True, kw_only=True)
class Blocks(Splits[Block]):
    """The two splits of a text, in token blocks."""

    train: BlockSource
    eval: BlockSource
    stats: BlockStats
    second: BlockSource | None = None


@lru_cache(maxsize=2)
def shuffled(items: int, seed: int) -> torch.Tensor:
    """The numbers below ``items`` in an order that the seed decides."""
    return torch.randperm(items, generator=torch.Generator().manual_seed(seed))


def spread(available: int, wanted: int) -> list[int]:
    """``wanted`` of ``available`` indices (or all), spread evenly: the same in every run."""
    wanted = min(wanted, available)
    return [i * available // wanted for i in range(wanted)]


def perplexity(loss: float) -> float:
    """exp(loss) for a loss in nats per token; infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss_per_token: float, stats: BlockStats) -> float:
    """Bits per UTF-8 byte of text: ``loss * eval_tokens / (eval_bytes * ln 2)``, comparable across tokenizers.

    Three approximations, each below one percent for blocks of useful length: the mean loss over the predicted tokens
    (all but the first of each block) stands for all tokens; end-of-text tokens cost bits but have no bytes; the dropped
    remainder is assumed to be like the rest.

    Args:
        loss_per_token: mean cross-entropy in nats on the eval split.
        stats: the numbers of that split.
    """
    return loss_per_token * stats.eval_tokens / (stats.eval_bytes * math.log(2))
