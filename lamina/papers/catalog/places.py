"""Where the catalog of studies is, and what it holds."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from lamina.errors import UserError, unknown

BASES = "bases.yaml"


def catalog_folder() -> Path:
    """The folder of the studies that come with Lamina: the repository's, or the installed copy."""
    inside = Path(__file__).parents[3] / "studies"
    return inside if (inside / BASES).is_file() else Path(sysconfig.get_path("data")) / "share" / "lamina" / "studies"


def names() -> list[str]:
    """The names of all studies of the catalog."""
    return sorted(path.stem for path in catalog_folder().glob("*.yaml") if path.name != BASES)


def find(study: str) -> Path:
    """The file of a study: a name of the catalog, or the path of a user's own. Raises UserError."""
    path = Path(study)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"study: {study!r} is no file (allowed: a YAML file, or a name: see `lamina study list`)")
        return path.resolve()
    if study not in (known := names()):
        raise unknown("study", study, known)
    return catalog_folder() / f"{study}.yaml"
