"""Placements of the user's own: a YAML file or a Python file.

A YAML file holds rules (see ``rules``), or the full plan as ``Plan.to_dict`` writes it, for one depth. A Python file
registers a scheme with ``@placement``. It runs as code, with the rights of whoever reads it; a YAML file cannot.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.python_files import guarded
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError, nearest, shortened
from lamina.placements.custom import PLAN_FIELDS, from_rules
from lamina.placements.plan import Plan
from lamina.placements.registry import PLACEMENTS, Placement

SUFFIXES = (".yaml", ".yml", ".py")
LONGEST_TEXT = 2000  # characters of a title, a source, an advice
_TEXTS = ("placement", "title", "source", "initialization", "advice")
_FIELDS = ("placement", "title", "equation", "source", "initialization", "advice", "rules", *PLAN_FIELDS)


def load(path: Path) -> Placement:
    """Read a placement from a YAML or Python file. Raises UserError that names the file and the field."""
    if not path.is_file():
        raise UserError(f"placement {str(path)!r}: no such file")
    return _load_python(path) if path.suffix == ".py" else _load_yaml(path)


def _load_python(path: Path) -> Placement:
    scheme = PLACEMENTS.from_file(path)

    def make(num_layers: int, **options: object) -> Plan:
        with guarded(f"placement {str(path)!r}: the function {scheme.name!r}"):
            return scheme.make(num_layers, **options)

    return replace(scheme, make=make)


def _load_yaml(path: Path) -> Placement:
    try:
        data = read_mapping(path, "a mapping with the field 'rules'")
    except UserError as error:
        raise UserError(f"placement {error}") from None
    try:
        texts, equation = _texts(data)
    except UserError as error:
        raise UserError(f"placement {str(path)!r}: {error}") from None
    name = texts["placement"] or path.stem

    def make(num_layers: int) -> Plan:
        try:
            fields = data if "layers" in data else from_rules(data, num_layers)
            return Plan.from_dict({"placement": name, **fields})
        except UserError as error:
            raise UserError(f"placement {str(path)!r}: {error}") from None

    return Placement(
        name=name,
        title=texts.get("title", name),
        equation=equation,
        source=texts.get("source", path.name),
        initialization=texts.get("initialization", "normal"),
        advice=texts.get("advice", ""),
        description="",
        options=(),
        make=make,
    )


def _texts(data: Json) -> tuple[dict[str, str], tuple[str, ...]]:
    """The file's texts that describe the placement, by field, and its equations. Raises UserError."""
    for key in data if "layers" not in data else ():  # Plan.from_dict checks those of a full plan
        if key not in _FIELDS:
            raise UserError(f"unknown field {key!r}{nearest(str(key), _FIELDS)} (allowed: {', '.join(_FIELDS)})")
    texts = {}
    for field in _TEXTS:
        value = data.get(field, "")
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            text = shortened(repr(value), 200)
            raise UserError(f"{field}: {text} (allowed: text of at most {LONGEST_TEXT} characters)")
        if field in data or field == "placement":
            texts[field] = value
    equation = data.get("equation", ())
    lines = (equation,) if isinstance(equation, str) else equation
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise UserError(f"equation: {shortened(repr(lines), 200)} (allowed: a text, or a list of texts)")
    return texts, tuple(lines)
