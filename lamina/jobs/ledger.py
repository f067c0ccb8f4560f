"""What the files of a job's folder held when they were last written: the ledger, digests.jsonl.

A ledger follows a folder whose files are written one after another. A line is added before a file gets its new content,
so a kill at any moment leaves each file as its last line says, and the one of the very last line as that says or as it
was before. Every line is chained to the one before, so an altered ledger is known as such. A folder without one (of an
older Lamina) is not checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from lamina.jobs.manifest import NOT_A_MANIFEST, Entry, entry_of, sha256, sync

LEDGER = "digests.jsonl"
ALTERED = f"is altered: its digest in {LEDGER} is another"


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
        """Write the ledger anew, one line per file: it does not grow with what was overwritten."""
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
