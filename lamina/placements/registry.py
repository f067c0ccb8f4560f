"""The registry of placements: ``@placement`` adds one, ``resolve`` makes a plan of it.

A scheme is one file of ``schemes/``. Everything else (command line, docs, diagrams, tests) iterates over the registry.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lamina.core.values import text, whole_number
from lamina.errors import UserError, nearest, shortened, unknown
from lamina.placements.plan import HeadNorm, Norm, NormKind, Plan

ENTRY_POINTS = "lamina.placements"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One keyword of a placement: what it may be, its default and what it does."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def type_name(self) -> str:
        """The allowed values as a person reads them: ``float | None``, ``"off" | "head"``."""
        return " | ".join(_type_names(self.type))

    def check(self, placement: str, value: Any) -> None:
        """Raise UserError that names the option where the value is of another type than it takes."""
        if not any(_fits(value, kind) for kind in _alternatives(self.type)):
            raise UserError(f"placement {placement!r}: option {self.name!r} is {value!r} (allowed: {self.type_name})")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A published scheme: its equation, source, recommended initialisation, advice and options."""

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


_registry: dict[str, Placement] = {}
_loaded = False


def placement(
    name: str, *, title: str, equation: tuple[str, ...], source: str, initialization: str = "normal", advice: str = ""
) -> Callable[[Callable[..., Plan]], Callable[..., Plan]]:
    """Register a function ``(num_layers, *, options...) -> Plan`` as the placement ``name``.

    The options are read off the function's keyword-only parameters, their help off its docstring's Args.
    """

    def register(make: Callable[..., Plan]) -> Callable[..., Plan]:
        hints = get_type_hints(make)
        summary, helps = _read_docstring(make.__doc__ or "")
        options = tuple(
            Option(name=p.name, type=hints[p.name], default=p.default, help=helps.get(p.name, ""))
            for p in inspect.signature(make).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        )
        _registry[name] = Placement(
            name=name,
            title=title,
            equation=equation,
            source=source,
            initialization=initialization,
            advice=advice,
            description=summary,
            options=options,
            make=make,
        )
        return make

    return register


def names() -> list[str]:
    """The names of all registered placements, sorted."""
    _load()
    return sorted(_registry)


def get(name: str) -> Placement:
    """The placement of this name. Raises UserError that suggests the nearest name."""
    _load()
    if name not in _registry:
        raise unknown("placement", name, _registry)
    return _registry[name]


def resolve(name: str, num_layers: int, **options: Any) -> Plan:
    """The plan of a placement for ``num_layers`` blocks (each an attention and a feed-forward sub-layer).

    ``name`` is a registered name, a YAML or Python file with a placement of the user's own, or either of them with
    options in brackets: ``"mix_ln(alpha=0.5, final_norm=true)"``. Raises UserError for an unknown name, an unknown
    option (suggesting the nearest) and a value that the option does not take.
    """
    whole_number("num_layers", num_layers)
    name = text("placement", name)
    from lamina.placements.custom import parse_spec  # imports this module

    target, given = parse_spec(name)
    options = {key: _off(key, value) for key, value in {**given, **options}.items()}
    scheme = target if isinstance(target, Placement) else get(target)
    known = {option.name: option for option in scheme.all_options()}
    for key, value in options.items():
        if key not in known:
            raise UserError(
                f"placement {scheme.name!r} has no option {key!r}{nearest(key, known)} (allowed: {', '.join(known)})"
            )
        known[key].check(scheme.name, value)
    own = {option.name for option in scheme.options}
    plan = scheme.make(num_layers, **{k: v for k, v in options.items() if k in own})
    if not isinstance(plan, Plan):
        raise UserError(f"placement {scheme.name!r}: it makes {shortened(repr(plan), 200)} (allowed: a Plan)")
    if plan.num_layers != num_layers:
        raise UserError(f"placement {scheme.name!r}: its plan has {plan.num_layers} layers, num_layers is {num_layers}")
    plan = replace(
        plan, placement=scheme.name, initialization=plan.initialization or scheme.initialization, options=options
    )
    return _apply_common(plan, {k: v for k, v in options.items() if k not in own and v is not None})


