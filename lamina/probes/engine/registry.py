"""The base class and the registry of probes. Each probe has its own file."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from lamina.core import specs
from lamina.core.registry import Registry
from lamina.errors import UserError, unknown

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from lamina.probes.engine.context import Context
    from lamina.probes.engine.figures import Figure
    from lamina.probes.structure.hooks import Output
    from lamina.probes.structure.sites import Point

COLUMNS = ["layer", "sublayer", "role", "index", "metric", "value", "standard_error"]  # of most probes' frames
PROBES = Path(__file__).parents[1]  # one file each


class Sample(NamedTuple):
    """The number of measured sequences (or images) and tokens."""

    sequences: int
    tokens: int


def sample_of(batches: Iterable[Mapping[str, torch.Tensor]]) -> Sample:
    """Count the sequences, and the tokens without padding, in batches."""
    sequences = tokens = 0
    for batch in batches:
        first = next(iter(batch.values()))
        sequences += len(first)
        mask = batch.get("attention_mask")
        tokens += (first.numel() if mask is None else int(mask.sum())) if first.ndim == 2 else 0
    return Sample(sequences, tokens)


class Probe(ABC):
    """The base class of a measurement. ``@probe`` registers a subclass, and ``__init__`` takes the probe's options.

    Most probes name tensors to watch in ``points`` and receive them in ``see`` during shared forward passes. The engine
    keeps no tensor. A probe may also do work in ``finish``.

    ``name``: the probe's name on the command line.
    ``title``: the heading of the probe's section on the page.
    ``summary``: one phrase for `lamina probe --help` on what the probe measures.
    ``source``: the paper, with the equation or figure that defines the measurement.
    ``needs``: "logits" if the model must run with its head, and "tokens" if the model must read token ids.
    ``of_streams``: whether the probe also measures models whose layers return several streams or earlier hidden states.
    ``over_steps``: the metrics that a run's page plots over training steps if you schedule the probe (empty for all).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    of_streams: ClassVar[bool] = False
    over_steps: ClassVar[tuple[str, ...]] = ()

    def cost(self, context: Context) -> float:
        """Estimate the cost of the probe's own work. The unit is one token's forward pass through the whole model."""
        return 0.0

    def begin(self, context: Context) -> None:
        """Prepare the probe before the forward passes. Raises UserError if the probe does not apply to the model."""

    def points(self) -> Mapping[Any, Point]:
        """Return the tensors to watch in each forward pass, under keys that the probe chooses."""
        return {}

    def see(self, key: Any, value: torch.Tensor) -> None:
        """Receive a watched tensor [batch, tokens, channels]. Do not store or change the tensor."""

    def end_batch(self, inputs: Mapping[str, torch.Tensor], output: Output) -> None:
        """Receive the inputs (input_ids [batch, tokens] or pixel_values) and the output of a finished forward pass."""

    def standard_error(self) -> float | None:
        """Return the results' largest relative standard error so far, or infinity for too few inputs.

        The forward passes stop when every probe's error is small enough. Return None if no result is an average over
        text.
        """
        return None

    def measured(self, context: Context) -> Sample | None:
        """Return the size of the measured sample, or None if the size is unknown or differs between rows."""
        return sample_of(context.batches[: context.forwards]) if self.streams else None

    @property
    def streams(self) -> bool:
        """Return whether the probe takes part in the shared forward passes."""
        return bool(self.points()) or type(self).end_batch is not Probe.end_batch

    @abstractmethod
    def finish(self, context: Context) -> pd.DataFrame:
        """Return the result as a tidy DataFrame.

        Layers count from 0. State l is the residual stream before layer l, and state N is the stream after the last
        layer.
        """

    def figures(self, frame: pd.DataFrame) -> Iterable[tuple[Figure, str]]:
        """Return plotly figures of a result, each with a caption in plain text."""
        return []

    def sentences(self, frame: pd.DataFrame) -> Iterable[str]:
        """Return the results in plain sentences, with numbers."""
        return []

    def urgent(self, frame: pd.DataFrame) -> bool:
        """Return whether the page and the terminal show this probe's first sentence before all others."""
        return False


