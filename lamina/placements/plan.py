"""The plan: one record per layer that says where the norms sit, what the skip carries and how it is scaled.

A sub-layer computes

    y = C( skip_scale * s + out_scale * B( module( pre_scale * A(x) ) ) )

with A = ``pre_norm``, B = ``out_norm``, C = ``post_norm`` (the positions of Figure 2 in the Peri-LN paper) and s what
the skip carries: the stream x, the block's input (FuseNorm's feed-forward) or the sum of both (B2T).

Plain data: imports neither torch nor transformers, goes to JSON and comes back equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from lamina.core.json_types import Json
from lamina.core.values import is_finite
from lamina.errors import UserError, unknown

NormKind = Literal["backbone", "rms", "layer", "group", "l2", "dyt", "derf"]
OWN_KINDS: set[str] = set()  # of the user's own norms (lamina.modeling.norm)
Skip = Literal["stream", "block_input", "both"]
Learned = Literal["no", "scalar", "vector"]
Coupling = Literal["none", "lerp", "variance"]
HeadNorm = Literal["off", "head", "full"]

POSITIONS = ("pre_norm", "out_norm", "post_norm")
SCALES = ("skip_scale", "pre_scale", "out_scale")
SUBLAYERS = ("attention", "feed_forward")
# Fields younger than the first plans that were saved: left out at their default, so that those plans stay the same.
YOUNGER = frozenset(
    (
        *("out_scale", "out_scale_learned", "coupling", "gate_temperature", "inner_norm"),
        "qkv_norm",
        "zero_centered",
        "alpha",
    )
)
_Record = TypeVar("_Record", bound="Norm | Sublayer | Layer | Plan")


def _one_of(field_name: str, value: object, literal: object) -> None:
    allowed = (*get_args(literal), *(sorted(OWN_KINDS) if literal is NormKind else ()))
    if value not in allowed:
        raise UserError(f"{field_name}: {value!r} is not one of {', '.join(map(repr, allowed))}")


def _finite(field_name: str, value: object, more: str = "") -> None:
    if not is_finite(value):
        raise UserError(f"{field_name}: {value!r} is not a finite number{more}")


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm at one position.

    ``kind`` "backbone" is the family that the backbone uses itself (RMSNorm in Llama, LayerNorm in ViT); "group"
    normalizes ``groups`` equal parts of each token's channels on their own, so it is causal; "l2" divides by the
    length; "dyt" and "derf" have no statistics: tanh or erf of ``alpha`` (learned, here its start) times the input.
    ``zero_centered``: the parameter is the gain's difference from 1, as in Gemma.
    """

    kind: NormKind = "backbone"
    learnable_gain: bool = True
    initial_gain: float = 1.0
    groups: int = 1
    zero_centered: bool = False
    alpha: float = 0.5

    def __post_init__(self) -> None:
        """Raise UserError for a kind, gain or number of groups that is invalid."""
        _one_of("kind", self.kind, NormKind)
        for name in ("learnable_gain", "zero_centered"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}: {getattr(self, name)!r} is not true or false")
        for name in ("initial_gain", "alpha"):
            _finite(name, getattr(self, name))
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise UserError(f"groups: {self.groups!r} is not a whole number of at least 1")
        if self.groups > 1 and self.kind != "group":
            raise UserError(f"groups: {self.groups} groups need kind 'group', not {self.kind!r}")


