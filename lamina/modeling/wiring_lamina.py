"""The norms, sub-layers and blocks of a norm placement, around a backbone's attention and feed-forward modules.

This file imports only torch, transformers and other ``*_lamina.py`` files, because transformers copies these files
beside a checkpoint.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from .forwards_lamina import with_calls
from .streams_lamina import DEPTH_READS, BlockState, DepthAttention, LaminaWiring, State, StreamMixer, mixed


class Record(dict):
    """A dict with keys that are also attributes: ``record.name`` returns ``record["name"]``."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return Record(value) if isinstance(value, dict) else value


class LaminaNorm(nn.Module):
    """The base class of all norms. To define a norm, write a subclass with a ``forward``.

    ``weight`` is the learned gain [hidden_size] (minus 1 if ``zero_centered``), or None. A subclass lists its other
    learned numbers in ``more``, and returns their initial values from ``starts``.
    """

    divides = True  # whether the norm divides by the channels' root mean square or standard deviation
    more: tuple[str, ...] = ()  # names of other learned numbers
    biased = False  # whether the norm has a bias [hidden_size]

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        gain: float = 1.0,
        learnable: bool = True,
        zero_centered: bool = False,
        groups: int = 1,
        alpha: float = 0.5,
    ):
        super().__init__()
        if hidden_size % groups:
            raise ValueError(
                f"groups: {groups} does not divide the hidden size {hidden_size}. Give a divisor of {hidden_size}."
            )
        self.hidden_size, self.eps, self.groups, self.initial_gain = hidden_size, eps, groups, float(gain)
        self.zero_centered, self.alpha_start = zero_centered and learnable, alpha
        start = torch.full((hidden_size,), self.starts()["weight"])
        self.weight: nn.Parameter | None = nn.Parameter(start) if learnable else None
        self._has_constant_gain = not learnable and self.initial_gain != 1.0
        for name in self.more:
            self.register_parameter(name, nn.Parameter(torch.full((1,), self.starts()[name])))
        if self.biased:
            self.register_parameter("bias", nn.Parameter(torch.zeros(hidden_size)))

    def starts(self) -> dict[str, float]:
        """Return the initial value of each parameter, by the parameter's name."""
        return {"weight": self.initial_gain - self.zero_centered, "bias": 0.0}

    def gain(self) -> torch.Tensor | None:
        """Return the learned gain [hidden_size], or None."""
        return 1 + self.weight if self.zero_centered and self.weight is not None else self.weight

    def apply_gain(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.gain()
        if gain is not None:
            return gain * x
        return self.initial_gain * x if self._has_constant_gain else x

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class LaminaRMSNorm(LaminaNorm):
    """Compute x / sqrt(mean(x^2) + eps) * gain over the last axis, bit-identical to LlamaRMSNorm.

    Serving engines use this formula for LaminaRMSNorm (vLLM), or for any class with a name that ends in "RMSNorm"
    (SGLang). So norms with other formulas need other class names.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.apply_gain(y.to(x.dtype))


class LaminaZeroCenteredNorm(LaminaRMSNorm):
    """A LaminaRMSNorm with the gain 1 + weight."""


class LaminaFixedGainNorm(LaminaRMSNorm):
    """A LaminaRMSNorm with a constant gain other than 1."""


class LaminaGainlessNorm(LaminaRMSNorm):
    """A LaminaRMSNorm with the gain 1 and no parameter."""


class LaminaGroupedNorm(LaminaNorm):
    """An RMSNorm that normalizes ``groups`` equal groups of channels separately."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32).unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.apply_gain(y.flatten(-2).to(x.dtype))


class LaminaLayerNorm(LaminaNorm):
    """Compute (x - mean) / sqrt(var + eps) * gain + bias over the last axis. ``bias=False`` leaves out the bias."""

    def __init__(self, hidden_size: int, *, bias: bool = True, **options: Any):
        super().__init__(hidden_size, **options)
        biased = bias and self.weight is not None
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(hidden_size)) if biased else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x, (self.hidden_size,), self.gain(), self.bias, self.eps)
        return y if self.weight is not None else self.apply_gain(y)


