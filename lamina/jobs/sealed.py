"""YAML mappings that carry their own digest, so that a cut or altered file is noticed and ignored."""

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

DIGEST = "digest"  # the first key, so that it survives a cut


def write_sealed(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping with its digest, whole or not at all."""
    write_yaml(path, {DIGEST: digest_of(data), **data})


def read_sealed(path: Path) -> Json:
    """The mapping without its digest. Raises UserError naming the file if it is missing, cut short or altered."""
    data = read_yaml(path)
    if DIGEST not in data:
        raise UserError(f"{str(path)!r}: cut short or altered (its digest is missing)")
    if data.pop(DIGEST) != digest_of(data):
        raise UserError(f"{str(path)!r}: cut short or altered (its digest does not match)")
    return data


def is_sealed(path: Path) -> bool:
    """Whether the file exists and is as it was written."""
    try:
        read_sealed(path)
    except UserError:
        return False
    return True


def digest_of(data: Mapping[str, Any]) -> str:
    """SHA-256 of a mapping after a round trip through YAML."""
    read_back = yaml.safe_load(yaml.safe_dump(dict(data)))
    return hashlib.sha256(json.dumps(read_back, sort_keys=True, default=str).encode()).hexdigest()
