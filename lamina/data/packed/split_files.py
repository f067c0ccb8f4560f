"""The segments of a corpus, written to two files of token blocks: train and held out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from lamina.core.progress import has_bars
from lamina.data.encoding import Encoder, TokenJoiner
from lamina.data.split import Segment

_BATCH_CHARS = 1024 * 1024


@dataclass
class SplitFile:
    """The file of one split while it is written: its tokens in the order of the corpus, joined by a TokenJoiner.

    ``tokens`` counts the tokens written, ``bytes`` the UTF-8 bytes of the text added.
    """

    path: Path
    encoder: Encoder
    tokens: int = 0
    bytes: int = 0
    joiner: TokenJoiner = field(init=False)

    def __post_init__(self) -> None:
        self.file = self.path.open("wb")
        self.joiner = TokenJoiner(self.encoder)

    def add(self, segment: Segment) -> None:
        """Add a segment, which ``flush`` writes."""
        self.joiner.add(segment)
        self.bytes += len(segment.text.encode())

    def flush(self) -> None:
        """Write the tokens of the added segments."""
        ids = self.joiner.encode()
        self.file.write(ids.tobytes())
        self.tokens += len(ids)

    def finish(self, sequence_length: int) -> None:
        """Cut the file to whole blocks and close it; ``tokens`` and, in proportion, ``bytes`` shrink with it."""
        whole = self.tokens // sequence_length * sequence_length
        self.file.truncate(whole * self.encoder.dtype.itemsize)
        self.file.close()
        self.bytes = round(self.bytes * whole / max(1, self.tokens))
        self.tokens = whole


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The sizes of both splits in whole blocks. ``all_tokens`` counts the dropped remainders, too."""

    train_tokens: int
    train_bytes: int
    eval_tokens: int
    eval_bytes: int
    all_tokens: int
    documents: int


def pack(
    segments: Iterable[Segment],
    encoder: Encoder,
    sequence_length: int,
    train_path: Path,
    eval_path: Path,
    *,
    total_chars: int,
    progress: bool,
) -> Packed:
    """Tokenize segments and write the blocks of both splits, [blocks, sequence_length] of the encoder's dtype.

    The progress bar counts characters. It appears after two seconds, and only on a terminal.

    Raises:
        OSError: the disk is full.
    """
    train, held_out = SplitFile(train_path, encoder), SplitFile(eval_path, encoder)
    documents = 0
    bar = tqdm(
        desc="tokenizing",
        total=total_chars,
        unit="char",
        unit_scale=True,
        delay=2,
        disable=not (progress and has_bars()),
    )
    try:
        with bar:
            for segment in segments:
                (held_out if segment.held_out else train).add(segment)
                documents = segment.document + 1
                if (chars := train.joiner.chars + held_out.joiner.chars) >= _BATCH_CHARS:
                    train.flush()
                    held_out.flush()
                    bar.update(chars)
            bar.update(train.joiner.chars + held_out.joiner.chars)
            train.flush()
            held_out.flush()
        all_tokens = train.tokens + held_out.tokens
        train.finish(sequence_length)
        held_out.finish(sequence_length)
    finally:
        train.file.close()
        held_out.file.close()
    return Packed(
        train_tokens=train.tokens,
        train_bytes=train.bytes,
        eval_tokens=held_out.tokens,
        eval_bytes=held_out.bytes,
        all_tokens=all_tokens,
        documents=documents,
    )
