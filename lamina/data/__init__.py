"""Text in, packed token blocks out.

Importing this package loads neither torch nor transformers: the public names are resolved when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.data.blocks import Blocks, BlockSource, BlockStats, bits_per_byte, perplexity
    from lamina.data.corpus import EMBEDDED, Corpus
    from lamina.data.packed.preparation import prepare_blocks
    from lamina.data.packed.whole import single_corpus_of, whole_blocks
    from lamina.data.sources.file_documents import Document
    from lamina.data.streamed.preparation import stream_blocks
    from lamina.data.tokenizers import load_tokenizer, validate_spec

__all__ = [
    "EMBEDDED",
    "BlockSource",
    "BlockStats",
    "Blocks",
    "Corpus",
    "Document",
    "bits_per_byte",
    "load_tokenizer",
    "perplexity",
    "prepare_blocks",
    "single_corpus_of",
    "stream_blocks",
    "validate_spec",
    "whole_blocks",
]

_HOME = {
    "blocks": ("BlockSource", "BlockStats", "Blocks", "bits_per_byte", "perplexity"),
    "corpus": ("EMBEDDED", "Corpus"),
    "packed.preparation": ("prepare_blocks",),
    "packed.whole": ("single_corpus_of", "whole_blocks"),
    "sources.file_documents": ("Document",),
    "streamed.preparation": ("stream_blocks",),
    "tokenizers": ("load_tokenizer", "validate_spec"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
