"""The plan: one record per layer, with the positions of the norms, the skip's source and its scale.

A sub-layer computes

    y = C( skip_scale * s + out_scale * B( module( pre_scale * A(x) ) ) )

with A = ``pre_norm``, B = ``out_norm``, C = ``post_norm`` (the positions of Figure 2 in the Peri-LN paper) and s the
skip's source: the stream x, the block's input (FuseNorm's feed-forward) or the sum of both (B2T).

A plan is plain data: it needs neither torch nor transformers, and survives JSON unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from lamina.core.json_types import Json
from lamina.core.values import is_finite, whole_number
from lamina.errors import UserError, unknown

NormKind = Literal["backbone", "rms", "layer", "group", "l2", "dyt", "derf"]
OWN_KINDS: set[str] = set()  # of the user's own norms (lamina.modeling.norm)
Skip = Literal["stream", "block_input", "both"]
Learned = Literal["no", "scalar", "vector"]
Coupling = Literal["none", "lerp", "variance"]
HeadNorm = Literal["off", "head", "full"]
Weights = Literal["constant", "learned", "tanh", "sigmoid", "gate"]
Mix = Literal["identity", "free", "sinkhorn"]
StreamNorm = Literal["read", "stream"]
Read = Literal["stream", "block_input", "depth", "memory"]

POSITIONS = ("pre_norm", "out_norm", "post_norm")
SCALES = ("skip_scale", "pre_scale", "out_scale")
SUBLAYERS = ("attention", "feed_forward")
# Fields younger than the first plans that were saved: left out at their default, so that those plans stay the same.
YOUNGER = frozenset(
    (
        *("out_scale", "out_scale_learned", "coupling", "gate_temperature", "inner_norm", "streams", "read"),
        *("sources", "boundary", "readout", "final_sources", "qkv_norm", "zero_centered", "alpha", "norms"),
        *("inner_boundary", "dynamic", "multiway", "own_norms", "hidden", "normed_states"),
        *("eps", "diagonal", "noise", "transposed"),
    )
)
_Record = TypeVar("_Record", bound="Norm | Streams | Sources | Sublayer | Layer | Plan")


def _one_of(field_name: str, value: object, literal: object) -> None:
    allowed = (*get_args(literal), *(sorted(OWN_KINDS) if literal is NormKind else ()))
    if value not in allowed:
        raise UserError(f"{field_name}: {value!r} is not one of {', '.join(map(repr, allowed))}")


def _finite(field_name: str, value: object, more: str = "") -> None:
    if not is_finite(value):
        raise UserError(f"{field_name}: {value!r} is not a finite number{more}")


def _not_negative(field_name: str, value: object) -> None:
    if not is_finite(value) or value < 0:
        raise UserError(f"{field_name}: {value!r} (allowed: a number of at least 0)")


def _tuple(field_name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{field_name}: {value!r} is not a list")
    return tuple(value)


def _typed(record: object, **kinds: type | UnionType) -> None:
    """Raise UserError for a field whose value is not of its type in ``kinds``."""
    words = {bool: "true or false", str: "a text", Mapping: "a mapping", NoneType: "none"}
    for name, kind in kinds.items():
        if not isinstance(value := getattr(record, name), kind):
            each_kind = (kind,) if isinstance(kind, type) else get_args(kind)
            allowed = " or ".join(words.get(one, f"a {one.__name__}") for one in each_kind)
            raise UserError(f"{name}: {value!r} (allowed: {allowed})")


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm at one position.

    ``kind`` "backbone" is the family that the backbone uses itself (RMSNorm in Llama, LayerNorm in ViT); "group"
    normalizes ``groups`` equal parts of each token's channels separately, so it is causal; "l2" divides by the
    length; "dyt" and "derf" have no statistics: tanh or erf of ``alpha`` (learned, here its start) times the input.
    ``zero_centered``: the parameter is the gain's difference from 1, as in Gemma. ``eps``: its epsilon, 0 for the
    backbone's.
    """

    kind: NormKind = "backbone"
    learnable_gain: bool = True
    initial_gain: float = 1.0
    groups: int = 1
    zero_centered: bool = False
    alpha: float = 0.5
    eps: float = 0.0

    def __post_init__(self) -> None:
        """Raise UserError for a kind, gain, epsilon or number of groups that is invalid."""
        _one_of("kind", self.kind, NormKind)
        _typed(self, learnable_gain=bool, zero_centered=bool)
        for name in ("initial_gain", "alpha"):
            _finite(name, getattr(self, name))
        _not_negative("eps", self.eps)
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise UserError(f"groups: {self.groups!r} is not a whole number of at least 1")
        if self.groups > 1 and self.kind != "group":
            raise UserError(f"groups: {self.groups} groups need kind 'group', not {self.kind!r}")


