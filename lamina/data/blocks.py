"""Training data as numbered items: blocks of tokens in a file, in memory, in a stream, or from several corpora."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NotRequired, TypedDict, TypeVar, cast

import numpy as np
import torch
from scipy import sparse
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from lamina.data.corpus import Part

_AT_ONCE = 2**20  # the number of tokens for each count of token pairs
T = TypeVar("T")
EVAL_SEED = 20_260_101
"""The seed of all random numbers for held-out items. All runs use this seed, so that their losses are comparable."""
_SEEDS = 2**63 - 1


class TokenBlock(TypedDict):
    """A training example of two tensors [sequence_length].

    For next-token prediction, ``labels`` and ``input_ids`` are the same tensor, because the model shifts the labels. A
    padded block also has an ``attention_mask``, which is 1 for tokens and 0 for padding.
    """

    input_ids: torch.Tensor
    attention_mask: NotRequired[torch.Tensor]
    labels: torch.Tensor


class PartShare(TypedDict):
    """The number and the fraction of a mix's blocks that come from one corpus. A streamed corpus has no ``epochs``."""

    wanted: float
    share: float
    blocks: int
    epochs: NotRequired[float]


class ItemSource(Dataset[T], Generic[T], ABC):
    """A source of numbered training examples. An item is a mapping from the model's arguments to tensors."""

    # whether item ``i`` is the i-th training example of a run. A stream or a mix of corpora is in order and never ends.
    # A finite set is not in order, so the run shuffles the set
    in_order: bool = False

    @property
    def lengths(self) -> np.ndarray | None:
        """The number of tokens in each item without padding, or None if no item has padding."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> T: ...

    @abstractmethod
    def sample(self, count: int) -> torch.Tensor:
        """Return the inputs of up to ``count`` evenly spaced items, [items, ...]. Every call selects the same items."""

    def for_run(self, seed: int) -> ItemSource[T]:
        """Return the items in the order in which a run with this seed reads them."""
        return self

    def realized(self, spans: Sequence[tuple[int, int]]) -> dict[str, PartShare]:
        """Return the number of items from each corpus in the ranges (start, end), or {} for a single corpus."""
        return {}

    def state_dict(self, index: int) -> object:
        """Return the state from which a resumed run can read item ``index``, as JSON, or None if no state is needed."""
        return None

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        """Continue from ``state``, or from the beginning if ``state`` is None. With ``verbose``, log each new epoch."""


class BlockSource(ItemSource[TokenBlock], ABC):
    """A source of token blocks. ``sample`` returns the token ids of several blocks, [blocks, sequence_length].

    Attributes:
        parts: each corpus of a mix, as a pair (share of the mix, source of blocks). A single corpus has the share 1.
        known: the token ids in memory or in the cache, [blocks, sequence_length] of unsigned integers.
    """

    @property
    def parts(self) -> Sequence[tuple[Fraction, BlockSource]]:
        return ((Fraction(1), self),)

    @property
    @abstractmethod
    def known(self) -> np.ndarray: ...

    def sample(self, count: int) -> torch.Tensor:
        known = self.known
        return torch.from_numpy(known[spread(len(known), count)].astype(np.int64))

    def frequencies(self, vocab_size: int, count: int) -> np.ndarray:
        """Estimate the token frequencies [vocab_size] from ``count`` blocks of each corpus, with add-one smoothing."""
        total = np.zeros(vocab_size)
        for share, part in self.parts:
            total = total + float(share) * smoothed(count_tokens(part.sample(count).numpy(), vocab_size))
        return total

    def for_run(self, seed: int) -> BlockSource:
        return self

    @abstractmethod
    def rows(self, indices: Sequence[int]) -> np.ndarray:
        """Return the token ids of the blocks, [blocks, sequence_length], each block once. Streams return ``known``."""


class ArrayBlocks(BlockSource):
    """Token blocks in memory, [num_blocks, sequence_length] of unsigned integers."""

    def __init__(self, array: np.ndarray):
        self._array: np.ndarray | None = array

    @property
    def array(self) -> np.ndarray:
        """The token ids, [num_blocks, sequence_length] of uint16 or uint32."""
        assert self._array is not None
        return self._array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> TokenBlock:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[TokenBlock]:
        """Return several items with one copy, which makes a DataLoader faster than one copy per item."""
        rows = torch.from_numpy(self.array[np.asarray(indices, dtype=np.int64)].astype(np.int64))
        return [{"input_ids": row, "labels": row} for row in rows]

    @property
    def known(self) -> np.ndarray:
        return self.array

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        return self.array[np.unique(np.asarray(indices, dtype=np.int64))]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of the training split and the eval split."""

    # the eval loss, in nats, of a model that knows only how often each token or class occurs in the training split,
    # with add-one smoothing
    unigram_entropy: float
    fingerprint: str  # a hash of the data and of the settings that decide the items


