"""Find the registered norm placement that computes the same as a model. Lamina compares layers, not names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args, get_origin

from lamina.core.text import ranges
from lamina.errors import UserError
from lamina.placements.plan import SUBLAYERS, Layer, Norm, Plan, Sublayer
from lamina.placements.registry import get, names
from lamina.placements.resolution import resolve
from lamina.placements.wirings import WIRINGS

Facts: TypeAlias = Mapping[str, object]  # {"attention.pre_norm": "norm"} in a layer, {"final_norm": ...} outside layers
UNSEEN = "not seen"  # agrees with any value of a plan
UNSEEN_NUMBER = "a number that Lamina did not measure"  # agrees with any constant number of a plan
_UNMEASURED = ("weight_gain", "gate_gain", "gate_temperature")  # about weights: the layer's equation does not have them
SEQUENTIAL, PARALLEL = "attention, then feed-forward", "attention and feed-forward side by side"
_ENDS = ("embedding_norm", "embedding_scale", "final_norm", "qk_norm", "v_norm")
_MOST_VALUES = 4
_DEEPER = 8
_CLOSE = 1e-4  # the relative difference of two equal scales


@dataclass(frozen=True, kw_only=True)
class Match:
    """The registered norm placement that is most similar to a model.

    Attributes:
        placement: the placement with its options.
        differences: a phrase for each difference between the model and the placement. Empty for an exact match.
        others: other placements that match exactly at this depth and at larger depths.
        here: other placements that match exactly at this depth, but may differ at other depths or after training.
    """

    placement: str
    differences: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    here: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Return a list with one note on the placements in ``here``, or an empty list."""
        told = "are equal at this depth, but differ at other depths or after training"
        return (
            [f"{self.placement} and {', '.join(self.here)} {told}; Lamina names the simplest placement"]
            if self.here
            else []
        )


def norm_fact(norm: Norm | None) -> str:
    """Describe a norm: "none", "norm" (the backbone's kind or RMSNorm), "layer norm", "norm over G groups"."""
    if norm is None:
        return "none"
    if norm.kind == "group":
        return f"norm over {norm.groups} groups"
    return "norm" if norm.kind in ("backbone", "rms") else f"{norm.kind} norm"


def learned_fact(shape: str) -> str:
    return f"a learned {shape}"  # without the value, which training changes


def layer_facts(layer: Layer) -> dict[str, object]:
    """Map each field of a layer to the field's value: ``{"attention.pre_norm": "norm", ...}``."""
    facts: dict[str, object] = {"order": SEQUENTIAL}
    for part in SUBLAYERS:
        sublayer: Sublayer = getattr(layer, part)
        for entry in fields(sublayer):
            value = getattr(sublayer, entry.name)
            if entry.name == "read" and value == "block_input":
                facts["order"] = PARALLEL
                continue
            if (learned := getattr(sublayer, f"{entry.name}_learned", "no")) != "no":
                value = learned_fact(learned)
            if entry.name not in _UNMEASURED and not entry.name.endswith("_learned"):
                fact = norm_fact(value) if value is None or isinstance(value, Norm) else value
                facts[f"{part}.{entry.name}"] = fact
    return facts


def end_facts(plan: Plan) -> dict[str, object]:
    """Map a placement's fields outside the layers to their values, such as the final norm and the norms on queries."""
    values = {name: getattr(plan, name) for name in _ENDS}
    return {name: norm_fact(v) if v is None or isinstance(v, Norm) else v for name, v in values.items()}


def match(layers: Sequence[Facts], ends: Facts) -> Match:
    """Return the registered norm placement that is most similar to a model.

    If several placements match exactly, Lamina prefers fewer options, and then fewer norms and scales in deeper models.

    Args:
        layers: the measured fields of each layer. A missing field stands for the field's default.
        ends: the measured fields outside the layers, such as the final norm.
    """
    best: tuple[float, Match] | None = None
    exact: list[tuple[tuple[int, int, int], str]] = []
    deep = _DEEPER * len(layers)  # in a model of few layers, Mix-LN may have no Post-LN layer and equal Pre-LN
    for spec, plan in _candidates(layers):
        distance, differences = _distance(layers, plan)
        spec, ended = _with_ends(spec, plan, ends)
        differences += ended
        options = spec.count("="), len(get(plan.placement).options)
        if not differences:
            exact.append(((options[0], _more_of(resolved(spec, deep) or plan), options[1]), spec))
        distance += len(ended) / 2 + options[0] / 100 + options[1] / 1000 + _more_of(plan) / 10_000
        if best is None or distance < best[0]:
            best = distance, Match(placement=spec, differences=tuple(differences))
    assert best is not None
    if not exact:
        return best[1]
    first, *alternatives = dict.fromkeys(spec for _, spec in sorted(exact, key=lambda one: one[0]))
    same = [spec for spec in alternatives if _layers_of(spec, deep) == _layers_of(first, deep)]
    plain = [spec for spec in alternatives if spec not in same and spec.count("=") == first.count("=")]
    return Match(placement=first, others=tuple(same), here=tuple(plain))