def _as_norm(field_name: str, value: object) -> Norm | None:
    """Return a norm as the user may write it: True or a kind's name for one, False or None for none, or a Norm."""
    if value is None or isinstance(value, Norm):
        return value
    if isinstance(value, bool):
        return Norm() if value else None
    if isinstance(value, str):
        _one_of(f"{field_name}.kind", value, NormKind)
        return Norm(kind=value)  # type: ignore[arg-type]  # one of the kinds
    raise UserError(f"{field_name}: {value!r} is not a norm (true, false, a kind, or its fields)")


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """One residual sub-layer (attention or feed-forward).

    ``coupling`` ties the skip's factor to b = ``out_scale``: "lerp" makes it 1 - b, "variance" sqrt(1 - b^2). A learned
    b is then the sigmoid of a parameter over ``gate_temperature``. ``inner_norm`` stands inside the module, before its
    last projection (SubLN).

    ``weight_gain`` is a factor that an initializer with gains (DeepNorm's beta) applies to the sub-layer's value and
    output projections; ``gate_gain`` is the same for a gated feed-forward's gate. They do not act in the forward pass.
    """

    pre_norm: Norm | None = None
    out_norm: Norm | None = None
    post_norm: Norm | None = None
    skip: Skip = "stream"
    skip_scale: float = 1.0
    skip_scale_learned: Learned = "no"
    pre_scale: float = 1.0
    pre_scale_learned: Learned = "no"
    out_scale: float = 1.0
    out_scale_learned: Learned = "no"
    coupling: Coupling = "none"
    gate_temperature: float = 1.0
    inner_norm: Norm | None = None
    weight_gain: float = 1.0
    gate_gain: float = 1.0

    def __post_init__(self) -> None:
        """Accept True / False for a norm of the default kind / none; raise UserError for anything invalid."""
        for position in (*POSITIONS, "inner_norm"):
            object.__setattr__(self, position, _as_norm(position, getattr(self, position)))
        _one_of("skip", self.skip, Skip)
        for name in SCALES:
            _one_of(f"{name}_learned", getattr(self, f"{name}_learned"), Learned)
        for name in (*SCALES, "gate_temperature", "weight_gain", "gate_gain"):
            _finite(name, getattr(self, name))
        _one_of("coupling", self.coupling, Coupling)
        if self.coupling != "none":
            self._check_coupling()

    def _check_coupling(self) -> None:
        if (self.skip_scale, self.skip_scale_learned) != (1.0, "no"):
            raise UserError(
                f"coupling: {self.coupling!r} sets the skip's factor (allowed: no skip_scale beside it, or 'none')"
            )
        if not (0 <= self.out_scale <= 1 and (self.out_scale_learned == "no" or 0 < self.out_scale < 1)):
            raise UserError(
                f"out_scale: {self.out_scale!r} with coupling {self.coupling!r} (allowed: 0 to 1; if learned, between)"
            )
        if self.gate_temperature <= 0:
            raise UserError(f"gate_temperature: {self.gate_temperature!r} (allowed: a number above 0)")

    @property
    def norms(self) -> dict[str, Norm]:
        """The norms of the sub-layer, by position."""
        return {p: n for p in (*POSITIONS, "inner_norm") if (n := getattr(self, p)) is not None}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block: an attention and a feed-forward sub-layer, run in this order."""

    attention: Sublayer = field(default_factory=Sublayer)
    feed_forward: Sublayer = field(default_factory=Sublayer)

    @classmethod
    def of(cls, sublayer: Sublayer) -> Layer:
        """Return the block whose two sub-layers are wired alike."""
        return cls(attention=sublayer, feed_forward=sublayer)

    def map(self, change: Callable[[Sublayer], Sublayer]) -> Layer:
        """Return the block with ``change`` applied to both sub-layers."""
        return Layer(attention=change(self.attention), feed_forward=change(self.feed_forward))

    def __post_init__(self) -> None:
        """Raise UserError where the attention's skip asks for the block's input, which the stream is already."""
        for name in SUBLAYERS:
            if not isinstance(getattr(self, name), Sublayer):
                raise UserError(f"{name}: {getattr(self, name)!r} is not a sub-layer (a Sublayer, or its fields)")
        if self.attention.skip != "stream":
            raise UserError(
                f"attention.skip: {self.attention.skip!r} contradicts its place (the stream that enters a block's "
                "attention is the block's input; allowed: 'stream')"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A placement resolved for a number of layers: all that a model needs to know about norms and skips.

    ``placement`` is its name; a scheme leaves it out, ``resolve`` sets it.
    ``embedding_scale`` multiplies the embedding; "sqrt_hidden_size" stands for the square root of the model's width.
    ``initialization`` is the recommended initializer's name ("" leaves it to the placement's registration).
    ``qk_norm`` and ``v_norm`` normalize queries and keys, or values: per head, or over the full projected width.
    ``qkv_norm`` is the norm that stands there; of kind "group" it is an RMSNorm where it is per head, which is a group.
    """

    placement: str = ""
    layers: tuple[Layer, ...]
    final_norm: Norm | None = None
    embedding_norm: Norm | None = None
    embedding_scale: float | Literal["sqrt_hidden_size"] = 1.0
    qk_norm: HeadNorm = "off"
    v_norm: HeadNorm = "off"
    qkv_norm: Norm = Norm(kind="rms")
    initialization: str = ""
    options: Json = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raise UserError for a plan without layers or with invalid fields."""
        if not isinstance(self.layers, list | tuple) or not all(isinstance(layer, Layer) for layer in self.layers):
            raise UserError(f"layers: {self.layers!r} is not a list of layers (Layer, or its fields)")
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise UserError("layers: a plan needs at least one layer")
        for name, kind in (("placement", str), ("initialization", str), ("options", Mapping)):
            if not isinstance(getattr(self, name), kind):
                expected = "a text" if kind is str else "a mapping"
                raise UserError(f"{name}: {getattr(self, name)!r} is not {expected}")
        if self.qkv_norm is None or isinstance(self.qkv_norm, bool):
            raise UserError(
                f"qkv_norm: {self.qkv_norm!r} is not a norm (a kind, or its fields; qk_norm and v_norm switch it)"
            )
        for name in ("final_norm", "embedding_norm", "qkv_norm"):
            object.__setattr__(self, name, _as_norm(name, getattr(self, name)))
        if self.embedding_scale != "sqrt_hidden_size":
            _finite("embedding_scale", self.embedding_scale, " or 'sqrt_hidden_size'")
        _one_of("qk_norm", self.qk_norm, HeadNorm)
        _one_of("v_norm", self.v_norm, HeadNorm)

    @property
    def num_layers(self) -> int:
        """The number of blocks (twice as many sub-layers)."""
        return len(self.layers)

    def kinds(self) -> list[tuple[Layer, list[int]]]:
        """Return the distinct layers with the indices at which each stands, in order of first appearance."""
        indices: dict[Layer, list[int]] = {}
        for index, layer in enumerate(self.layers):
            indices.setdefault(layer, []).append(index)
        return list(indices.items())

    def to_dict(self) -> Json:
        """Return the plan as plain dicts, lists and scalars, fit for JSON: Plan.from_dict gives an equal plan.

        Fields of YOUNGER are left out where they are at their default.
        """
        return {**_plain(self), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Plan:
        """Read a plan from plain dicts. Raises UserError that names an unknown field or an invalid value."""
        if isinstance(data, Mapping) and "placement" not in data:
            raise UserError("plan: field 'placement' is missing")
        return _read(cls, data, "plan")


def _plain(record: Norm | Sublayer | Layer | Plan) -> Json:
    """Return a record's fields, nested records and tuples of them as dicts and lists."""

    def plain(value: object) -> object:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return _plain(value) if isinstance(value, Norm | Sublayer | Layer) else value

    held = [(entry, getattr(record, entry.name)) for entry in fields(record)]
    return {e.name: plain(v) for e, v in held if e.name not in YOUNGER or v != e.default}