def check_most(name: str, option: str, value: object) -> int | None:
    """Check an option that limits the number of inputs (0: all, None: the default). Raises UserError."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UserError(f"{name}: option {option!r} is {value!r}. Give a whole number, or 0 for all.")
    return value


REGISTRY: Registry[type[Probe]] = Registry(
    "probe",
    modules=lambda: [f"lamina.probes.{path.stem}" for path in sorted(PROBES.glob("*.py")) if any(read(path))],
)
names, get = REGISTRY.names, REGISTRY.get


Kind = TypeVar("Kind", bound=Probe)


def probe(cls: type[Kind]) -> type[Kind]:
    """Register a probe. Raises TypeError if the class has no name, title, summary or source."""
    for attribute in ("name", "title", "summary", "source"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise TypeError(f"{cls.__name__}: a probe needs a {attribute}")
    REGISTRY.add(cls.name, cls, cls.__module__)
    return cls


def options_of(cls: type[Probe]) -> dict[str, object]:
    parameters = {} if cls.__init__ is object.__init__ else inspect.signature(cls).parameters
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p.default for p in parameters.values() if p.kind in kinds}


def make(spec: str | Probe) -> Probe:
    """Return a probe from ``name`` or ``name(option=value)``. Raises UserError with the name of an invalid option."""
    if isinstance(spec, Probe):
        return spec
    target, options = specs.parse(str(spec), "probe")
    cls = REGISTRY.from_file(Path(target)) if Path(target).suffix == ".py" else get(target)
    allowed = options_of(cls)
    for option in options:
        if option not in allowed:
            raise unknown("option", option, allowed, f"probe {cls.name}")
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"probes: {spec!r}: {error}") from None


def make_all(chosen: str | Iterable[str | Probe]) -> list[Probe]:
    """Return probes from ``all`` or a list of names with options. Raises UserError for an unknown or repeated name."""
    if isinstance(chosen, str):
        chosen = specs.split(chosen, "probe")
    probes = [p for spec in chosen for p in ([make(n) for n in names()] if spec == "all" else [make(spec)])]
    if not probes:
        raise UserError(f"probes: no probe is given (allowed: all, {', '.join(names())})")
    for name, count in Counter(probe.name for probe in probes).items():
        if count > 1:
            raise UserError(f"probes: {name!r} is given twice. Give it once.")
    return probes


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A probe's description, read from its source file."""

    name: str
    title: str
    summary: str
    source: str
    options: dict[str, str]
    over_steps: tuple[str, ...] = ()


@cache
def listed() -> dict[str, Listed]:
    probes = [probe for path in sorted(PROBES.glob("*.py")) for probe in read(path)]
    return {probe.name: probe for probe in sorted(probes, key=lambda probe: probe.name)}


def check_probes(chosen: str) -> None:
    """Raise UserError for an unknown probe or option. Lamina does not check probes in the user's files here."""
    for spec in specs.split(chosen, "probe"):
        if spec != "all":
            check_probe(spec)


def check_probe(spec: str) -> None:
    """Raise UserError, with the nearest name, for a probe or an option that does not exist."""
    name, options = specs.parse(spec, "probe")
    listed_probes = listed()
    if name not in listed_probes:  # one of the user's own, or none
        if Path(name).suffix == ".py" or REGISTRY.registered(name) is not None:
            return
        raise unknown("probe", name, listed_probes)
    for option in options:
        if option not in listed_probes[name].options:
            raise unknown("option", option, listed_probes[name].options, f"probe {name}")


def read(path: Path) -> Iterator[Listed]:
    """Yield the probes in a file: the classes with the decorator ``@probe``."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(decorator).partition("(")[0].rpartition(".")[2] == "probe" for decorator in node.decorator_list
        ):
            values: dict[str, Any] = {}  # the class attributes that are plain values (adjacent string literals are one)
            for statement in node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    with contextlib.suppress(ValueError):  # the value of a call, not a text
                        value = ast.literal_eval(statement.value)
                        values |= {target.id: value for target in targets if isinstance(target, ast.Name)}
            if "name" in values:
                words = {k: str(values.get(k, "")) for k in ("name", "title", "summary", "source")}
                yield Listed(**words, options=_options(node), over_steps=tuple(values.get("over_steps", ())))


def _options(node: ast.ClassDef) -> dict[str, str]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            names = [argument.arg for argument in (*statement.args.args[1:], *statement.args.kwonlyargs)]
            defaults = [*statement.args.defaults, *statement.args.kw_defaults]
            defaults = [None] * (len(names) - len(defaults)) + defaults
            return {n: "" if d is None else ast.unparse(d) for n, d in zip(names, defaults, strict=True)}
    return {}


def listing(*, full: bool = False) -> str:
    """Return the probes with one phrase each, without loading torch. If ``full`` is true, add options and sources."""
    lines = []
    for probe in listed().values():
        if not full:
            lines += textwrap.wrap(probe.summary, 94, initial_indent=f"  {probe.name:<18} ", subsequent_indent=" " * 21)
            continue
        options = ", ".join(f"{name}={default}" if default else name for name, default in probe.options.items())
        lines += [f"{probe.name}({options})" if options else probe.name]
        lines += textwrap.wrap(probe.summary, 100, initial_indent="    ", subsequent_indent="    ")
        lines += textwrap.wrap(f"source: {probe.source}", 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
