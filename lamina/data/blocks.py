"""Token blocks, the source of all training data: in a file, in memory, in a stream, or mixed from several of these."""

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
    """The contribution of one corpus to a mix; ``epochs`` is absent where its text is streamed."""

    wanted: float
    share: float
    blocks: int
    epochs: NotRequired[float]


class BlockSource(Dataset[Block], ABC):
    """Token blocks by number. Item ``i`` is a :class:`Block`.

    Attributes:
        in_order: whether item ``i`` is the i-th block that a run trains on, endlessly (a stream, a mix). Otherwise the
            blocks are a finite set, which the run shuffles.
        parts: the sources of a mix, each with its share; the source itself where there is only one corpus.
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
        """Up to ``count`` blocks, spread evenly over the text and always the same: LongTensor [blocks, length]."""

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
        """The blocks in the form that a run with this seed draws them from."""
        return self

    def realized(self, spans: Sequence[tuple[int, int]]) -> dict[str, PartShare]:
        """The contribution of each corpus to the blocks in ``spans`` (start, end); empty where there is only one."""
        return {}

    def state_dict(self, index: int) -> object:
        """The state from which block ``index`` can be read, of JSON's types; None for a source without state."""
        return None

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        """Continue from a ``state_dict``; None starts at the beginning.

        ``verbose``: log where the corpus ends and is read again.
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
    """The numbers of a pair of splits. Tokens and bytes are counted in whole blocks, without the remainders.

    Attributes:
        train_bytes, eval_bytes: UTF-8 bytes of text. End-of-text tokens count as none; the dropped remainder is assumed
            to have as many bytes per token as the rest.
        unigram_entropy: cross-entropy of the eval split under the train split's add-one smoothed frequencies, in nats
            per token.
        documents: the number of documents in the whole corpus.
        fingerprint: a hash of corpus, tokenizer and settings.
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
    """The two splits of a corpus and their numbers.

    Attributes:
        second: blocks of a second corpus to evaluate on, if there is one.
    """

    train: BlockSource
    eval: BlockSource
    stats: BlockStats
    second: BlockSource | None = None


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
