"""The option ``wiring`` of every norm placement: variants of the residual path, such as several streams.

A wiring is a function that changes a placement's layers. The parameter ``size`` is the number of streams, or for
attn_res the number of layers in a group. ``start`` selects the initial weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from lamina.core.python_files import guarded
from lamina.core.registry import Registry
from lamina.core.values import whole_number
from lamina.errors import UserError, shortened
from lamina.placements.plan import Layer, Mix, Plan, Sources, StreamNorm, Streams, Sublayer


@dataclass(frozen=True, kw_only=True)
class PlanWiring:
    """A variant of the residual path. Its function ``make`` changes the layers of a placement's plan."""

    make: Callable[..., Plan]
    equation: str
    source: str

    def apply(
        self, plan: Plan, *, size: int | None = None, start: str | None = None, collapse: str | None = None
    ) -> Plan:
        """Return a placement with this variant of the residual path. Raises UserError for an unsuitable option or
        placement.
        """
        takes, given = inspect.signature(self.make).parameters, {"size": size, "start": start}
        for name, value in given.items():
            if value is not None and name not in takes:
                raise UserError(f"{name}: {value!r} has no effect with this wiring. Leave {name!r} out.")
        if size is not None:
            whole_number("size", size, low=0)
        with guarded("its function"):
            wired = self.make(plan, **{name: value for name, value in given.items() if name in takes})
        if not isinstance(wired, Plan) or wired.num_layers != plan.num_layers:
            made = f"{wired.num_layers} layers" if isinstance(wired, Plan) else shortened(repr(wired), 200)
            raise UserError(f"its function returns {made}. Return a Plan of {plan.num_layers} layers.")
        return wired if collapse is None else _collapsed(wired, collapse)


WIRINGS: Registry[PlanWiring] = Registry("wiring")
Make = TypeVar("Make", bound=Callable[..., Plan])


def named_wiring(name: str) -> PlanWiring:
    """Return the wiring with this name. If the name is a user's Python file, execute the file."""
    return WIRINGS.from_file(Path(name)) if name.endswith(".py") else WIRINGS.get(name)


def wiring(name: str, *, equation: str, source: str) -> Callable[[Make], Make]:
    """Register a function as a wiring, a variant of the residual path. The function changes a placement's layers."""

    def register(make: Make) -> Make:
        WIRINGS.add(name, PlanWiring(make=make, equation=equation, source=source), make.__module__)
        return make

    return register


def with_streams(plan: Plan, one: Callable[[int], Streams], readout: Streams) -> Plan:
    """Give a placement several residual streams. ``one`` returns the ``Streams`` of a sub-layer from its index."""
    layers = [
        replace(
            layer,
            attention=replace(layer.attention, streams=one(2 * index)),
            feed_forward=replace(layer.feed_forward, streams=one(2 * index + 1)),
        )
        for index, layer in enumerate(plan.layers)
    ]
    return replace(plan, layers=tuple(layers), readout=readout)


def _collapsed(plan: Plan, how: str) -> Plan:
    if plan.readout is None or plan.readout.normed or plan.readout.norms:
        raise UserError(f"collapse: {how!r} has no effect with this wiring. Leave 'collapse' out.")
    n = plan.streams
    read, normed = (1 / n if how == "mean" else 1.0,) * n, (how == "sum_of_norms",) * n
    return replace(plan, readout=Streams(weights="constant", read=read, normed=normed if any(normed) else ()))


def _count(size: int | None) -> int:
    return 4 if size is None else whole_number("size", size, low=2)


def _sigmoid(plan: Plan, size: int | None, mix: Mix = "identity") -> Plan:
    """Use n streams with sigmoid weights. Initially, sub-layer l mainly reads stream l mod n."""
    n = _count(size)

    def one(index: int) -> Streams:
        read = tuple(((stream == index % n) + 1 / n) / 2 for stream in range(n))
        return Streams(weights="sigmoid", read=read, write=(1.0,) * n, mix=mix)

    return with_streams(plan, one, Streams(weights="sigmoid", read=(1 / n,) * n))


@wiring("identity_hc", equation="h = r S, S' = S + w b", source="HY-V4; transformers' hy_v4")
def identity_hc(plan: Plan, size: int | None) -> Plan:
    """Use several residual streams that never mix. Sub-layers read and write the streams with sigmoid weights."""
    return _sigmoid(plan, size)


@wiring("mhc", equation="h = r S, S' = M S + w b, M doubly stochastic", source="mHC (arXiv 2512.24880); deepseek_v4")
def mhc(plan: Plan, size: int | None, start: str | None = None) -> Plan:
    """Use Hyper-Connections with a mix that keeps the sum of all streams. Sinkhorn's iterations run in float32.

    With ``start`` "liger", all biases are 0 and the projections are N(0, 0.02^2) at first, as in Liger's kernels. Each
    sub-layer then reads and mixes all streams about equally. After the last block, Lamina averages the streams.
    """
    if start is None:
        return _sigmoid(plan, size, mix="sinkhorn")
    if start != "liger":
        raise UserError(f"start: {start!r} has no effect with wiring=mhc. Use start=liger, or leave 'start' out.")
    n = _count(size)
    read, write = (0.5,) * n, (1.0,) * n
    streams = Streams(
        weights="sigmoid", read=read, write=write, mix="sinkhorn", diagonal=0.0, noise=0.02, transposed=True
    )
    return with_streams(plan, lambda index: streams, Streams(weights="constant", read=(1 / n,) * n))