class LaminaL2Norm(LaminaNorm):
    """Compute x / ||x|| * gain over the last axis (nGPT). The division runs in float32."""

    divides = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_gain(nn.functional.normalize(x.float(), dim=-1, eps=self.eps).to(x.dtype))


class LaminaTanhNorm(LaminaNorm):
    """Compute gain * tanh(alpha * x) + bias with a learned number alpha (DyT, arXiv 2503.10622)."""

    divides, biased = False, True
    more = ("alpha",)
    alpha: torch.Tensor
    bias: torch.Tensor

    def starts(self) -> dict[str, float]:
        return {**super().starts(), "alpha": self.alpha_start, "shift": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_gain(torch.tanh(self.alpha * x)) + self.bias


class LaminaErfNorm(LaminaTanhNorm):
    """Compute gain * erf(alpha * x + shift) + bias with learned numbers alpha and shift (Derf, arXiv 2512.10938)."""

    more = ("alpha", "shift")
    shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_gain(torch.erf(self.alpha * x + self.shift)) + self.bias


# The norms by kind. lamina.modeling.building.norm adds a user's own.
NORMS: dict[str, type[LaminaNorm]] = {
    "rms": LaminaRMSNorm,
    "group": LaminaGroupedNorm,
    "layer": LaminaLayerNorm,
    "l2": LaminaL2Norm,
    "dyt": LaminaTanhNorm,
    "derf": LaminaErfNorm,
}


@dataclass(frozen=True, kw_only=True)
class NormStyle:
    """The settings of the backbone's norms. The placement's norms of kind "backbone" use the same settings."""

    kind: str = "rms"  # or "layer"
    eps: float = 1e-6  # of every norm
    bias: bool = True  # whether a LayerNorm has a bias

    @classmethod
    def of(cls, norm: nn.Module) -> NormStyle:
        layer = isinstance(norm, nn.LayerNorm) or "LayerNorm" in type(norm).__name__
        return cls(
            kind="layer" if layer else "rms",
            eps=float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or cls.eps),
            bias=not layer or getattr(norm, "bias", None) is not None,
        )


def make_norm(spec: dict | None, hidden_size: int, style: NormStyle) -> LaminaNorm | None:
    """Create a norm from a placement's settings of the norm. Return None if the settings are None."""
    if spec is None:
        return None
    kind = style.kind if spec["kind"] == "backbone" else spec["kind"]
    if kind not in NORMS:
        raise ValueError(f"norm: kind {kind!r} is unknown here (allowed: {', '.join(NORMS)})")
    options = {"eps": spec.get("eps") or style.eps, "gain": spec["initial_gain"], "learnable": spec["learnable_gain"]}
    options |= {"bias": style.bias} if NORMS[kind] is LaminaLayerNorm else {}
    younger = {name: spec[name] for name in ("zero_centered", "alpha") if name in spec}
    made = NORMS[kind]
    if made is LaminaRMSNorm and not spec["learnable_gain"]:
        made = LaminaGainlessNorm if spec["initial_gain"] == 1.0 else LaminaFixedGainNorm
    elif made is LaminaRMSNorm and younger.get("zero_centered"):
        made = LaminaZeroCenteredNorm
    return made(hidden_size, groups=spec["groups"], **options, **younger)


