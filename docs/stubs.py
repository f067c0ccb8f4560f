"""Writes lamina/api/__init__.pyi, in which an editor finds every setting: ``python docs/stubs.py``."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import lamina.api
from lamina.catalog import JOBS
from lamina.core import values

STUB = Path(lamina.api.__file__).with_suffix(".pyi")
TYPES = ("Examples", "Names", "Numbers", "PathLike", "Text")
HEAD = '''"""Every setting of every job, for editors; written by docs/stubs.py."""

from typing import Literal

import pandas as pd

{written}
from lamina.api.results import Comparison as Comparison
from lamina.api.results import Diagnosis as Diagnosis
from lamina.api.results import RunResult as RunResult
from lamina.api.results import StudyOutcome as StudyOutcome
from lamina.core.json_types import Json
from lamina.core.values import Examples, Names, Numbers, PathLike, Text
from lamina.jobs.folder import Resume

WRITTEN: tuple[str, ...]
'''


def text() -> str:
    """The whole stub."""
    names = [row.function_name for row in JOBS.values()]
    jobs = {name: getattr(lamina.api, name) for name in names}
    written = "\n".join(f"from lamina.api.models import {name} as {name}" for name in lamina.api.WRITTEN)
    return HEAD.replace("{written}", written) + "".join(
        f"\n{declaration(name, inspect.signature(job))}" for name, job in jobs.items()
    )


def declaration(name: str, signature: inspect.Signature) -> str:
    """One function, a line per setting."""
    lines = [
        f"    {p.name}: {written(p.annotation)} = {p.default!r},".replace("'", '"')
        for p in signature.parameters.values()
    ]
    about = textwrap.indent(str(getattr(lamina.api, name).__doc__), "    ").strip()
    head = [f"def {name}(", "    *,", *lines, f") -> {written(signature.return_annotation)}:"]
    return "\n".join([*head, f'    """{about}\n    """']) + "\n"


def written(kind: object) -> str:
    """A type as the stub writes it."""
    for name in TYPES:
        if kind == getattr(values, name):
            return name
        if kind == getattr(values, name) | None:
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