@dataclass(frozen=True, kw_only=True)
class BlockStats(Stats):
    """Statistics of two splits of a text. Lamina counts only the tokens and bytes in whole blocks."""

    train_tokens: int
    eval_tokens: int
    # UTF-8 bytes of the training split's text, without end-of-text tokens. The value is an estimate if tokens remain
    # after the last whole block
    train_bytes: int
    eval_bytes: int  # UTF-8 bytes of the eval split's text, counted like ``train_bytes``
    vocab_size: int
    sequence_length: int
    documents: int  # the number of documents in the whole corpus

    @property
    def bytes_per_token(self) -> float:
        """The number of UTF-8 bytes per token in the eval split."""
        return self.eval_bytes / self.eval_tokens


@dataclass(frozen=True, kw_only=True)
class Splits(Generic[T]):
    """The training split and the eval split of a text or an image set, and optionally a second text for evaluation."""

    train: ItemSource[T]
    eval: ItemSource[T]
    stats: Stats
    second: ItemSource[T] | None = None


@dataclass(frozen=True, kw_only=True)
class Blocks(Splits[TokenBlock]):
    """The training split and the eval split of a text, cut into blocks of tokens."""

    train: BlockSource
    eval: BlockSource
    stats: BlockStats
    second: BlockSource | None = None


@lru_cache(maxsize=2)
def shuffled(items: int, seed: int) -> torch.Tensor:
    """Return the numbers 0 to ``items`` - 1 in a random order that depends only on the seed."""
    return torch.randperm(items, generator=torch.Generator().manual_seed(seed))


