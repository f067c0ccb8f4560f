"""What a probe is, and where the probes register themselves: one file each, nothing else knows their names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lamina.core.python_files import run_file
from lamina.errors import UserError, unknown
from lamina.placements.custom import parse_spec, split_specs
from lamina.probes.engine.listing import PROBES, read

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from lamina.probes.engine.context import Context
    from lamina.probes.structure.discovery import Point

_PROBES: dict[str, type[Probe]] = {}
_loaded = False


class Probe:
    """One measurement of a model's layers. A subclass registers itself with ``@probe``; its keywords are its options.

    A probe either streams (``points`` is not empty): the engine runs the forward passes once for all streaming probes,
    hands over each watched tensor as it appears (``see``) and keeps none of them; or it does its work in ``finish``.
    Both may be done by one probe. Nothing may keep the states of all layers unless it has to.

    Attributes:
        name: what the command line calls it.
        title: the heading of its section on the page.
        summary: one sentence for `lamina probe --help`: what it measures.
        source: the paper and the equation or figure that define it.
        needs: what it needs of the forward passes, of "logits" (the whole model is run, with its head) and "tokens"
            (the model reads token ids).
        over_steps: of a run's scheduled probes: the metrics that its page draws over the steps (none named: all).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    over_steps: ClassVar[tuple[str, ...]] = ()

    def cost(self, context: Context) -> float:
        """About how many tokens' forward passes of the whole model its own work takes, beside the shared passes.

        An estimate: probes run in its order, and the time that is left is told by it.
        """
        return 0.0

    def begin(self, context: Context) -> None:
        """Called once, before the forward passes. Raises UserError where the probe has no meaning for the model."""

    def points(self) -> Mapping[Any, Point]:
        """What to watch in each forward pass, by a key of the probe's own."""
        return {}

    def see(self, key: Any, value: torch.Tensor) -> None:
        """A watched tensor [batch, tokens, channels] at the moment that it appears; not to be kept or changed."""

    def end_batch(self, inputs: Mapping[str, torch.Tensor], output: Any) -> None:
        """After a forward pass: its inputs (input_ids [batch, tokens] or pixel_values) and the model's output."""

    def standard_error(self) -> float | None:
        """The largest relative standard error of what the page shows, None where it isn't an average over text.

        Inf while there is too little to tell. The forward passes stop once that of each probe is small enough.
        """
        return None

    def finish(self, context: Context) -> pd.DataFrame:
        """The tidy result. Layers count from 0; state l is the stream before layer l, state N that behind the last."""
        raise NotImplementedError

    def figures(self, frame: pd.DataFrame) -> Sequence[tuple[Any, str]]:
        """Plotly figures of a result, each with its caption (plain text)."""
        return []

    def sentences(self, frame: pd.DataFrame) -> Sequence[str]:
        """What a result says, in plain sentences with its numbers."""
        return []


def check_sequences(name: str, sequences: Any) -> int:
    """The option ``sequences`` of a probe: how many it measures, 0 for all. Raises UserError for what is no count."""
    if isinstance(sequences, bool) or not isinstance(sequences, int) or sequences < 0:
        raise UserError(f"{name}: option 'sequences' is {sequences!r} (allowed: a whole number, 0 for all)")
    return sequences


def probe(made: type[Probe]) -> type[Probe]:
    """Register a probe (a class decorator)."""
    for attribute in ("name", "title", "summary", "source"):
        if not isinstance(getattr(made, attribute, None), str):
            raise TypeError(f"{made.__name__}: a probe states its {attribute}")
    if made.name in _PROBES and _PROBES[made.name].__module__ != made.__module__:
        raise ValueError(f"two probes are named {made.name!r}")
    _PROBES[made.name] = made
    return made


def names() -> list[str]:
    """The names of all probes, sorted."""
    _load()
    return sorted(_PROBES)


def get(name: str) -> type[Probe]:
    """The probe's class. Raises UserError for an unknown name, with the nearest known."""
    _load()
    if name not in _PROBES:
        raise unknown("probe", name, _PROBES)
    return _PROBES[name]


def options_of(made: type[Probe]) -> dict[str, Any]:
    """The options of a probe with their defaults."""
    if made.__init__ is object.__init__:
        return {}
    return {
        p.name: p.default
        for p in inspect.signature(made).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }


def make(spec: str | Probe) -> Probe:
    """A probe from ``name`` or ``name(option=value)``. Raises UserError that names the option."""
    if isinstance(spec, Probe):
        return spec
    if own := re.fullmatch(r"\s*([^()]+\.py)\s*(\(.*\))?\s*", spec, re.S):
        spec = load_file(Path(own[1])) + (own[2] or "")
    name, options = parse_spec(str(spec))
    made = get(str(name))
    allowed = options_of(made)
    for option in options:
        if option not in allowed:
            raise unknown(f"option of the probe {made.name}", option, allowed)
    try:
        return made(**options)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"probes: {spec!r}: {error}") from None


def make_all(wanted: str | Iterable[str | Probe]) -> list[Probe]:
    """The probes of ``all`` or of a list of specs, each once. Raises UserError for a name given twice or unknown."""
    if isinstance(wanted, str):
        wanted = names() if wanted.strip() == "all" else split_specs(wanted)
    made = [one for spec in wanted for one in ([make(n) for n in names()] if spec == "all" else [make(spec)])]
    if not made:
        raise UserError(f"probes: none given (allowed: all, {', '.join(names())})")
    for one in made:
        if [other.name for other in made].count(one.name) > 1:
            raise UserError(f"probes: {one.name!r} is given twice (allowed: once)")
    return made


def load_file(path: Path) -> str:
    """Load a probe of one's own from a Python file; returns its name. Raises UserError that names the file."""
    if not path.is_file():
        raise UserError(f"probe {str(path)!r}: no such file")
    _load()  # the package's own first: the file must not take one's name
    before = dict(_PROBES)
    run_file("probe", path)
    new = [name for name, made in _PROBES.items() if before.get(name) is not made]
    if len(new) != 1:
        raise UserError(f"probe {str(path)!r}: registers {len(new)} probes with @probe (needed: one)")
    return new[0]


def _load() -> None:
    global _loaded
    if _loaded:
        return
    for path in sorted(PROBES.glob("*.py")):
        if any(read(path)):  # only the files that hold a probe
            importlib.import_module(f"lamina.probes.{path.stem}")
    _loaded = True
