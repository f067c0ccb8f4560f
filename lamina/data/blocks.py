"""Token blocks: what training draws from, whether it lies in a file, in memory, in a stream or in several of these."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch.utils.data import Dataset

from lamina.data.token_counts import count_tokens, smoothed


class Block(TypedDict):
    """One block: ``input_ids`` LongTensor [sequence_length], and ``labels``, the same tensor: models shift labels."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class PartShare(TypedDict):
    """What one corpus of a mix contributed; ``epochs`` is absent where its text is streamed."""

    wanted: float
    share: float
    blocks: int
    epochs: NotRequired[float]


class BlockSource(Dataset[Block], ABC):
    """Token blocks by number. Item ``i`` is a :class:`Block`.

    Attributes:
        in_order: item ``i`` is the i-th block that a run trains on, without end (a stream, a mix in a run's order);
            otherwise the blocks are a finite set that the run shuffles.
        parts: the single corpora of a mix with their shares; the source itself where it is one corpus.
    """

    in_order: bool = False

    @property
    def parts(self) -> Sequence[tuple[Fraction, BlockSource]]:
        return ((Fraction(1), self),)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Block: ...

    @abstractmethod
    def sample(self, count: int) -> torch.Tensor:
        """Up to ``count`` blocks spread evenly over the text, always the same ones, LongTensor [blocks, length]."""

    @abstractmethod
    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each id occurs in the text, or in the part of it that is known, [vocab_size]."""

    def frequencies(self, vocab_size: int, count: int) -> np.ndarray:
        """Add-one smoothed frequency of each id in a sample of ``count`` blocks per corpus, [vocab_size].

        In a mix each corpus counts by its share.
        """
        total = np.zeros(vocab_size)
        for share, part in self.parts:
            total = total + float(share) * smoothed(count_tokens(part.sample(count).numpy(), vocab_size))
        return total

    def for_run(self, seed: int) -> BlockSource:
        """These blocks as a run with this seed draws them."""
        return self

    def realized(self, spans: Sequence[tuple[int, int]]) -> dict[str, PartShare]:
        """Each corpus' contribution to the blocks from start to end of each span; empty where there is only one."""
        return {}

    def state_dict(self, index: int) -> object:
        """Where reading has to begin for block ``index``, of JSON's types; None where any block can be read at once."""
        return None

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        """Begin reading at a ``state_dict``, or at the beginning for None.

        ``verbose``: log when the corpus ends and is read again.
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


@dataclass(frozen=True, kw_only=True)
class BlockStats:
    """What a pair of splits holds. Tokens and bytes are those in whole blocks; remainders are dropped.

    ``train_bytes`` and ``eval_bytes``: UTF-8 bytes of text; end-of-text tokens count none, and the dropped remainder is
    taken to have as many bytes a token as the rest (less than a block's worth of approximation).
    ``unigram_entropy``: nats per token, cross-entropy of the eval split under the train split's add-one smoothed
    frequencies. ``documents``: in the whole corpus. ``fingerprint``: the hash of corpus, tokenizer and settings.
    """

    train_tokens: int
    eval_tokens: int
    train_bytes: int
    eval_bytes: int
    unigram_entropy: float
    vocab_size: int
    sequence_length: int
    documents: int
    fingerprint: str

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token of the eval split."""
        return self.eval_bytes / self.eval_tokens


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The two splits of a corpus and their numbers."""

    train: BlockSource
    eval: BlockSource
    stats: BlockStats


def spread(available: int, wanted: int) -> list[int]:
    """``wanted`` indices (or all) spread evenly over ``available``: the same ones in every run."""
    wanted = min(wanted, available)
    return [i * available // wanted for i in range(wanted)]


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats per token; infinity where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss_per_token: float, stats: BlockStats) -> float:
    """Bits per UTF-8 byte of text: ``loss * eval_tokens / (eval_bytes * ln 2)``, comparable across tokenizers.

    Approximate in three places, each below a part in a hundred for blocks of useful length: the loss is a mean over the
    predicted tokens (all but each block's first) and stands for all of them; end-of-text tokens cost bits but have no
    bytes; the dropped remainder is taken to be like the rest.

    Args:
        loss_per_token: mean cross-entropy in nats on the eval split.
        stats: that split's numbers.
    """
    return loss_per_token * stats.eval_tokens / (stats.eval_bytes * math.log(2))
