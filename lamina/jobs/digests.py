"""What files held when they were written: SHA-256 sums in a folder's manifest or ledger, and what differs from them.

A *manifest* (manifest.json) lists a folder that is written once: a checkpoint, a saved model, an entry of the data
cache. A *ledger* (digests.jsonl) follows a folder whose files are written one after another: a run's, a study's, a
probed checkpoint's. A line is added before a file gets its new content, so a kill at any moment leaves each file as its
last line says, and the one of the very last line as that says or as it was before. Every line is chained to the one
before, so an altered ledger is known as such. A folder without one (of an older Lamina) is not checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lamina.errors import UserError

MANIFEST, LEDGER = "manifest.json", "digests.jsonl"
NOT_A_MANIFEST = (ValueError, KeyError, TypeError, AttributeError)  # what reading an altered one raises
# Files that are read whoever wrote them, so one that the ledger does not know is named, too.
_READ = ("layers/part-*.parquet", "probes/*/part-*.parquet", "rollbacks.json", "result.json", "metrics.jsonl")
ALTERED = f"is altered: its digest in {LEDGER} is another"
_PLAIN = (".md", ".txt", ".log", ".html")  # beside a saved model these are nobody's input

Entry = tuple[int, str]
"""Size in bytes and SHA-256."""


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entry_of(path: Path) -> Entry:
    """Size and SHA-256 of a file."""
    return path.stat().st_size, sha256(path)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of files, to the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def settled(path: Path) -> Entry:
    """Bring a file to the disk; gives its size and SHA-256."""
    sync(path)
    return entry_of(path)


def checksum(listed: Mapping[str, Entry]) -> str:
    """The SHA-256 of a list of files: what a manifest knows itself by."""
    return hashlib.sha256(json.dumps(sorted((n, *e) for n, e in listed.items())).encode()).hexdigest()


def files_in(folder: Path) -> list[str]:
    """Every file below a folder, by its path from there."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def seal(folder: Path, listed: Mapping[str, Entry] | None = None) -> None:
    """Write a folder's manifest and bring all to the disk; ``listed`` where the files are there and hashed already."""
    listed = {name: settled(folder / name) for name in files_in(folder)} if listed is None else listed
    manifest = {"checksum": checksum(listed), "files": listed}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sync(folder / MANIFEST)
    for place in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync(place)


