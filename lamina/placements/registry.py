"""The registry of norm placements. The decorator ``@placement`` adds a placement.

Each file in ``schemes/`` defines one or more placements. The command line, the docs, the diagrams and the tests use
every placement in the registry.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from lamina.core.registry import Registry, refuse_namesake
from lamina.core.scaling_schemes import DepthScheme
from lamina.errors import UserError
from lamina.placements.plan import OWN_KINDS, HeadNorm, NormKind, Plan


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a placement. ``type`` is a class, a Literal, or a union of classes and Literals."""

    name: str
    type: object
    default: object
    help: str

    @property
    def type_name(self) -> str:
        """Return the allowed values as text, such as ``float | None`` or ``'off' | 'head'``."""
        names: list[str] = []
        for kind in _alternatives(self.type):
            names += map(repr, get_args(kind)) if get_origin(kind) is Literal else [getattr(kind, "__name__", "")]
        return " | ".join(names).replace("NoneType", "None")

    def check(self, placement: str, value: object) -> None:
        if not any(_fits(value, kind) for kind in _alternatives(self.type)):
            raise UserError(f"placement {placement!r}: option {self.name!r} is {value!r} (allowed: {self.type_name})")


COMMON: tuple[Option, ...] = (
    Option(
        name="final_norm",
        type=bool | None,
        default=None,
        help="whether a norm follows the last block (default: the placement decides)",
    ),
    Option(name="embedding_norm", type=bool | None, default=None, help="a norm on the embedding's output"),
    Option(
        name="embedding_scale",
        type=float | Literal["sqrt_hidden_size"] | None,
        default=None,
        help="a factor on the embedding's output. 'sqrt_hidden_size' is the square root of the hidden size (Takase et "
        "al.'s scaled embedding)",
    ),
    Option(
        name="norm",
        type=NormKind | None,
        default=None,
        help="the kind of all norms, such as 'layer' for LayerNorm (default: the placement decides)",
    ),
    Option(
        name="groups",
        type=int | None,
        default=None,
        help="number of equal parts into which norm='group' divides a token's channels (default: 8)",
    ),
    Option(name="qk_norm", type=HeadNorm | None, default=None, help="a norm on queries and keys"),
    Option(name="v_norm", type=HeadNorm | None, default=None, help="a norm on values"),
    Option(
        name="wiring",
        type=str | None,
        default=None,
        help="residual paths that replace the single stream: a wiring's name, such as x0 or mhc, or a .py file",
    ),
    Option(
        name="size",
        type=int | None,
        default=None,
        help=(
            "number of residual streams (default: 4). The wiring attn_res takes the number of layers per group, and 0 "
            "makes each sub-layer a group. The wiring mudd rounds a projection's width up to a multiple of this number"
        ),
    ),
    Option(
        name="start",
        type=Literal["liger", "mean", "dlcl"] | None,
        default=None,
        help="initial weights of a wiring. The wiring mhc accepts 'liger', the initial weights "
        "in Liger's kernels. The wiring denseformer accepts 'mean' (after block l, all weights are 1/(l+1)) and 'dlcl' "
        "(the same weights, and a norm on each state)",
    ),
    Option(
        name="collapse",
        type=Literal["mean", "sum", "sum_of_norms"] | None,
        default=None,
        help="how a wiring joins its streams after the last block: as the mean, the sum, or the sum of the normed "
        "streams",
    ),
    Option(
        name="depth_scaling",
        type=DepthScheme | None,
        default=None,
        help="divide every branch by (num_layers / base_depth)^alpha, with alpha = 1/2 (depth-mup) or 1 (completep). "
        "The job option `--depth-scaling` also scales the learning rates",
    ),
    Option(
        name="base_depth",
        type=int | None,
        default=None,
        help="reference depth of depth_scaling, in blocks. A model of this depth keeps its branches unchanged",
    ),
)


