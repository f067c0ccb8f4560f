"""Checks of users' values. Each check raises a UserError that names the field, the value and what to give instead."""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

from lamina.errors import UserError, nearest, nearest_file, shortened

Number = TypeVar("Number", int, float)
C = TypeVar("C", bound=Callable[[str, object], object])
DTYPES = ("auto", "float32", "bfloat16", "float16")  # of a loaded model. auto means the checkpoint's dtype


@runtime_checkable
class Rows(Protocol):
    """A datasets.Dataset: rows with named columns, and a length."""

    @property
    def column_names(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Mapping[str, object]]: ...


PathLike: TypeAlias = str | os.PathLike[str]
Names: TypeAlias = PathLike | Sequence[PathLike]
Numbers: TypeAlias = str | float | Sequence[float | str]
Text: TypeAlias = PathLike | Sequence[PathLike] | Rows
"""A corpus: a text from the command line, a path, a list of paths or texts, or a dataset with a text column."""
Examples: TypeAlias = PathLike | Sequence[Mapping[str, object]] | Rows
"""Examples: a text from the command line, a path, a list of rows, or a dataset."""


def takes(kind: object) -> Callable[[C], C]:
    """Return a decorator that stores the types that Python callers may pass to a check."""

    def note(check: C) -> C:
        check.__dict__["takes"] = kind
        return check

    return note


def taken(check: object) -> Any:
    """Return the types that Python callers may pass to a check, or None if only the setting's type is allowed."""
    return getattr(check, "takes", getattr(getattr(check, "func", None), "takes", None))


_ROWS = r"\.(jsonl|ndjson|json)(\.(gz|xz|zst))?$"  # the names of files with examples
SEED_LIMIT = 2**32 - 1  # the largest seed of numpy's generators
MOST = 2**31 - 1  # of any count
# With these limits, a typing error such as an additional zero gives an error message before the memory is full.
LIMITS = {
    **dict.fromkeys(("num_layers", "base_depth", "depths"), 10_000),
    "size": 2**10,  # streams of a wiring, or layers in its blocks
    **dict.fromkeys(("trainer.dataloader_num_workers", "trainer.dataloader_prefetch_factor"), 2**10),
    **dict.fromkeys(("threads", "workers"), 2**12),
    **dict.fromkeys(("num_hidden_layers", "height"), 2**14),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads"), 2**16),
    **dict.fromkeys(("hidden_size", "base_width", "proxy_width", "verify_width", "widths"), 2**20),
    **dict.fromkeys(("batch_size", "sequences", "max_new_tokens"), 2**20),
    "intermediate_size": 2**23,
    "sequence_length": 2**24,
    "vocab_size": 2**28,
}
LONGEST_NAME, LONGEST_PATH = 255, 3800  # bytes of a name in a folder, and of a path with room for a run's own files


def whole_number(name: str, value: object, low: int = 1, *, says: str = "") -> int:
    """Return a whole number from ``low`` to the field's limit in ``LIMITS``. An error message begins with ``says``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserError(f"{says}{name}: {_shown(value)}. Give a whole number of at least {low}.")
    if value > (high := LIMITS.get(name, MOST)):
        raise UserError(f"{says}{name}: {_shown(value)} is too large. Give a whole number from {low} to {high}.")
    return value


def seed_number(name: str, value: object) -> int:
    """Return a whole number that every random generator accepts as a seed."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= SEED_LIMIT:
        raise UserError(f"{name}: {_shown(value)}. Give a whole number from 0 to {SEED_LIMIT}.")
    return value