def listed(folder: Path) -> dict[str, Entry]:
    """The files that a manifest lists. Raises OSError, or one of NOT_A_MANIFEST where it is altered."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    found = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    if manifest["checksum"] != checksum(found):
        raise ValueError(f"{MANIFEST} is altered")
    return found


def what_is_broken(folder: Path) -> str | None:
    """What of a sealed folder is not as it was, naming the file: missing, cut short or altered. None where it is whole.

    Files that the manifest does not list are ``strays``.
    """
    try:
        known = listed(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    except NOT_A_MANIFEST:
        return f"{MANIFEST} is cut short or altered"
    for name, (size, digest) in known.items():
        try:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
            if sha256(folder / name) != digest:
                return f"{name} is altered"
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
    return None


def strays(folder: Path) -> list[str]:
    """The files of a sealed folder that its manifest does not list."""
    known = {*listed(folder), MANIFEST}
    return [name for name in files_in(folder) if name not in known]


def refuse_damaged(folder: Path) -> None:
    """Raise UserError where a saved model or a checkpoint is not what was written; one without a manifest passes."""
    if not (folder / MANIFEST).exists() and not _expects_manifest(folder):
        return
    broken = what_is_broken(folder)
    if broken is None:
        others = [n for n in strays(folder) if not (n.endswith(_PLAIN) or Path(n).name.startswith("."))]
        broken = f"{others[0]} is not one of its files" if others else None
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


class Ledger:
    """What the files of a folder held when they were last written.

    Attributes:
        entries: by path from the folder; None for a file that was deleted.
        before: the file of the last line, which a kill may have left as it was, and what it was.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, Entry | None] = {}
        self.before: tuple[str, Entry | None] | None = None
        self._last = ""

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """A folder's. Raises FileNotFoundError where it has none, ValueError where it is altered."""
        ledger = cls(folder)
        lines = (folder / LEDGER).read_bytes().split(b"\n")
        try:
            if len(lines) - 2 < json.loads(lines[0])[1][0]:
                raise ValueError(f"{LEDGER} is cut short")
            for line in lines[:-1]:  # what follows the last line's end is one that a kill cut short
                name, entry, check = json.loads(line)
                ledger._take(str(name), None if entry is None else (int(entry[0]), str(entry[1])))
                if check != ledger._last:
                    raise ValueError(f"{LEDGER} is altered")
        except (*NOT_A_MANIFEST, IndexError) as error:
            raise ValueError(str(error) if str(error).startswith(LEDGER) else f"{LEDGER} is altered") from None
        return ledger

    def _take(self, name: str, entry: Entry | None) -> str:
        self.before = (name, self.entries.get(name))
        self.entries[name] = entry
        self._last = hashlib.sha256(f"{self._last}\0{json.dumps([name, entry])}".encode()).hexdigest()[:16]
        return json.dumps([name, entry, self._last]) + "\n"

    def note(self, name: str, entry: Entry | None, *, settle: bool = True) -> None:
        """Add a line: the file is about to hold this (None: to be deleted). ``settle``: bring it to the disk first."""
        with (self.folder / LEDGER).open("a", encoding="utf-8") as file:
            file.write(self._take(name, entry))
            if settle:
                file.flush()
                os.fsync(file.fileno())

    def rewrite(self) -> None:
        """Write the ledger anew, a line a file: it does not grow with what was overwritten."""
        whole = Ledger(self.folder)
        kept = [(name, entry) for name, entry in self.entries.items() if name and entry is not None]
        # The first line says how many follow, the last one is of no file: each file is as its line says.
        text = "".join(whole._take(name, entry) for name, entry in [("", (len(kept), "")), *kept, ("", None)])
        temporary = self.folder / f".{LEDGER}.{os.getpid()}"
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            os.replace(temporary, self.folder / LEDGER)
        finally:
            temporary.unlink(missing_ok=True)
        self.entries, self.before, self._last = whole.entries, whole.before, whole._last
        _ledgers[self.folder] = (_stamp(self.folder), self)

    def differs(self, name: str) -> str | None:
        """How a file differs from what was written, in words; None where it does not."""
        path, entry = self.folder / name, self.entries.get(name)
        allowed = [entry, self.before[1]] if self.before is not None and self.before[0] == name else [entry]
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            return None if None in allowed else "is missing"
        except OSError as error:
            return error.strerror
        if name not in self.entries:
            return "was not written by this run"
        if not path.is_file():
            return "is a folder"
        if any(one is not None and one[0] == found and one[1] == sha256(path) for one in allowed):
            return None
        earlier = allowed[-1]
        if len(allowed) == 2 and earlier is not None and found > earlier[0] and name.endswith(".jsonl"):
            return None if _starts_with(path, earlier) else ALTERED  # a line that a kill or a full disk cut short
        return ALTERED

    def settle(self) -> None:
        """Decide what the file of the last line holds, now that nobody writes it, and write the ledger anew."""
        if self.before is not None:
            name, earlier = self.before
            if not name:
                return  # it is as ``rewrite`` left it
            path = self.folder / name
            if (entry_of(path) if path.is_file() else None) == earlier:
                self.entries[name] = earlier
        self.rewrite()


def _starts_with(path: Path, entry: Entry) -> bool:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(entry[0])).hexdigest() == entry[1]


# The ledgers that this process writes, each with the state of its file: another process may have changed it.
_ledgers: dict[Path, tuple[tuple[int, int] | None, Ledger]] = {}


def _stamp(folder: Path) -> tuple[int, int] | None:
    try:
        state = (folder / LEDGER).stat()
    except OSError:
        return None
    return state.st_ino, state.st_size


