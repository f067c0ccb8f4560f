"""Blocks of several corpora in fixed shares."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lamina.data.mix import Part
from lamina.data.packed.packing import token_counts
from lamina.data.streamed.stream import StreamedBlocks

if TYPE_CHECKING:
    from lamina.data.blocks import Blocks, BlockStats


class MixedBlocks(torch.utils.data.Dataset):
    """Blocks of several corpora in one order: item ``i`` is the i-th block that a run trains on.

    After any number n of blocks each part has given its share of n, to within one block a part. Which of its blocks
    comes next is a permutation of ``seed``, drawn anew each time the part has been seen whole; with no seed they come
    as they lie. Nothing but the seed decides, so a run that is resumed at block i goes on with the same ones.
    """

    def __init__(self, parts: Sequence[tuple[str, Fraction, Any]], length: int, seed: int | None = None):
        self.names = [name for name, _, _ in parts]
        self.shares = [share for _, share, _ in parts]
        self.blocks = [blocks for _, _, blocks in parts]
        self.length, self.seed = length, seed
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def drawn(self, seed: int, length: int = 2**62) -> MixedBlocks:
        """The same mix in the order of a run with this seed; as good as without end."""
        return MixedBlocks(list(zip(self.names, self.shares, self.blocks, strict=True)), length, seed)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        part, position = self.where(index)
        if isinstance(self.blocks[part], StreamedBlocks):
            return self.blocks[part][position]
        count = len(self.blocks[part])
        return self.blocks[part][self._order(part, position // count)[position % count]]

    def where(self, index: int) -> tuple[int, int]:
        """The part that block ``index`` is of, and how many of that part came before it."""
        if index < 0:
            index += self.length
        if not 0 <= index < self.length:
            raise IndexError(index)
        rest = Fraction(1)
        for part, share in enumerate(self.shares):
            before, after = (_given(n, share / rest) for n in (index, index + 1))
            if after > before:
                return part, before
            index, rest = index - before, rest - share  # a block of one of the other parts, counted among those
        raise AssertionError("the last part has all that is left")

    def counts(self, blocks: int) -> list[int]:
        """How many of the first ``blocks`` blocks are of each part."""
        rest, counts = Fraction(1), []
        for share in self.shares:
            counts.append(_given(blocks, share / rest))
            blocks, rest = blocks - counts[-1], rest - share
        return counts

    def realised(self, spans: Sequence[tuple[int, int]]) -> dict[str, dict[str, float]]:
        """Of the blocks from start to end of each span: each part's number and share, how many times it was seen."""
        counts = [0] * len(self.shares)
        for start, end in spans:
            steps = zip(self.counts(end), self.counts(start), strict=True)
            counts = [c + after - before for c, (after, before) in zip(counts, steps, strict=True)]
        blocks = sum(counts)
        rows = zip(self.names, self.shares, self.blocks, counts, strict=True)
        return {
            name: {
                "wanted": float(share),
                "share": count / blocks if blocks else 0.0,
                "blocks": count,
                **({} if isinstance(part, StreamedBlocks) else {"epochs": count / len(part)}),
            }
            for name, share, part, count in rows
        }

    @property
    def sample(self) -> np.ndarray:
        """Of streamed parts: some of each one's text, [blocks, sequence_length]."""
        return np.concatenate([part.sample for part in self.blocks])

    def state_dict(self, index: int) -> list[dict[str, Any]]:
        """Of streamed parts: where each has to begin for block ``index`` and those after it."""
        return [part.state_dict(count) for part, count in zip(self.blocks, self.counts(index), strict=True)]

    def load_state_dict(self, state: Sequence[dict[str, Any]] | None, *, tell: bool = True) -> None:
        """Of streamed parts: begin where ``state_dict`` was, as theirs."""
        for part, place in zip(self.blocks, state or [None] * len(self.blocks), strict=True):
            part.load_state_dict(place, tell=tell)

    def _order(self, part: int, epoch: int) -> np.ndarray | range:
        count = len(self.blocks[part])
        if self.seed is None:
            return range(count)
        kept = self._orders.get(part)
        if kept is None or kept[0] != epoch:
            kept = (epoch, np.random.default_rng([self.seed, part, epoch]).permutation(count))
            self._orders[part] = kept
        return kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}


def _given(blocks: int, share: Fraction) -> int:
    """floor(blocks * share + 1/2) in whole numbers: how many of the first ``blocks`` a part of this share has."""
    return (2 * blocks * share.numerator + share.denominator) // (2 * share.denominator)


def mix(parts: Sequence[Part], blocks: Sequence[Blocks]) -> Blocks:
    """One pair of splits of several: the shares hold in training and in what is held out.

    The held-out split has as many blocks as can be had in these shares with none twice. ``train`` is as long as all
    the parts together; ``MixedBlocks.drawn`` gives a run's own order and length.
    """
    from lamina.data.blocks import Blocks

    train = [(p.corpus, p.share, b.train) for p, b in zip(parts, blocks, strict=True)]
    held_out = [(p.corpus, p.share, b.eval) for p, b in zip(parts, blocks, strict=True)]
    trained = MixedBlocks(train, sum(len(b.train) for b in blocks))
    length = max(1, min(int(len(b.eval) / p.share) for p, b in zip(parts, blocks, strict=True)))
    evaluated = MixedBlocks(held_out, length)
    while length > 1 and any(n > len(b.eval) for n, b in zip(evaluated.counts(length), blocks, strict=True)):
        length -= 1
        evaluated = MixedBlocks(held_out, length)
    stats = _stats(parts, [b.stats for b in blocks], trained, evaluated, _entropy(parts, blocks))
    return Blocks(train=trained, eval=evaluated, stats=stats)  # type: ignore[arg-type]


def _stats(
    parts: Sequence[Part], stats: Sequence[BlockStats], train: MixedBlocks, held_out: MixedBlocks, entropy: float
) -> BlockStats:
    counts = held_out.counts(len(held_out))
    length = stats[0].sequence_length
    told = "|".join(f"{s.fingerprint}:{p.share}" for p, s in zip(parts, stats, strict=True))
    return dataclasses.replace(
        stats[0],
        train_tokens=sum(s.train_tokens for s in stats),
        train_bytes=sum(s.train_bytes for s in stats),
        eval_tokens=len(held_out) * length,
        eval_bytes=round(sum(n * length * s.bytes_per_token for n, s in zip(counts, stats, strict=True))),
        unigram_entropy=entropy,
        documents=sum(s.documents for s in stats),
        fingerprint=hashlib.sha256(f"mix|{told}".encode()).hexdigest(),
    )


def _entropy(parts: Sequence[Part], blocks: Sequence[Blocks]) -> float:
    """Cross-entropy of the mixed held-out tokens under the mixed train tokens' add-one smoothed frequencies, in nats.

    Both are mixed by the shares: p(t) = sum over the parts of share * p_part(t).
    """
    train, held_out = np.zeros(1), np.zeros(1)
    for part, of in zip(parts, blocks, strict=True):
        ids = of.train.sample if isinstance(of.train, StreamedBlocks) else of.train.array
        counts = token_counts(ids, of.stats.vocab_size)
        seen = token_counts(of.eval.array, of.stats.vocab_size)
        train = train + float(part.share) * (counts + 1) / (counts.sum() + of.stats.vocab_size)
        held_out = held_out + float(part.share) * seen / seen.sum()
    return float(-(held_out * np.log(train)).sum())
