"""Create a norm placement's layers from a name and options, or from a user's file (``resolve``).

A YAML file contains rules (see ``from_rules``), or all layers of one plan, as ``Plan.to_dict`` writes them. A YAML file
can't execute code. A Python file registers a placement with ``@placement``, and Lamina executes this file.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lamina.core import specs
from lamina.core.initializers import INITIALIZERS
from lamina.core.json_types import Json
from lamina.core.python_files import guarded
from lamina.core.registry import refuse_namesake
from lamina.core.scaling_schemes import DEPTH_SCHEMES
from lamina.core.values import is_finite, text, whole_number
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError, nearest, shortened, unknown
from lamina.placements.plan import SUBLAYERS, Layer, Norm, Plan, Sublayer
from lamina.placements.registry import PLACEMENTS, Placement, as_written, get
from lamina.placements.wirings import named_wiring

PLAN_FIELDS = ("final_norm", "embedding_norm", "embedding_scale", "qk_norm", "v_norm", "qkv_norm")  # beside the rules
OF_WIRINGS = ("size", "start", "collapse")  # the options that need a wiring
LONGEST_FORMULA = 200  # characters
MOST_RULED_LAYERS = 200_000  # rules times layers: a second's work
_RULE_FIELDS = ("layers", *SUBLAYERS)
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
SUFFIXES = (".yaml", ".yml", ".py")
LONGEST_TEXT = 2000  # characters of a title, a source, an advice
_TEXTS = ("placement", "title", "source", "initialization", "advice")
_FIELDS = ("placement", "title", "equation", "source", "initialization", "advice", "rules", *PLAN_FIELDS)


def load(path: Path) -> Placement:
    """Read a norm placement from a YAML or Python file. Raises UserError for an invalid file."""
    if not path.is_file():
        raise UserError(f"placement {str(path)!r}: no such file. Give a YAML or Python file, or a placement's name.")
    if path.suffix != ".py":
        return _load_yaml(path)
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
    name = texts.pop("placement") or path.stem

    def make(num_layers: int) -> Plan:
        try:
            if "layers" in data:
                return Plan.from_dict({"placement": name, **data})
            plan = Plan.from_dict({"placement": name, **from_rules(data, num_layers)})
            if name in PLACEMENTS.names() and PLACEMENTS.get(name).make(num_layers).layers != plan.layers:
                refuse_namesake("placement", name, "the file", "another placement")
            return plan
        except UserError as error:
            raise UserError(f"placement {str(path)!r}: {error}") from None

    defaults = {"title": name, "source": path.name, "initialization": "normal", "advice": "", "description": ""}
    return Placement(equation=equation, options=(), make=make, **{**defaults, **texts, "name": name})


def _texts(data: Json) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the texts (such as the title) and the equations of a YAML file. Raises UserError for an invalid field."""
    for key in data if "layers" not in data else ():  # Plan.from_dict checks the fields of a full plan
        if key not in _FIELDS:
            raise unknown("field", key, _FIELDS)
    texts = {}
    for field in _TEXTS:
        value = data.get(field, "")
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            text = shortened(repr(value), 200)
            raise UserError(f"{field}: {text} is not a short text. Give a text of at most {LONGEST_TEXT} characters.")
        if field in data or field == "placement":
            texts[field] = value
    equation = data.get("equation", ())
    lines = (equation,) if isinstance(equation, str) else equation
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise UserError(f"equation: {shortened(repr(lines), 200)} is not text. Give a text, or a list of texts.")
    return texts, tuple(lines)


