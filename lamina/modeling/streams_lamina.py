"""Residual paths with several streams, or with stored states of earlier blocks.

This file imports only torch, because transformers copies this file beside a checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

DEPTH_READS = ("depth", "memory")  # reads of stored states: with the stream ("depth"), or without ("memory")


class State(NamedTuple):
    """The residual stream, and the stored states of earlier blocks, each [batch, tokens, width]."""

    stream: torch.Tensor
    memory: tuple[torch.Tensor, ...]


class LaminaWiring(nn.Module, ABC):
    """The base class of residual paths with learned weights, other than norms and scales.

    Initializers and weight decay skip these weights, and the module computes in float32. ``begin`` registers the
    entries of ``starts`` as parameters, or as constants (except "gains") if the placement learns no weights.
    """

    def begin(self, learned: bool = True) -> None:
        for name, start in self.initial().items():
            if learned or name == "gains":
                start = start.to(device=torch.get_default_device(), dtype=torch.get_default_dtype())
                self.register_parameter(name, nn.Parameter(start))
            else:
                setattr(self, name, start.tolist())

    @abstractmethod
    def starts(self) -> dict[str, torch.Tensor]:
        """Return the initial value of each parameter, by the parameter's name."""

    def initial(self) -> dict[str, torch.Tensor]:
        """Return ``starts`` on the CPU, because tensors on the meta device have no values."""
        with torch.device("cpu"):
            return self.starts()

    def held(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the parameter or the constant of this name, in float32."""
        value = getattr(self, name)
        return value.float() if isinstance(value, torch.Tensor) else torch.tensor(value, device=like.device)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last axis. The result keeps the axis with length 1."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def mixed(matrix: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Return sum_i M_ij S_i [..., m, width], for streams S [..., n, width] and a matrix M [..., n, m]."""
    with torch.autocast(streams.device.type, enabled=False):  # a float32 stream stays float32
        return matrix.to(streams.dtype).transpose(-1, -2).expand(*streams.shape[:-2], -1, -1) @ streams


def sinkhorn(logits: torch.Tensor, iterations: int = 20, eps: float = 1e-6) -> torch.Tensor:
    """Make each row and each column of the matrix [..., n, n] sum to 1 (mHC, arXiv 2512.24880 Eq 9)."""
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class StreamMixer(LaminaWiring):
    """Read a sub-layer's input from n streams [batch, tokens, n, width], and compute the mixing and write weights.

    For the equations, see ``lamina.placements.plan.Streams``. The mixer after the last block has no write weights.
    """

    def __init__(self, spec: dict, width: int, eps: float):
        super().__init__()
        self.spec, self.width, self.eps = spec, width, spec.get("eps") or eps
        self.n, self.writes = len(spec["read"]), bool(spec["write"])
        self.mixes = spec["mix"] != "identity"
        self.norms: tuple[str, ...] = tuple(spec.get("norms", ()))
        self.begin(learned=spec["weights"] != "constant")

    def starts(self) -> dict[str, torch.Tensor]:
        """Return the initial values. Projections start near 0, so the weights start near the placement's values."""
        n, kind = self.n, self.spec["weights"]
        if kind == "gate":
            generator = torch.Generator().manual_seed(0)  # so that the other weights do not depend on this draw
            down = torch.randn(self.spec["rank"], n * self.width, generator=generator) * (n * self.width) ** -0.5
            up, inject = (
                0.02 * torch.randn(*size, generator=generator) for size in (down.T.shape, (n, n * self.width))
            )
            starts = {"gain": torch.ones(n * self.width), "down": down, "up": up}  # equal streams would stay equal
            return starts | ({"inject": inject} if self.writes else {})
        tops = {"read": 1.0, "write": self.spec["magnitude"]}
        starts = {name: torch.tensor(self.spec[name], dtype=torch.float32) for name in tops if self.spec[name]}
        if kind == "sigmoid":
            starts = {name: torch.logit(start / tops[name]) for name, start in starts.items()}
        if self.mixes:
            starts["mix"] = torch.eye(n) * (self.spec.get("diagonal", 4.0) if kind == "sigmoid" else 1.0)
        if kind == "sigmoid":
            starts["projection"] = torch.zeros(sum(start.numel() for start in starts.values()), n * self.width)
            if noise := self.spec.get("noise"):
                starts["projection"].normal_(std=noise, generator=torch.Generator().manual_seed(0))
        if kind == "tanh":
            starts["projection"] = torch.zeros(1 + self.writes + n * self.mixes, self.width)
        if kind in ("sigmoid", "tanh"):
            starts["scale"] = torch.full((1 + self.writes + self.mixes,), 0.01)
        return starts | ({"gains": torch.ones(n, self.width)} if self.norms else {})

    def normed(self, streams: torch.Tensor, where: str) -> torch.Tensor:
        """Apply a float32 RMSNorm to each stream for which ``norms`` has the entry ``where``."""
        if where not in self.norms:
            return streams
        parts = []
        for norm, x, gain in zip(self.norms, streams.float().unbind(-2), self.held("gains", streams), strict=True):
            parts.append(x * inverse_rms(x, self.eps) * gain if norm == where else x)
        return torch.stack(parts, dim=-2).to(streams.dtype)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return a sub-layer's input [batch, tokens, width], mixing matrix [..., n, n] and write weights [..., n]."""
        with torch.autocast(streams.device.type, enabled=False):
            x = self.normed(streams, "read").float()
            if self.spec["weights"] == "gate":
                read, write = self._gates(x)
                return read.to(streams.dtype), None, write
            logits = [self.held("read", x), *([self.held("write", x)] if self.writes else [])]
            logits += [self.held("mix", x)] if self.mixes else []
            if self.spec["weights"] in ("sigmoid", "tanh"):
                logits = self._moved(logits, x)
            if self.spec["weights"] == "sigmoid":
                tops = (1.0, float(self.spec["magnitude"]))
                weights = [top * p.sigmoid() for top, p in zip(tops, logits, strict=False)]
                matrices = [sinkhorn(p, eps=self.spec.get("eps") or 1e-6) for p in logits[2:]]
                logits = [*weights, *(m.mT if self.spec.get("transposed") else m for m in matrices)]
            read = mixed(logits[0].unsqueeze(-1), x).squeeze(-2)
        write = logits[1] if self.writes else None
        return read.to(streams.dtype), logits[-1] if self.mixes else None, write

    def _moved(self, logits: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        """Return the static weights plus the weights that a projection computes from the normed streams."""
        flat = self.spec["weights"] == "sigmoid"
        rows = x.flatten(-2) if flat else x
        y = nn.functional.linear(rows, self.held("projection", x)) * inverse_rms(rows, self.eps)  # no normed copy
        if flat:
            split = y.split([p.numel() for p in logits], -1)
            parts = [part.unflatten(-1, p.shape) for part, p in zip(split, logits, strict=True)]
        else:  # for each stream: the stream's weights, and its row of the matrix
            split = y.tanh().split([1 if p.ndim == 1 else self.n for p in logits], -1)
            parts = [part.squeeze(-1) if p.ndim == 1 else part for part, p in zip(split, logits, strict=True)]
        return [p + part * scale for p, part, scale in zip(logits, parts, self.held("scale", x), strict=True)]

    def _gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the mean of the gated, normed streams (Qwen's gated residual), and the write weights."""
        y = (x * inverse_rms(x, self.eps)).flatten(-2) * self.held("gain", x)
        low = nn.functional.silu(nn.functional.linear(y, self.held("down", x)) / self.n)
        share = torch.sigmoid(nn.functional.linear(low, self.held("up", x)))
        read = (share * y).unflatten(-1, (self.n, -1)).mean(-2)
        write = 2 * torch.sigmoid(nn.functional.linear(y, self.held("inject", x)) / self.n) if self.writes else None
        return read, write


class DepthAttention(LaminaWiring):
    """Compute sum_i softmax_i(query . v_i / RMS(v_i)) v_i over stored states and the stream (arXiv 2603.15031 Eq 3)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.width, self.eps = width, eps
        self.begin()

    def starts(self) -> dict[str, torch.Tensor]:
        """Return a query of zeros, which weights all states equally."""
        return {"query": torch.zeros(self.width)}

    def forward(self, memory: tuple[torch.Tensor, ...], stream: torch.Tensor | None = None) -> torch.Tensor:
        states = [*memory, *([] if stream is None else [stream])]
        with torch.autocast(states[0].device.type, enabled=False):
            values = [state.float() for state in states]  # no stack, which would copy all states for each reader
            query = self.held("query", values[0])
            logits = [(v * query).sum(-1, keepdim=True) * inverse_rms(v, self.eps) for v in values]
            shares = torch.cat(logits, -1).softmax(-1).split(1, -1)
            return _weighted(shares, values).to(states[0].dtype)


def _weighted(shares: Sequence[torch.Tensor] | torch.Tensor, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weighted sum of states. Stacking the states first would need more memory."""
    total = shares[0] * states[0]
    for share, state in zip(shares[1:], states[1:], strict=True):
        total = total + share * state
    return total


class StateSources(LaminaWiring):
    """Compute a weighted sum of the residual stream and of earlier states, which have the indices ``slots``.

    Dynamic weights are a + W_2 GELU(W_1 RMS(x)) (arXiv 2502.12170 Eq 6). With ``multiway``, queries, keys, values and
    the stream (in this order) have separate sums.
    """

    def __init__(self, spec: dict, width: int, slots: Sequence[int], eps: float):
        super().__init__()
        self.spec, self.width, self.slots, self.eps = spec, width, tuple(slots), eps
        self.dynamic, self.ways = bool(spec.get("dynamic")), 4 if spec.get("multiway") else 1
        self.begin(learned=spec["learned"] != "no")

    def starts(self) -> dict[str, torch.Tensor]:
        """Return the initial weights of the residual stream and the states, [1 + states].

        Vector weights have the shape [1 + states, width]. With ``multiway``, the shape is [4, 1 + states].
        """
        states = [weight for _, weight in self.spec["states"]]
        weights = torch.tensor([self.spec["stream"], *states], dtype=torch.float32)
        vectors = weights[:, None].repeat(1, self.width)
        starts = {"weight": vectors if self.spec["learned"] == "vector" else weights}
        if self.ways > 1:
            starts["weight"] = weights.repeat(self.ways, 1)
        if self.dynamic:
            number, generator = starts["weight"].numel(), torch.Generator().manual_seed(0)
            hidden = self.spec.get("hidden") or number
            starts["down"] = torch.randn(hidden, self.width, generator=generator) * self.width**-0.5
            starts["up"] = torch.zeros(number, hidden)
        return starts | ({"gains": torch.ones(self.width)} if self.spec.get("normed_states") else {})

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the placement's RMSNorm to the stream in float32, before Lamina adds or stores the stream."""
        if not self.spec.get("normed_states"):
            return x
        return (x.float() * inverse_rms(x.float(), self.eps) * self.held("gains", x)).to(x.dtype)

    def forward(
        self, x: torch.Tensor, memory: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream [batch, tokens, width].

        With ``multiway``, also return the inputs of the queries, keys and values [batch, tokens, 3, width].
        """
        weights, states = self.held("weight", x), [x, *(memory[slot] for slot in self.slots)]
        if self.dynamic:
            with torch.autocast(x.device.type, enabled=False):
                low = nn.functional.linear(x.float(), self.held("down", x)) * inverse_rms(x.float(), self.eps)
                moved = nn.functional.linear(nn.functional.gelu(low), self.held("up", x))
                weights = weights + moved.unflatten(-1, weights.shape)
        weights = weights.to(x.dtype)
        if self.ways > 1:
            states = [state.unsqueeze(-2) for state in states]
        shares = weights.split(1, -1) if self.dynamic or self.ways > 1 else weights
        total = _weighted(shares, states)
        return total if self.ways == 1 else (total[..., -1, :], total[..., :-1, :])


class Collapse(nn.Module):
    """Replace the final norm: combine several streams or stored states into one state, and normalize this state."""

    def __init__(self, norm: nn.Module, reader: StreamMixer | DepthAttention | StateSources | None):
        super().__init__()
        self.norm, self.reader = norm, reader

    def forward(self, state: torch.Tensor | State) -> torch.Tensor:
        x, memory = (state.stream, state.memory) if isinstance(state, tuple) else (state, ())
        if isinstance(self.reader, StreamMixer) and (normed := self.reader.spec["normed"]):
            parts = zip(normed, x.unbind(-2), strict=True)
            return torch.stack([self.norm(part) if is_normed else part for is_normed, part in parts]).sum(0)
        if isinstance(self.reader, StreamMixer):
            x = self.reader(self.reader.normed(x, "stream"))[0]
        elif isinstance(self.reader, StateSources):
            x = cast(torch.Tensor, self.reader(self.reader.normed(x), memory))
        elif self.reader is not None:
            x = self.reader(memory, x)
        return self.norm(x)


class BlockState(NamedTuple):
    """The number of streams of a block, and the states that the block reads and stores."""

    streams: int = 0  # the number of copies that the first block makes of its input; 0 in the other blocks
    sources: StateSources | None = None  # the weighted sum that the block reads
    remembers: bool = False  # whether the block stores its input
    has_memory: bool = False  # whether any block stores a state
    slots: int = 0  # the number of states that are stored before the block's attention
    remembers_inside: bool = False  # whether the block also stores the stream between its sub-layers


class StatePlan:
    """The number of streams in a placement, and the states that the blocks read and store."""

    def __init__(self, plan: dict, width: int, eps: float):
        self.plan, self.width, self.eps, layers = plan, width, eps, plan["layers"]
        self.streams: dict | None = layers[0]["attention"].get("streams")
        sources = [layer.get("sources") for layer in layers] + [plan.get("final_sources")]
        named = {int(state) for source in sources if source for state, _ in source["states"]}
        self.slots = sorted(named | {index for index, layer in enumerate(layers) if layer.get("boundary")})
        self.inside = [index for index, layer in enumerate(layers) if layer.get("inner_boundary")]
        self.has_memory = bool(self.slots or self.inside) or any(sources)
        self.is_more = self.streams is not None or self.has_memory

    def of_block(self, index: int) -> BlockState:
        streams = len(self.streams["read"]) if self.streams and index == 0 else 0
        remembers = index in self.slots
        sources = self._sources(self.plan["layers"][index].get("sources"))
        slots = sum(slot <= index for slot in self.slots) + sum(inside < index for inside in self.inside)
        return BlockState(streams, sources, remembers, self.has_memory, slots, index in self.inside)

    def end(self, norm: nn.Module) -> Collapse:
        """Return the module that replaces the final norm."""
        if self.plan.get("readout"):
            return Collapse(norm, StreamMixer(self.plan["readout"], self.width, self.eps))
        halves = [layer[half] for layer in self.plan["layers"] for half in ("attention", "feed_forward")]
        depth = any(half.get("read") in DEPTH_READS for half in halves)
        reader = DepthAttention(self.width, self.eps) if depth else self._sources(self.plan.get("final_sources"))
        return Collapse(norm, reader)

    def _sources(self, spec: dict | None) -> StateSources | None:
        slots = [self.slots.index(int(state)) for state, _ in spec["states"]] if spec else []
        return StateSources(spec, self.width, slots, self.eps) if spec else None