class NormedProjections(nn.Module):
    """The base class of attention and feed-forward modules with added norms.

    The norms are on the queries, keys or values, or before the last projection. Each norm is a separate module, so
    LoRA, quantization and serving engines can replace the linear layers. With ``ways``, queries, keys and values have
    separate inputs, concatenated along the last axis.
    """

    backbone_class: type[nn.Module]
    normed: tuple[str, ...]  # some of "q", "k" and "v", or the name of the last projection
    stacked: str | None  # the name of the projection that computes queries, keys and values together
    ways: bool
    normed_widths: dict[str, int]  # the channels that a norm normalizes together: of one head, or all
    q_norm: LaminaNorm
    k_norm: LaminaNorm
    v_norm: LaminaNorm
    inner_norm: LaminaNorm

    def normed_queries(self, y: torch.Tensor) -> torch.Tensor:
        """Normalize projected queries [batch, tokens, heads * head_dim], for each head or over the full width."""
        return self._in_parts("q", y)

    def normed_keys(self, y: torch.Tensor) -> torch.Tensor:
        return self._in_parts("k", y)

    def normed_values(self, y: torch.Tensor) -> torch.Tensor:
        return self._in_parts("v", y)

    def normed_stack(self, y: torch.Tensor) -> torch.Tensor:
        """Normalize queries, keys and values that are concatenated in the last axis."""
        parts = zip("qkv", y.chunk(3, dim=-1), strict=True)
        return torch.cat([self._in_parts(name, part) if name in self.normed else part for name, part in parts], dim=-1)

    def _in_parts(self, part: str, y: torch.Tensor) -> torch.Tensor:
        return getattr(self, f"{part}_norm")(y.unflatten(-1, (-1, self.normed_widths[part]))).flatten(-2)

    def input_of_queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the query projection, the first third of ``hidden`` [batch, tokens, 3 * hidden_size]."""
        return hidden.unflatten(-1, (3, -1))[..., 0, :]

    def input_of_keys(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.unflatten(-1, (3, -1))[..., 1, :]

    def input_of_values(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.unflatten(-1, (3, -1))[..., 2, :]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Pickle the backbone's class, because this subclass may not exist in the process that unpickles."""
        kind = self.backbone_class, self.normed, self.stacked, self.ways
        return _empty_normed_projections, kind, self.__getstate__()


def normed_class(
    base: type[nn.Module], normed: tuple[str, ...], stacked: str | None = None, ways: bool = False
) -> type[NormedProjections]:
    """Return a subclass of a backbone's module with norms at ``normed``: "q", "k", "v" or the last projection's name.

    In the forward, ``self.q_proj(x)`` becomes ``self.normed_queries(self.q_proj(x))``, and ``self.o_proj(x)`` becomes
    ``self.o_proj(self.inner_norm(x))``. Raises ValueError if the backbone's forward does not call the projections, or
    if the forward's source code is not available.
    """
    key = (base, normed, stacked, ways)
    if key not in _NORMED_CLASSES:
        after = {f"{part}_proj": f"normed_{name}" for part, name in _PARTS.items() if part in normed}
        after = {stacked: "normed_stack"} if stacked and after else after
        before = {name: "inner_norm" for name in normed if name not in _PARTS}
        before |= {f"{part}_proj": f"input_of_{name}" for part, name in _PARTS.items() if ways}
        forward = with_calls(base, before, after)
        attributes = {"backbone_class": base, "normed": normed, "stacked": stacked, "ways": ways, "forward": forward}
        name = f"Normed{base.__name__}"
        _NORMED_CLASSES[key] = type(name, (NormedProjections, base), {**attributes, "__module__": __name__})
    return _NORMED_CLASSES[key]


_PARTS = {"q": "queries", "k": "keys", "v": "values"}
# The possible names of the last projection in an attention or a feed-forward.
LAST_PROJECTIONS = ("o_proj", "down_proj", "Wo", "fc2", "c_proj", "dense", "dense_4h_to_h")
_NORMED_CLASSES: dict[tuple, type[NormedProjections]] = {}


def _empty_normed_projections(
    base: type[nn.Module], normed: tuple[str, ...], stacked: str | None, ways: bool
) -> NormedProjections:
    normed_attention = normed_class(base, normed, stacked, ways)
    return normed_attention.__new__(normed_attention)


T = TypeVar("T", torch.Tensor, float)


def skip_source(skip: str, x: T, block_input: T | None = None) -> T:
    """Return the tensor on the skip: x ("stream"), the block's input ("block_input") or their sum ("both").

    In the attention, x is the block's input, and ``block_input`` is None.
    """
    if block_input is None or skip == "stream":
        return x
    return block_input if skip == "block_input" else x + block_input


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a sub-layer's equation in one forward pass, each [batch, tokens, hidden_size]."""

    output: torch.Tensor  # of the module
    branch: torch.Tensor  # the output after the out_norm, times out_scale
    source: torch.Tensor  # the tensor on the skip, before skip_scale
    skip: torch.Tensor  # the tensor on the skip, times skip_scale
    sum: torch.Tensor  # skip + branch, before the post_norm