def from_rules(data: Mapping[str, object], num_layers: int) -> dict[str, object]:
    layers: list[dict[str, dict[str, object]]] = [{s: {} for s in SUBLAYERS} for _ in range(num_layers)]
    rules = data.get("rules")
    if not isinstance(rules, list) or not rules:
        raise UserError("rules: no rule is given. Give a list of at least one rule.")
    if len(rules) * num_layers > MOST_RULED_LAYERS:
        raise UserError(
            f"rules: {len(rules)} rules for {num_layers} layers are too many. Keep the number of rules times the "
            f"number of layers at {MOST_RULED_LAYERS} or less."
        )
    for number, rule in enumerate(rules):
        where = f"rules[{number}]"
        if not isinstance(rule, Mapping):
            raise UserError(f"{where}: {rule!r} is not a mapping of fields")
        for key in rule:
            if key not in _RULE_FIELDS:
                raise UserError(f"{where}: {unknown('field', key, _RULE_FIELDS)}")
        for index in _indices(rule.get("layers", ":"), num_layers, where):
            for sublayer in SUBLAYERS:
                fields = rule.get(sublayer) or {}
                if not isinstance(fields, Mapping):
                    raise UserError(f"{where}.{sublayer}: {fields!r} is not a mapping of fields")
                names = {"num_layers": num_layers, "num_sublayers": 2 * num_layers, "layer": index}
                layers[index][sublayer].update(
                    {k: _formula(v, names, f"{where}.{sublayer}.{k}") for k, v in fields.items()}
                )
    return {"layers": layers, **{key: as_written(key, data[key]) for key in data if key in PLAN_FIELDS}}


def _indices(written: object, num_layers: int, where: str) -> list[int]:
    everything = range(num_layers)
    try:
        if isinstance(written, list):
            return [everything[i] for i in written]
        parts = [int(part) if part.strip() else None for part in str(written).split(":")]
        named = [everything[int(str(written))]] if len(parts) == 1 else list(everything[slice(*parts)])
        if not named:
            raise IndexError(written)
        return named
    except (ValueError, IndexError, TypeError):
        raise UserError(
            f"{where}.layers: {written!r} names none of the {num_layers} layers. Give an index, a slice such as '0:4', "
            "or a list of indices."
        ) from None


def _formula(value: object, names: Mapping[str, float], where: str) -> object:
    if isinstance(value, Mapping):
        return {k: _formula(v, names, f"{where}.{k}") for k, v in value.items()}
    if not isinstance(value, str) or not where.endswith(("_scale", "_gain")):
        return value
    try:
        result = _evaluate(_parsed(value), names)
        if is_finite(result):
            return result
        reason = "is a root of a negative number" if isinstance(result, complex) else "is no finite number"
        reason += f" in layer {names['layer']}."
    except UserError as error:  # an unknown name, or a function
        reason = str(error)
    except ZeroDivisionError:
        reason = f"divides by zero in layer {names['layer']}."
    except (ValueError, SyntaxError, ArithmeticError, TypeError, RecursionError, MemoryError):
        reason = "is not a formula."
    raise UserError(
        f"{where}: {shortened(repr(value), 200)} {reason} Use numbers up to 1e308, + - * / **, parentheses and "
        f"{', '.join(names)}, in at most {LONGEST_FORMULA} characters."
    )


@lru_cache(maxsize=1000)
def _parsed(formula: str) -> ast.expr:
    if len(formula) > LONGEST_FORMULA:
        raise ValueError("too long")
    return ast.parse(formula.strip(), mode="eval").body


def _evaluate(node: ast.expr, names: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]  # a float overflows where whole numbers would fill the memory
    if isinstance(node, ast.Name) and node.id in names:
        return float(names[node.id])
    if isinstance(node, ast.Name):
        raise UserError(f"has the unknown name {shortened(repr(node.id), 60)}{nearest(node.id, names) or '.'}")
    if isinstance(node, ast.Call):
        raise UserError("calls a function. Write a root as a power, such as 2 ** 0.5.")
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, names), _evaluate(node.right, names))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand, names))
    raise ValueError(ast.dump(node))


# The fields of a sub-layer that act inside the branch, and the fields of a plan that act before the first block, after
# the last block or inside the modules. All other fields act on the stream.
IN_THE_BRANCH = (
    *("pre_norm", "inner_norm", "out_norm", "pre_scale", "pre_scale_learned", "out_scale", "out_scale_learned"),
    *("weight_gain", "gate_gain"),
)
AT_THE_ENDS = ("placement", "layers", *PLAN_FIELDS, "initialization", "options")


