"""The files of a folder in order, and hashes of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from lamina.errors import UserError

FileState = tuple[int, int]
"""The size of a file in bytes and the time of its last change in nanoseconds."""

_HASHED_BYTES = 2**30


def walk(root: Path, linked: list[Path] | None = None) -> list[Path]:
    """The files below a folder in the order of their relative names, without hidden files and folders.

    Links to files are read, links to folders are not followed, since they may lead in a circle; ``linked`` gets them.

    Raises:
        UserError: a folder below must not be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"corpus: {str(error.filename)!r} cannot be read ({error.strerror})") from None

    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if linked is not None:
            linked += [path for name in folders if (path := Path(folder, name)).is_symlink()]
        paths += [path for name in files if not name.startswith(".") and (path := Path(folder, name)).is_file()]
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


def hash_files(digest: hashlib._Hash, root: Path) -> None:
    """Add the relative name and the content of a file, or of all files below a folder, to ``digest``."""
    for path in walk(root) if root.is_dir() else [root]:
        name = os.fsencode(path.relative_to(root if root.is_dir() else root.parent).as_posix())
        try:
            with path.open("rb") as file:
                # a hash per file, so that bytes cannot move from one file to the next unnoticed
                content = hashlib.file_digest(file, "sha256").digest()
        except PermissionError as error:
            raise UserError(f"corpus: {str(path)!r} cannot be read ({error.strerror})") from None
        digest.update(name + b"\0" + content)


def state_of(path: Path) -> FileState:
    """The size of a file and the time of its last change."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def fingerprint_of_large(root: Path, paths: Sequence[Path], states: Sequence[FileState], text_field: str) -> str | None:
    """A hash of the names, sizes and times of change of files over 1 GiB in all.

    None for less than that: then the content itself can be hashed.
    """
    if sum(size for size, _ in states) <= _HASHED_BYTES:
        return None
    digest = hashlib.sha256(f"stream\0{text_field}\0".encode())
    for path, (size, changed) in zip(paths, states, strict=True):
        digest.update(os.fsencode(path.relative_to(root).as_posix()) + f"\0{size}\0{changed}\0".encode())
    return digest.hexdigest()