def read_options(make: Callable[..., object]) -> tuple[str, tuple[Option, ...]]:
    """Return a function's docstring without ``Args:``, and an Option for each keyword-only parameter."""
    hints = get_type_hints(make)
    for p in inspect.signature(make).parameters.values():
        if p.kind is p.KEYWORD_ONLY and p.name not in hints:
            kind = "float" if p.default is p.empty else type(p.default).__name__
            raise UserError(
                f"{make.__module__}: annotate the option {p.name!r} of {make.__name__!r}, as in {p.name}: {kind}."
            )
    summary, _, rest = inspect.cleandoc(make.__doc__ or "").partition("\nArgs:\n")
    block = re.split(r"\n(?=\S)", rest, maxsplit=1)[0]
    helps = {m[1]: " ".join(m[2].split()) for m in re.finditer(r"^ {4}(\w+): ((?:.|\n(?! {4}\w+: ))*)", block, re.M)}
    options = tuple(
        Option(name=p.name, type=hints[p.name], default=p.default, help=helps.get(p.name, ""))
        for p in inspect.signature(make).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    )
    return summary.strip(), options


def as_written(option: str, value: object) -> object:
    """Return an option's value as the user wrote it. (YAML reads a bare ``off`` as false.)"""
    return "off" if value is False and option in ("qk_norm", "v_norm") else value


def _alternatives(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: object, kind: object) -> bool:
    if get_origin(kind) is Literal:
        return value in (*get_args(kind), *(OWN_KINDS if kind is NormKind else ()))
    assert isinstance(kind, type)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A published norm placement."""

    name: str
    title: str
    equation: tuple[str, ...]
    source: str
    initialization: str
    advice: str
    description: str
    options: tuple[Option, ...]
    make: Callable[..., Plan]

    @property
    def heading(self) -> str:
        title = self.title.replace("*", " with a Pre-LN start")
        return title[0].upper() + title[1:]

    @property
    def anchor(self) -> str:
        """Return the heading's anchor for links, or "" for a user's own placement."""
        is_ours = self.make.__module__.startswith(f"{__package__}.schemes.")
        return re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-") if is_ours else ""

    @property
    def bibtex(self) -> str:
        """Return a BibTeX entry for each arXiv paper in ``source``, or "" if ``source`` names no such paper."""
        entries = []
        for part in self.source.split(";"):
            if found := re.search(r"arXiv (\d{4}\.\d{5})", part):
                name, number = part.partition(" (")[0].strip().replace("&", r"\&"), found[1]
                fields = f"note = {{{name}}}, eprint = {{{number}}}, archivePrefix = {{arXiv}}"
                entries.append(f"@misc{{arxiv:{number}, {fields}, url = {{https://arxiv.org/abs/{number}}}}}")
        return "\n".join(entries)

    def all_options(self) -> tuple[Option, ...]:
        """Return the placement's own options, followed by the options that every placement has."""
        names = {option.name for option in self.options}
        return (*self.options, *(option for option in COMMON if option.name not in names))


def _schemes() -> Iterator[str]:
    package = importlib.import_module("lamina.placements.schemes")  # by name, because the schemes import this module
    return (module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))


PLACEMENTS: Registry[Placement] = Registry("placement", modules=_schemes, plugins="lamina.placements")
names = PLACEMENTS.names
OTHER_NAMES: dict[str, str] = {"spannorm": "fusenorm", "olmo3": "olmo2"}  # other papers' or models' names, and ours


def get(name: str) -> Placement:
    """Return a placement by any of its names. Raises UserError for an unknown name, and suggests a similar name."""
    return PLACEMENTS.get(OTHER_NAMES.get(name, name), other_names=OTHER_NAMES)


def placement(
    name: str, *, title: str, equation: tuple[str, ...], source: str, initialization: str = "normal", advice: str = ""
) -> Callable[[Callable[..., Plan]], Callable[..., Plan]]:
    """Register a function ``(num_layers, *, options...) -> Plan`` as a norm placement.

    The function's keyword-only parameters are the placement's options. The docstring's ``Args:`` has the help text of
    each option.
    """

    def register(make: Callable[..., Plan]) -> Callable[..., Plan]:
        texts = {"title": title, "source": source, "initialization": initialization, "advice": advice}
        texts["description"], options = read_options(make)
        refuse_namesake("placement", name, make.__module__, OTHER_NAMES.get(name))
        entry = Placement(name=name, equation=equation, options=options, make=make, **texts)
        PLACEMENTS.add(name, entry, make.__module__)
        return make

    return register
