"""Write a norm placement as Python code for a trainer: a block's norms, constants and forward pass.

If layers differ, the code has a condition on the layer's index, or a table if no condition is possible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lamina.core.initializers import CUT_AT, INITIALIZERS, NO_SCALES, Facts, check
from lamina.errors import UserError
from lamina.placements.plan import POSITIONS, SUBLAYERS, Norm, Plan, Sublayer
from lamina.placements.registry import Placement
from lamina.ports.targets import Target

WIDTH = 88  # the length of a line, ruff's default
_FACTORS = ("skip_scale", "pre_scale", "out_scale")
_FORMULAS: dict[str, Callable[[int], float]] = {"({0} + 1) ** -0.5": lambda layer: (layer + 1) ** -0.5}
_INPUTS = {"attention": "x", "feed_forward": "y"}


def condition(layers: Sequence[int], count: int, index: str) -> str:
    """Return a Python condition that is true only in ``layers``. ``count`` is the number of all layers."""
    first, last, more = layers[0], layers[-1], len(layers)
    if more == 1:
        return f"{index} > 0" if (first, count) == (1, 2) else f"{index} == {first}"
    if last - first == more - 1:
        if first == 0:
            return f"{index} < {last + 1}"
        if last == count - 1:
            return f"{index} > 0" if first == 1 else f"{index} >= {first}"
        return f"{first} <= {index} <= {last}"
    step = layers[1] - first
    if list(layers) == list(range(first, count, step)) and first < step:
        return f"{index} % {step} == {first}"
    return f"{index} in {tuple(layers)}"


def choose(values: Sequence[str], index: str = "layer", last: str = "") -> str:
    """Return a Python expression for a layer's value. ``last`` is the value after the final ``else``."""
    if len(set(values)) == 1:
        return values[0]
    usual, count = next(v for v in reversed(values) if v != last), len(values)
    if len(set(values)) == 2:
        having = [layer for layer, value in enumerate(values) if value == usual]
        return f"{usual} if {condition(having, count, index)} else {next(v for v in values if v != usual)}"
    usual = last if last in values else usual
    parts = {v: [layer for layer, one in enumerate(values) if one == v] for v in values if v != usual}
    return " else ".join([*(f"{v} if {condition(at, count, index)}" for v, at in parts.items()), usual])


def assigned(target: str, value: str, indent: int = 8) -> list[str]:
    """Return the lines of an assignment or a return statement, with line breaks in a long value."""
    head = f"{target} " if target == "return" else f"{target} = "
    if indent + len(head) + len(value) <= WIDTH:
        return [head + value]
    call, _, arguments = value.partition("(")
    if re.fullmatch(r"[\w.]+", call) and value.endswith(")") and " if " not in value:
        return [f"{head}{call}(", f"    {arguments[:-1]}", ")"]
    return [f"{head}(", f"    {value}", ")"]


@dataclass(frozen=True)
class _Factor:
    """A scale factor of the attention or feed-forward, with a value and a kind for each layer."""

    name: str
    starts: tuple[float, ...]
    kinds: tuple[str, ...]  # "no", "scalar" or "vector"

    @property
    def is_one(self) -> bool:
        return set(self.kinds) == {"no"} and set(self.starts) == {1.0}

    @property
    def is_learned(self) -> bool:
        return set(self.kinds) != {"no"}

    @property
    def is_constant(self) -> bool:
        return not self.is_learned and len(set(self.starts)) == 1