def _read(cls: type[_Record], data: object, field_name: str) -> _Record:
    """Build a record from its fields. Raises UserError that names the field's path: ``plan.layers[3].attention``."""
    if not isinstance(data, Mapping):
        raise UserError(f"{field_name}: {data!r} is not a mapping of fields")
    entries = {entry.name: entry for entry in fields(cls)}
    for key in data:
        if key not in entries:
            raise UserError(f"{field_name}: {unknown('field', key, entries)}")
    for name, entry in entries.items():
        if entry.default is MISSING and entry.default_factory is MISSING and name not in data:
            raise UserError(f"{field_name}: field {name!r} is missing")
    hints = get_type_hints(cls)
    values: Json = {key: _convert(hints[key], value, f"{field_name}.{key}") for key, value in data.items()}
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f"{field_name}.{error}") from None


def _convert(hint: Any, value: object, field_name: str) -> object:
    """Return a field's value: mappings become the record that the field's type asks for, of a tuple one by one."""
    record = next((a for a in (hint, *get_args(hint)) if a in (Norm, Sublayer, Layer)), None)
    if record is None or (record is Norm and not isinstance(value, Mapping)):
        return value  # a norm is also written as true, false or its kind
    if get_args(hint)[1:] != (...,):
        return _read(record, value, field_name)
    if not isinstance(value, list | tuple):
        raise UserError(f"{field_name}: {value!r} is not a list of layers")
    return tuple(_read(record, item, f"{field_name}[{i}]") for i, item in enumerate(value))
