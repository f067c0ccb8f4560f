"""Placements of the user's own: a YAML file, a Python file, and options written behind a name.

A YAML placement is a list of rules; a later rule changes the layers that it names, field by field:

    placement: my_ln
    equation: ["y = x + A(LN(x))", "x = y + F(LN(y))"]
    final_norm: true
    rules:
      - attention: {pre_norm: true}
        feed_forward: {pre_norm: true}
      - layers: "0:4"                       # a slice, an index (negative ones count from the end) or a list of them
        feed_forward: {out_norm: true}

or the full plan as ``Plan.to_dict`` writes it, for one depth. Numbers may be formulas of ``num_layers`` and ``layer``
(1-based): ``skip_scale: "2 * num_layers"``, ``pre_scale: "layer ** -0.5"``.

A Python file runs as code, with the rights of whoever reads it; a YAML file cannot.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lamina.core.python_files import guarded, run_file
from lamina.core.values import is_finite
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError, nearest, shortened
from lamina.placements import registry
from lamina.placements.plan import SUBLAYERS, Plan

LONGEST_FORMULA = 200  # characters
LONGEST_TEXT = 2000  # characters of a title, a source, an advice
MOST_RULED_LAYERS = 200_000  # rules times layers: a second's work
_RULE_FIELDS = ("layers", *SUBLAYERS)
_FILE_FIELDS = (
    *("placement", "title", "equation", "source", "initialization", "advice", "rules"),
    *("final_norm", "embedding_norm", "embedding_scale", "qk_norm", "v_norm"),
)
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def parse_spec(spec: str) -> tuple[registry.Placement | str, dict[str, Any]]:
    """Split ``"name(option=value, ...)"`` into the placement, or its name, and the options."""
    match = re.fullmatch(r"\s*([^()]+?)\s*(?:\((.*)\))?\s*", spec, re.S)
    if match is None:
        raise UserError(f"placement {spec!r}: not of the form name, file or name(option=value, ...)")
    target, written = match[1], match[2]
    options = {}
    for part in (written or "").split(","):
        if part.strip():
            key, equals, value = part.partition("=")
            if not equals:
                raise UserError(f"placement {spec!r}: {part.strip()!r} is not of the form option=value")
            options[key.strip()] = _scalar(value.strip())
    if Path(target).suffix in (".yaml", ".yml", ".py"):
        return load(Path(target)), options
    return target, options


def find(spec: str) -> registry.Placement:
    """The placement that a spec names, without its options. Raises UserError that suggests the nearest name."""
    target, _ = parse_spec(spec)
    return registry.get(target) if isinstance(target, str) else target


def split_specs(text: str) -> list[str]:
    """Split a comma-separated list of specs, leaving the commas within brackets alone."""
    if not isinstance(text, str):
        raise UserError(f"placements: {shortened(repr(text), 200)} (allowed: text with commas between the names)")
    return [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]


def load(path: Path) -> registry.Placement:
    """Read a placement from a YAML or Python file. Raises UserError that names the file and the field."""
    if not path.is_file():
        raise UserError(f"placement {str(path)!r}: no such file")
    return _load_python(path) if path.suffix == ".py" else _load_yaml(path)


def _load_python(path: Path) -> registry.Placement:
    registry.names()  # the package's own placements first: the file may ask for them
    before = dict(registry._registry)
    try:
        run_file("placement", path)
    finally:
        new = [p for name, p in registry._registry.items() if before.get(name) is not p]
        for placement in new:  # the file's own: it neither hides nor replaces a registered one
            registry._registry.pop(placement.name)
        registry._registry.update(before)
    if len(new) != 1:
        raise UserError(f"placement {str(path)!r}: registers {len(new)} placements with @placement (needed: one)")
    made = new[0]

    def make(num_layers: int, **options: Any) -> Plan:
        with guarded(f"placement {str(path)!r}: the function {made.name!r}"):
            return made.make(num_layers, **options)

    return replace(made, make=make)


def _load_yaml(path: Path) -> registry.Placement:
    try:
        data = read_mapping(path, "a mapping with the field 'rules'")
    except UserError as error:
        raise UserError(f"placement {error}") from None
    full = "layers" in data
    if not full:
        for key in data:
            if key not in _FILE_FIELDS:
                raise UserError(
                    f"placement {str(path)!r}: unknown field {key!r}{nearest(str(key), _FILE_FIELDS)} "
                    f"(allowed: {', '.join(_FILE_FIELDS)})"
                )
    for field in ("placement", "title", "source", "initialization", "advice"):
        if not isinstance(value := data.get(field, ""), str) or len(value) > LONGEST_TEXT:
            raise UserError(
                f"placement {str(path)!r}: {field}: {shortened(repr(value), 200)} (allowed: text of at most "
                f"{LONGEST_TEXT} characters)"
            )
    equation = data.get("equation", ())
    equation = (equation,) if isinstance(equation, str) else equation
    if not isinstance(equation, list | tuple) or not all(isinstance(line, str) for line in equation):
        raise UserError(
            f"placement {str(path)!r}: equation: {shortened(repr(equation), 200)} (allowed: a text, or a list of texts)"
        )
    name = str(data.get("placement") or path.stem)

    def make(num_layers: int) -> Plan:
        try:
            return Plan.from_dict({"placement": name, **data} if full else _from_rules(name, data, num_layers))
        except UserError as error:
            raise UserError(f"placement {str(path)!r}: {error}") from None

    return registry.Placement(
        name=name,
        title=str(data.get("title", name)),
        equation=tuple(equation),
        source=str(data.get("source", path.name)),
        initialization=str(data.get("initialization", "normal")),
        advice=str(data.get("advice", "")),
        description="",
        options=(),
        make=make,
    )


def _from_rules(name: str, data: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    layers: list[dict[str, dict[str, Any]]] = [{s: {} for s in SUBLAYERS} for _ in range(num_layers)]
    rules = data.get("rules")
    if not isinstance(rules, list) or not rules:
        raise UserError("rules: a list of at least one rule is needed")
    if len(rules) * num_layers > MOST_RULED_LAYERS:
        raise UserError(
            f"rules: {len(rules)} rules for {num_layers} layers are too many (allowed: at most {MOST_RULED_LAYERS} "
            "layers in all the rules together)"
        )
    for number, rule in enumerate(rules):
        where = f"rules[{number}]"
        if not isinstance(rule, Mapping):
            raise UserError(f"{where}: {rule!r} is not a mapping of fields")
        for key in rule:
            if key not in _RULE_FIELDS:
                raise UserError(
                    f"{where}: unknown field {key!r}{nearest(str(key), _RULE_FIELDS)} "
                    f"(allowed: {', '.join(_RULE_FIELDS)})"
                )
        for index in _indices(rule.get("layers", ":"), num_layers, where):
            for sublayer in SUBLAYERS:
                given = rule.get(sublayer) or {}
                if not isinstance(given, Mapping):
                    raise UserError(f"{where}.{sublayer}: {given!r} is not a mapping of fields")
                names = {"num_layers": num_layers, "num_sublayers": 2 * num_layers, "layer": index + 1}
                layers[index][sublayer].update(
                    {k: _formula(v, names, f"{where}.{sublayer}.{k}") for k, v in given.items()}
                )
    kept = {k: registry._off(k, v) for k, v in data.items() if k in _FILE_FIELDS[7:]}
    return {"placement": name, "layers": layers, **kept}


def _indices(written: Any, num_layers: int, where: str) -> list[int]:
    everything = range(num_layers)
    try:
        if isinstance(written, list):
            return [everything[i] for i in written]
        parts = str(written).split(":")
        if len(parts) == 1:
            return [everything[int(parts[0])]]
        named = list(everything[slice(*(int(p) if p.strip() else None for p in parts))])
        if not named:
            raise IndexError(written)
        return named
    except (ValueError, IndexError, TypeError):
        raise UserError(
            f"{where}.layers: {written!r} names no layer of {num_layers} (allowed: an index, a slice such as '0:4', "
            "a list of indices)"
        ) from None


def _formula(value: Any, names: Mapping[str, float], where: str) -> Any:
    if isinstance(value, Mapping):
        return {k: _formula(v, names, f"{where}.{k}") for k, v in value.items()}
    if not isinstance(value, str) or not where.endswith(("_scale", "_gain")):
        return value
    try:
        if not is_finite(found := _evaluate(_parsed(value), names)):
            raise ArithmeticError(found)  # also complex: a root of a negative number
        return found
    except (ValueError, SyntaxError, ArithmeticError, TypeError, RecursionError, MemoryError):
        raise UserError(
            f"{where}: {shortened(repr(value), 200)} is no formula (allowed: numbers up to 1e308, + - * / **, brackets "
            f"and {', '.join(names)}, in at most {LONGEST_FORMULA} characters)"
        ) from None


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
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, names), _evaluate(node.right, names))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand, names))
    raise ValueError(ast.dump(node))


def _scalar(text: str) -> Any:
    import yaml

    try:
        return float(text) if re.fullmatch(r"[-+]?[\d.]*\d[\d.]*[eE][-+]?\d+", text) else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