def parse_spec(spec: str) -> tuple[Placement | str, dict[str, object]]:
    """Split ``"name(option=value, ...)"`` into the placement and the options. If the name is a file, read the file."""
    target, options = specs.parse(spec, "placement")
    path = Path(target)
    if path.suffix and path.suffix not in SUFFIXES and os.path.isfile(path):
        raise UserError(f"placement {target!r}: the file's suffix is {path.suffix!r} (allowed: {', '.join(SUFFIXES)})")
    return (load(path) if path.suffix in SUFFIXES else target), options


def _scheme_and_options(spec: str, /, **more: object) -> tuple[Placement, dict[str, object]]:
    target, options = parse_spec(spec)
    written = {option: as_written(option, value) for option, value in {**options, **more}.items()}
    if str(written.get("wiring")).endswith(".py"):
        named_wiring(str(written["wiring"]))  # the file may register the norm that another option names
    return (get(target) if isinstance(target, str) else target), written


def find(spec: str) -> Placement:
    """Return the placement that a text such as "keel(alpha=2)" names. Raises UserError for an unknown name."""
    return _scheme_and_options(spec)[0]


def check_spec(spec: str) -> None:
    """Raise UserError for an unknown placement, an unknown option, or a value that the option does not allow."""
    _check_options(*_scheme_and_options(text("placement", spec)))


def resolve(name: str, num_layers: int, **options: object) -> Plan:
    """Return the layers of a norm placement for ``num_layers`` blocks, each with an attention and a feed-forward.

    The name may be the path of a YAML or Python file with your own placement. You can add options in parentheses, as in
    ``"mix_ln(alpha=0.5, final_norm=true)"``. Raises UserError for an unknown name or option, and for an invalid value.
    """
    whole_number("num_layers", num_layers)
    scheme, options = _scheme_and_options(text("placement", name), **options)
    _check_options(scheme, options)
    names = {option.name for option in scheme.options}
    with guarded(f"placement {scheme.name!r}: its function"):
        plan = scheme.make(num_layers, **{k: v for k, v in options.items() if k in names})
    if not isinstance(plan, Plan):
        raise UserError(f"placement {scheme.name!r}: its function returns {shortened(repr(plan), 200)}. Return a Plan.")
    if plan.num_layers != num_layers:
        raise UserError(
            f"placement {scheme.name!r} is for {plan.num_layers} layers, but num_layers is {num_layers}. Set "
            f"num_layers to {plan.num_layers}, or use another placement."
        )
    initialization = plan.initialization or scheme.initialization
    if initialization and {initialization, initialization.partition("(std")[0].strip()}.isdisjoint(INITIALIZERS):
        raise unknown("initialization", initialization, INITIALIZERS, f"placement {name!r}")
    plan = replace(plan, placement=scheme.name, initialization=initialization, options=options)
    return _with_common(plan, {k: v for k, v in options.items() if k not in names and v is not None})


def _check_options(scheme: Placement, options: Mapping[str, object]) -> None:
    options_by_name = {option.name: option for option in scheme.all_options()}
    for option, value in options.items():
        if option not in options_by_name:
            raise UserError(
                f"placement {scheme.name!r} has no option {option!r}{nearest(option, options_by_name)} "
                f"(allowed: {', '.join(options_by_name)})"
            )
        options_by_name[option].check(scheme.name, value)


