"""A norm placement as data: the norms, skips and scales of each layer.

A sub-layer computes

    y = C( skip_scale * s + out_scale * B( module( pre_scale * A(x) ) ) )

- A, B, C: ``pre_norm``, ``out_norm`` and ``post_norm`` (the positions in Figure 2 of the Peri-LN paper)
- x: the residual stream
- s: the skip, which is x, the block's input (FuseNorm's feed-forward), or the sum of both (B2T)

This module needs neither torch nor transformers. Saving a plan as JSON and loading the JSON returns an equal plan.
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
OWN_KINDS: set[str] = set()  # the names of users' own norms (lamina.modeling.norm)
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
# Fields newer than the first saved plans. Plan.to_dict omits them at their defaults, so that old plans stay equal.
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
        raise UserError(f"{field_name}: {value!r} is unknown. Choose one of {', '.join(map(repr, allowed))}.")


def _finite(field_name: str, value: object, more: str = "") -> None:
    if not is_finite(value):
        raise UserError(f"{field_name}: {value!r} is not a finite number{more}")


def _not_negative(field_name: str, value: object) -> None:
    if not is_finite(value) or value < 0:
        raise UserError(f"{field_name}: {value!r} is not a number of at least 0")


def _tuple(field_name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{field_name}: {value!r} is not a list")
    return tuple(value)


def _typed(record: object, **kinds: type | UnionType) -> None:
    words = {bool: "true or false", str: "a text", Mapping: "a mapping", NoneType: "none"}
    for name, kind in kinds.items():
        if not isinstance(value := getattr(record, name), kind):
            each_kind = (kind,) if isinstance(kind, type) else get_args(kind)
            allowed = " or ".join(words.get(one, f"a {one.__name__}") for one in each_kind)
            raise UserError(f"{name}: {value!r} is not {allowed}")


@dataclass(frozen=True, kw_only=True)
class Norm:
    """One norm of a sub-layer, or of the whole model.

    Raises UserError if a field is invalid, or if ``groups`` is above 1 for a kind other than "group".

    Attributes:
        kind: the kind of norm. "backbone" is the backbone's own kind (RMSNorm in Llama, LayerNorm in ViT). "group"
            divides a token's channels into ``groups`` equal parts and normalizes each part. "l2" divides by the L2
            norm. "dyt" multiplies the input by a learned factor and applies tanh. "derf" does the same with erf.
        zero_centered: whether the weight stores the gain minus 1, as in Gemma.
        alpha: the initial value of the learned factor of "dyt" and "derf".
        eps: the epsilon, or 0 for the backbone's epsilon.
    """

    kind: NormKind = "backbone"
    learnable_gain: bool = True
    initial_gain: float = 1.0
    groups: int = 1
    zero_centered: bool = False
    alpha: float = 0.5
    eps: float = 0.0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, NormKind)
        _typed(self, learnable_gain=bool, zero_centered=bool)
        for name in ("initial_gain", "alpha"):
            _finite(name, getattr(self, name))
        _not_negative("eps", self.eps)
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise UserError(f"groups: {self.groups!r} is not a whole number of at least 1")
        if self.groups > 1 and self.kind != "group":
            raise UserError(f"groups: {self.groups} groups do not work with kind {self.kind!r}. Set kind to 'group'.")


def _as_norm(field_name: str, value: object) -> Norm | None:
    """Convert True or a kind's name to a Norm, and False to None."""
    if value is None or isinstance(value, Norm):
        return value
    if isinstance(value, bool):
        return Norm() if value else None
    if isinstance(value, str):
        _one_of(f"{field_name}.kind", value, NormKind)
        return Norm(kind=value)  # type: ignore[arg-type]  # one of the kinds
    raise UserError(f"{field_name}: {value!r} is not a norm. Give true, false, a kind of norm, or a mapping of fields.")