def number(
    name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> float:
    """Return a finite number between ``low`` and ``high``. ``open_low`` and ``open_high`` exclude these bounds."""
    if is_finite(value):
        too_low = value <= low if open_low else value < low
        too_high = value >= high if open_high else value > high
        if not (too_low or too_high):
            return float(value) if isinstance(value, float) else value  # NumPy's floats are floats, but not to YAML
    span = f"above {low:g}" if open_low else f"of at least {low:g}"
    if math.isfinite(high):
        span += f" and {'below' if open_high else 'at most'} {high:g}"
    raise UserError(f"{name}: {_shown(value)}. Give a number {span}.")


def steps_or_share(name: str, value: object, *, open_low: bool = False) -> float:
    """Return a whole number of steps, or a fraction of all steps (below 1). ``open_low`` excludes 0."""
    span = number(name, value, 0.0, open_low=open_low)
    if span >= 1 and span != int(span):
        raise UserError(f"{name}: {_shown(value)}. Give a whole number of steps, or a fraction of all steps (below 1).")
    return span


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return whether a value is an int or float (but no bool) that is finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


SPECIAL = "is a pipe, a socket or a device"


def is_special(place: str | Path) -> bool:
    """Return whether a path leads to a pipe, a socket or a device. Reading from these could block forever."""
    try:
        mode = os.stat(place).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def real_path(place: str | Path) -> Path:
    return Path(os.path.realpath(place))  # Path.resolve would raise RuntimeError for a loop of links


def folder_beside(place: str | Path) -> Path:
    """Return the folder for records that Lamina converts from a file or folder NAME: NAME-lamina, beside NAME.

    If NAME begins with "checkpoint-", return lamina-NAME. Trainer would count "checkpoint-100-lamina" as a checkpoint.
    """
    whole = real_path(place)
    return whole.with_name(f"lamina-{whole.name}" if whole.name.startswith("checkpoint-") else f"{whole.name}-lamina")


_LEVELS, _ENTRIES = 3, 20_000  # of a folder that is given as an input


def refuse_special(name: str, value: str | Path, *, levels: int = _LEVELS, entries: int = _ENTRIES) -> None:
    """Raise UserError for a pipe, a socket or a device at a path or in a folder. Accept a missing path."""
    waiting = [(os.fspath(value), 0)]
    for seen, (place, level) in enumerate(waiting):
        if is_special(place):
            raise UserError(f"{name}: {place!r} {SPECIAL}. Give a file or a folder.")
        with suppress(OSError, ValueError):
            if level < levels and seen < entries and os.path.isdir(place) and (level == 0 or not os.path.islink(place)):
                waiting += [(entry.path, level + 1) for entry in os.scandir(place)]


@takes(PathLike)
def path(name: str, value: object) -> str:
    """Return a path as text, with ``~`` replaced by the home folder. Raises UserError if the value is no path."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{name}: {_shown(value)} is not a path")
    written = os.fspath(value)
    try:
        encoded = os.fsencode(written)
    except UnicodeEncodeError:
        raise UserError(
            f"{name}: {_shown(written)} has characters that a path can't have. Give another path."
        ) from None
    if not written or isinstance(written, bytes):
        raise UserError(f"{name}: {_shown(written)}. Give a path.")
    if "\0" in written:
        raise UserError(f"{name}: {_shown(written)} holds a NUL character. Remove this character.")
    if len(encoded) > LONGEST_PATH or any(len(part) > LONGEST_NAME for part in encoded.split(os.fsencode(os.sep))):
        raise UserError(
            f"{name}: {_shown(written)} is too long. Give a path of at most {LONGEST_PATH} bytes, with names of "
            f"at most {LONGEST_NAME} bytes."
        )
    if written.startswith("~"):  # a shell leaves --output=~/runs as it is
        written = str(home(name, written))
    refuse_special(name, written, levels=0)
    return written


def writable_folder(name: str, folder: Path) -> None:
    """Raise UserError if Lamina could not create the folder or write into it. This function creates no folder."""
    path(name, folder)
    for parent in (folder, *folder.absolute().parents):
        try:
            is_folder = stat.S_ISDIR(parent.stat().st_mode)
        except FileNotFoundError:
            if parent.is_symlink():
                raise UserError(f"{name}: {str(parent)!r} is a link to a missing file. Give a folder.") from None
            continue
        except OSError as error:
            if error.errno == errno.ENOTDIR:
                continue  # the file is among the parents
            raise UserError(f"{name}: {str(folder)!r}: {error.strerror}. Give another folder.") from None
        if not is_folder:
            raise UserError(f"{name}: {str(parent)!r} is a file. Give a folder.")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"{name}: you have no permission to write into {str(parent)!r}. Choose another folder.")
        return


def home(name: str, value: str | Path) -> Path:
    """Expand ``~`` and ``~user`` in a path to the home folder."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise UserError(
            f"{name}: {_shown(str(value))} names a home folder that does not exist. Give an existing path."
        ) from None


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names by their numbers, so that step-9 comes before step-10."""
    return sorted(names, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(20), name))


def nearby(missing: str | Path) -> str:
    """Return a hint for a missing path, the content of the nearest parent folder, or "" if the hint would not help."""
    parents = Path(os.path.expanduser(missing)).parents
    folder = next((parent for parent in parents if os.access(parent, os.R_OK | os.X_OK)), Path())
    if folder in (Path(), Path(folder.anchor), Path(os.path.expanduser("~"))) or not folder.is_dir():
        return ""
    names = in_order(name for name in os.listdir(folder) if not name.startswith("."))
    more = f" and {len(names) - 8} more" * (len(names) > 8)
    return f"; {_shown(str(folder))} " + (f"has {', '.join(names[-8:])}{more}" if names else "is empty")


def existing_file(name: str, source: str) -> None:
    """Raise UserError if a source is the name of a missing file. Accept sources that are no files, such as hf:NAME."""
    file = source.rpartition(":")[0] if ".py:" in source else source
    if file and ":" not in file and not (path := home(name, file)).exists():
        beside = os.listdir(path.parent) if path.parent.is_dir() else ()
        hint = nearest_file(path.name, (name for name in beside if re.search(_ROWS, name)))
        kinds = "a .jsonl, .json, .csv or .parquet file, or hf:NAME"
        raise UserError(f"{name}: {_shown(file)}: no such file{hint or '.'} Give {kinds}.")


def text(name: str, value: object) -> str:
    """Return a text or path as text. Raises UserError for NUL characters."""
    if isinstance(value, os.PathLike):
        return path(name, value)
    if not isinstance(value, str):
        raise UserError(f"{name}: {_shown(value)}. Give a text.")
    if "\0" in value:
        raise UserError(f"{name}: {_shown(value)} holds a NUL character. Remove this character.")
    return value


@takes(PathLike)
def place(name: str, value: object) -> str:
    """Check a text that may be a name, a path or a list of paths. Raises UserError if a part is too long for a file."""
    place = text(name, value)
    if any(len(part.encode(errors="replace")) > LONGEST_NAME for part in re.split(r"[/,:]", place)):
        raise UserError(f"{name}: {_shown(place)} is too long. Give names of at most {LONGEST_NAME} bytes.")
    for folder in re.findall(r"(?:^|,)\s*(~[^/,:]*)", place):
        home(name, folder)
    for part in entries(place):
        refuse_special(name, part, levels=0)
    return place


corpus_name = takes(Text)(partial(place))
examples_name = takes(Examples)(partial(place))


def switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name}: {_shown(value)} is not true or false.")
    return value


def one_of(name: str, value: object, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        raise UserError(f"{name}: {_shown(value)}{hint} (allowed: {', '.join(allowed)})")
    return value


def mapping(name: str, value: object) -> Mapping[str, object]:
    if not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise UserError(f"{name}: {_shown(value)}. Give a mapping of names to values.")
    return value


@takes(Names)
def comma_separated(name: str, value: object) -> str:
    """Join a list with commas. Return a text unchanged, and convert a number to text."""
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    if isinstance(value, Mapping | bytes | bytearray | memoryview) or not isinstance(value, Iterable):
        raise UserError(f"{name}: {_shown(value)}. Give a list, or a text with commas between the entries.")
    return ",".join(str(part) for part in value)


def entries(listed: str | None) -> list[str]:
    """Split a comma-separated text into non-empty entries. Return an empty list for None."""
    return [part for part in map(str.strip, (listed or "").split(",")) if part]


def factors(name: str, value: object) -> str | None:
    """Check a list of comma-separated finite numbers, and return the list as text. Numbers may repeat."""
    if value is None:
        return None
    text = comma_separated(name, value)
    try:
        finite = all(math.isfinite(float(part)) for part in entries(text)) and "_" not in text
    except ValueError:
        finite = False
    if not finite or not entries(text):
        raise UserError(f"{name}: {_shown(text)}. Give comma-separated numbers.")
    return text


def numbers(name: str, text: object, kind: type[Number]) -> list[Number]:
    try:
        values = [kind(part) for part in str(text).split(",") if part.strip()] if "_" not in str(text) else []
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values) or not all(map(is_finite, values)):
        noun = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{name}: {_shown(text)}. Give a comma-separated list of different {noun}.")
    return values


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a whole number of {value.bit_length()} bits"  # more digits than Python writes
    return shortened(repr(value), 200)