def spread(available: int, wanted: int) -> list[int]:
    """Return up to ``wanted`` evenly spaced indices below ``available``."""
    wanted = min(wanted, available)
    return [i * available // wanted for i in range(wanted)]


def perplexity(loss: float) -> float:
    """Return exp(loss) for a loss in nats per token. Return infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss_per_token: float, stats: BlockStats) -> float:
    """Return bits per UTF-8 byte, which are comparable across tokenizers: ``loss * eval_tokens / (eval_bytes * ln 2)``.

    Each of three approximations changes the result by less than 1 % for blocks of usual length:

    - No model predicts the first token of a block. Lamina assumes the mean loss for this token.
    - End-of-text tokens cost bits but have no bytes.
    - ``eval_bytes`` is itself an estimate (see ``BlockStats``).

    Args:
        loss_per_token: the mean cross-entropy in nats on the eval split.
        stats: the statistics of the splits.
    """
    return loss_per_token * stats.eval_tokens / (stats.eval_bytes * math.log(2))


def count_tokens(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Count how often each id below ``vocab_size`` occurs in ``ids`` [blocks, sequence_length]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    rows = max(1, 2**22 // ids.shape[1])
    for start in range(0, len(ids), rows):
        counts += np.bincount(ids[start : start + rows].ravel(), minlength=vocab_size)[:vocab_size]
    return counts


def smoothed(counts: np.ndarray) -> np.ndarray:
    """Convert counts to frequencies with add-one smoothing, [vocab_size]."""
    return (counts + 1) / (counts.sum() + len(counts))


def unigram_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Return the cross-entropy, in nats per token, of held-out tokens under the training split's smoothed frequencies.

    ``train`` and ``held_out`` are [blocks, sequence_length]. Ids of ``vocab_size`` or more are padding.
    """
    train_counts, eval_counts = count_tokens(train, vocab_size), count_tokens(held_out, vocab_size)
    log_probability = np.log(train_counts + 1) - np.log(train_counts.sum() + vocab_size)
    return float(-(eval_counts * log_probability).sum() / eval_counts.sum())


def pair_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Return the cross-entropy, in nats per token, of a bigram model on held-out tokens.

    The bigram model has the counts of the training split, with the smoothing of Witten and Bell (1991):

        p(v | u) = (c(u, v) + n(u) p(v)) / (c(u) + n(u))

    - c(u, v): the number of times that token v follows token u
    - c(u): the sum of c(u, v) over all v
    - n(u): the number of different tokens that follow u
    - p(v): the frequency of v, with add-one smoothing

    Lamina omits the first token of each block, and padding (the id ``vocab_size``). For the arguments, see
    ``unigram_entropy``.
    """
    wanted = held_out.astype(np.int64)
    real = wanted[:, 1:] < vocab_size
    before, after = wanted[:, :-1][real], wanted[:, 1:][real]
    matters = np.zeros(vocab_size + 1, dtype=bool)
    matters[before] = True
    pairs: Any = sparse.csr_array((vocab_size, vocab_size))
    rows = max(1, _AT_ONCE // train.shape[1])
    for start in range(0, len(train), rows):
        ids = train[start : start + rows].astype(np.int64)
        first, second = ids[:, :-1].ravel(), ids[:, 1:].ravel()
        chosen = matters[first] & (second < vocab_size)
        entries = np.ones(int(chosen.sum())), (first[chosen], second[chosen])
        pairs = pairs + sparse.csr_array(entries, shape=pairs.shape)
    seen = np.asarray(pairs[before, after]).ravel()
    followed, different = pairs.sum(axis=1)[before], np.diff(pairs.indptr)[before]
    alone = smoothed(count_tokens(train, vocab_size))[after]
    probability = np.where(followed > 0, (seen + different * alone) / np.maximum(followed + different, 1), alone)
    return float(-np.log(probability).mean())


class DrawnItems(ItemSource[T]):
    """Items of another source, each with a random change, such as masked tokens.

    The random numbers depend only on the seed and the item's position in the run. Resumed runs, runs after a rollback
    and runs of several processes therefore draw the same numbers as any other run.

    Args:
        source: the items before the change.
        seed: the seed for the order of the items and for the random changes.
        training: whether the items are for training. If true, the items never end, and Lamina shuffles them in each
            epoch. If false, the items keep the source's order.
        repeats: the number of consecutive positions with the same item.
    """

    def __init__(self, source: ItemSource[T], seed: int = EVAL_SEED, *, training: bool = False, repeats: int = 1):
        self.source, self.seed, self.training, self.repeats = source, seed, training, repeats
        self.in_order = training

    def generator(self, position: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1_000_003 + position * 7_919 + 17) % _SEEDS)

    def number(self, position: int) -> int:
        """Convert a position in the run to the item's index in the source."""
        if not self.training or self.source.in_order:
            return position
        turn, index = divmod(position // self.repeats, len(self.source))
        return int(shuffled(len(self.source), self.seed + turn)[index])

    @property
    def lengths(self) -> np.ndarray | None:
        return self.source.lengths

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, count: int) -> torch.Tensor:
        return self.source.sample(count)

    def realized(self, spans: Sequence[tuple[int, int]]) -> dict[str, PartShare]:
        return self.source.realized(spans)

    def state_dict(self, index: int) -> object:
        return self.source.state_dict(index)

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        self.source.load_state_dict(state, verbose=verbose)


class MixedBlocks(BlockSource):
    """The blocks of several corpora in training order. Item ``i`` is the i-th block of the run.

    After n blocks, a corpus with the share s has contributed s * n blocks, to within one block. The order depends only
    on the corpora, the shares and the seed. With a seed, Lamina shuffles the blocks of each corpus in each epoch.
    """

    in_order = True

    def __init__(self, parts: Sequence[tuple[str, Fraction, BlockSource]], length: int, seed: int | None = None):
        self.names = [name for name, _, _ in parts]
        self.shares = [share for _, share, _ in parts]
        self.blocks = [blocks for _, _, blocks in parts]
        self.length, self.seed = length, seed
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def parts(self) -> Sequence[tuple[Fraction, BlockSource]]:
        return list(zip(self.shares, self.blocks, strict=True))

    def for_run(self, seed: int, length: int = 2**62) -> MixedBlocks:
        """Return the shuffled blocks for a run with this seed. The blocks do not end during the run."""
        return MixedBlocks(list(zip(self.names, self.shares, self.blocks, strict=True)), length, seed)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> TokenBlock:
        part, number = self._number(index)
        return self.blocks[part][number]

    def _number(self, index: int) -> tuple[int, int]:
        """Return the corpus of block ``index``, and the block's number in that corpus."""
        part, position = self.where(index)
        if self.blocks[part].in_order:
            return part, position
        epoch, offset = divmod(position, len(self.blocks[part]))
        if self.seed is None:
            return part, offset
        if part not in self._orders or self._orders[part][0] != epoch:
            order = np.random.default_rng([self.seed, part, epoch]).permutation(len(self.blocks[part]))
            self._orders[part] = (epoch, order)
        return part, int(self._orders[part][1][offset])

    def where(self, index: int) -> tuple[int, int]:
        """Return the corpus of block ``index``, and the number of earlier blocks from the same corpus."""
        if index < 0:
            index += self.length
        if not 0 <= index < self.length:
            raise IndexError(index)
        rest = Fraction(1)
        for part, share in enumerate(self.shares):
            before, after = (_share_of(n, share / rest) for n in (index, index + 1))
            if after > before:
                return part, before
            index, rest = index - before, rest - share  # the block belongs to a later part
        raise AssertionError("the last part takes every block that remains")

    def counts(self, blocks: int) -> list[int]:
        """Count the blocks of each corpus among the first ``blocks`` blocks."""
        rest, counts = Fraction(1), []
        for share in self.shares:
            counts.append(_share_of(blocks, share / rest))
            blocks, rest = blocks - counts[-1], rest - share
        return counts

    def realized(self, spans: Sequence[tuple[int, int]]) -> dict[str, PartShare]:
        counts = [0] * len(self.shares)
        for start, end in spans:
            steps = zip(self.counts(end), self.counts(start), strict=True)
            counts = [c + after - before for c, (after, before) in zip(counts, steps, strict=True)]
        blocks = sum(counts)
        shares: dict[str, PartShare] = {}
        for name, share, part, count in zip(self.names, self.shares, self.blocks, counts, strict=True):
            shares[name] = {"wanted": float(share), "share": count / blocks if blocks else 0.0, "blocks": count}
            if not part.in_order:
                shares[name]["epochs"] = count / len(part)
        return shares

    @property
    def known(self) -> np.ndarray:
        return np.concatenate([part.known for part in self.blocks])

    def sample(self, count: int) -> torch.Tensor:
        if any(part.in_order for part in self.blocks):
            return super().sample(count)
        return torch.stack([self[i]["input_ids"] for i in spread(len(self), count)])

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        numbers: list[list[int]] = [[] for _ in self.blocks]
        for part, number in map(self._number, indices):
            numbers[part].append(number)
        return np.concatenate(
            [part.rows(part_numbers) for part, part_numbers in zip(self.blocks, numbers, strict=True) if part_numbers]
        )

    def state_dict(self, index: int) -> object:
        if not all(part.in_order for part in self.blocks):
            return None
        return [part.state_dict(count) for part, count in zip(self.blocks, self.counts(index), strict=True)]

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        states = cast("Sequence[object] | None", state) or [None] * len(self.blocks)
        for part, part_state in zip(self.blocks, states, strict=True):
            part.load_state_dict(part_state, verbose=verbose)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_orders": {}}


def _share_of(blocks: int, share: Fraction) -> int:
    """Return blocks * share, rounded to the nearest integer without floating-point errors."""
    return (2 * blocks * share.numerator + share.denominator) // (2 * share.denominator)


def mix(parts: Sequence[Part], blocks: Sequence[Blocks]) -> Blocks:
    """Mix the training splits and the eval splits of several corpora. The eval split repeats no block."""
    if len(blocks) == 1:
        return blocks[0]
    train = [(p.corpus.spec, p.share, b.train) for p, b in zip(parts, blocks, strict=True)]
    held_out = [(p.corpus.spec, p.share, b.eval) for p, b in zip(parts, blocks, strict=True)]
    mixed_train = MixedBlocks(train, sum(len(b.train) for b in blocks))
    length = max(1, min(int(len(b.eval) / p.share) for p, b in zip(parts, blocks, strict=True)))
    mixed_eval = MixedBlocks(held_out, length)
    while length > 1 and any(n > len(b.eval) for n, b in zip(mixed_eval.counts(length), blocks, strict=True)):
        length -= 1
        mixed_eval = MixedBlocks(held_out, length)
    stats, tokens = [b.stats for b in blocks], blocks[0].stats.sequence_length
    counts = zip(mixed_eval.counts(length), stats, strict=True)
    identity = "|".join(f"{s.fingerprint}:{p.share}" for p, s in zip(parts, stats, strict=True))
    mixed = dataclasses.replace(
        stats[0],
        train_tokens=sum(s.train_tokens for s in stats),
        train_bytes=sum(s.train_bytes for s in stats),
        eval_tokens=length * tokens,
        eval_bytes=round(sum(n * tokens * s.bytes_per_token for n, s in counts)),
        unigram_entropy=_entropy(parts, blocks),
        documents=sum(s.documents for s in stats),
        fingerprint=hashlib.sha256(f"mix|{identity}".encode()).hexdigest(),
    )
    return Blocks(train=mixed_train, eval=mixed_eval, stats=mixed)


def _entropy(parts: Sequence[Part], blocks: Sequence[Blocks]) -> float:
    """Return the unigram entropy of a mix of corpora, in nats per token."""
    train, held_out = np.zeros(1), np.zeros(1)
    for part, part_blocks in zip(parts, blocks, strict=True):
        share, vocab_size = float(part.share), part_blocks.stats.vocab_size
        trained, tested = (count_tokens(split.known, vocab_size) for split in (part_blocks.train, part_blocks.eval))
        train = train + share * (trained + 1) / (trained.sum() + vocab_size)
        held_out = held_out + share * tested / tested.sum()
    return float(-(held_out * np.log(train)).sum())
