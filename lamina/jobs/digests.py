"""Write and check files against their folder's ledger (see ``lamina.jobs.ledger``)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.ledger import LEDGER, Ledger
from lamina.jobs.manifest import MANIFEST, Entry, entry_of, strays, sync_and_hash, what_is_broken

# Files that are read whoever wrote them, so one that the ledger does not know is also reported.
_READ = ("layers/part-*.parquet", "probes/*/part-*.parquet", "rollbacks.json", "result.json", "metrics.jsonl")
_PLAIN = (".md", ".txt", ".log", ".html")  # nothing reads these beside a saved model
# The ledgers that this process writes, each with its file's inode and size: another process may have changed it.
_ledgers: dict[Path, tuple[tuple[int, int] | None, Ledger]] = {}


def refuse_damaged(folder: Path) -> None:
    """Raise UserError if a saved model or a checkpoint is not as it was written; one without a manifest passes."""
    if not (folder / MANIFEST).exists() and not _expects_manifest(folder):
        return
    broken = what_is_broken(folder)
    if broken is None:
        foreign = [n for n in strays(folder) if not (n.endswith(_PLAIN) or Path(n).name.startswith("."))]
        broken = f"{foreign[0]} is not one of its files" if foreign else None
    if broken is not None:
        raise UserError(
            f"checkpoint {str(folder)!r}: {broken} (allowed: the files as they were written; without {MANIFEST} they "
            "are read as they are)"
        )


def _expects_manifest(folder: Path) -> bool:
    try:
        return f"{folder.name}/{MANIFEST}" in Ledger.read(folder.parent).entries
    except (OSError, ValueError):
        return False


def _stamp(folder: Path) -> tuple[int, int] | None:
    try:
        state = (folder / LEDGER).stat()
    except OSError:
        return None
    return state.st_ino, state.st_size


def begin(folder: Path) -> str | None:
    """Open a folder's ledger for writing; where it has none, begin one with the files that are there.

    Returns the fault of its old ledger, if there is one.
    """
    broken = None
    try:
        Ledger.read(folder).finalize()
        return None
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        broken = str(error)
    ledger = Ledger(folder)
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        apart = name.startswith((".", "checkpoints/", "trials/", "tensorboard/", "model/"))
        if path.is_file() and not apart and path.suffix in (".json", ".jsonl", ".yaml", ".csv", ".parquet"):
            ledger.entries[name] = entry_of(path)
    ledger.entries.pop(LEDGER, None)
    if (folder / "model" / MANIFEST).is_file():
        ledger.entries[f"model/{MANIFEST}"] = entry_of(folder / "model" / MANIFEST)
    if (folder / LEDGER).is_dir():
        os.replace(folder / LEDGER, folder / f"{LEDGER}.damaged")
    ledger.rewrite()
    return broken


def _above(path: Path) -> Iterator[Path]:
    """The folders whose ledger may list a file: its own and up to two above, but not a study's for a trial's files."""
    for folder in list(path.parents)[:3]:
        yield folder
        if folder.parent.name == "trials":
            return


def _writing(path: Path) -> tuple[Ledger, str] | None:
    """The ledger that a file belongs to (its folder's, or of up to two above), and its name there."""
    for folder in _above(path):
        stamp = _stamp(folder)
        if stamp is not None:
            known = _ledgers.get(folder)
            if known is None or known[0] != stamp:
                try:
                    _ledgers[folder] = known = stamp, Ledger.read(folder)
                except (OSError, ValueError):
                    return None  # reported when the folder is claimed
            return known[1], path.relative_to(folder).as_posix()
    return None


def note(path: Path, entry: Entry | None, *, sync: bool = True) -> None:
    """Note in its folder's ledger what a file is about to hold; nothing where the folder has none."""
    if target := _writing(path):
        ledger, name = target
        ledger.note(name, entry, sync=sync)
        _ledgers[ledger.folder] = (_stamp(ledger.folder), ledger)


def replace(temporary: Path, path: Path) -> None:
    """Move a file that was written under a temporary name into place: sync it, note it in the ledger, rename it.

    A folder in its place is kept beside it as NAME.damaged.
    """
    note(path, sync_and_hash(temporary))
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
    os.replace(temporary, path)


def remove(path: Path) -> None:
    """Delete a file, after noting that in the ledger."""
    if path.exists():
        note(path, None)
        path.unlink()


def close(folder: Path) -> None:
    """At the end of the work in a folder: finalize its ledger, so that a later cut of it shows."""
    with contextlib.suppress(OSError, ValueError):
        Ledger.read(folder).finalize()


def rewrite(folder: Path) -> None:
    """Shorten a folder's ledger to one line per file."""
    if target := _writing(folder / LEDGER):
        target[0].rewrite()


def entries(folder: Path) -> dict[str, Entry]:
    """What a folder's files should hold according to its ledger; empty if it has no readable one."""
    with contextlib.suppress(OSError, ValueError):
        return {name: entry for name, entry in Ledger.read(folder).entries.items() if entry is not None}
    return {}


def differs(path: Path) -> str | None:
    """How a file differs from what was written, in words; None if it does not, or if no ledger lists it."""
    for folder in _above(path):
        if (folder / LEDGER).is_file():
            try:
                return Ledger.read(folder).differs(path.relative_to(folder).as_posix())
            except (OSError, ValueError):
                return None
    return None


def intact(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that match a pattern and are as they were written, sorted; all, if there is no ledger."""
    paths = sorted(folder.glob(pattern))
    with contextlib.suppress(OSError, ValueError):
        ledger = Ledger.read(folder)
        paths = [path for path in paths if ledger.differs(path.relative_to(folder).as_posix()) is None]
    return paths


def require(path: Path) -> None:
    """Raise ValueError if a file is not as it was written: reading it could raise anything, or mislead."""
    if words := differs(path):
        raise ValueError(f"{path.name} {words}")


def differences(folder: Path, *, trials: bool = True) -> list[str]:
    """One line per file of a run's or a study's folder that is not as it was written, the file's name first.

    Of files that a manifest lists (checkpoints, a saved model), only the manifest is checked.
    """
    lines = []
    try:
        ledger = Ledger.read(folder)
        existing = [p.relative_to(folder).as_posix() for pattern in _READ for p in folder.glob(pattern)]
        for name in dict.fromkeys([*(n for n in ledger.entries if n), *existing]):
            if words := ledger.differs(name):
                lines.append(f"{name} {words}")
    except FileNotFoundError:
        if _was_kept(folder):
            lines.append(f"{LEDGER} is missing, so what the folder holds cannot be checked")
    except (OSError, ValueError) as error:
        lines.append(f"{error}, so what the folder holds cannot be checked")
    inner: Iterable[Path] = sorted(folder.glob("trials/*/")) if trials else ()
    return lines + [f"trials/{path.name}/{line}" for path in inner for line in differences(path, trials=False)]


def _was_kept(folder: Path) -> bool:
    try:
        return json.loads((folder / "environment.json").read_text(encoding="utf-8")).get("digests") == LEDGER
    except (OSError, ValueError, AttributeError):
        return False