class Port:
    """A norm placement as code for a trainer. Raises UserError for anything that the trainer can't express."""

    def __init__(self, placement: Placement, plan: Plan, target: Target):
        self.placement, self.plan, self.target = placement, plan, target
        self.num_layers = plan.num_layers
        self._refuse()

    # errors for placements that the trainer can't express

    def _refuse(self) -> None:
        plan, halves = self.plan, [half for layer in self.plan.layers for half in (layer.attention, layer.feed_forward)]
        if plan.streams > 1:
            self._refused(
                f"the residual path has {plan.streams} streams", "Choose a placement with one stream and no wiring"
            )
        if plan.has_memory or any(half.reads_memory for half in halves):
            self._refused(
                "the blocks read states of earlier blocks", "Choose a placement with one stream and no wiring"
            )
        gates = {
            (half.coupling, half.gate_temperature, half.out_scale_learned) for half in halves if half.coupling != "none"
        }
        if any(learned != "no" for *_, learned in gates) and (
            len(gates) > 1 or any(half.coupling == "none" for half in halves)
        ):
            self._refused(
                "the gates differ between sub-layers", "Give all sub-layers one coupling and one gate_temperature"
            )
        for norm in self._all_norms():
            self.norm_kind(norm)

    def _refused(self, what: str, fix: str) -> None:
        raise UserError(
            f"placement {self.plan.placement!r}: {what}, which a block for {self.target.title} does not support. {fix}."
        )

    def _all_norms(self) -> list[Norm]:
        halves = [half for layer in self.plan.layers for half in (layer.attention, layer.feed_forward)]
        norms = [norm for half in halves for norm in half.norms.values()]
        norms += [norm for norm in (self.plan.final_norm, self.plan.embedding_norm) if norm]
        return norms + ([self.projection_norm] if self.projections else [])

    # norms

    def norm_kind(self, norm: Norm) -> str:
        """Return a norm's key in the trainer's table: the kind of norm, and a suffix for the gain.

        The suffix is "_zero" for gains of 1 + w, and "_plain" for no gain. Raises UserError if the table does not have
        the key.
        """
        if not norm.learnable_gain and norm.initial_gain != 1.0:
            self._refused(f"a norm has the constant gain {norm.initial_gain}", "Choose learned gains, or a gain of 1")
        if norm.eps:
            self._refused(
                f"a norm has the epsilon {norm.eps}", "Leave 'eps' out, so that the trainer's epsilon applies"
            )
        end = "_plain" if not norm.learnable_gain else "_zero" if norm.zero_centered else ""
        if (kind := norm.kind + end) not in self.target.norms:
            said = {"_plain": " without a gain", "_zero": " with gains of 1 + w", "": ""}[end]
            self._refused(f"the placement has a norm of kind {norm.kind!r}{said}", "Choose a norm of kind 'backbone'")
        return kind

    def norm(self, norm: Norm | None, width: str = "") -> str:
        """Return the code of a norm for ``width`` channels, or of an identity for None."""
        if norm is None:
            return self.target.norms["none"]
        kind = self.norm_kind(norm)
        key = "inside" if width and kind == "backbone" and "inside" in self.target.norms else kind
        text = self.target.norms[key].format(groups=norm.groups, alpha=norm.alpha)
        return text.replace(self.target.code["width"], width) if width else text

    @cached_property
    def constructors(self) -> str:
        return " ".join(sorted({self.norm(norm) for norm in self._all_norms()}))

    @cached_property
    def norm_names(self) -> dict[tuple[str, str], str]:
        """Return the names of a block's norms by sub-layer and position. Leave out norms that no layer has."""
        names = {}
        for half in SUBLAYERS:
            layers = [getattr(layer, half) for layer in self.plan.layers]
            used = [p for p in POSITIONS if any(getattr(names_of_layer, p) is not None for names_of_layer in layers)]
            all_names = self.target.norm_names[half]
            chosen = all_names if self.target.in_order else [all_names[POSITIONS.index(p)] for p in used]
            names |= {(half, position): name for position, name in zip(used, chosen, strict=False)}
        return names

    @cached_property
    def norm_lines(self) -> list[str]:
        lines = []
        for (half, position), name in self.norm_names.items():
            specs = [self.norm(getattr(getattr(layer, half), position)) for layer in self.plan.layers]
            lines += assigned(f"self.{name}", choose(specs, self.index, last=self.norm(None)))
        return lines

    # norms inside the modules

    @cached_property
    def projections(self) -> dict[str, str]:
        """Map "q", "k" and "v" to the scope of the norm ("head" or "full"). Leave out projections without a norm."""
        scopes = {"q": self.plan.qk_norm, "k": self.plan.qk_norm, "v": self.plan.v_norm}
        return {part: scope for part, scope in scopes.items() if scope != "off"}

    @property
    def projections_by_scope(self) -> list[tuple[str, str]]:
        """Return pairs: "head" or "full", and code that lists the projections, such as ``("q_proj", "k_proj")``."""
        names = {
            scope: [f'"{p}_proj"' for p, s in self.projections.items() if s == scope] for scope in ("head", "full")
        }
        return [(scope, f"({', '.join(found)}{',' * (len(found) == 1)})") for scope, found in names.items() if found]

    @property
    def projection_norm(self) -> Norm:
        norm = self.plan.qkv_norm
        per_head = "full" not in self.projections.values()
        return Norm(kind="rms") if norm.kind == "group" and per_head else norm

    @cached_property
    def inner(self) -> dict[str, Norm]:
        """Return the norm before each sub-layer's last projection. Raises UserError if layers differ."""
        found = {}
        for half in SUBLAYERS:
            specs = {getattr(layer, half).inner_norm for layer in self.plan.layers}
            if len(specs) > 1:
                self._refused(
                    f"only some layers have an inner_norm in the {half}",
                    "Choose a placement with this norm in all layers or in none",
                )
            if (spec := specs.pop()) is not None:
                found[half] = spec
        return found

    # scales

    def _sublayers(self, half: str) -> list[Sublayer]:
        return [getattr(layer, half) for layer in self.plan.layers]

    @cached_property
    def gate(self) -> Sublayer | None:
        """Return the first layer's attention if a learned branch factor also sets the skip's factor, otherwise None."""
        first = self.plan.layers[0].attention
        return first if first.coupling != "none" and first.out_scale_learned != "no" else None

    @cached_property
    def factors(self) -> dict[tuple[str, str], _Factor]:
        """Return the scale factors by sub-layer and kind. Leave out factors that are 1 in every layer."""
        by_scale = {}
        for half in SUBLAYERS:
            subs = self._sublayers(half)
            for scale in _FACTORS:
                starts = tuple(_constant(sub, scale) for sub in subs)
                kinds = tuple(getattr(sub, f"{scale}_learned") for sub in subs)
                if self.gate and scale != "pre_scale":
                    continue
                factor = _Factor(scale, starts, kinds)
                if not factor.is_one:
                    by_scale[half, scale] = factor
            if self.gate:
                starts = tuple(s.gate_temperature * math.log(s.out_scale / (1 - s.out_scale)) for s in subs)
                by_scale[half, "gate"] = _Factor("gate", starts, tuple(sub.out_scale_learned for sub in subs))
        shared = {}
        for (half, scale), factor in by_scale.items():
            other = by_scale.get((next(name for name in SUBLAYERS if name != half), scale))
            same = not factor.is_learned and other is not None and other == factor
            name = scale if same else f"{self.target.halves[half]}_{scale}"
            shared[half, scale] = _Factor(name, factor.starts, factor.kinds)
        return shared

    def _numbers(self, factor: _Factor, index: str) -> str:
        for formula, compute in _FORMULAS.items():
            if all(value == compute(layer) for layer, value in enumerate(factor.starts)) and self.num_layers > 1:
                return formula.format(index)
        if len(set(factor.starts)) > 2:
            return f"{factor.name.upper()}[{index}]"
        return choose([repr(value) for value in factor.starts], index)

    @cached_property
    def constants(self) -> list[str]:
        """Return the code of the constants: factors that all layers share, and tables of irregular factors."""
        lines: dict[str, list[str]] = {}  # by name, because two sub-layers may share a factor
        for factor in self.factors.values():
            name = factor.name.upper()
            if factor.is_constant:
                lines[name] = [f"{name} = {factor.starts[0]!r}"]
            elif self._numbers(factor, self.index).startswith(name):
                rows = [f"    {value!r},  # layer {layer}" for layer, value in enumerate(factor.starts)]
                lines[name] = [f"{name} = (", *rows, ")"]
        return [line for each in lines.values() for line in each]

    @cached_property
    def scale_lines(self) -> list[str]:
        lines: dict[str, list[str]] = {}
        code = self.target.code
        for factor in self.factors.values():
            if factor.is_constant:
                continue
            if factor.is_learned:
                made = zip(factor.kinds, factor.starts, strict=True)
                value = choose([repr(start) if kind == "no" else code[kind] for kind, start in made], self.index)
            else:
                value = self._numbers(factor, self.index)
            lines[factor.name] = assigned(f"self.{factor.name}", value)
        return [line for each in lines.values() for line in each]

    @cached_property
    def reset_lines(self) -> list[str]:
        """Return the code that sets learned scales and gains to initial values other than 1."""
        lines = []
        set_to = self.target.code["set"]
        for factor in self.factors.values():
            if factor.is_learned:
                learned = [kind != "no" for kind in factor.kinds]
                lines += self._guarded(
                    learned, set_to.format(parameter=f"self.{factor.name}", value=self._numbers(factor, "self.layer"))
                )
        for (half, position), name in self.norm_names.items():
            specs = [getattr(sub, position) for sub in self._sublayers(half)]
            gains = tuple(s.initial_gain if s and s.learnable_gain and not s.zero_centered else 1.0 for s in specs)
            if set(gains) != {1.0}:
                factor = _Factor(f"{name}_gain", gains, ("no",) * len(gains))
                value = self._numbers(factor, "self.layer")
                line = set_to.format(parameter=f"self.{name}.weight", value=value)
                lines += self._guarded([spec is not None for spec in specs], line)
        return lines

    def _guarded(self, holds: Sequence[bool], line: str) -> list[str]:
        if all(holds):
            return [line]
        layers = [layer for layer, holder in enumerate(holds) if holder]
        return [f"if {condition(layers, self.num_layers, 'self.layer')}:", f"    {line}"]

    @property
    def needs_layer(self) -> bool:
        return "self.layer" in "\n".join([*self.reset_lines, *self.forward_lines])

    # the forward pass

    @cached_property
    def forward_lines(self) -> list[str]:
        return [*self._half("attention", "y"), *self._half("feed_forward", "return")]

    def _used(self, half: str, scale: str) -> str:
        factor = self.factors.get((half, scale))
        if factor is None:
            return ""
        return f"{factor.name.upper()} * " if factor.is_constant else f"self.{factor.name} * "

    def _half(self, half: str, out: str) -> list[str]:
        input_name, subs = _INPUTS[half], self._sublayers(half)
        norms = {p: self.norm_names.get((half, p)) for p in POSITIONS}

        def normed(position: str, text: str) -> str:
            return f"self.{norms[position]}({text})" if norms[position] else text

        read = choose(["x" if sub.read == "block_input" else input_name for sub in subs], "self.layer")
        inner = normed("pre_norm", read)
        if scale := self._used(half, "pre_scale"):
            inner = scale + inner
        call = self.target.code[half]
        branch_scale, skip_scale = self._used(half, "out_scale"), self._used(half, "skip_scale")
        lines = []
        if self.gate:
            lines.append(f"a, b = {self.target.code['gate']}(self.{self.factors[half, 'gate'].name})")
            branch_scale, skip_scale = "b * ", "a * "
        skips = {"stream": input_name, "block_input": "x", "both": f"{input_name} + x"}
        skip = choose([skips[sub.skip] if half == "feed_forward" else input_name for sub in subs], "self.layer")
        skip = f"({skip})" if " " in skip and (skip_scale or " if " in skip) else skip

        def total(branch: str) -> str:
            return normed("post_norm", f"{skip_scale}{skip} + {branch_scale}{branch}")

        summed = total(normed("out_norm", call.format(x=inner)))
        if len(summed) <= 48 and not self.gate:
            return [*lines, *assigned(out, summed)]
        h = "h"
        if 12 + len(call.format(x=inner)) > WIDTH or len(inner) > 44:
            lines += assigned(h, inner)
            inner = h
        lines += assigned(h, call.format(x=inner))
        joined = total(normed("out_norm", h))
        if 15 + len(joined) > WIDTH:
            lines += assigned(h, normed("out_norm", h))
            joined = total(h)
        return [*lines, *assigned(out, joined)]

    @cached_property
    def block_lines(self) -> list[str]:
        """Return the code of a block's constructor. Leave out norms that the trainer's own block creates."""
        return [line for line in self.norm_lines + self.scale_lines if line not in self.target.made]

    def uses(self, name: str) -> bool:
        return re.search(rf"(?<![\w.]){re.escape(name)}", "\n".join(self.block_lines)) is not None

    @property
    def index(self) -> str:
        return self.target.code.get("index", "layer")

    @property
    def function(self) -> str:
        return re.sub(r"\W", "_", self.plan.placement) or "placement"

    @property
    def equations(self) -> list[str]:
        """Return the placement's equations, without the formulas for options that the user has set."""
        return [line for line in self.placement.equation if line.partition(" = ")[0] not in self.plan.options]

    @property
    def numbers(self) -> str:
        """Return the number of layers and the equations' options as text, such as ``N = 24 and alpha = 2``."""
        words, equations = [f"N = {self.num_layers}"], " ".join(self.placement.equation)
        for option in self.placement.options:
            value = self.plan.options.get(option.name, option.default)
            if not self.plan.options and (found := re.search(r"\(default:? (\d[\d.]*)\)", option.help)):
                value = float(found[1])  # the default in the placement's equations
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and re.search(rf"\b{option.name}\b", equations):
                words.append(f"{option.name} = {value}")
        return " and ".join(words)

    @property
    def scales_embedding(self) -> bool:
        return self.plan.embedding_scale != 1.0

    # the initial weights

    @cached_property
    def initializer(self) -> Initialization:
        return Initialization(self.plan, self.placement)


