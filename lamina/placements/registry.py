"""The registry of placements: ``@placement`` adds one.

A scheme is one file of ``schemes/``. Everything else (command line, docs, diagrams, tests) iterates over the registry.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lamina.core.registry import Registry
from lamina.placements.plan import Plan
from lamina.placements.registry import COMMON, Option, read_options

SCHEMES = "lamina.placements.schemes"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A published scheme: its equation, source, recommended initialization, advice and options."""

    name: str
    title: str
    equation: tuple[str, ...]
    source: str
    initialization: str
    advice: str
    description: str
    options: tuple[Option, ...]
    make: Callable[..., Plan]

    def all_options(self) -> tuple[Option, ...]:
        """The placement's own options, then those that every placement takes."""
        own = {option.name for option in self.options}
        return (*self.options, *(option for option in COMMON if option.name not in own))


def _schemes() -> Iterator[str]:
    package = importlib.import_module(SCHEMES)
    return (f"{SCHEMES}.{module.name}" for module in pkgutil.iter_modules(package.__path__))


PLACEMENTS: Registry[Placement] = Registry("placement", modules=_schemes, plugins="lamina.placements")
names, get = PLACEMENTS.names, PLACEMENTS.get


def placement(
    name: str, *, title: str, equation: tuple[str, ...], source: str, initialization: str = "normal", advice: str = ""
) -> Callable[[Callable[..., Plan]], Callable[..., Plan]]:
    """Register a function ``(num_layers, *, options...) -> Plan`` as the placement ``name``.

    The options are the function's keyword-only parameters, with their help from the docstring's Args.
    """

    def register(make: Callable[..., Plan]) -> Callable[..., Plan]:
        description, options = read_options(make)
        scheme = Placement(
            name=name,
            title=title,
            equation=equation,
            source=source,
            initialization=initialization,
            advice=advice,
            description=description,
            options=options,
            make=make,
        )
        PLACEMENTS.add(name, scheme)
        return make

    return register
