"""YAML mappings that carry a digest of themselves: one that is cut short or altered is known, and not believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import read_yaml, write_yaml

DIGEST = "digest"  # the first key, so that a cut leaves it


def write_sealed(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping with its digest, whole or not at all."""
    write_yaml(path, {DIGEST: digest_of(data), **data})


def read_sealed(path: Path) -> Json:
    """The mapping, without its digest. Raises UserError naming the file where it is missing, cut short or altered."""
    data = read_yaml(path)
    if DIGEST not in data:
        raise UserError(f"{str(path)!r}: cut short or altered (its digest is missing)")
    if data.pop(DIGEST) != digest_of(data):
        raise UserError(f"{str(path)!r}: cut short or altered (its digest is of something else)")
    return data


def is_sealed(path: Path) -> bool:
    """Whether the file is there and as it was written."""
    try:
        read_sealed(path)
    except UserError:
        return False
    return True


def digest_of(data: Mapping[str, Any]) -> str:
    """SHA-256 of what YAML gives back of a mapping."""
    read_back = yaml.safe_load(yaml.safe_dump(dict(data)))
    return hashlib.sha256(json.dumps(read_back, sort_keys=True, default=str).encode()).hexdigest()
