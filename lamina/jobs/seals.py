"""Detect altered records: result.json contains a checksum of itself, and the hashes of the record files."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from lamina.core.values import refuse_special
from lamina.errors import UserError
from lamina.jobs.files import (
    DIGEST,
    SEAL,
    as_json,
    digest_of_json,
    noted,
    read_result,
    read_seal,
    read_sealed,
    write_json,
)
from lamina.jobs.manifest import MODEL, sha256
from lamina.jobs.names import (
    CLAIMS,
    CONFIG,
    COORDINATES,
    ENVIRONMENT,
    LAYERS,
    MANIFEST,
    MEASURES,
    METRICS,
    PREFLIGHT,
    PREFLIGHT_ROWS,
    RESULT,
    RESULTS,
    SEALED,
    SLOPES,
    STUDY,
    TRANSFER,
    TRIAL,
)
from lamina.jobs.status import ENDED

logger = logging.getLogger(__name__)

GROWING = (METRICS, "layers/part-*", "probes/*/part-*")
"""The record files that grow during a run. A checkpoint stores each record file's hash at the checkpoint's step."""
_MISSING = "missing"
_FIRST = f"first line of {METRICS}"
_RECORDS = (
    *(*GROWING, "*.yaml", "*.json", "*.jsonl", "*.parquet", f"{MODEL}/{MANIFEST}"),
    *("figures/*.json", "scores/*/*.json", "items/*/*.parquet"),  # of probes and evaluations
)
_APART = (RESULT, ENVIRONMENT, TRIAL, MEASURES)  # files that Lamina rewrites, or that the trial's key identifies
_OF_PREFLIGHT = (PREFLIGHT, PREFLIGHT_ROWS, LAYERS)
_TABLES = (
    *(STUDY, RESULTS, CLAIMS, TRANSFER, SLOPES, COORDINATES, "table.*", "tables/*.parquet"),
    *_OF_PREFLIGHT,
)


def write_result(folder: Path, result: Mapping[str, object]) -> None:
    """Write result.json with the hashes of the folder's files. Raises OSError."""
    write_with_seal(folder, RESULT, result, _RECORDS)


def write_with_seal(folder: Path, name: str, data: Mapping[str, object], patterns: Iterable[str]) -> None:
    """Write a JSON file with a checksum, and with the hashes of the files that match ``patterns``. Raises OSError."""
    data = {key: value for key, value in as_json(data).items() if key != SEAL}
    seal = {"trial": _trial(folder), "files": hashes(folder, patterns)}
    write_json(folder / name, {**data, SEAL: {DIGEST: digest_of_json({**data, SEAL: seal}), **seal}})


def seal_tables(folder: Path) -> None:
    """Write seal.json with the hashes of the tables that a job computed from its runs. Raises OSError."""
    if hashes(folder, _TABLES):
        write_with_seal(folder, SEALED, {}, _TABLES)


def lift_seal(folder: Path) -> bool:
    """Delete seal.json before a job rewrites its tables. Return whether the tables still match seal.json."""
    try:
        # After a fault, seal.json stays until the job has rewritten the table. The job cannot rewrite study.yaml.
        faults = altered(folder, SEALED, missing=False)
    except UserError as error:
        faults = {SEALED: str(error)}
    if STUDY in faults:
        refuse_tables(folder)
    for name, fault in faults.items():
        logger.warning("%s: %s. Lamina rewrites the file", folder / name, fault)
    if not faults:
        (folder / SEALED).unlink(missing_ok=True)
    return not faults


def refuse_tables(folder: Path) -> None:
    """Raise UserError if a table was altered after Lamina wrote seal.json. Accept a folder without seal.json."""
    refuse_altered(folder, SEALED, missing=False)


