"""What a probe is, and where the probes register themselves: one file each, nothing else knows their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lamina.core import specs
from lamina.core.registry import Registry
from lamina.errors import UserError, unknown
from lamina.probes.engine.listing import PROBES, read

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from lamina.probes.engine.context import Context
    from lamina.probes.structure.discovery import Point


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


def _modules() -> Iterator[str]:
    return (f"lamina.probes.{path.stem}" for path in sorted(PROBES.glob("*.py")) if any(read(path)))


REGISTRY: Registry[type[Probe]] = Registry("probe", modules=_modules)
names, get = REGISTRY.names, REGISTRY.get


def probe(cls: type[Probe]) -> type[Probe]:
    """Register a probe (a class decorator)."""
    for attribute in ("name", "title", "summary", "source"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise TypeError(f"{cls.__name__}: a probe states its {attribute}")
    namesake = REGISTRY.registered(cls.name)
    if namesake is not None and namesake.__module__ != cls.__module__:
        raise ValueError(f"two probes are named {cls.name!r}")
    REGISTRY.add(cls.name, cls)
    return cls


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
    target, options = specs.parse(str(spec), "probe")
    cls = REGISTRY.from_file(Path(target)) if Path(target).suffix == ".py" else get(target)
    allowed = options_of(cls)
    for option in options:
        if option not in allowed:
            raise unknown(f"option of the probe {cls.name}", option, allowed)
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"probes: {spec!r}: {error}") from None


def make_all(wanted: str | Iterable[str | Probe]) -> list[Probe]:
    """The probes of ``all`` or of a list of specs, each once. Raises UserError for a name given twice or unknown."""
    if isinstance(wanted, str):
        wanted = names() if wanted.strip() == "all" else specs.split(wanted, "probe")
    made = [one for spec in wanted for one in ([make(n) for n in names()] if spec == "all" else [make(spec)])]
    if not made:
        raise UserError(f"probes: none given (allowed: all, {', '.join(names())})")
    for one in made:
        if [other.name for other in made].count(one.name) > 1:
            raise UserError(f"probes: {one.name!r} is given twice (allowed: once)")
    return made
