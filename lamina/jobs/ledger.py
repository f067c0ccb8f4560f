"""The ledger, digests.jsonl: what each file of a job's folder held when it was last written.

A line is added before a file gets its new content. So after a kill at any moment, each file is as its last line says;
only the file of the very last line may still be as it was before. Each line is chained to the one before by a hash, so
an altered ledger shows. A folder without a ledger (of an older Lamina) is not checked.
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
    """What each file of a folder held when it was last written.

    Attributes:
        entries: by the path relative to the folder; None for a deleted file.
        before: the file of the last line, which a kill may have left unchanged, and its entry before that line.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, Entry | None] = {}
        self.before: tuple[str, Entry | None] | None = None
        self._last = ""

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """Read a folder's ledger. Raises FileNotFoundError if there is none, ValueError if it is altered."""
        ledger = cls(folder)
        lines = (folder / LEDGER).read_bytes().split(b"\n")
        try:
            if len(lines) - 2 < json.loads(lines[0])[1][0]:
                raise ValueError(f"{LEDGER} is cut short")
            for line in lines[:-1]:  # after the last newline comes a line that a kill cut short
                name, entry, check = json.loads(line)
                ledger._append(str(name), None if entry is None else (int(entry[0]), str(entry[1])))
                if check != ledger._last:
                    raise ValueError(f"{LEDGER} is altered")
        except (*NOT_A_MANIFEST, IndexError) as error:
            raise ValueError(str(error) if str(error).startswith(LEDGER) else f"{LEDGER} is altered") from None
        return ledger

    def _append(self, name: str, entry: Entry | None) -> str:
        self.before = (name, self.entries.get(name))
        self.entries[name] = entry
        self._last = hashlib.sha256(f"{self._last}\0{json.dumps([name, entry])}".encode()).hexdigest()[:16]
        return json.dumps([name, entry, self._last]) + "\n"

    def note(self, name: str, entry: Entry | None, *, sync: bool = True) -> None:
        """Add a line: the file is about to hold this (None: to be deleted). ``sync``: sync the ledger to disk first."""
        with (self.folder / LEDGER).open("a", encoding="utf-8") as file:
            file.write(self._append(name, entry))
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def rewrite(self) -> None:
        """Rewrite the ledger with one line per file, so that overwriting files does not make it grow."""
        whole = Ledger(self.folder)
        entries = [(name, entry) for name, entry in self.entries.items() if name and entry is not None]
        # The first line says how many follow; the last one names no file: each file is as its line says.
        text = "".join(whole._append(name, entry) for name, entry in [("", (len(entries), "")), *entries, ("", None)])
        temporary = self.folder / f".{LEDGER}.{os.getpid()}"
        temporary.unlink(missing_ok=True)  # a link would be followed
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            os.replace(temporary, self.folder / LEDGER)
        finally:
            temporary.unlink(missing_ok=True)
        self.entries, self.before, self._last = whole.entries, whole.before, whole._last

    def differs(self, name: str) -> str | None:
        """How a file differs from what was written, in words; None if it does not."""
        path, entry = self.folder / name, self.entries.get(name)
        allowed = [entry, self.before[1]] if self.before is not None and self.before[0] == name else [entry]
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return None if None in allowed else "is missing"
        except OSError as error:
            return error.strerror
        if name not in self.entries:
            return "was not written by this run"
        if not path.is_file():
            return "is a folder"
        if any(state is not None and state[0] == size and state[1] == sha256(path) for state in allowed):
            return None
        earlier = allowed[-1]
        if len(allowed) == 2 and earlier is not None and size > earlier[0] and name.endswith(".jsonl"):
            return None if _starts_with(path, earlier) else ALTERED  # a line that a kill or a full disk cut short
        return ALTERED

    def finalize(self) -> None:
        """Correct the entry of the last line's file, now that nobody writes it, and rewrite the ledger."""
        if self.before is not None:
            name, earlier = self.before
            if not name:
                return  # nothing was added since ``rewrite``
            path = self.folder / name
            if (entry_of(path) if path.is_file() else None) == earlier:
                self.entries[name] = earlier
        self.rewrite()


def _starts_with(path: Path, entry: Entry) -> bool:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(entry[0])).hexdigest() == entry[1]
