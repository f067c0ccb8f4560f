"""Writes lamina/api/__init__.pyi, in which an editor finds every setting: ``python docs/stubs.py``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import lamina.api
from lamina.api import given

STUB = Path(lamina.api.__file__).with_suffix(".pyi")
TYPES = ("Examples", "Names", "Numbers", "PathLike", "Text")
HEAD = '''"""Every setting of every job, for editors; written by docs/stubs.py."""

from typing import Literal

import pandas as pd

from lamina.api.given import Examples as Examples
from lamina.api.given import Names as Names
from lamina.api.given import Numbers as Numbers
from lamina.api.given import PathLike as PathLike
from lamina.api.given import Text as Text
from lamina.api.models import backbones as backbones
from lamina.api.models import convert as convert
from lamina.api.models import diagnose as diagnose
from lamina.api.models import generate as generate
from lamina.api.models import report as report
from lamina.api.results import Comparison as Comparison
from lamina.api.results import Diagnosis as Diagnosis
from lamina.api.results import RunResult as RunResult
from lamina.api.results import StudyOutcome as StudyOutcome
from lamina.core.json_types import Json
from lamina.jobs.folder import Resume

HOME: dict[str, tuple[str, ...]]
'''


def text() -> str:
    """The whole stub."""
    names = [name for names in lamina.api.HOME.values() for name in names]
    jobs = {name: function for name in names if hasattr(function := getattr(lamina.api, name), "record")}
    return HEAD + "".join(f"\n{declaration(name, inspect.signature(job))}" for name, job in jobs.items())


def declaration(name: str, signature: inspect.Signature) -> str:
    """One function, a line per setting."""
    lines = [
        f"    {p.name}: {written(p.annotation)} = {p.default!r},".replace("'", '"')
        for p in signature.parameters.values()
    ]
    about = str(getattr(lamina.api, name).__doc__)
    head = [f"def {name}(", "    *,", *lines, f") -> {written(signature.return_annotation)}:"]
    return "\n".join([*head, f'    """{about}"""']) + "\n"


def written(kind: object) -> str:
    """A type as the stub writes it."""
    for name in TYPES:
        if kind == getattr(given, name):
            return name
        if kind == getattr(given, name) | None:
            return f"{name} | None"
    if isinstance(kind, str):
        return kind
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(written(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return "Literal[" + ", ".join(f'"{value}"' for value in get_args(kind)) + "]"
    if kind is type(None):
        return "None"
    if get_origin(kind) is dict:
        return "Json"
    return re.sub(r".*\.", "", getattr(kind, "__name__", str(kind)))


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
