"""Read and write the files of a job's folder. Lamina writes a temporary file first, so that no file is incomplete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lamina.core.extras import missing_extra
from lamina.core.frames import Frame
from lamina.core.json_types import Json
from lamina.core.values import SPECIAL, is_special
from lamina.core.yaml_files import read_back, read_mapping
from lamina.errors import UserError
from lamina.jobs.manifest import sync
from lamina.jobs.names import CLAIMS, CONFIG, RESULT

DIGEST = "digest"
SEAL = "seal"  # the key of the checksum and the hashes in result.json, see seals.py


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then rename the file to ``path``. After an exception, the old file stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # otherwise, Lamina would write to the target of a link
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write JSON, with null for NaN and infinities."""
    write_text(path, json.dumps(finite(data), indent=2, ensure_ascii=False) + "\n")


def write_parquet(path: Path, table: Frame, **options: Any) -> None:
    """Write a pandas table completely or not at all. ``options`` are arguments of pandas' ``to_parquet``."""
    with writing(path) as temporary:
        table.to_parquet(temporary.absolute(), index=False, **options)  # a relative path with a colon would be a URI


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(finite(record)) + "\n" for record in records))


def write_yaml(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True))


def read_json(path: Path) -> Json:
    """Read a JSON file that holds an object. Raises OSError or ValueError."""
    if is_special(path):
        raise OSError(errno.EINVAL, SPECIAL, str(path))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def noted(path: Path) -> Json:
    """Read a JSON object. Return {} if the file is missing or unreadable, or holds no JSON object."""
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_sealed(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as YAML with a checksum as the first key."""
    write_yaml(path, {DIGEST: _digest(read_back(dict(data))), **data})


def read_sealed(path: Path) -> Json:
    """Read a YAML file and verify its checksum. Raises UserError if the file is missing or altered."""
    data = read_mapping(path)
    if DIGEST not in data:
        raise UserError(f"{str(path)!r}: cut short or altered (its checksum is missing)", "Restore the file.")
    if data.pop(DIGEST) != _digest(data):
        raise UserError(f"{str(path)!r}: cut short or altered (its checksum does not match)", "Restore the file.")
    return data


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def is_table(path: Path) -> bool:
    """Return whether a Parquet or .npz file has an intact end. Raises UserError if pyarrow is needed but missing."""
    if path.suffix == ".npz":
        return zipfile.is_zipfile(path)
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise missing_extra(str(path), error) or error from None
    try:
        pq.read_metadata(path.absolute())
    except (OSError, ValueError):
        return False
    return True


def finite(data: Any) -> Any:
    """Replace NaN and infinities, which JSON does not allow, with None."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, int | str):  # far faster than the next question
        return data
    if isinstance(data, Mapping):
        return {k: finite(v) for k, v in data.items()}
    return [finite(v) for v in data] if isinstance(data, list | tuple) else data


def as_json(data: Mapping[str, object]) -> Json:
    """Convert data to JSON and read the result again, with None for NaN and infinities."""
    return json.loads(json.dumps(finite(data)))


def read_result(folder: Path) -> Json | None:
    """Read a run's result.json, or return None if the run has not ended. Raises UserError for a wrong checksum."""
    data = noted(folder / RESULT)
    if "status" not in data:
        return None
    read_seal(folder / RESULT, data)
    return {name: value for name, value in data.items() if name != SEAL}


def read_seal(path: Path, data: Json) -> Json | None:
    """Return the hashes of other files that a JSON file lists, or None. Raises UserError if the file is altered."""
    seal = data.get(SEAL)
    if not data or (seal is None and not _is_sealed(path.parent)):
        return None
    seal = dict(seal) if isinstance(seal, dict) else {}
    digest = seal.pop(DIGEST, None)
    if digest != digest_of_json({**data, SEAL: seal}):
        raise UserError(
            f"{str(path)!r}: altered (its checksum does not match). Restore the original file. Or remove the "
            "altered file: --resume computes missing files again."
        )
    return seal


def _is_sealed(folder: Path) -> bool:
    try:
        with (folder / CONFIG).open("rb") as file:
            return file.readline(20).startswith(f"{DIGEST}:".encode())
    except OSError:
        return False


def digest_of_json(data: Json) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def read_config(folder: Path) -> Json:
    """Read a job's config.yaml and verify its checksum. Raises UserError if the file is missing or altered."""
    path = folder / CONFIG
    data = read_mapping(path)
    if DIGEST in data and data.pop(DIGEST) != _digest(data):
        raise UserError(f"{str(path)!r}: cut short or altered (its checksum does not match)", "Restore the file.")
    return data


def disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk caused an exception, even if a library wrapped the exception."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "os error 28" in str(error) or "No space left on device" in str(error):
            return True
        # an error of torch.save's stream has no errno, and only reports an incomplete write
        if re.search(r"inline_container.*unexpected pos|PytorchStreamWriter failed|iostream error", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def full_disk(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_claims(folder: Path) -> list[Json] | None:
    """Read the verdicts in a study's folder. Return None if there is no file. Raises UserError for a damaged file."""
    path = folder / CLAIMS
    if not path.is_file():
        return None
    try:
        claims = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r}: not readable ({error})") from None
    if not isinstance(claims, list) or not all(isinstance(claim, dict) for claim in claims):
        raise UserError(f"{str(path)!r} does not hold a list of verdicts. Restore the original file.")
    return claims