def _off(key: str, value: Any) -> Any:
    """YAML reads a bare ``off`` as false."""
    return "off" if value is False and key in ("qk_norm", "v_norm") else value


def _apply_common(plan: Plan, options: dict[str, Any]) -> Plan:
    changes = {key: options[key] for key in ("embedding_scale", "qk_norm", "v_norm") if key in options}
    for key in ("final_norm", "embedding_norm"):
        if key in options and options[key] != (getattr(plan, key) is not None):
            changes[key] = _like_others(plan) if options[key] else None
    plan = replace(plan, **changes)
    if "groups" in options and options.get("norm") != "group":
        raise UserError(f"placement {plan.placement!r}: option 'groups' needs norm='group'")
    if "norm" in options:
        kind = options["norm"]

        def change(norm: Norm) -> Norm:
            own = norm.groups if norm.kind == "group" else 8
            return replace(norm, kind=kind, groups=options.get("groups", own) if kind == "group" else 1)

        plan = map_norms(plan, change)
        if (plan.qk_norm, plan.v_norm) != ("off", "off"):
            plan = replace(plan, qkv_norm=change(plan.qkv_norm))
    return plan


def _like_others(plan: Plan) -> Norm:
    """A norm of the kind that the plan has elsewhere."""
    found: list[Norm] = []
    map_norms(plan, lambda norm: found.append(norm) or norm)
    return Norm(kind=found[0].kind, groups=found[0].groups) if found else Norm()


def map_norms(plan: Plan, change: Callable[[Norm], Norm]) -> Plan:
    """The plan with ``change`` applied to every norm in it, the embedding's and the last one included."""

    def over(record: Any, positions: tuple[str, ...]) -> Any:
        there = {p: getattr(record, p) for p in positions}
        return replace(record, **{p: change(n) for p, n in there.items() if n is not None})

    positions = ("pre_norm", "out_norm", "post_norm")
    layers = tuple(
        replace(x, attention=over(x.attention, positions), feed_forward=over(x.feed_forward, positions))
        for x in plan.layers
    )
    return over(replace(plan, layers=layers), ("final_norm", "embedding_norm"))


def _load() -> None:
    global _loaded
    if _loaded:
        return
    _loaded = True
    package = importlib.import_module("lamina.placements.schemes")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"lamina.placements.schemes.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _type_names(hint: Any) -> list[str]:
    named: list[str] = []
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            named += [repr(a) for a in get_args(kind)]
        else:
            named.append("None" if kind is type(None) else kind.__name__)
    return named


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    text = inspect.cleandoc(text)
    summary, _, rest = text.partition("\nArgs:\n")
    block = re.split(r"\n(?=\S)", rest, maxsplit=1)[0]
    helps = {m[1]: " ".join(m[2].split()) for m in re.finditer(r"^ {4}(\w+): ((?:.|\n(?! {4}\w+: ))*)", block, re.M)}
    return summary.strip(), helps


COMMON: tuple[Option, ...] = (
    Option(
        name="final_norm", type=bool | None, default=None, help="a norm after the last block (default: the scheme's)"
    ),
    Option(name="embedding_norm", type=bool | None, default=None, help="a norm on the embedding's output"),
    Option(
        name="embedding_scale",
        type=float | Literal["sqrt_hidden_size"] | None,
        default=None,
        help="a factor on the embedding's output ('sqrt_hidden_size': Takase et al.'s scaled embedding)",
    ),
    Option(name="norm", type=NormKind | None, default=None, help="the kind of every norm of the plan"),
    Option(name="groups", type=int | None, default=None, help="with norm='group': parts of a token's channels (8)"),
    Option(name="qk_norm", type=HeadNorm | None, default=None, help="a norm on queries and keys"),
    Option(name="v_norm", type=HeadNorm | None, default=None, help="a norm on values"),
)
