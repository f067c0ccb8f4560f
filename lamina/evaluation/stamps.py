"""When the files under a score were last written: a score of other files is computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from lamina.data import Corpus


def stamp_of_corpus(corpus: str, text_field: str) -> str:
    """A hash of sizes and times of a corpus's files; of a corpus without files, the same always."""
    return _stamp(Corpus.parse(corpus, text_field).changed_since(0.0))


def stamp_of_folder(folder: str | None) -> str:
    """The same of all files in a folder, or of no file."""
    return _stamp([] if folder is None else (path for path in Path(folder).rglob("*") if path.is_file()))


def _stamp(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        about = path.stat()
        digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
