"""The held-out text of a stream, chosen before training from a bounded part of the corpus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lamina.data.encoding import Encoder, TokenJoiner
from lamina.data.sources.shards import Shards
from lamina.data.split import Segment, Splitter, is_held_out, piece_chars
from lamina.errors import UserError

_SCANNED = 64 * 2**20  # the held-out text is spread over this many characters
_SHARDS = 64  # and over this many shards
_PIECES, _SMALLEST_PIECE, _CHARS_PER_TOKEN = 64, 1024, 4


@dataclass
class Excerpt:
    """Some segments of a corpus as ids, by shard."""

    encoder: Encoder
    ids: dict[int, list[np.ndarray]] = field(default_factory=dict)
    tokens: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        # the first segment of every shard has an end-of-text token: which shard comes first is known only at the end
        self._joiner = TokenJoiner(self.encoder, TokenJoiner.ELSEWHERE)
        self._shard: int | None = None

    def add(self, shard: int, segment: Segment) -> None:
        """Append a segment of a shard."""
        if shard != self._shard:
            self._joiner.jump()
        self._shard = shard
        self._joiner.add(segment)
        ids = self._joiner.encode()
        self.ids.setdefault(shard, []).append(ids)
        self.tokens += len(ids)
        self.bytes += len(segment.text.encode())

    def blocks(self, sequence_length: int) -> np.ndarray:
        """[blocks, sequence_length], in the shards' order, without the end-of-text token at the very beginning."""
        rows = [ids for shard in sorted(self.ids) for ids in self.ids[shard]]
        ids = np.concatenate(rows)[1:] if rows else np.empty(0, dtype=self.encoder.dtype)
        whole = len(ids) // sequence_length
        return ids[: whole * sequence_length].reshape(whole, sequence_length)


@dataclass
class Division:
    """The division of a stream into held-out text and the rest.

    Attributes:
        chars: characters per piece.
        fraction: the share of the scanned pieces that is held out.
        held_out: the text to evaluate on.
        known: some of the text to train on, from between the held-out pieces.
        limits: for each shard with held-out pieces, how many of its pieces were scanned.
    """

    chars: int
    fraction: float
    held_out: Excerpt
    known: Excerpt
    limits: dict[int, int] = field(default_factory=dict)


def hold_out(
    corpus: str, shards: Shards, encoder: Encoder, sequence_length: int, *, blocks: int, eval_fraction: float
) -> Division:
    """Hold out pieces until they fill ``blocks`` blocks, at most ``eval_fraction`` of the scanned text.

    Raises:
        UserError: the text is too short for one block to train on and one held out.
    """
    needed = blocks * sequence_length * _CHARS_PER_TOKEN
    total = _SCANNED if shards.bytes is None else max(1, shards.bytes)
    chars = min(piece_chars(total), max(_SMALLEST_PIECE, needed // _PIECES))
    fraction = min(eval_fraction, needed / min(total, _SCANNED))
    while True:
        division = Division(chars, fraction, Excerpt(encoder), Excerpt(encoder))
        held_out, known = division.held_out, division.known
        for shard, segment, piece in _pieces(shards, division, blocks, sequence_length):
            if is_held_out(shard + piece, fraction):
                held_out.add(shard, segment)
                division.limits[shard] = piece + 1
            elif known.tokens < max(2 * held_out.tokens, sequence_length + 1):
                known.add(shard, segment)
        if len(held_out.blocks(sequence_length)) and len(known.blocks(sequence_length)):
            return division
        if not held_out.tokens and not known.tokens:
            raise UserError(f"corpus: {corpus!r} holds no text")
        if fraction >= 0.5:
            raise UserError(
                f"corpus: {corpus!r} has about {held_out.tokens + known.tokens} tokens, too few for a sequence_length "
                f"of {sequence_length}: one block to train on and one held out are needed"
            )
        fraction = min(0.5, 2 * fraction)


def _pieces(
    shards: Shards, division: Division, blocks: int, sequence_length: int
) -> Iterator[tuple[int, Segment, int]]:
    """Shard, segment and piece number, until enough is held out: about as much from each of up to 64 shards."""
    count = len(shards.shards)
    per_shard = math.ceil(blocks / min(count, _SHARDS)) * sequence_length if count else 0
    for shard in np.random.default_rng(0).permutation(count).tolist():
        before = division.held_out.tokens
        if before > blocks * sequence_length:
            return
        splitter = Splitter()
        for document, _ in shards.shards[shard].read():
            for segment, piece in splitter.cut(document, division.chars):
                if division.held_out.tokens - before > per_shard and piece >= division.limits[shard]:
                    break
                yield shard, segment, piece
            else:
                continue
            break