@dataclass(frozen=True, kw_only=True)
class Streams:
    """How a sub-layer reads, mixes and writes n residual streams S [batch, tokens, n, width].

        h = sum_j read_j S_j
        S'_i = C( skip_scale * sum_j mix_ji s_j + write_i * branch )

    Here h is the sub-layer's input, C is the post_norm, and S'_i is the new stream i. The skip s_j is S_j, stream j of
    the block's input, or the sum of both. If the norm of stream j is "stream", S_j is the normed stream.

    Raises UserError if a field is invalid, if there are fewer than 2 streams, or if ``mix`` does not work with
    ``weights``. Every tuple other than ``read`` must be empty or as long as ``read``.

    Attributes:
        weights: how Lamina computes the read and write weights.

            - "constant": fixed numbers
            - "learned": learned numbers
            - "tanh": learned numbers, plus the tanh of a projection of each normed stream (Hyper-Connections)
            - "sigmoid": the sigmoid of a projection of all streams. Lamina multiplies the write weights by
              ``magnitude`` (mHC).
            - "gate": a gate for each channel, from a projection of rank ``rank`` (Qwen)
        read: the initial read weight of each stream.
        write: the initial write weight of each stream.
        mix: the n x n matrix that mixes the streams: the "identity", any matrix ("free"), or a doubly stochastic matrix
            ("sinkhorn").
        normed: whether the post_norm normalizes each stream, with one entry per stream. An empty tuple means all
            streams.
        norms: the target of an RMSNorm for each stream: the stream itself ("stream"), or only the copy that the
            sub-layer reads ("read"). An empty tuple means no norms.
        diagonal: the initial diagonal of the learned matrix to which Lamina applies Sinkhorn's iterations (mHC).
        noise: the standard deviation of the projections' initial weights (mHC).
        transposed: whether mix_ij, instead of mix_ji, is the weight of stream j in the new stream i.
        eps: the epsilon of mHC's RMS and of Sinkhorn's iterations. 0 means the backbone's epsilon for the RMS, and 1e-6
            for the iterations.
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
        _one_of("weights", self.weights, Weights)
        _one_of("mix", self.mix, Mix)
        for name in ("read", "write", "normed", "norms"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        n = len(self.read)
        if n < 2 or {len(self.write), len(self.normed), len(self.norms)} - {0, n}:
            raise UserError(
                f"read: 'read' has {n} weights. Give at least 2 weights, and give 'write', 'normed' and 'norms' as "
                "many values as 'read'."
            )
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
                raise UserError(f"{name}: a sigmoid cannot start at {value!r}. Give a number between 0 and {top:g}.")
        fits = {"identity": get_args(Weights), "free": ("learned", "tanh"), "sinkhorn": ("sigmoid",)}[self.mix]
        if self.weights not in fits:
            raise UserError(
                f"mix: {self.mix!r} does not work with weights {self.weights!r} (allowed weights: {', '.join(fits)})"
            )


@dataclass(frozen=True, kw_only=True)
class Sources:
    """A weighted sum of earlier hidden states that replaces the residual stream at a block's input.

    Raises UserError if a field is invalid. ``own_norms`` needs ``multiway``, and ``hidden`` needs ``dynamic``. Both
    ``dynamic`` and ``multiway`` need ``learned="scalar"``.

    Attributes:
        states: pairs of a state's index and initial weight. State 0 is the embedding's output x^0, and state l is the
            output of the l-th block.
        stream: the initial weight of the residual stream.
        learned: whether the weights are fixed ("no"), learned numbers ("scalar") or learned vectors ("vector").
        dynamic: whether the weights also depend on the stream, through a two-layer projection.
        hidden: the number of hidden channels in this projection. 0 means as many channels as weights.
        multiway: whether queries, keys and values each read a separate sum, as in MUDD. A fourth sum replaces the
            stream.
        own_norms: whether the sums for queries, keys and values have separate norms.
        normed_states: whether an RMSNorm normalizes each state before Lamina sums and stores the state (DLCL).
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
        states = tuple(_tuple("states", state) for state in _tuple("states", self.states))
        if any(len(state) != 2 or type(state[0]) is not int for state in states):
            raise UserError(
                f"states: {self.states!r} is not a list of pairs. Give each pair as [index of a state, initial weight]."
            )
        object.__setattr__(self, "states", states)
        for weight in (self.stream, *(weight for _, weight in states)):
            _finite("sources", weight)
        _one_of("learned", self.learned, Learned)
        _typed(self, dynamic=bool, multiway=bool, own_norms=bool, normed_states=bool)
        whole_number("hidden", self.hidden, low=0)
        for name, value, other in (("own_norms", self.own_norms, "multiway"), ("hidden", self.hidden, "dynamic")):
            if value and not getattr(self, other):
                raise UserError(
                    f"{name}: {value!r} has no effect without {other}. Set {other!r}, or leave {name!r} out."
                )
        if (self.dynamic or self.multiway) and self.learned != "scalar":
            raise UserError(
                f"learned: {self.learned!r} does not work with dynamic or multiway weights. Set 'learned' to 'scalar'."
            )


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """A residual sub-layer: attention or feed-forward. Raises UserError if a field is invalid.

    Attributes:
        inner_norm: the norm inside the module, before the module's last projection (SubLN).
        coupling: how the branch's factor b (``out_scale``) determines the skip's factor. "lerp" is 1 - b, and
            "variance" is sqrt(1 - b^2). With a coupling, a learned b is sigmoid(parameter / ``gate_temperature``).
        read: the sub-layer's input: the residual stream ("stream"), the block's input ("block_input", as in GPT-J), or
            a softmax-weighted sum of the stored states ("memory") or of the stored states and the stream ("depth").
        weight_gain: the factor on the initial weights for values, outputs and feed-forwards (DeepNorm's beta).
        gate_gain: the factor on the initial gate weights of a gated feed-forward. Only initializers with gains, such as
            deepnorm, use ``weight_gain`` and ``gate_gain``.
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
            raise UserError("streams.write: no weights are given. Give as many weights as in 'streams.read'.")
        if self.read != "stream" and (self.streams or self.skip != "stream"):
            what = "several streams" if self.streams else f"skip {self.skip!r}"
            what += ", because the memory holds the block's input" * (self.reads_memory and not self.streams)
            fix = "Leave out 'streams'." if self.streams else "Choose a placement with skip 'stream', such as pre_ln."
            raise UserError(f"read: {self.read!r} does not work with {what}. {fix}")
        if self.coupling != "none":
            self._check_coupling()

    def _check_coupling(self) -> None:
        if (self.skip_scale, self.skip_scale_learned) != (1.0, "no"):
            raise UserError(
                f"coupling: {self.coupling!r} already sets the skip's factor. Leave 'skip_scale' out, or set "
                "'coupling' to 'none'."
            )
        if not (0 <= self.out_scale <= 1 and (self.out_scale_learned == "no" or 0 < self.out_scale < 1)):
            raise UserError(
                f"out_scale: {self.out_scale!r} does not work with coupling {self.coupling!r}. Give a number from 0 "
                "to 1. Start a learned out_scale above 0 and below 1."
            )
        if self.gate_temperature <= 0:
            raise UserError(f"gate_temperature: {self.gate_temperature!r} is not a number above 0")

    @property
    def reads_memory(self) -> bool:
        return self.read in ("depth", "memory")

    @property
    def norms(self) -> dict[str, Norm]:
        return {p: n for p in (*POSITIONS, "inner_norm") if (n := getattr(self, p)) is not None}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A block: an attention sub-layer, then a feed-forward sub-layer.

    Raises UserError for a field with a wrong type. The attention's ``skip`` must be "stream", and the attention's
    ``read`` must not be "block_input". With multiway ``sources``, the attention must not read earlier states.

    Attributes:
        sources: the weighted sum of earlier states that the block reads, or None for the residual stream.
        boundary: whether Lamina stores the block's input for later blocks.
        inner_boundary: whether Lamina also stores the residual stream between attention and feed-forward.
    """

    attention: Sublayer = field(default_factory=Sublayer)
    feed_forward: Sublayer = field(default_factory=Sublayer)
    sources: Sources | None = None
    boundary: bool = False
    inner_boundary: bool = False

    @classmethod
    def of(cls, sublayer: Sublayer) -> Layer:
        """Return a block whose two sub-layers have the same norms and scales."""
        return cls(attention=sublayer, feed_forward=sublayer)

    def map(self, change: Callable[[Sublayer], Sublayer]) -> Layer:
        return replace(self, attention=change(self.attention), feed_forward=change(self.feed_forward))

    def __post_init__(self) -> None:
        _typed(self, attention=Sublayer, feed_forward=Sublayer, sources=Sources | None)
        _typed(self, boundary=bool, inner_boundary=bool)
        for name, value in (("skip", self.attention.skip), ("read", self.attention.read)):
            if value != "stream" and (name == "skip" or value == "block_input"):
                raise UserError(
                    f"attention.{name}: {value!r} equals the residual stream, because the attention is the first "
                    f"sub-layer of its block. Set {name} to 'stream'."
                )
        if self.sources and self.sources.multiway and self.attention.read != "stream":
            raise UserError(
                f"sources.multiway: the attention reads {self.attention.read!r}. Set attention.read to 'stream'."
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A norm placement for a fixed number of layers. The plan determines all norms and skips of a model.

    Raises UserError if a field is invalid, if there are no layers, or if fields contradict each other.

    Attributes:
        embedding_scale: the factor on the embedding. "sqrt_hidden_size" is the square root of the model's width.
        qk_norm: the norm on queries and keys: "off", in each head ("head"), or over the full projected width ("full").
        v_norm: the norm on values, with the same choices as ``qk_norm``.
        qkv_norm: the kind of the norms on queries, keys and values. With "head", the kind "group" is an RMSNorm.
        readout: how to join several residual streams after the last block.
        final_sources: the weighted sum that replaces the residual stream after the last block.
        initialization: the recommended initializer, or "" for the initializer in the placement's registration.
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
        if not isinstance(self.layers, list | tuple) or not all(isinstance(layer, Layer) for layer in self.layers):
            raise UserError(
                f"layers: {self.layers!r} is not a list of layers. Give a list of Layer objects or mappings."
            )
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise UserError("layers: the list is empty. Give at least one layer.")
        kinds = {"readout": Streams | None, "final_sources": Sources | None}
        _typed(self, placement=str, initialization=str, options=Mapping, **kinds)
        if self.qkv_norm is None or isinstance(self.qkv_norm, bool):
            raise UserError(
                f"qkv_norm: {self.qkv_norm!r} is not a norm. Give a kind of norm, or a mapping of fields. To "
                "add norms on queries and keys, set 'qk_norm'. To add norms on values, set 'v_norm'."
            )
        for name in ("final_norm", "embedding_norm", "qkv_norm"):
            object.__setattr__(self, name, _as_norm(name, getattr(self, name)))
        if self.embedding_scale != "sqrt_hidden_size":
            _finite("embedding_scale", self.embedding_scale, " or 'sqrt_hidden_size'")
        _one_of("qk_norm", self.qk_norm, HeadNorm)
        _one_of("v_norm", self.v_norm, HeadNorm)
        self._check_state()

    def _check_state(self) -> None:
        """Raise UserError if layers contradict each other, for example in their numbers of streams or stored states."""
        halves = [half for layer in self.layers for half in (layer.attention, layer.feed_forward)]
        counts = {len(half.streams.read) if half.streams else 1 for half in halves}
        counts.add(len(self.readout.read) if self.readout else 1)
        if len(counts) > 1:
            raise UserError(
                f"streams: the sub-layers have different numbers of streams, {sorted(counts)}. Give all sub-layers and "
                "the readout the same number of streams."
            )
        if self.readout and (self.readout.write or self.readout.mix != "identity"):
            raise UserError(
                "readout: no block follows, so a readout cannot write to the streams or mix them. Leave out 'write' "
                "and 'mix'."
            )
        if self.streams > 1 and self.has_memory:
            raise UserError(
                "streams: a layer with streams cannot read earlier states. Leave out 'streams', or leave out "
                "'sources' and 'read'."
            )
        ends = [*enumerate(layer.sources for layer in self.layers), (len(self.layers), self.final_sources)]
        for index, sources in ends:
            for state, _ in sources.states if sources else ():
                if not 0 <= state <= (last := min(index, len(self.layers) - 1)):
                    raise UserError(f"sources: layer {index} cannot read state {state}. Give a state from 0 to {last}.")
        if any(sources for _, sources in ends) and any(layer.inner_boundary for layer in self.layers):
            raise UserError(
                "inner_boundary: this field does not work with sources, because a source is a whole block's state. "
                "Leave out 'inner_boundary' or 'sources'."
            )
        if self.final_sources and self.final_sources.multiway:
            raise UserError("final_sources.multiway: no attention reads final_sources. Set 'multiway' to false.")
        if any(half.reads_memory for half in halves) and (self.final_sources or not self.layers[0].boundary):
            raise UserError(
                "read: 'depth' and 'memory' need stored states from the first block on. Set 'boundary' in the "
                "first layer, and leave out 'final_sources'."
            )

    @property
    def streams(self) -> int:
        first = self.layers[0].attention.streams
        return len(first.read) if first else 1

    @property
    def has_memory(self) -> bool:
        """Return whether blocks store or read earlier states, in addition to the residual stream."""
        layers = any(layer.sources or layer.boundary or layer.inner_boundary for layer in self.layers)
        return layers or self.final_sources is not None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kinds(self) -> list[tuple[Layer, list[int]]]:
        """Return each distinct layer with the indices of all equal layers, in order of first appearance."""
        indices: dict[Layer, list[int]] = {}
        for index, layer in enumerate(self.layers):
            indices.setdefault(layer, []).append(index)
        return list(indices.items())

    def to_dict(self) -> Json:
        return {**_plain(self), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Plan:
        """Create a plan from the data of ``to_dict``. Raises UserError for an unknown field or an invalid value."""
        if isinstance(data, Mapping) and "placement" not in data:
            raise UserError("plan: field 'placement' is missing")
        return _read(cls, data, "plan")


def _plain(record: Norm | Streams | Sources | Sublayer | Layer | Plan) -> Json:
    def plain(value: object) -> object:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return _plain(value) if isinstance(value, Norm | Streams | Sources | Sublayer | Layer) else value

    held = [(entry, getattr(record, entry.name)) for entry in fields(record)]
    return {e.name: plain(v) for e, v in held if e.name not in YOUNGER or v != e.default}


def _read(cls: type[_Record], data: object, field_name: str) -> _Record:
    """Create an object from a mapping of fields. A UserError names a field's path: ``plan.layers[3].attention``."""
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
    """Convert a mapping, or a list of mappings, to objects of the field's type. Return other values unchanged."""
    record = next((a for a in (hint, *get_args(hint)) if a in (Norm, Streams, Sources, Sublayer, Layer)), None)
    if record is None or (record is Norm and not isinstance(value, Mapping)):
        return value  # the value of a norm may be true, false or the name of a kind
    if get_args(hint)[1:] != (...,):
        return _read(record, value, field_name)
    if not isinstance(value, list | tuple):
        raise UserError(f"{field_name}: {value!r} is not a list of layers")
    return tuple(_read(record, item, f"{field_name}[{i}]") for i, item in enumerate(value))
