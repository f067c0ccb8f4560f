"""Where the catalog of studies is, and what it holds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lamina.errors import UserError, unknown

BASES = "bases.yaml"
_RECORDS = "lamina_records"


def catalog_folder() -> Path:
    """Return the folder of the studies that come with Lamina: the repository's, or the package's."""
    repository = Path(__file__).parents[3] / "studies"
    return repository if (repository / BASES).is_file() else Path(__file__).parents[1] / "studies"


def records_folder() -> Path:
    """Return the folder of their records: the repository's, or the one that lamina[papers] installs.

    It does not exist without either: then nothing is recorded.
    """
    spec = find_spec(_RECORDS)
    installed = list(spec.submodule_search_locations or ()) if spec else []
    folder = catalog_folder() / "records"
    return Path(installed[0]) if installed and not folder.is_dir() else folder


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