def _hyper(plan: Plan, size: int | None, dynamic: bool) -> Plan:
    n = _count(size)

    def one(index: int) -> Streams:
        read = tuple(float(stream == index % n) for stream in range(n))
        return Streams(weights="tanh" if dynamic else "learned", read=read, write=(1.0,) * n, mix="free")

    return with_streams(plan, one, Streams(weights="constant", read=(1 / n,) * n))


@wiring("hc", equation="h = r S, S' = M S + w b, all learned", source="Hyper-Connections (arXiv 2409.19606) Sec 2.1")
def hc(plan: Plan, size: int | None) -> Plan:
    """Use static Hyper-Connections. Initially, sub-layer l reads stream l mod n and writes to all n streams."""
    return _hyper(plan, size, dynamic=False)


@wiring(
    "dynamic_hc",
    equation="the equation of hc, but each weight is a constant plus a tanh of the normed stream",
    source="arXiv 2409.19606 Sec 2.2, Algorithm 2",
)
def dynamic_hc(plan: Plan, size: int | None) -> Plan:
    """Use dynamic Hyper-Connections: the weights depend on the residual streams."""
    return _hyper(plan, size, dynamic=True)


@wiring("gated_residual", equation="h = mean_j g_j * LN S_j, S' = S + w b", source="Qwen4; transformers' qwen4_exp")
def gated_residual(plan: Plan, size: int | None) -> Plan:
    """Use several streams that sub-layers read through low-rank gates. Each channel of a normed stream has a gate."""
    n = _count(size)
    streams = Streams(weights="gate", read=(1.0,) * n, write=(1.0,) * n, rank=16)
    return with_streams(plan, lambda index: streams, replace(streams, write=()))


def _check_sums(plan: Plan, *, post_norms: bool) -> None:
    """Raise UserError for a scaled skip, for missing post-norms if ``post_norms``, and otherwise for a post-norm."""
    for half in (half for layer in plan.layers for half in (layer.attention, layer.feed_forward)):
        plain = (half.skip, half.skip_scale, half.skip_scale_learned) == ("stream", 1.0, "no")
        if not plain or (half.post_norm is not None) != post_norms:
            how, such = ("with", "post_ln") if post_norms else ("without", "pre_ln")
            raise UserError(
                f"this wiring needs skips without scales, and sub-layers {how} post-norms. Choose a placement such as "
                f"{such}."
            )


@wiring("residual", equation="p' = C(p + b), r' = r + b, out: p + LN r", source="ResiDual (arXiv 2304.14802)")
def residual(plan: Plan) -> Plan:
    """Give Post-LN a second residual stream. Lamina normalizes the second stream only after the last block."""
    _check_sums(plan, post_norms=True)
    if plan.options.get("final_norm") is False:
        raise UserError("final_norm: False leaves the second stream without a final norm. Set final_norm to true.")
    plan = replace(plan, final_norm=plan.final_norm or plan.layers[-1].feed_forward.post_norm)
    streams = Streams(weights="constant", read=(1.0, 0.0), write=(1.0, 1.0), normed=(True, False))
    return with_streams(plan, lambda index: streams, Streams(weights="constant", read=(1.0, 1.0), normed=(False, True)))


