"""Text in, packed token blocks out.

Importing this package loads neither torch nor transformers: the public names are resolved when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamina.data.blocks import Blocks, BlockStats, PackedBlocks, bits_per_byte, perplexity, prepare_blocks
    from lamina.data.corpus import EMBEDDED, corpus_fingerprint, read_corpus, validate_corpus
    from lamina.data.sources.documents import Document
    from lamina.data.streamed.preparation import stream_blocks
    from lamina.data.tokenizers import load_tokenizer, validate_spec

__all__ = [
    "EMBEDDED",
    "BlockStats",
    "Blocks",
    "Document",
    "PackedBlocks",
    "bits_per_byte",
    "corpus_fingerprint",
    "load_tokenizer",
    "perplexity",
    "prepare_blocks",
    "read_corpus",
    "stream_blocks",
    "validate_corpus",
    "validate_spec",
]

_HOME = {
    "blocks": ("BlockStats", "Blocks", "PackedBlocks", "bits_per_byte", "perplexity", "prepare_blocks"),
    "corpus": ("EMBEDDED", "corpus_fingerprint", "read_corpus", "validate_corpus"),
    "sources.documents": ("Document",),
    "streamed.preparation": ("stream_blocks",),
    "tokenizers": ("load_tokenizer", "validate_spec"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