def _with_common(plan: Plan, options: Mapping[str, Any]) -> Plan:
    changes = {key: options[key] for key in ("embedding_scale", "qk_norm", "v_norm") if key in options}
    for key in ("final_norm", "embedding_norm"):
        if key in options and options[key] != (getattr(plan, key) is not None):
            changes[key] = _like_others(plan) if options[key] else None
    plan = replace(plan, **changes)
    if "wiring" in options:
        chosen = named_wiring(options["wiring"])
        try:
            plan = chosen.apply(plan, **{name: options[name] for name in OF_WIRINGS if name in options})
        except UserError as error:
            raise UserError(f"wiring: {options['wiring']!r} on {plan.placement!r}: {error}") from None
    elif alone := [name for name in OF_WIRINGS if name in options]:
        raise UserError(
            f"placement {plan.placement!r}: option {alone[0]!r} needs the option 'wiring'. Set 'wiring', or leave "
            f"{alone[0]!r} out."
        )
    if "groups" in options and options.get("norm") != "group":
        raise UserError(
            f"placement {plan.placement!r}: option 'groups' needs norm='group'. Set 'norm' to 'group', or leave "
            "'groups' out."
        )
    if "norm" in options:
        kind = options["norm"]

        def change(norm: Norm) -> Norm:
            groups = norm.groups if norm.kind == "group" else 8
            return replace(norm, kind=kind, groups=options.get("groups", groups) if kind == "group" else 1)

        plan = map_norms(plan, change)
        if (plan.qk_norm, plan.v_norm) != ("off", "off"):
            plan = replace(plan, qkv_norm=change(plan.qkv_norm))
    return _scaled_by_depth(plan, options.get("depth_scaling"), options.get("base_depth"))


def _scaled_by_depth(plan: Plan, scheme: str | None, base_depth: int | None) -> Plan:
    """Divide every branch by m^alpha, where m is the number of blocks over ``base_depth`` (arXiv 2505.01618, Table 1).

    Raises UserError for a norm or scale on the residual stream, because the paper's blocks compute x + F(x) / m^alpha.
    """
    name = f"placement {plan.placement!r}:"
    if scheme is None or base_depth is None:
        if scheme == base_depth:
            return plan
        raise UserError(
            f"{name} the option 'depth_scaling' needs the option 'base_depth', and vice versa. Set both, or neither."
        )
    whole_number("base_depth", base_depth)
    if more := next(_on_the_stream(plan), None):
        raise UserError(
            f"{name} depth_scaling {scheme!r} needs blocks that only add to the residual stream, but {more}. Choose "
            "a placement with norms and scales only in its branches, or leave 'depth_scaling' out."
        )
    factor = (plan.num_layers / base_depth) ** -DEPTH_SCHEMES[scheme]
    layers = [layer.map(lambda sub: replace(sub, out_scale=sub.out_scale * factor)) for layer in plan.layers]
    return replace(plan, layers=tuple(layers))


def _on_the_stream(plan: Plan) -> Iterator[str]:
    """Yield a phrase for each field that changes the residual stream itself, such as a post-norm."""
    records: list[tuple[str, Plan | Layer | Sublayer, tuple[str, ...]]] = [("the plan", plan, AT_THE_ENDS)]
    for index, layer in enumerate(plan.layers):
        records.append((f"layer {index}", layer, SUBLAYERS))
        halves = (("attention", layer.attention), ("feed_forward", layer.feed_forward))
        records += [(f"the {part} of layer {index}", half, IN_THE_BRANCH) for part, half in halves]
    for place, record, kept in records:
        for entry in fields(record):
            if entry.name not in kept and getattr(record, entry.name) != entry.default:
                yield f"{place} sets {entry.name}"


def _like_others(plan: Plan) -> Norm:
    """Return a norm of the same kind as the placement's first norm, or a default norm if the placement has no norms."""
    norms = [norm for x in plan.layers for sub in (x.attention, x.feed_forward) for norm in sub.norms.values()]
    norms += [norm for norm in (plan.final_norm, plan.embedding_norm) if norm is not None]
    return Norm(kind=norms[0].kind, groups=norms[0].groups) if norms else Norm()


def map_norms(plan: Plan, change: Callable[[Norm], Norm]) -> Plan:
    """Return the placement with ``change`` applied to every norm, including the embedding norm and the final norm."""

    def changed(sub: Sublayer) -> Sublayer:
        return replace(sub, **{position: change(norm) for position, norm in sub.norms.items()})

    ends = {name: change(norm) for name in ("final_norm", "embedding_norm") if (norm := getattr(plan, name))}
    return replace(plan, layers=tuple(layer.map(changed) for layer in plan.layers), **ends)