@wiring(
    "siamese",
    equation="p = LN p, h = p + LN u, p' = p + b / sqrt(2 l), u' = u + b",
    source="SiameseNorm (arXiv 2602.08064)",
)
def siamese(plan: Plan) -> Plan:
    """Use SiameseNorm's two residual streams: p with norms, and u without norms. Every branch adds to both streams."""
    _check_sums(plan, post_norms=False)

    def one(index: int) -> Streams:
        # in the equation, l counts the blocks from 1
        return Streams(weights="constant", read=(1.0, 1.0), write=((2 * (index // 2 + 1)) ** -0.5, 1.0), norms=norms)

    norms: tuple[StreamNorm, ...] = ("stream", "read")
    return with_streams(plan, one, Streams(weights="constant", read=(1.0, 1.0), norms=norms))


def _with_sources(plan: Plan, of: Callable[[int], Sources | None], last: Sources | None = None) -> Plan:
    layers = tuple(replace(layer, sources=of(index)) for index, layer in enumerate(plan.layers))
    return replace(plan, layers=layers, final_sources=last)


@wiring("x0", equation="x <- a x + b x_0 before each block", source="modded-nanogpt; nanochat's lambdas")
def x0(plan: Plan) -> Plan:
    """Add the embedding to the residual stream before every block. The embedding's factor b starts at 0."""
    return _with_sources(plan, lambda index: Sources(states=((0, 0.0),)))


@wiring("denseformer", equation="x_l <- sum_i w_li x_i after each block", source="DenseFormer (arXiv 2402.02622) Eq 2")
def denseformer(plan: Plan, start: str | None = None) -> Plan:
    """Replace the residual stream with a weighted sum of all states so far.

    By default, the latest state's weight starts at 1, and all other weights start at 0. With ``start`` "mean", the
    weights of the l + 1 states after block l start at 1 / (l + 1). With "dlcl", an RMSNorm also normalizes each state
    before Lamina sums and stores the state, as in DLCL's Pre-LN (arXiv 1906.01787).
    """
    if start is None:
        return _with_sources(plan, _all_before, _all_before(plan.num_layers))
    if start == "liger":
        raise UserError(
            "start: 'liger' has no effect with wiring=denseformer. Use start=mean or start=dlcl, or leave 'start' out."
        )

    def mean(index: int) -> Sources | None:
        share, normed = 1 / (index + 1), start == "dlcl"
        states = tuple((state, share) for state in range(index))
        return Sources(states=states, stream=share, normed_states=normed) if index or normed else None

    return _with_sources(plan, mean, mean(plan.num_layers))


def _all_before(index: int, dynamic: bool = False) -> Sources | None:
    states = tuple((state, 0.0) for state in range(index))
    return Sources(states=states, dynamic=dynamic) if index else None


@wiring("dynamic_dense", equation="x_l <- sum_i a_li(x_l) x_i after each block", source="arXiv 2502.12170 Eq 5, 6")
def dynamic_dense(plan: Plan) -> Plan:
    """Let DenseFormer's weights depend on the stream: a weight is a + W_2 GELU(W_1 RMS(x)), and W_2 starts at 0."""
    return _with_sources(plan, lambda index: _all_before(index, dynamic=True), _all_before(plan.num_layers, True))


@wiring(
    "mudd",
    equation="the equation of dynamic_dense, with separate sums for q, k, v and x",
    source="MUDDFormer (arXiv 2502.12170) Eq 7, 8",
)
def mudd(plan: Plan, size: int | None) -> Plan:
    """Use multiway dynamic dense connections: queries, keys, values and the stream read separate weighted sums.

    As in MUDDFormer's code, q, k and v have separate norms. The width of W_1 is four times the number of states, even
    after the last block. With ``size`` (64 in MUDDFormer's code), Lamina rounds this width up to a larger multiple of
    ``size``. Lamina does not widen the feed-forwards of later layers as in the paper.
    """
    size = size if size is None else whole_number("size", size)

    def one(index: int, ways: int) -> Sources | None:
        width = 4 * (index + 1)  # four times as wide even after the last block, which has a single sum
        width = width if size is None else (width // size + 1) * size
        if not (before := _all_before(index, dynamic=True)):
            return None
        return replace(before, multiway=ways > 1, own_norms=ways > 1, hidden=width)

    return _with_sources(plan, lambda index: one(index, 4), one(plan.num_layers, 1))


@wiring("unet", equation="x <- x + w x_(N-l) in the second half", source="modded-nanogpt's U-net skips")
def unet(plan: Plan) -> Plan:
    """Add the outputs of the first half's blocks to the inputs of the second half's blocks, in reverse order."""
    n = plan.num_layers
    return _with_sources(plan, lambda index: Sources(states=((n - index, 1.0),)) if 2 * index >= n and index else None)


@wiring("parallel", equation="y = x + A(x), x' = y + F(x)", source="GPT-J, PaLM; transformers' gpt_neox")
def parallel(plan: Plan) -> Plan:
    """Let attention and feed-forward read the block's input, each through a separate norm."""
    layers = (replace(layer, feed_forward=replace(layer.feed_forward, read="block_input")) for layer in plan.layers)
    return replace(plan, layers=tuple(layers))


@wiring("attn_res", equation="h = sum_i softmax(q LN v_i) v_i", source="Attention Residuals (arXiv 2603.15031) Sec 3.2")
def attn_res(plan: Plan, size: int | None) -> Plan:
    """Let each sub-layer attend to earlier layers: to the summed output of each group of layers so far.

    By default, there are 8 groups of layers. With ``size`` 0, each sub-layer is a group, as in the paper's Sec 3.1.
    """
    layers_of_block = math.ceil(plan.num_layers / 8) if size is None else size

    def alone(half: Sublayer) -> Sublayer:
        return replace(half, read="memory", skip_scale=0.0, skip_scale_learned="no")

    def wired(index: int, layer: Layer) -> Layer:
        if layers_of_block == 0:
            return replace(layer.map(alone), boundary=True, inner_boundary=True)
        starts = index % layers_of_block == 0
        attention = alone(layer.attention) if starts else replace(layer.attention, read="depth")
        feed_forward = replace(layer.feed_forward, read="depth")
        return replace(layer, attention=attention, feed_forward=feed_forward, boundary=starts)

    return replace(plan, layers=tuple(wired(index, layer) for index, layer in enumerate(plan.layers)))