SCALES = ("skip_scale", "pre_scale", "out_scale")
# Fields of a sub-layer that a saved plan leaves out if they have these defaults.
YOUNGER = {"out_scale": 1.0, "out_scale_learned": "no", "coupling": "none", "gate_temperature": 1.0, "inner_norm": None}
YOUNGER |= {"streams": None, "read": "stream"}
_LEAST_VARIANCE = 1e-3  # of the skip under "variance", as in Muse Spark


class Residual(nn.Module):
    """A sub-layer of a norm placement: y = C(skip_scale * s + out_scale * B(module(pre_scale * A(x)))).

    A, B and C are the pre_norm, out_norm and post_norm, and s is the tensor on the skip. Constant scales are floats,
    because a buffer would lose its value on the meta device. The code applies the scales in ``scaled`` even if they are
    1. So layers with different scales can share a compiled graph.
    """

    def __init__(
        self,
        module: nn.Module,
        sublayer: dict,
        hidden_size: int,
        style: NormStyle,
        dropout: float = 0.0,
        scaled: Collection[str] = (),
        own_norms: bool = False,
    ):
        super().__init__()
        self.sublayer = Record({**YOUNGER, **sublayer})
        self.module = module
        self.pre_norm = make_norm(sublayer["pre_norm"], hidden_size, style)
        # With own_norms, the pre_norm is only for the queries, and keys and values have their own norms.
        self.key_norm, self.value_norm = (
            make_norm(sublayer["pre_norm"] if own_norms else None, hidden_size, style) for _ in range(2)
        )
        self.out_norm = make_norm(sublayer["out_norm"], hidden_size, style)
        self.post_norm = make_norm(sublayer["post_norm"], hidden_size, style)
        self.dropout: nn.Module | None = nn.Dropout(dropout) if dropout else None
        self.skip: str = sublayer["skip"]
        self.coupling: str = self.sublayer["coupling"]
        self.skip_scale = self._scale("skip_scale", hidden_size)
        self.pre_scale = self._scale("pre_scale", hidden_size)
        self.out_scale = self._scale("out_scale", hidden_size)
        self.gate = self._scale("gate", hidden_size) if "gate" in self.starts() else None
        streams, self.read = self.sublayer["streams"], self.sublayer["read"]
        self.mixer = StreamMixer(streams, hidden_size, style.eps) if streams else None
        self.depth = DepthAttention(hidden_size, style.eps) if self.read in DEPTH_READS else None
        # Decided once: comparing the floats in forward would make torch.compile guard on each layer's value.
        self._applied = {name: name in scaled or self._is_scaled(name) for name in SCALES}
        self._terms_hooks: OrderedDict[int, Callable[[Terms], None]] = OrderedDict()

    def _is_scaled(self, name: str) -> bool:
        scale = getattr(self, name)
        coupled = self.coupling != "none" and name != "pre_scale"
        return coupled or isinstance(scale, nn.Parameter) or scale != 1.0

    def _scale(self, name: str, hidden_size: int) -> float | nn.Parameter:
        learned, starts = self.sublayer[f"{'out_scale' if name == 'gate' else name}_learned"], self.starts()
        if learned == "no" or (name == "out_scale" and "gate" in starts):
            return starts[name]
        scalar = (1,) if name in ("out_scale", "gate") else ()  # FSDP2 shards no 0-d tensor; older checkpoints have it
        return nn.Parameter(torch.full((hidden_size,) if learned == "vector" else scalar, starts[name]))

    def starts(self) -> dict[str, float]:
        """Return the initial scales, and the initial logit of the gate if a coupled out_scale is learned."""
        values = {name: float(self.sublayer[name]) for name in SCALES}
        if self.coupling != "none" and self.sublayer["out_scale_learned"] != "no":
            b = values["out_scale"]
            values["gate"] = float(self.sublayer["gate_temperature"]) * math.log(b / (1 - b))
        return values

    def forward(
        self,
        x: torch.Tensor,
        block_input: torch.Tensor | None = None,
        *,
        memory: tuple[torch.Tensor, ...] = (),
        ways: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Compute the sub-layer's output.

        Args:
            x: the residual stream [batch, tokens, hidden_size], or n streams [batch, tokens, n, hidden_size].
            block_input: the block's input (default: x).
            memory: the stored states of earlier blocks, each [batch, tokens, hidden_size].
            ways: the separate inputs of queries, keys and values [batch, tokens, 3, hidden_size], which replace x.
            kwargs: arguments of the module.
        """
        hidden, mix, write = x if self.read != "block_input" or block_input is None else block_input, None, None
        if self.mixer is not None:
            x = self.mixer.normed(x, "stream")
            hidden, mix, write = self.mixer(x)
        elif self.depth is not None:
            hidden = self.depth(memory, x if self.read == "depth" else None)
        elif ways is not None:
            hidden = ways
        hidden = hidden if self.pre_norm is None else self._normed(hidden, self.pre_norm)
        if self._applied["pre_scale"]:
            hidden = hidden * self.pre_scale
        if ways is not None:
            hidden = hidden.flatten(-2)
        output = self.module(hidden, **kwargs)
        if isinstance(output, tuple):  # attention also returns its weights
            output = output[0]
        branch = output if self.out_norm is None else self.out_norm(output)
        if self.dropout is not None:
            branch = self.dropout(branch)
        if self._applied["out_scale"]:
            branch = branch * self.branch_factor()
        source = skip_source(self.skip, x, block_input)
        if mix is not None:
            source = mixed(mix, source)
        skip = self.scale_skip(source)
        if write is not None:
            branch = write.to(branch.dtype).unsqueeze(-1) * branch.unsqueeze(-2)
        total = skip + branch
        if self._terms_hooks:
            terms = Terms(output=output, branch=branch, source=source, skip=skip, sum=total)
            for hook in tuple(self._terms_hooks.values()):
                hook(terms)
        if self.post_norm is not None and self.mixer is not None and self.mixer.spec["normed"]:
            parts = zip(self.mixer.spec["normed"], total.unbind(-2), strict=True)
            return torch.stack([self.post_norm(part) if is_normed else part for is_normed, part in parts], dim=-2)
        return total if self.post_norm is None else self.post_norm(total)

    def _normed(self, hidden: torch.Tensor, norm: LaminaNorm) -> torch.Tensor:
        """Normalize an input [..., hidden_size], or the inputs [..., 3, hidden_size] of queries, keys and values."""
        if self.key_norm is None or self.value_norm is None:
            return norm(hidden)
        norms = (norm, self.key_norm, self.value_norm)
        return torch.stack([one(way) for one, way in zip(norms, hidden.unbind(-2), strict=True)], dim=-2)

    def branch_factor(self) -> float | torch.Tensor:
        """Return the factor on the branch: a number, or a learned tensor [1] or [hidden_size]."""
        return self.out_scale if self.gate is None else torch.sigmoid(self.gate / self.sublayer["gate_temperature"])

    def skip_factor(self) -> float | torch.Tensor:
        """Return the factor on the skip. If the skip is coupled to the branch's factor b, the factor depends on b."""
        if self.coupling == "none":
            return self.skip_scale
        b = self.branch_factor()
        if self.coupling == "lerp":
            return 1 - b
        if self.gate is None:
            return (1 - b * b) ** 0.5
        rest = torch.sigmoid(-self.gate / self.sublayer["gate_temperature"])  # 1 - b, without cancellation
        return (rest * (1 + b)).clamp(min=_LEAST_VARIANCE).sqrt()

    def scale_skip(self, source: torch.Tensor) -> torch.Tensor:
        return source * self.skip_factor() if self._applied["skip_scale"] else source

    def register_terms_hook(self, hook: Callable[[Terms], None]) -> RemovableHandle:
        """Call ``hook`` with the Terms of each forward pass until the handle is removed. Compiled blocks skip hooks."""
        handle = RemovableHandle(self._terms_hooks)
        self._terms_hooks[handle.id] = hook
        return handle

    @property
    def graph_key(self) -> tuple[object, ...]:
        """Return a key that is equal for sub-layers that can share a compiled graph."""
        spec = {} if self.mixer is None else self.mixer.spec
        kinds = {name: len(value) if name in ("read", "write") else value for name, value in spec.items()}
        return self.skip, self.coupling, self.read, str(kinds), *self._applied.values()


ONE_STREAM = BlockState()


class Block(GradientCheckpointingLayer):
    """A layer of the model: the attention sub-layer, then the feed-forward sub-layer.

    ``arguments`` names the positional arguments of a call after the hidden states.
    """

    def __init__(
        self,
        attention: Residual,
        feed_forward: Residual,
        state: BlockState = ONE_STREAM,
        arguments: Sequence[str] = ("attention_mask",),
    ):
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.streams, self.sources, self.remembers, self.has_memory, self.slots, self.remembers_inside = state
        takes = inspect.signature(attention.module.forward).parameters
        known = (*takes, "attention_mask")  # without a parameter of this name, the attention would ignore the argument
        self.arguments = tuple(itertools.takewhile(known.__contains__, arguments))
        self._takes_mask = "attention_mask" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
        self._is_recurrent = "cache_params" in takes  # the cache's name in Mamba's relatives

    def forward(self, hidden_states: torch.Tensor | State, *args: object, **kwargs: object) -> torch.Tensor | State:
        """Return the next residual stream [batch, tokens, hidden_size]. The attention gets all other arguments.

        With n streams, the shape is [batch, tokens, n, hidden_size]. With stored states, input and output are a State.
        """
        if len(args) > len(self.arguments):
            raise TypeError(f"the layer got too many arguments. The attention takes only: {', '.join(self.arguments)}")
        kwargs.update(zip(self.arguments, args, strict=False))
        if self._takes_mask:  # a user's own module may have no such parameter
            kwargs.setdefault("attention_mask", None)
        else:
            kwargs.pop("attention_mask", None)
        if self._is_recurrent:
            kwargs["cache_params"] = kwargs.pop("past_key_values", None)
        if self.has_memory:
            return self._with_memory(hidden_states, **kwargs)
        x = cast(torch.Tensor, hidden_states)
        if self.streams:
            x = x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1])
        y = self.attention(x, **kwargs)
        return self.feed_forward(y, x)

    @property
    def graph_key(self) -> tuple[object, ...]:
        """Return a key that is equal for blocks that can share a compiled graph."""
        own = self.sources
        read = (
            None
            if own is None
            else (own.slots, own.dynamic, own.ways, own.spec.get("own_norms"), own.spec.get("normed_states"))
        )
        return self.streams, self.remembers, self.has_memory, self.slots, self.remembers_inside, read

    def _with_memory(self, state: torch.Tensor | State, **kwargs: object) -> State:
        x, memory = (state.stream, state.memory) if isinstance(state, tuple) else (state, ())
        if self.sources is not None:
            x = self.sources.normed(x)
        if self.remembers:
            memory = (*memory, x)
        ways = None
        if self.sources is not None:
            x = self.sources(x, memory)
            x, ways = x if isinstance(x, tuple) else (x, None)
        y = self.attention(x, memory=memory, ways=ways, **kwargs)
        if self.remembers_inside:
            memory = (*memory, y)
        return State(self.feed_forward(y, x, memory=memory), memory)


