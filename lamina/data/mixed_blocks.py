"""Blocks of several corpora in fixed shares."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from lamina.data.blocks import Block, Blocks, BlockSource, BlockStats, PartShare, spread

if TYPE_CHECKING:
    from lamina.data.corpus import Part


class MixedBlocks(BlockSource):
    """Blocks of several corpora in one order: item ``i`` is the i-th block that a run trains on.

    After any n blocks, each part has contributed its share of n to within one block. The order of a part's own blocks
    is a permutation by ``seed``, a new one for each epoch of the part; without a seed they keep their order. Nothing
    else decides the order, so a run that resumes at block i sees the same blocks.
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
        """The same mix in the order of a run with this seed, practically endless."""
        return MixedBlocks(list(zip(self.names, self.shares, self.blocks, strict=True)), length, seed)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Block:
        part, number = self._number(index)
        return self.blocks[part][number]

    def _number(self, index: int) -> tuple[int, int]:
        """The part that block ``index`` belongs to, and the block's number there."""
        part, position = self.where(index)
        if self.blocks[part].in_order:
            return part, position
        count = len(self.blocks[part])
        return part, int(self._order(part, position // count)[position % count])

    def where(self, index: int) -> tuple[int, int]:
        """The part that block ``index`` belongs to, and how many blocks of that part come before it."""
        if index < 0:
            index += self.length
        if not 0 <= index < self.length:
            raise IndexError(index)
        rest = Fraction(1)
        for part, share in enumerate(self.shares):
            before, after = (_share_of(n, share / rest) for n in (index, index + 1))
            if after > before:
                return part, before
            index, rest = index - before, rest - share  # it belongs to another part: count among those
        raise AssertionError("the last part takes every block that remains")

    def counts(self, blocks: int) -> list[int]:
        """How many of the first ``blocks`` blocks belong to each part."""
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

    def sample(self, count: int) -> torch.Tensor:
        if not any(part.in_order for part in self.blocks):
            return torch.stack([self[i]["input_ids"] for i in spread(len(self), count)])
        rows = torch.cat([part.sample(len(part)) for part in self.blocks])  # the known text of each stream
        return rows[spread(len(rows), count)]

    def token_counts(self, vocab_size: int) -> np.ndarray:
        return np.sum([part.token_counts(vocab_size) for part in self.blocks], axis=0)

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        numbers: list[list[int]] = [[] for _ in self.blocks]
        for part, number in map(self._number, indices):
            numbers[part].append(number)
        return np.concatenate([part.rows(own) for part, own in zip(self.blocks, numbers, strict=True) if own])

    def state_dict(self, index: int) -> object:
        if not all(part.in_order for part in self.blocks):
            return None
        return [part.state_dict(count) for part, count in zip(self.blocks, self.counts(index), strict=True)]

    def load_state_dict(self, state: object, *, verbose: bool = True) -> None:
        states = cast("Sequence[object] | None", state) or [None] * len(self.blocks)
        for part, own in zip(self.blocks, states, strict=True):
            part.load_state_dict(own, verbose=verbose)

    def _order(self, part: int, epoch: int) -> np.ndarray | range:
        count = len(self.blocks[part])
        if self.seed is None:
            return range(count)
        order = self._orders.get(part)
        if order is None or order[0] != epoch:
            order = (epoch, np.random.default_rng([self.seed, part, epoch]).permutation(count))
            self._orders[part] = order
        return order[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_orders": {}}


def _share_of(blocks: int, share: Fraction) -> int:
    """floor(blocks * share + 1/2) in integers: how many of the first ``blocks`` belong to a part with this share."""
    return (2 * blocks * share.numerator + share.denominator) // (2 * share.denominator)


def mix(parts: Sequence[Part], blocks: Sequence[Blocks]) -> Blocks:
    """Mix several pairs of splits into one, with the same shares in training and held out. One part stays as it is.

    The held-out split has as many blocks as these shares allow without repeating one. ``train`` is as long as all parts
    together; ``MixedBlocks.for_run`` gives the order and length for a run.
    """
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
    stats = _stats(parts, [b.stats for b in blocks], mixed_eval, _entropy(parts, blocks))
    return Blocks(train=mixed_train, eval=mixed_eval, stats=stats)


def _stats(parts: Sequence[Part], stats: Sequence[BlockStats], held_out: MixedBlocks, entropy: float) -> BlockStats:
    counts = held_out.counts(len(held_out))
    length = stats[0].sequence_length
    identity = "|".join(f"{s.fingerprint}:{p.share}" for p, s in zip(parts, stats, strict=True))
    return dataclasses.replace(
        stats[0],
        train_tokens=sum(s.train_tokens for s in stats),
        train_bytes=sum(s.train_bytes for s in stats),
        eval_tokens=len(held_out) * length,
        eval_bytes=round(sum(n * length * s.bytes_per_token for n, s in zip(counts, stats, strict=True))),
        unigram_entropy=entropy,
        documents=sum(s.documents for s in stats),
        fingerprint=hashlib.sha256(f"mix|{identity}".encode()).hexdigest(),
    )


def _entropy(parts: Sequence[Part], blocks: Sequence[Blocks]) -> float:
    """Cross-entropy of the mixed held-out tokens under the mixed, add-one smoothed train frequencies, in nats.

    Both are mixed by the shares: p(t) = sum over the parts of share * p_part(t).
    """
    train, held_out = np.zeros(1), np.zeros(1)
    for part, own in zip(parts, blocks, strict=True):
        share, vocab_size = float(part.share), own.stats.vocab_size
        trained, tested = own.train.token_counts(vocab_size), own.eval.token_counts(vocab_size)
        train = train + share * (trained + 1) / (trained.sum() + vocab_size)
        held_out = held_out + share * tested / tested.sum()
    return float(-(held_out * np.log(train)).sum())