def hashes(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    paths = sorted(
        {path for pattern in patterns for path in folder.glob(pattern) if path.is_file() and path.name not in _APART}
    )
    return {
        path.relative_to(folder).as_posix(): hash_of(
            path.absolute(), (stat := path.stat()).st_size, stat.st_mtime_ns, stat.st_ino
        )
        for path in paths
    }


def altered(folder: Path, by: str = RESULT, *, missing: bool = True) -> dict[str, str]:
    """Map each altered or missing record of a folder to a description of the fault.

    ``by`` is the name of the file that lists the records' hashes. A missing record is a fault only if ``missing`` is
    true. Raises UserError if the file with the hashes was altered.
    """
    seal = read_seal(folder / by, noted(folder / by)) or {}
    faults = {}
    if seal and seal["trial"] != _trial(folder):
        faults[by] = f"not from the same run as the {TRIAL} in this folder"
    for name, digest in seal.get("files", {}).items():
        if name == f"{MODEL}/{MANIFEST}":
            continue
        path = folder / name
        if not path.is_file():
            faults |= {name: _MISSING} if missing else {}
        elif sha256(path) != digest and name == CONFIG:  # config.yaml also contains a checksum
            faults[by] = f"not from the same run as the {CONFIG} in this folder, or one of these two files is altered"
        elif sha256(path) != digest and not (name == STUDY and _is_cut(path)):
            faults[name] = f"altered since Lamina wrote {by}, or from another run"
    if seal and by == RESULT:
        there = {path.relative_to(folder).as_posix() for pattern in GROWING for path in folder.glob(pattern)}
        faults |= dict.fromkeys(sorted(there - seal["files"].keys()), f"not among the records that {RESULT} lists")
    return faults


def refuse_altered(folder: Path, by: str = RESULT, *, missing: bool = True) -> None:
    _refuse(folder, by, altered(folder, by, missing=missing))


def _refuse(folder: Path, by: str, faults: Mapping[str, str]) -> None:
    for name, fault in faults.items():
        again = f"delete the folder {str(folder)!r} and run the job again"
        if by == SEALED and name not in (STUDY, *_OF_PREFLIGHT):
            again = "add --resume to rewrite the file"
        raise UserError(f"{str(folder / name)!r}: {fault}. Restore the original file, or {again}.")


def refuse_page(folder: Path) -> None:
    """Raise UserError if a finished job has an altered record. For an unfinished job, log a warning instead."""
    refuse_special("folder", folder)
    refuse_tables(folder)
    faults = altered(folder)
    if (read_result(folder) or {}).get("status") in (*ENDED, "imported"):
        _refuse(folder, RESULT, {name: fault for name, fault in faults.items() if fault != _MISSING})
    for name, fault in faults.items():
        logger.warning("%s: %s", folder / name, fault)


def grown_records(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the size and SHA-256 of each file that grows during a run, and of the first line of metrics.jsonl."""
    hashes_now = {name: ((folder / name).stat().st_size, digest) for name, digest in hashes(folder, GROWING).items()}
    if METRICS in hashes_now:
        with (folder / METRICS).open("rb") as file:
            line = file.readline()
        hashes_now[_FIRST] = (len(line), hashlib.sha256(line).hexdigest())
    return hashes_now


def refuse_regrown(folder: Path, known: Mapping[str, tuple[int, str]], checkpoint: str) -> None:
    """Raise UserError if a record file has changed in the part that existed at the checkpoint."""
    for entry, (size, digest) in known.items():
        name = METRICS if entry == _FIRST else entry
        path = folder / name
        if not path.is_file() and name.startswith("probes/"):  # other code warns about other missing files
            logger.warning("%s: %s, so the page leaves this record out", path, _MISSING)
        # the resumed run writes the missing part again
        if not path.is_file() or (name == METRICS and path.stat().st_size < size):
            continue
        if _beginning(path, size) != digest:
            raise UserError(
                f"resume: {name} in {str(folder)!r} has changed since {checkpoint} was saved. Restore the "
                "original file, remove the changed file, or begin again with --overwrite."
            )


def _beginning(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(size, 2**20))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def _is_cut(path: Path) -> bool:
    try:
        read_sealed(path)
    except UserError:
        return True
    return False


@lru_cache(maxsize=2**16)
def hash_of(path: Path, *state: int) -> str:
    """Return a file's SHA-256. Lamina caches the hash by size, modification time and inode."""
    return sha256(path)


def _trial(folder: Path) -> str | None:
    """Return the identifier of a run in a study's store of runs, or None for a folder outside the store."""
    identity = noted(folder / TRIAL)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16] if identity else None