class InitializesPlan:
    """A mixin that gives norms, scales and residual paths the initial values of the norm placement."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Residual):
            for name, start in module.starts().items():
                if isinstance(parameter := getattr(module, name), nn.Parameter):
                    init.constant_(parameter, start)
        elif isinstance(module, LaminaWiring):
            for name, start in module.initial().items():
                if isinstance(parameter := getattr(module, name), nn.Parameter):
                    init.copy_(parameter, start.to(parameter.device))
        elif isinstance(module, LaminaNorm):
            starts = module.starts()
            for name, parameter in module.named_parameters(recurse=False):
                if name in starts:  # a user's own norm may initialize other parameters in its constructor
                    init.constant_(parameter, starts[name])
        else:
            super()._init_weights(module)  # type: ignore[misc]


def norm_projections(
    attention: nn.Module,
    plan: dict,
    style: NormStyle,
    stacked: str | None = None,
    inner: dict | None = None,
    ways: bool = False,
) -> None:
    """Add norms to an attention's queries, keys and values, and the norm ``inner`` before the last projection.

    ``stacked`` names the projection that computes queries, keys and values together. With ``ways``, queries, keys and
    values have separate inputs. If a projection is missing or already has a norm, raises ValueError and changes
    nothing.
    """
    last = next((name for name in LAST_PROJECTIONS if isinstance(getattr(attention, name, None), _LINEAR)), None)
    if inner and (last is None or hasattr(attention, "inner_norm")):
        raise ValueError(f"inner_norm: {type(attention).__name__} has no last projection. Leave inner_norm out")
    scopes = {"q": plan["qk_norm"], "k": plan["qk_norm"], "v": plan["v_norm"]}
    scopes = {part: scope for part, scope in scopes.items() if scope != "off"}
    module: Any = attention
    dims = {}
    for part, scope in scopes.items():
        name, why = stacked or f"{part}_proj", None
        if hasattr(module, f"{part}_norm"):
            why = f"already has a norm on {name!r}"
        elif not isinstance(getattr(module, name, None), _LINEAR):
            why = f"has no projection {name!r}"
        elif scope == "head" and not hasattr(module, "head_dim"):
            why = "has heads of several widths"
        if why is None:
            width = _channels(getattr(module, name))[1] // (3 if stacked else 1)
            dims[part] = int(module.head_dim) if scope == "head" else width
            if width % dims[part]:
                why = f"has {width} channels in {name!r}, but the head's width {dims[part]} does not divide this number"
        if why:
            option = "v_norm" if part == "v" else "qk_norm"
            raise ValueError(
                f"{option}: {scope!r} does not work, because {type(module).__name__} {why}. Set {option} to 'off'"
            )
    absent = [f"{part}_proj" for part in _PARTS if not isinstance(getattr(module, f"{part}_proj", None), nn.Linear)]
    if ways and absent:
        raise ValueError(
            f"sources: this wiring needs {absent[0]!r}, but {type(module).__name__} has none. Choose another wiring"
        )
    if not dims and not inner and not ways:
        return
    try:
        normed_attention = normed_class(type(module), (*dims, *([last] if inner and last else [])), stacked, ways)
    except ValueError as error:
        option = "sources" if ways else "qk_norm" if "q" in dims else "v_norm" if dims else "inner_norm"
        raise ValueError(f"{option}: {error}") from None
    spec = plan.get("qkv_norm") or QKV_NORM
    in_head = {**spec, "kind": "rms", "groups": 1} if spec["kind"] == "group" else spec  # a head is a group
    norms = {p: make_norm(in_head if scopes[p] == "head" else spec, dim, style) for p, dim in dims.items()}
    module.__class__ = normed_attention
    module.normed_widths = dims
    for part, norm in norms.items():
        setattr(module, f"{part}_norm", norm)
    if inner and last:
        module.inner_norm = make_norm(inner, _channels(getattr(module, last))[0], style)


_LINEAR = (nn.Linear, Conv1D)  # the second is GPT-2's, whose weight is [channels in, channels out]


def _channels(linear: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output channels of a projection."""
    first, second = linear.get_parameter("weight").shape
    return (first, second) if isinstance(linear, Conv1D) else (second, first)


# The default of a plan without ``qkv_norm``: RMSNorm, as in HybridNorm's code, OLMo 2 and Qwen 3.
QKV_NORM = {"kind": "rms", "initial_gain": 1.0, "learnable_gain": True, "groups": 1}