class Initialization:
    """The numbers of the placement's initializer, for the templates.

    Attributes:
        std: the standard deviation, or None if the variance is ``variance`` / width.
        out: the divisor for the weights of the last projection in each branch.
        gains: Xavier's gain for each kind of weight in the blocks, or None for other initializers.
        cut: the largest magnitude of a truncated draw, in standard deviations, or None for other initializers.
    """

    def __init__(self, plan: Plan, placement: Placement):
        self.name, base = check(plan.initialization or "normal")
        first = plan.layers[0]

        def std(role: str, width: int = 1000) -> float:
            wiring = {"weight_gain": first.attention.weight_gain, "gate_gain": first.attention.gate_gain}
            facts = Facts(hidden_size=width, role=role, num_layers=plan.num_layers, wiring=wiring)
            return INITIALIZERS[self.name](facts, base)

        self.cut, self.profiles = CUT_AT.get(self.name), self.name == "admin"
        halves = [half for layer in plan.layers for half in (layer.attention, layer.feed_forward)]
        if self.profiles and any(half.skip_scale_learned == "no" for half in halves):
            raise UserError(NO_SCALES)
        self.gains: dict[str, float] | None = None
        self.std: float | None = std("query")
        self.variance: float | None = None
        self.out = 1.0
        if self.name in ("deepnorm", "xavier"):
            self.gains = {role: std(role) / std("query") for role in ("value", "attention_out", "gate")}
            self.std = base
            if len({(half.weight_gain, half.gate_gain) for half in halves}) > 1:
                raise UserError(
                    f"placement {plan.placement!r}: weight_gain differs between layers. Give all layers the same value."
                )
        elif std("query", 4000) != std("query"):
            self.std, self.variance = None, round(std("query") ** 2 * 1000, 12)
        if self.gains is None and std("attention_out") != std("query"):
            self.out = math.sqrt(2 * plan.num_layers)

    def with_gain(self, roles: dict[str, list[str]]) -> list[str]:
        """Return the names of the weights with Xavier's gain."""
        assert self.gains is not None
        return [*roles["value"], *roles["out"], *(roles["gate"] if self.gains["gate"] != 1.0 else [])]

    @property
    def says(self) -> str:
        """Return a sentence about the distribution of the initial weights."""
        variance = f"{self.std:g}^2" if self.std is not None else f"{self.variance:g} / width"
        if self.gains is not None:
            return f"Xavier's weights, with gain {self.gains['value']:.4g} on values, outputs and feed-forwards"
        words = f"{'a truncated' if self.cut else 'all weights from'} N(0, {variance})"
        return words + (", divided by sqrt(2 N) where a branch ends" if self.out != 1.0 else "")


def _constant(sub: Sublayer, scale: str) -> float:
    if scale == "skip_scale" and sub.coupling != "none":
        b = sub.out_scale
        return 1 - b if sub.coupling == "lerp" else math.sqrt(1 - b * b)
    return float(getattr(sub, scale))


def nameless(plan: Plan) -> Placement:
    """Return a placement without texts for a plan. The plan's placement may not be registered in this process."""
    texts = dict.fromkeys(("title", "source", "initialization", "advice", "description"), "")
    return Placement(name=plan.placement, equation=(), options=(), make=lambda num_layers: plan, **texts)
