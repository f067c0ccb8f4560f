"""Placements of the user's own: a YAML file or a Python file.

A YAML file holds rules (see ``rules``), or the full plan as ``Plan.to_dict`` writes it, for one depth. A Python file
registers a scheme with ``@placement``. It runs as code, with the rights of whoever reads it; a YAML file cannot.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lamina.core.json_types import Json
from lamina.core.python_files import guarded
from lamina.core.registry import refuse_namesake
from lamina.core.values import is_finite
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError, shortened, unknown
from lamina.placements.plan import SUBLAYERS, Plan
from lamina.placements.registry import PLACEMENTS, Placement, as_written

PLAN_FIELDS = ("final_norm", "embedding_norm", "embedding_scale", "qk_norm", "v_norm", "qkv_norm")  # beside the rules
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
    """Read a placement from a YAML or Python file. Raises UserError that names the file and the field."""
    if not path.is_file():
        raise UserError(f"placement {str(path)!r}: no such file")
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
    """Return the file's texts that describe the placement, by field, and its equations. Raises UserError."""
    for key in data if "layers" not in data else ():  # Plan.from_dict checks those of a full plan
        if key not in _FIELDS:
            raise unknown("field", key, _FIELDS)
    texts = {}
    for field in _TEXTS:
        value = data.get(field, "")
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            text = shortened(repr(value), 200)
            raise UserError(f"{field}: {text} (allowed: text of at most {LONGEST_TEXT} characters)")
        if field in data or field == "placement":
            texts[field] = value
    equation = data.get("equation", ())
    lines = (equation,) if isinstance(equation, str) else equation
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise UserError(f"equation: {shortened(repr(lines), 200)} (allowed: a text, or a list of texts)")
    return texts, tuple(lines)


def from_rules(data: Mapping[str, object], num_layers: int) -> dict[str, object]:
    """Return the fields of a plan (as ``Plan.from_dict`` reads them, without its name) that a file's rules give."""
    layers: list[dict[str, dict[str, object]]] = [{s: {} for s in SUBLAYERS} for _ in range(num_layers)]
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
                raise UserError(f"{where}: {unknown('field', key, _RULE_FIELDS)}")
        for index in _indices(rule.get("layers", ":"), num_layers, where):
            for sublayer in SUBLAYERS:
                fields = rule.get(sublayer) or {}
                if not isinstance(fields, Mapping):
                    raise UserError(f"{where}.{sublayer}: {fields!r} is not a mapping of fields")
                names = {"num_layers": num_layers, "num_sublayers": 2 * num_layers, "layer": index + 1}
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
            f"{where}.layers: {written!r} names no layer of {num_layers} (allowed: an index, a slice such as '0:4', "
            "a list of indices)"
        ) from None


def _formula(value: object, names: Mapping[str, float], where: str) -> object:
    if isinstance(value, Mapping):
        return {k: _formula(v, names, f"{where}.{k}") for k, v in value.items()}
    if not isinstance(value, str) or not where.endswith(("_scale", "_gain")):
        return value
    try:
        if not is_finite(result := _evaluate(_parsed(value), names)):
            raise ArithmeticError(result)  # also complex: a root of a negative number
        return result
    except (ValueError, SyntaxError, ArithmeticError, TypeError, RecursionError, MemoryError):
        raise UserError(
            f"{where}: {shortened(repr(value), 200)} is not a formula (allowed: numbers up to 1e308, + - * / **, "
            f"brackets and {', '.join(names)}, in at most {LONGEST_FORMULA} characters)"
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
