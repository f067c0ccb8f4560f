"""The probes' names, summaries and options, read from their files without running them: help needs no torch."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lamina.core import specs
from lamina.errors import unknown

PROBES = Path(__file__).parents[1]  # one file each


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A probe's description. ``options`` are its keywords with their defaults as written; ``over_steps`` are the
    metrics that are drawn over a run's steps (empty: all).
    """

    name: str
    title: str
    summary: str
    source: str
    options: dict[str, str]
    over_steps: tuple[str, ...] = ()


@cache
def listed() -> dict[str, Listed]:
    """Every probe of the package by its name, sorted."""
    probes = [probe for path in sorted(PROBES.glob("*.py")) for probe in read(path)]
    return {probe.name: probe for probe in sorted(probes, key=lambda probe: probe.name)}


def check_probes(chosen: str) -> None:
    """Raise UserError for a name or an option that no listed probe has; the user's own probes are left to the job."""
    for spec in [] if chosen.strip() == "all" else specs.split(chosen, "probe"):
        if spec != "all":
            check_probe(spec)


def check_probe(spec: str) -> None:
    """Raise UserError for a name or an option that no probe has, with the nearest one."""
    name, options = specs.parse(spec, "probe")
    registry = sys.modules.get("lamina.probes.engine.registry")  # which knows the probes of the user's own, too
    known = listed()
    if name not in known:
        if Path(name).suffix == ".py" or (registry is not None and registry.REGISTRY.registered(name) is not None):
            return
        raise unknown("probe", name, known)
    for option in options:
        if option not in known[name].options:
            raise unknown(f"option of the probe {name}", option, known[name].options)


def read(path: Path) -> Iterator[Listed]:
    """The probes of one file: its classes that are decorated with ``@probe``."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and any(_name(d) == "probe" for d in node.decorator_list):
            attributes = dict(_texts(node))
            if "name" in attributes:
                words = {k: str(attributes.get(k, "")) for k in ("name", "title", "summary", "source")}
                yield Listed(**words, options=_options(node), over_steps=tuple(attributes.get("over_steps", ())))


def _name(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """The class attributes that are plain values (adjacent string literals are one)."""
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            with contextlib.suppress(ValueError):  # the value of a call, not a text
                value = ast.literal_eval(statement.value)
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))


def _options(node: ast.ClassDef) -> dict[str, str]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            words, positional = statement.args, statement.args.args[1:]
            written = list(zip(words.kwonlyargs, words.kw_defaults, strict=True))
            skipped = len(positional) - len(words.defaults)
            written += [
                (argument, words.defaults[i - skipped] if i >= skipped else None)
                for i, argument in enumerate(positional)
            ]
            return {argument.arg: "" if default is None else ast.unparse(default) for argument, default in written}
    return {}