def _more_of(plan: Plan) -> int:
    """Return how many fields of the layers, such as norms and scales, differ from their defaults."""
    return sum(
        not _same(value, _DEFAULT.get(field)) for layer in plan.layers for field, value in layer_facts(layer).items()
    )


def _candidates(layers: Sequence[Facts]) -> Iterator[tuple[str, Plan]]:
    """Yield each registered placement. If the placement does not match, also yield variants that change one option."""
    for name in names():
        plan = resolved(name, len(layers))
        if plan is None:
            continue
        yield name, plan
        wrong = _wrong_fields(layers, plan)
        if not wrong:
            continue
        for wiring in WIRINGS.names() if "order" in wrong else ():
            wired = resolved(name, len(layers), wiring=wiring)
            if wired is not None and "order" not in _wrong_fields(layers, wired):
                yield f"{name}(wiring={wiring})", wired
        for option in get(name).options:
            for value in _values(option.type, layers, scales=all("scale" in field for field in wrong)):
                changed = resolved(name, len(layers), **{option.name: value})
                if changed is not None and changed.layers != plan.layers:
                    written = str(value).lower() if isinstance(value, bool) else _shown(value)
                    yield f"{name}({option.name}={written})", changed


def _values(kind: object, layers: Sequence[Facts], *, scales: bool) -> list[object]:
    """Return the values to try for an option: all allowed words, or numbers measured in the model."""
    alternatives = get_args(kind) if get_origin(kind) is not Literal and get_args(kind) else (kind,)
    values: list[object] = []
    for alternative in alternatives:
        if get_origin(alternative) is Literal:
            values += get_args(alternative)
        elif alternative is bool:
            values += [True, False]
        elif alternative is float and scales:
            measured = {v for facts in layers for f, v in facts.items() if isinstance(v, float) and v != 1.0}
            values += sorted(measured)[:_MOST_VALUES]
        elif alternative is int and not scales:
            alike = sum(facts == layers[0] for facts in layers)
            values += [alike] if alike < len(layers) else []
    return values


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress the placements' warnings about options, because the user did not choose these options."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def resolved(name: str, num_layers: int, **options: object) -> Plan | None:
    """Return the plan of a placement, or None if the placement does not allow the options."""
    try:
        with _silenced():
            return resolve(name, num_layers, **options)
    except UserError:
        return None


def _layers_of(spec: str, num_layers: int) -> list[dict[str, object]]:
    plan = resolved(spec, num_layers)
    return [] if plan is None else [layer_facts(layer) for layer in plan.layers]


def _same(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float) and not isinstance(a, bool):
        return abs(a - b) <= _CLOSE * max(abs(a), abs(b))
    return a == b


_DEFAULT = layer_facts(Layer())


def _wrong_fields(layers: Sequence[Facts], plan: Plan) -> dict[str, list[int]]:
    """Map each field that differs from the placement to the indices of the layers where the field differs."""
    wrong: dict[str, list[int]] = {}
    for index, (facts, layer) in enumerate(zip(layers, plan.layers, strict=True)):
        expected = layer_facts(layer)
        for field in {**expected, **facts}:
            measured = facts.get(field, _DEFAULT.get(field))
            unseen = measured == UNSEEN or (measured == UNSEEN_NUMBER and not isinstance(expected.get(field), str))
            if not unseen and not _same(measured, expected.get(field)):
                wrong.setdefault(field, []).append(index)
    return wrong


def _distance(layers: Sequence[Facts], plan: Plan) -> tuple[float, list[str]]:
    wrong = _wrong_fields(layers, plan)
    phrases: dict[str, list[str]] = {}
    for field, indices in wrong.items():
        expected = layer_facts(plan.layers[indices[0]]).get(field, "none")
        measured = layers[indices[0]].get(field, _DEFAULT.get(field))
        where = "" if len(indices) == len(layers) else f" in layer {ranges(indices)}"
        part, _, name = field.rpartition(".")
        phrases.setdefault(f"{name}{where} is {_shown(measured)} instead of {_shown(expected)}", []).append(part)
    both = [phrase if parts in ([""], [*SUBLAYERS]) else f"{parts[0]}.{phrase}" for phrase, parts in phrases.items()]
    return sum(map(len, wrong.values())) / len(layers), both


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _with_ends(spec: str, plan: Plan, ends: Facts) -> tuple[str, list[str]]:
    """Add the options that make the fields outside the layers match. Return the new spec and other mismatches."""
    expected = end_facts(plan)
    options, differences = [], []
    for field, value in ends.items():
        if _same(value, expected.get(field)):
            continue
        if field in ("embedding_norm", "final_norm") and "none" in (value, expected[field]):
            options.append(f"{field}={str(value != 'none').lower()}")
        elif field in ("qk_norm", "v_norm") and value in ("off", "head", "full"):
            options.append(f"{field}={value}")
        elif field == "embedding_scale":
            options.append(f"{field}={_shown(value)}")
        else:
            differences.append(f"{field} is {_shown(value)} instead of {_shown(expected.get(field, 'none'))}")
    return with_options(spec, options), differences


def with_options(spec: str, options: Sequence[str]) -> str:
    if not options:
        return spec
    name, _, rest = spec.partition("(")
    return f"{name}({', '.join([*([rest[:-1]] if rest else []), *options])})"