def begin(folder: Path) -> str | None:
    """Open a folder's ledger to be written, begun with the files that are there where it has none.

    Returns what is wrong with the one that it had, if so.
    """
    broken = None
    try:
        Ledger.read(folder).settle()
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
    """The folders whose ledger may know a file: its own and up to two above, but no study's for a trial's files."""
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
                    return None  # found and said when the folder is claimed
            return known[1], path.relative_to(folder).as_posix()
    return None


def note(path: Path, entry: Entry | None, *, settle: bool = True) -> None:
    """Say in its folder's ledger what a file is about to hold; nothing where the folder has none."""
    if found := _writing(path):
        ledger, name = found
        ledger.note(name, entry, settle=settle)
        _ledgers[ledger.folder] = (_stamp(ledger.folder), ledger)


def replace(temporary: Path, path: Path) -> None:
    """Put a file that was written under another name in its place: on the disk, in the ledger, then renamed.

    A folder that stands under its name is kept beside it as NAME.damaged.
    """
    note(path, settled(temporary))
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
    os.replace(temporary, path)


def remove(path: Path) -> None:
    """Delete a file, and say so in the ledger first."""
    if path.exists():
        note(path, None)
        path.unlink()


def close(folder: Path) -> None:
    """At the end of the work in a folder: its ledger says of each file what it holds, and is known when it is cut."""
    with contextlib.suppress(OSError, ValueError):
        Ledger.read(folder).settle()


def rewrite(folder: Path) -> None:
    """Shorten a folder's ledger to a line a file."""
    if found := _writing(folder / LEDGER):
        found[0].rewrite()


def entries(folder: Path) -> dict[str, Entry]:
    """What a folder's files should hold by its ledger; empty where it has none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return {name: entry for name, entry in Ledger.read(folder).entries.items() if entry is not None}
    return {}


def differs(path: Path) -> str | None:
    """How a file differs from what was written, in words; None where it does not, or no ledger tells."""
    for folder in _above(path):
        if (folder / LEDGER).is_file():
            try:
                return Ledger.read(folder).differs(path.relative_to(folder).as_posix())
            except (OSError, ValueError):
                return None
    return None


def intact(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that match a pattern and are as they were written, in order; all where no ledger tells."""
    found = sorted(folder.glob(pattern))
    with contextlib.suppress(OSError, ValueError):
        ledger = Ledger.read(folder)
        found = [path for path in found if ledger.differs(path.relative_to(folder).as_posix()) is None]
    return found


def require(path: Path) -> None:
    """Raise ValueError where a file is not as it was written: reading it could raise anything, or mislead."""
    if words := differs(path):
        raise ValueError(f"{path.name} {words}")


def differences(folder: Path, *, trials: bool = True) -> list[str]:
    """A line for each file of a run's or a study's folder that is not as it was written, the file's name first.

    What a manifest lists (checkpoints, a saved model) is not looked at, only whether it is there.
    """
    found = []
    try:
        ledger = Ledger.read(folder)
        there = [p.relative_to(folder).as_posix() for pattern in _READ for p in folder.glob(pattern)]
        for name in dict.fromkeys([*(n for n in ledger.entries if n), *there]):
            if words := ledger.differs(name):
                found.append(f"{name} {words}")
    except FileNotFoundError:
        if _was_kept(folder):
            found.append(f"{LEDGER} is missing, so what the folder holds cannot be checked")
    except (OSError, ValueError) as error:
        found.append(f"{error}, so what the folder holds cannot be checked")
    inner: Iterable[Path] = sorted(folder.glob("trials/*/")) if trials else ()
    return found + [f"trials/{path.name}/{line}" for path in inner for line in differences(path, trials=False)]


def _was_kept(folder: Path) -> bool:
    try:
        return json.loads((folder / "environment.json").read_text(encoding="utf-8")).get("digests") == LEDGER
    except (OSError, ValueError, AttributeError):
        return False