def _as_norm(field_name: str, value: object) -> Norm | None:
    """Return the norm that a value stands for: True or a kind's name for one, False or None for none, or a Norm."""
    if value is None or isinstance(value, Norm):
        return value
    if isinstance(value, bool):
        return Norm() if value else None
    if isinstance(value, str):
        _one_of(f"{field_name}.kind", value, NormKind)
        return Norm(kind=value)  # type: ignore[arg-type]  # one of the kinds
    raise UserError(f"{field_name}: {value!r} is not a norm (true, false, a kind, or its fields)")


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The use of n streams S [batch, tokens, n, width] by a sub-layer: it reads one, mixes all, and writes to each.

        h = sum_j read_j S_j        S'_i = C( skip_scale * sum_j mix_ji s_j + write_i * branch )

    ``read`` and ``write`` are where the n weights start; ``mix`` starts at (or near) the identity. ``weights``: they
    are "constant", "learned" numbers, learned numbers plus a "tanh" of a projection of each normed stream
    (Hyper-Connections), the "sigmoid" of one of all of them, times ``magnitude`` to write (mHC), or Qwen's
    "gate": a share of each channel, by a projection of rank ``rank``. ``mix``: the "identity", a "free" matrix or a
    doubly stochastic one ("sinkhorn"). ``normed`` says which streams the post_norm is for; all of them if empty.
    ``norms``: an RMSNorm on each "stream", which then goes on normed, or on what is "read" of it alone; none if empty.

    mHC starts with ``diagonal`` times the identity before Sinkhorn's iterations, and with projections N(0, noise^2).
    ``transposed``: mix_ij weighs stream j for stream i. ``eps``: of its RMS and in Sinkhorn's iterations; 0 for the
    backbone's and 1e-6.
    """

    weights: Weights
    read: tuple[float, ...]
    write: tuple[float, ...] = ()
    mix: Mix = "identity"
    magnitude: float = 2.0
    rank: int = 0
    normed: tuple[bool, ...] = ()
    norms: tuple[StreamNorm, ...] = ()
    diagonal: float = 4.0
    noise: float = 0.0
    transposed: bool = False
    eps: float = 0.0

    def __post_init__(self) -> None:
        """Raise UserError for weights that are invalid or do not fit each other."""
        _one_of("weights", self.weights, Weights)
        _one_of("mix", self.mix, Mix)
        for name in ("read", "write", "normed", "norms"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        n = len(self.read)
        if n < 2 or {len(self.write), len(self.normed), len(self.norms)} - {0, n}:
            raise UserError(f"read: {n} streams (allowed: at least 2, and as many in write, normed and norms)")
        for norm in self.norms:
            _one_of("norms", norm, StreamNorm)
        _finite("magnitude", self.magnitude)
        _finite("diagonal", self.diagonal)
        _typed(self, transposed=bool)
        for name in ("noise", "eps"):
            _not_negative(name, getattr(self, name))
        whole_number("rank", self.rank, low=int(self.weights == "gate"))
        for name, value in (*(("read", v) for v in self.read), *(("write", v) for v in self.write)):
            _finite(name, value)
            top = 1.0 if name == "read" else self.magnitude
            if self.weights == "sigmoid" and not 0 < value < top:
                raise UserError(f"{name}: {value!r} of a sigmoid (allowed: between 0 and {top:g})")
        fits = {"identity": get_args(Weights), "free": ("learned", "tanh"), "sinkhorn": ("sigmoid",)}[self.mix]
        if self.weights not in fits:
            raise UserError(f"mix: {self.mix!r} with weights {self.weights!r} (allowed: {', '.join(fits)})")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sum that replaces the stream x in a layer: ``stream`` * x + ``states``, pairs of index and initial weight.

    State 0 is x^0, state l the output of the l-th block. ``learned``: "scalar" for each weight, or a "vector".
    ``dynamic``: scalars move with the stream, by two projections of it, with ``hidden`` channels between them (0: as
    many as there are weights). ``multiway``: the attention's queries, keys and values each read a sum of their own, by
    the same pre_norm or, with ``own_norms``, by one each; the last sum takes x's place (MUDD). ``normed_states``: x
    has an RMSNorm before it is summed and remembered (DLCL).
    """

    states: tuple[tuple[int, float], ...]
    stream: float = 1.0
    learned: Learned = "scalar"
    dynamic: bool = False
    multiway: bool = False
    own_norms: bool = False
    hidden: int = 0
    normed_states: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for states or weights that are invalid, or options that contradict each other."""
        states = tuple(_tuple("states", state) for state in _tuple("states", self.states))
        if any(len(state) != 2 or type(state[0]) is not int for state in states):
            raise UserError(f"states: {self.states!r} (allowed: pairs of a state's index and its weight at the start)")
        object.__setattr__(self, "states", states)
        for weight in (self.stream, *(weight for _, weight in states)):
            _finite("sources", weight)
        _one_of("learned", self.learned, Learned)
        _typed(self, dynamic=bool, multiway=bool, own_norms=bool, normed_states=bool)
        whole_number("hidden", self.hidden, low=0)
        for name, value, other in (("own_norms", self.own_norms, "multiway"), ("hidden", self.hidden, "dynamic")):
            if value and not getattr(self, other):
                raise UserError(f"{name}: {value!r} without {other} (allowed: {name} beside {other})")
        if (self.dynamic or self.multiway) and self.learned != "scalar":
            raise UserError(f"learned: {self.learned!r} of weights that are dynamic or multiway (allowed: 'scalar')")


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """One residual sub-layer (attention or feed-forward).

    ``coupling`` ties the skip's factor to b = ``out_scale``: "lerp" makes it 1 - b, "variance" sqrt(1 - b^2). A learned
    b is then the sigmoid of a parameter over ``gate_temperature``. ``read``: a feed-forward may read the "block_input",
    beside its attention (GPT-J); "depth" reads a softmax over the memory's states and the stream, "memory" over those
    alone (Attention Residuals). ``inner_norm`` stands inside the module, before its last projection (SubLN).

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
    streams: Streams | None = None
    read: Read = "stream"
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
        _one_of("read", self.read, Read)
        _typed(self, streams=Streams | None)
        if self.streams and not self.streams.write:
            raise UserError("streams.write: none given (allowed: as many weights as in read; a readout has none)")
        if self.read != "stream" and (self.streams or self.skip != "stream"):
            what = "several streams" if self.streams else f"skip {self.skip!r}"
            what += ": the memory holds the block's input" * (self.reads_memory and not self.streams)
            raise UserError(f"read: {self.read!r} has no meaning with {what}")
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
    def reads_memory(self) -> bool:
        """Whether it reads earlier states."""
        return self.read in ("depth", "memory")

    @property
    def norms(self) -> dict[str, Norm]:
        """The norms of the sub-layer, by position."""
        return {p: n for p in (*POSITIONS, "inner_norm") if (n := getattr(self, p)) is not None}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block: an attention and a feed-forward sub-layer, run in this order.

    ``sources`` take the stream's place; ``boundary`` puts the stream that enters into the memory,
    ``inner_boundary`` the stream between the sub-layers.
    """

    attention: Sublayer = field(default_factory=Sublayer)
    feed_forward: Sublayer = field(default_factory=Sublayer)
    sources: Sources | None = None
    boundary: bool = False
    inner_boundary: bool = False

    @classmethod
    def of(cls, sublayer: Sublayer) -> Layer:
        """Return the block whose two sub-layers are wired alike."""
        return cls(attention=sublayer, feed_forward=sublayer)

    def map(self, change: Callable[[Sublayer], Sublayer]) -> Layer:
        """Return the block with ``change`` applied to both sub-layers."""
        return replace(self, attention=change(self.attention), feed_forward=change(self.feed_forward))

    def __post_init__(self) -> None:
        """Raise UserError for a field of another type, or an attention wired to the block's input, its own stream."""
        _typed(self, attention=Sublayer, feed_forward=Sublayer, sources=Sources | None)
        _typed(self, boundary=bool, inner_boundary=bool)
        for name, value in (("skip", self.attention.skip), ("read", self.attention.read)):
            if value != "stream" and (name == "skip" or value == "block_input"):
                raise UserError(
                    f"attention.{name}: {value!r} contradicts its place (the stream that enters a block's "
                    "attention is the block's input; allowed: 'stream')"
                )
        if self.sources and self.sources.multiway and self.attention.read != "stream":
            raise UserError(f"sources.multiway: the attention reads {self.attention.read!r} (allowed: 'stream')")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A placement resolved for a number of layers: all that a model needs to know about norms and skips.

    ``placement`` is its name; a scheme leaves it out, ``resolve`` sets it.
    ``embedding_scale`` multiplies the embedding; "sqrt_hidden_size" stands for the square root of the model's width.
    ``initialization`` is the recommended initializer's name ("" leaves it to the placement's registration).
    ``qk_norm`` and ``v_norm`` normalize queries and keys, or values: per head, or over the full projected width.
    ``readout`` makes one stream of several after the last block, ``final_sources`` take the stream's place there.
    ``qkv_norm`` is the norm that stands there; of kind "group" it is an RMSNorm if it is per head, which is a group.
    """

    placement: str = ""
    layers: tuple[Layer, ...]
    final_norm: Norm | None = None
    embedding_norm: Norm | None = None
    embedding_scale: float | Literal["sqrt_hidden_size"] = 1.0
    qk_norm: HeadNorm = "off"
    v_norm: HeadNorm = "off"
    qkv_norm: Norm = Norm(kind="rms")
    readout: Streams | None = None
    final_sources: Sources | None = None
    initialization: str = ""
    options: Json = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raise UserError for a plan without layers or with invalid fields."""
        if not isinstance(self.layers, list | tuple) or not all(isinstance(layer, Layer) for layer in self.layers):
            raise UserError(f"layers: {self.layers!r} is not a list of layers (Layer, or its fields)")
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise UserError("layers: a plan needs at least one layer")
        kinds = {"readout": Streams | None, "final_sources": Sources | None}
        _typed(self, placement=str, initialization=str, options=Mapping, **kinds)
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
        self._check_state()

    def _check_state(self) -> None:
        """Raise UserError for sub-layers that disagree on the streams or states that blocks pass on."""
        halves = [half for layer in self.layers for half in (layer.attention, layer.feed_forward)]
        counts = {len(half.streams.read) if half.streams else 1 for half in halves}
        counts.add(len(self.readout.read) if self.readout else 1)
        if len(counts) > 1:
            raise UserError(f"streams: {sorted(counts)} in one plan (allowed: one number, also in the readout)")
        if self.readout and (self.readout.write or self.readout.mix != "identity"):
            raise UserError("readout: it writes or mixes after the last block, where it may only read")
        if self.streams > 1 and self.has_memory:
            raise UserError("streams: sources and earlier states need a single stream")
        ends = [*enumerate(layer.sources for layer in self.layers), (len(self.layers), self.final_sources)]
        for index, sources in ends:
            for state, _ in sources.states if sources else ():
                if not 0 <= state <= (last := min(index, len(self.layers) - 1)):
                    raise UserError(f"sources: state {state} at layer {index} (allowed: 0 to {last}, those before it)")
        if any(sources for _, sources in ends) and any(layer.inner_boundary for layer in self.layers):
            raise UserError("inner_boundary: beside sources, which number whole blocks (allowed: without sources)")
        if self.final_sources and self.final_sources.multiway:
            raise UserError("final_sources.multiway: no attention reads them (allowed: false)")
        if any(half.reads_memory for half in halves) and (self.final_sources or not self.layers[0].boundary):
            raise UserError(
                "read: 'depth' needs a memory, which is read at the end, too (allowed: boundary in the first layer, no "
                "final_sources)"
            )

    @property
    def streams(self) -> int:
        first = self.layers[0].attention.streams
        return len(first.read) if first else 1

    @property
    def has_memory(self) -> bool:
        """Whether the blocks pass on earlier states besides the stream."""
        layers = any(layer.sources or layer.boundary or layer.inner_boundary for layer in self.layers)
        return layers or self.final_sources is not None

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

        Fields of YOUNGER are left out at their default.
        """
        return {**_plain(self), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Plan:
        """Read a plan from plain dicts. Raises UserError that names an unknown field or an invalid value."""
        if isinstance(data, Mapping) and "placement" not in data:
            raise UserError("plan: field 'placement' is missing")
        return _read(cls, data, "plan")


def _plain(record: Norm | Streams | Sources | Sublayer | Layer | Plan) -> Json:
    """Return a record as a dict, with nested records as dicts and tuples as lists."""

    def plain(value: object) -> object:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return _plain(value) if isinstance(value, Norm | Streams | Sources | Sublayer | Layer) else value

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
    """Convert a field's value: a mapping, or each mapping of a list, becomes the record that the field's type names."""
    record = next((a for a in (hint, *get_args(hint)) if a in (Norm, Streams, Sources, Sublayer, Layer)), None)
    if record is None or (record is Norm and not isinstance(value, Mapping)):
        return value  # a norm is also written as true, false or its kind
    if get_args(hint)[1:] != (...,):
        return _read(record, value, field_name)
    if not isinstance(value, list | tuple):
        raise UserError(f"{field_name}: {value!r} is not a list of layers")
    return tuple(_read(record, item, f"{field_name}[{i}]") for i, item in enumerate(value))
