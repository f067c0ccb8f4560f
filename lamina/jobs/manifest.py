"""The manifest of a folder that never changes, such as a checkpoint. A manifest lists files, sizes and hashes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from lamina.core.values import SPECIAL, is_special, real_path
from lamina.errors import UserError
from lamina.jobs.names import MANIFEST, RESULT

MODEL = "model"  # the folder of a run's trained model
NOT_A_MANIFEST = (ValueError, KeyError, TypeError, AttributeError)  # reading an altered manifest raises these

_PLAIN = (".md", ".txt", ".log", ".html")  # allowed beside a saved model, because no library reads these files

Entry = tuple[int, str]
"""A file's size in bytes, and its SHA-256."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_and_hash(path: Path) -> Entry:
    sync(path)
    return path.stat().st_size, sha256(path)


def checksum(listed: Mapping[str, Entry]) -> str:
    """Return the checksum of a manifest: the SHA-256 of the listed files, sizes and hashes."""
    return hashlib.sha256(json.dumps(sorted((n, *e) for n, e in listed.items())).encode()).hexdigest()


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def seal(folder: Path, listed: Mapping[str, Entry] | None = None) -> None:
    """Write a folder's manifest, and wait until all files are on the disk. ``listed`` has known hashes."""
    listed = {name: sync_and_hash(folder / name) for name in files_in(folder)} if listed is None else listed
    manifest = {"checksum": checksum(listed), "files": listed}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sync(folder / MANIFEST)
    for directory in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync(directory)


def listed(folder: Path) -> dict[str, Entry]:
    """Return a manifest's entries. Raises OSError if the manifest is unreadable, or NOT_A_MANIFEST if it is altered."""
    if is_special(folder / MANIFEST):
        raise OSError(errno.EINVAL, SPECIAL)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    entries = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    if manifest["checksum"] != checksum(entries):
        raise ValueError(f"{MANIFEST} is altered")
    return entries


def what_is_broken(folder: Path, *, content: bool = True) -> str | None:
    """Describe the first missing or altered file of a manifest, or return None. ``content=False`` checks only sizes."""
    try:
        files = listed(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    except NOT_A_MANIFEST:
        return f"{MANIFEST} is cut short or altered"
    for name, (size, digest) in files.items():
        try:
            actual = (folder / name).stat().st_size
            if actual != size:
                return f"{name} has {actual} bytes, not {size}"
            if content and sha256(folder / name) != digest:
                return f"{name} is altered"
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
    return None


def strays(folder: Path) -> list[str]:
    """Return the files in a folder that the folder's manifest does not list."""
    files = {*listed(folder), MANIFEST}
    return [name for name in files_in(folder) if name not in files]


def refuse_damaged(folder: Path) -> None:
    """Raise UserError if a saved model or checkpoint was altered. Accept a folder without a manifest."""
    if not (folder / MANIFEST).exists() and not (folder.name == "model" and (folder.parent / RESULT).is_file()):
        return
    about = ((file, file.stat() if file.exists() else file.lstat()) for file in sorted(folder.rglob("*")))
    state = tuple((str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in about)
    broken = _damage(folder, state) or _of_another_run(folder)
    if broken is not None:
        raise UserError(f"checkpoint {str(folder)!r}: {broken}", "Restore the original files.")


@lru_cache(maxsize=64)
def _damage(folder: Path, files: tuple[tuple[str, int, int, int], ...]) -> str | None:
    broken = what_is_broken(folder)
    if broken is None:
        foreign = [n for n in strays(folder) if not (n.endswith(_PLAIN) or Path(n).name.startswith("."))]
        broken = f"{foreign[0]} does not belong to the model" if foreign else None
    return broken


def _of_another_run(folder: Path) -> str | None:
    """Return a message if the result.json beside a model belongs to another model, or None otherwise."""
    try:
        sealed = json.loads((folder.parent / RESULT).read_text(encoding="utf-8"))["seal"]["files"]
    except (OSError, *NOT_A_MANIFEST):  # not a run's model, or a run of an older version of Lamina
        return None
    digest = sealed.get(f"{folder.name}/{MANIFEST}")
    another = digest is not None and digest != sha256(folder / MANIFEST)
    return f"not the run's model, because {RESULT} lists the checksum of another model" if another else None


def model_folder(path: str | Path) -> Path:
    """Return the folder of a saved model: the subfolder model/ of a run's folder, or the folder itself."""
    inner = Path(path) / MODEL
    return inner if any((inner / name).is_file() for name in ("config.json", MANIFEST)) else Path(path)


def how_to_load(folder: str | Path) -> str:
    """Return lines on a saved model: its folder and class, the Python code that loads it, and how to serve it.

    Only a decoder of transformers has the line on serving, because vLLM has no code for Lamina's models.
    """
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    name = str((config.get("architectures") or [""])[0])
    auto = f"AutoModelFor{name.partition('For')[2] or 'CausalLM'}"
    modules = "lamina, transformers" if config.get("model_type") == "lamina" else "transformers"
    loads = f"import {modules}; model = transformers.{auto}.from_pretrained({str(folder)!r})"
    standard = name.endswith("ForCausalLM") and modules == "transformers"
    serves = (
        f"to serve the model without Lamina (not tested): vllm serve {shlex.quote(str(folder))}\n" if standard else ""
    )
    return f"the model: {folder} ({name})\n{serves}to load it: {loads}"


def content_hash(path: str | Path) -> str:
    """Return a hash that identifies a saved model, from the manifest, the model's files, or the name on the hub."""
    folder = model_folder(path)
    if (folder / MANIFEST).is_file():
        return sha256(folder / MANIFEST)
    parts = [sha256(file) for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))) if file.is_file()]
    return hashlib.sha256("".join(parts or [str(path)]).encode()).hexdigest()


def refuse_as_output(output: str, model: str) -> None:
    """Raise UserError if the output folder is or contains a saved model that the job reads."""
    target, held = real_path(output), model_folder(model)
    if held.exists() and target in (real_path(held), *real_path(held).parents):
        raise UserError(f"output: {output!r} holds the model that this job reads. Choose another folder.")
