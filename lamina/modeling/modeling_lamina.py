"""The modules that execute a plan, and the models that transformers' Auto classes load.

Attention and feed-forward come from the backbone as transformers builds it; each is wired again as

    y = C( skip_scale * s + out_scale * B( module( pre_scale * A(x) ) ) )

Copied beside a checkpoint by transformers, so it imports only torch, transformers and its configuration.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import FunctionType
from typing import Any, NamedTuple, SupportsIndex, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .configuration_lamina import AUTO_MAP, LaminaConfig, backbone_of

logger = logging.get_logger(__name__)


class Record(dict):
    """A part of a plan: a dict whose fields are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        """The field of this name."""
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return Record(value) if isinstance(value, dict) else value


class LaminaNorm(nn.Module):
    """The base of all norms: a gain [hidden_size], None if it is not learned, and the epsilon of the statistics."""

    def __init__(self, hidden_size: int, *, eps: float, gain: float = 1.0, learnable: bool = True, groups: int = 1):
        super().__init__()
        if hidden_size % groups:
            raise ValueError(f"groups: {groups} does not divide the hidden size {hidden_size}")
        self.hidden_size, self.eps, self.groups, self.initial_gain = hidden_size, eps, groups, float(gain)
        start = torch.full((hidden_size,), self.initial_gain)
        self.weight: nn.Parameter | None = nn.Parameter(start) if learnable else None
        self._has_constant_gain = not learnable and self.initial_gain != 1.0

    def apply_gain(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            return self.weight * x
        return self.initial_gain * x if self._has_constant_gain else x

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class LaminaRMSNorm(LaminaNorm):
    """x / sqrt(mean(x^2) + eps) * gain over the last axis, statistics in float32 (bit for bit as LlamaRMSNorm).

    With ``groups``, over each of as many equal parts of a token's channels on their own, hence causal.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32)
        if self.groups > 1:
            y = y.unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.apply_gain((y.flatten(-2) if self.groups > 1 else y).to(x.dtype))


class LaminaLayerNorm(LaminaNorm):
    """(x - mean) / sqrt(var + eps) * gain + bias over the last axis; no bias where ``bias`` is False (ModernBERT's)."""

    def __init__(self, hidden_size: int, *, bias: bool = True, **options: Any):
        super().__init__(hidden_size, **options)
        biased = bias and self.weight is not None
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(hidden_size)) if biased else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x, (self.hidden_size,), self.weight, self.bias, self.eps)
        return y if self.weight is not None else self.apply_gain(y)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The names of a model type's modules and the heads that fit it. A module's name may be a path ("encoder.layer").

    Args:
        layers: the backbone's list of layers; ``attention`` and ``feed_forward``: a layer's two modules; ``norm``: the
            backbone's final norm.
        dropout: the configuration's field for the dropout that the layer (not its modules) applies to its branches.
        stacked: the attention's one projection to queries, keys and values, where it has one.
        embedding_norm: a norm at the end of the backbone's embeddings. The plan's norm, or none, takes its place.
        input: the name of the model's input.
        embeddings: the module that computes x^0 from the input, if that is more than a look-up by id.
        is_decoder: whether the model is causal and caches keys and values.
        heads: the heads (names of HEADS) that fit, the default one first.
        roles: the roles of weights that core/architectures.py does not know, by the attribute name of their module.
        arguments: keyword arguments of the backbone's constructor.
    """

    layers: str = "layers"
    attention: str = "self_attn"
    feed_forward: str = "mlp"
    norm: str = "norm"
    dropout: str | None = None
    stacked: str | None = None
    embedding_norm: str | None = None
    input: str = "input_ids"
    embeddings: str | None = None
    is_decoder: bool = True
    heads: tuple[str, ...] = ("causal_lm", "sequence_classification")
    roles: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, names: object) -> Adapter:
        """Read the adapter in a configuration's ``lamina_adapter``. Raises ValueError that names the invalid field."""
        if not isinstance(names, Mapping):
            raise ValueError(f"adapter: {names!r} (allowed: a mapping from a field to a module's name)")
        own = {f.name: f.default for f in fields(cls) if f.name != "arguments"}  # those a file may not choose
        for name, value in names.items():
            if name not in own:
                raise ValueError(f"adapter: unknown field {name!r} (allowed: {', '.join(own)})")
            if name == "heads":
                fits = isinstance(value, list | tuple) and bool(value) and all(str(each) in HEADS for each in value)
                allowed = f"a list of {', '.join(HEADS)}"
            elif name == "roles":
                fits = isinstance(value, Mapping) and all(isinstance(role, str) for role in value.values())
                allowed = "a mapping from a module's name to its weight's role"
            elif name == "is_decoder":
                fits, allowed = isinstance(value, bool), "true or false"
            else:
                fits = (isinstance(value, str) and value != "") or (value is None and own[name] is None)
                allowed = "a name" if own[name] is not None else "a name, or None"
            if not fits:
                raise ValueError(f"adapter: {name}: {value!r} (allowed: {allowed})")
        return cls(**{**names, "heads": tuple(names.get("heads", cls.heads))})


# One row per model type whose wiring is tested: its logits equal transformers' own on the same weights. Any other
# backbone is taken for a decoder. What else Lamina knows of these model types is in core/architectures.py.
DECODER = Adapter()
ADAPTERS: dict[str, Adapter] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3_text"), DECODER),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), DECODER),
    "modernbert": Adapter(
        attention="attn",
        norm="final_norm",
        stacked="Wqkv",
        embedding_norm="embeddings.norm",
        is_decoder=False,
        heads=("masked_lm", "sequence_classification"),
    ),
    "vit": Adapter(
        attention="attention",
        norm="layernorm",
        dropout="hidden_dropout_prob",
        input="pixel_values",
        embeddings="embeddings",
        is_decoder=False,
        heads=("image_classification",),
        arguments={"add_pooling_layer": False},
    ),
}


def adapter_of(config: PreTrainedConfig) -> Adapter:
    """Return a configuration's adapter: its own, or its model type's, or the one of decoders."""
    own = getattr(config, "lamina_adapter", None)
    return ADAPTERS.get(config.model_type, DECODER) if own is None else Adapter.of(own)


@dataclass(frozen=True, kw_only=True)
class NormStyle:
    """The style of the backbone's own norms, for the plan's norms of kind "backbone".

    ``kind`` is "rms" or "layer"; ``eps`` is the epsilon of every norm; ``bias``: whether a LayerNorm has one.
    """

    kind: str = "rms"
    eps: float = 1e-6
    bias: bool = True

    @classmethod
    def of(cls, norm: nn.Module) -> NormStyle:
        """The style of one of the backbone's norms."""
        return cls(
            kind="layer" if isinstance(norm, nn.LayerNorm) or "LayerNorm" in type(norm).__name__ else "rms",
            eps=float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or cls.eps),
            bias=norm.bias is not None if isinstance(norm, nn.LayerNorm) else True,
        )


def make_norm(spec: dict | None, hidden_size: int, style: NormStyle) -> LaminaNorm | None:
    """The norm of a plan's record; None for None."""
    if spec is None:
        return None
    options = {"eps": style.eps, "gain": spec["initial_gain"], "learnable": spec["learnable_gain"]}
    if (style.kind if spec["kind"] == "backbone" else spec["kind"]) == "layer":
        return LaminaLayerNorm(hidden_size, bias=style.bias, **options)
    return LaminaRMSNorm(hidden_size, groups=spec["groups"], **options)


class NormedProjections(nn.Module):
    """A backbone's attention with norms on its queries, keys or values: ``q_norm``, ``k_norm`` and ``v_norm``.

    Each norm stands beside its projection, which stays the linear layer of transformers: code that wraps, swaps or
    merges linear layers (LoRA, quantization, serving engines) leaves the norms alone. ``norm_projections`` mixes this
    class into the attention's; its ``forward`` then calls the methods here instead of the projections.
    """

    backbone_class: type[nn.Module]
    normed: tuple[str, ...]  # of "q", "k" and "v"
    stacked: str | None  # the one projection to all three, where there is one
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    q_norm: LaminaNorm
    k_norm: LaminaNorm
    v_norm: LaminaNorm

    def normed_queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden_size] to [batch, tokens, heads * head_dim]; keys and values likewise."""
        return _in_parts(self.q_norm, self.q_proj(hidden))

    def normed_keys(self, hidden: torch.Tensor) -> torch.Tensor:
        return _in_parts(self.k_norm, self.k_proj(hidden))

    def normed_values(self, hidden: torch.Tensor) -> torch.Tensor:
        return _in_parts(self.v_norm, self.v_proj(hidden))

    def normed_stack(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values stacked in the last axis."""
        parts = list(getattr(self, str(self.stacked))(hidden).chunk(3, dim=-1))
        for index, name in enumerate("qkv"):
            if name in self.normed:
                parts[index] = _in_parts(getattr(self, f"{name}_norm"), parts[index])
        return torch.cat(parts, dim=-1)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Copy and pickle by the backbone's class: this one may not exist yet in the process that reads it."""
        return _empty_normed_projections, (self.backbone_class, self.normed, self.stacked), self.__getstate__()


def _in_parts(norm: LaminaNorm, y: torch.Tensor) -> torch.Tensor:
    """Norm each part of ``norm.hidden_size`` channels on its own: a head, or the full width."""
    return norm(y.unflatten(-1, (-1, norm.hidden_size))).flatten(-2)


def normed_class(base: type[nn.Module], normed: tuple[str, ...], stacked: str | None = None) -> type[NormedProjections]:
    """The subclass of a backbone's attention that norms the parts named in ``normed`` ("q", "k", "v").

    Its forward is the backbone's own, with the names of the projections that it calls replaced by the names of
    NormedProjections' methods. Raises ValueError where the backbone's forward doesn't call them itself.
    """
    key = (base, normed, stacked)
    if key not in _NORMED_CLASSES:
        calls = {f"{name}_proj": f"normed_{_PARTS[name]}" for name in normed}
        calls = {stacked: "normed_stack"} if stacked else calls
        forward = base.forward
        called = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
        absent = [name for name in calls if name not in called]
        if absent or not isinstance(forward, FunctionType):
            raise ValueError(f"{base.__name__}.forward does not call {absent[0]!r} itself")
        code = forward.__code__.replace(co_names=tuple(calls.get(name, name) for name in called))
        method = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
        method.__kwdefaults__, method.__annotations__ = forward.__kwdefaults__, forward.__annotations__
        method.__doc__, method.__qualname__ = forward.__doc__, forward.__qualname__
        attributes = {"backbone_class": base, "normed": normed, "stacked": stacked, "forward": method}
        name = f"Normed{base.__name__}"
        _NORMED_CLASSES[key] = type(name, (NormedProjections, base), {**attributes, "__module__": __name__})
    return _NORMED_CLASSES[key]


_PARTS = {"q": "queries", "k": "keys", "v": "values"}
_NORMED_CLASSES: dict[tuple, type[NormedProjections]] = {}


def _empty_normed_projections(base: type[nn.Module], normed: tuple[str, ...], stacked: str | None) -> NormedProjections:
    normed_attention = normed_class(base, normed, stacked)
    return normed_attention.__new__(normed_attention)


T = TypeVar("T", torch.Tensor, float)


def skip_source(skip: str, x: T, block_input: T | None = None) -> T:
    """Return the s of a sub-layer: its input x ("stream"), its block's input ("block_input") or both's sum ("both").

    Without a block's input, as in attention, x is the block's input and s is x.
    """
    if block_input is None or skip == "stream":
        return x
    return block_input if skip == "block_input" else x + block_input


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one sub-layer's equation in one forward pass, each [batch, tokens, hidden_size].

    ``output`` is the module's, ``branch`` is out_scale * B(output), ``source`` is s, ``skip`` is skip_scale * s and
    ``sum`` is skip + branch, the input of C.
    """

    output: torch.Tensor
    branch: torch.Tensor
    source: torch.Tensor
    skip: torch.Tensor
    sum: torch.Tensor


SCALES = ("skip_scale", "pre_scale", "out_scale")
# A sub-layer's fields that its record leaves out at their default.
YOUNGER = {"out_scale": 1.0, "out_scale_learned": "no", "coupling": "none", "gate_temperature": 1.0}
_LEAST_VARIANCE = 1e-3  # of the skip under "variance", as in Muse Spark


class Residual(nn.Module):
    """One sub-layer as the plan's record says: y = C(skip_scale * s + out_scale * B(module(pre_scale * A(x)))).

    Constant scales are floats (a buffer would come back as garbage from the meta device), learned ones Parameters.
    ``scaled`` names the scales that are applied even where they are 1: those that other layers of the plan have. Layers
    that differ in a scale's value alone then have one graph, compiled once.
    """

    def __init__(
        self,
        module: nn.Module,
        sublayer: dict,
        hidden_size: int,
        style: NormStyle,
        dropout: float = 0.0,
        scaled: Collection[str] = (),
    ):
        super().__init__()
        self.sublayer = Record({**YOUNGER, **sublayer})
        self.module = module
        self.pre_norm = make_norm(sublayer["pre_norm"], hidden_size, style)
        self.out_norm = make_norm(sublayer["out_norm"], hidden_size, style)
        self.post_norm = make_norm(sublayer["post_norm"], hidden_size, style)
        self.dropout: nn.Module | None = nn.Dropout(dropout) if dropout else None
        self.skip: str = sublayer["skip"]
        self.coupling: str = self.sublayer["coupling"]
        self.skip_scale = self._scale("skip_scale", hidden_size)
        self.pre_scale = self._scale("pre_scale", hidden_size)
        self.out_scale = self._scale("out_scale", hidden_size)
        self.gate = self._scale("gate", hidden_size) if "gate" in self.starts() else None
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
        """The scales at the start, and the gate's logit where out_scale is learned under a coupling."""
        values = {name: float(self.sublayer[name]) for name in SCALES}
        if self.coupling != "none" and self.sublayer["out_scale_learned"] != "no":
            b = values["out_scale"]
            values["gate"] = float(self.sublayer["gate_temperature"]) * math.log(b / (1 - b))
        return values

    def forward(self, x: torch.Tensor, block_input: torch.Tensor | None = None, **kwargs: object) -> torch.Tensor:
        """``x`` and ``block_input``: [batch, tokens, hidden_size]; the block's input is x by default."""
        hidden = x if self.pre_norm is None else self.pre_norm(x)
        if self._applied["pre_scale"]:
            hidden = hidden * self.pre_scale
        output = self.module(hidden, **kwargs)
        if isinstance(output, tuple):  # attention also returns its weights
            output = output[0]
        branch = output if self.out_norm is None else self.out_norm(output)
        if self.dropout is not None:
            branch = self.dropout(branch)
        if self._applied["out_scale"]:
            branch = branch * self.branch_factor()
        source = skip_source(self.skip, x, block_input)
        skip = self.scale_skip(source)
        total = skip + branch
        if self._terms_hooks:
            terms = Terms(output=output, branch=branch, source=source, skip=skip, sum=total)
            for hook in tuple(self._terms_hooks.values()):
                hook(terms)
        return total if self.post_norm is None else self.post_norm(total)

    def branch_factor(self) -> float | torch.Tensor:
        """What multiplies B(module(...)): a number, [1] or [hidden_size]."""
        return self.out_scale if self.gate is None else torch.sigmoid(self.gate / self.sublayer["gate_temperature"])

    def skip_factor(self) -> float | torch.Tensor:
        """What multiplies s: skip_scale, or by the coupling 1 - b or sqrt(1 - b^2) of the branch's factor b."""
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
        """skip_scale * s, in the precision of ``source`` at least."""
        return source * self.skip_factor() if self._applied["skip_scale"] else source

    def register_terms_hook(self, hook: Callable[[Terms], None]) -> RemovableHandle:
        """Call ``hook`` with the terms of every forward pass until the handle is removed.

        A compiled block calls it only where it is run uncompiled, as for torch's own hooks inside it.
        """
        handle = RemovableHandle(self._terms_hooks)
        self._terms_hooks[handle.id] = hook
        return handle

    @property
    def graph_key(self) -> tuple[object, ...]:
        """What decides the compiled graph: the skip's source, the coupling, and which scales are applied."""
        return self.skip, self.coupling, *self._applied.values()


class Block(GradientCheckpointingLayer):
    """A layer of the model: the attention's residual, then the feed-forward's."""

    def __init__(self, attention: Residual, feed_forward: Residual):
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        takes = inspect.signature(attention.module.forward).parameters.values()
        self._takes_mask = any(p.name == "attention_mask" or p.kind is p.VAR_KEYWORD for p in takes)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: object
    ) -> torch.Tensor:
        """``hidden_states`` (the stream x^i) and the result: [batch, tokens, hidden_size]; attention gets the rest."""
        if self._takes_mask:  # a module of the user's own may not know of masks
            kwargs["attention_mask"] = attention_mask
        y = self.attention(hidden_states, **kwargs)
        return self.feed_forward(y, hidden_states)


class _InitializesPlan:
    """Gives Lamina's own modules the values that the plan states; transformers does the rest."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Residual):
            for name, start in module.starts().items():
                if isinstance(parameter := getattr(module, name), nn.Parameter):
                    init.constant_(parameter, start)
        elif isinstance(module, LaminaNorm):
            if module.weight is not None:
                init.constant_(module.weight, module.initial_gain)
            if isinstance(module, LaminaLayerNorm) and module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)  # type: ignore[misc]


def build_backbone(config: LaminaConfig) -> tuple[PreTrainedModel, LaminaNorm | None]:
    """The transformers model of ``config.backbone_config`` wired as ``config.plan`` says, and the embedding's norm.

    Raises ValueError for an architecture whose layers can't be wired again, or for a plan that asks for norms on
    projections that it does not have.
    """
    backbone_config, plan = backbone_of(config), config.plan
    if plan is None:
        raise ValueError("plan: a Lamina model needs one (lamina.build makes it)")
    adapter = adapter_of(backbone_config)
    # Not the configuration's own dtype: what is asked for holds for the whole model, backbone, norms and head.
    backbone = _backbone_class(backbone_config)._from_config(
        backbone_config, dtype=torch.get_default_dtype(), **adapter.arguments
    )
    _check_wirable(backbone, adapter)
    layers = cast(nn.ModuleList, backbone.get_submodule(adapter.layers))
    style = NormStyle.of(backbone.get_submodule(adapter.norm))
    width = backbone_config.hidden_size
    dropout = float(getattr(backbone_config, adapter.dropout)) if adapter.dropout else 0.0
    scaled = {
        part: [name for name in SCALES if any(w[part].get(name, 1.0) != 1.0 for w in plan["layers"])]
        for part in ("attention", "feed_forward")
    }
    for index, (layer, wiring) in enumerate(zip(layers, plan["layers"], strict=True)):
        attention, feed_forward = layer.get_submodule(adapter.attention), layer.get_submodule(adapter.feed_forward)
        norm_projections(attention, plan, style, adapter.stacked)
        block = Block(
            Residual(attention, wiring["attention"], width, style, dropout, scaled["attention"]),
            Residual(feed_forward, wiring["feed_forward"], width, style, dropout, scaled["feed_forward"]),
        )
        if hasattr(layer, "attention_type"):  # some models pick the mask by it
            block.attention_type = layer.attention_type
        layers[index] = block
    backbone.set_submodule(adapter.norm, make_norm(plan["final_norm"], width, style) or nn.Identity())
    if adapter.embedding_norm:
        backbone.set_submodule(adapter.embedding_norm, nn.Identity())
    _rename_parallel_plans(backbone, adapter, plan)
    return backbone, make_norm(plan["embedding_norm"], width, style)


def _backbone_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """A subclass of the backbone's model that records Blocks as its hidden states.

    transformers keys its output recorders by the class, so it must exist before the model is built; it is kept in this
    module under its name, so that models can be pickled.
    """
    try:
        base = cast(type[PreTrainedModel], MODEL_MAPPING[type(config)])
    except KeyError:
        raise ValueError(f"backbone {config.model_type!r}: transformers has no base model for it") from None
    name = "Lamina" + base.__name__
    while name in globals() and base not in globals()[name].__mro__:  # another class of the name, or one of Lamina's
        name += "_"
    if name not in globals():
        record = {**(getattr(base, "_can_record_outputs", None) or {}), "hidden_states": Block}
        attributes = {"_can_record_outputs": record, "_no_split_modules": ["Block"], "__module__": __name__}
        globals()[name] = type(name, (_InitializesPlan, base), attributes)
    return globals()[name]


def _rename_parallel_plans(backbone: PreTrainedModel, adapter: Adapter, plan: dict) -> None:
    """Put the modules' new names into the backbone's plans for tensor and expert parallelism and for FSDP.

    The layers' own norms are gone from the plans: Lamina's stand where every process has all channels. Those on
    queries, keys and values do so only in a head; over the full width the projections are gathered, as in OLMo 2.
    """
    parts = {adapter.attention: "attention.module", adapter.feed_forward: "feed_forward.module"}
    inside = re.compile(rf"({re.escape(adapter.layers)}\.(?:\*|\d+)\.)([^.]+)(?=\.|$)(.*)")
    for name in ("_tp_plan", "_ep_plan", "_fsdp_plan"):
        renamed = {}
        for key, style in (getattr(backbone, name, None) or {}).items():
            if (found := inside.fullmatch(key)) is None:
                renamed[key] = style
            elif found[2] in parts:
                renamed[f"{found[1]}{parts[found[2]]}{found[3]}"] = style
        setattr(backbone, name, renamed)
    prefix = f"{adapter.layers}.*.{parts[adapter.attention]}."
    if "full" in (plan["qk_norm"], plan["v_norm"]) and f"{prefix}q_proj" in backbone.tp_plan:
        for key, style in (CONFIG_MAPPING["olmo2"].base_model_tp_plan or {}).items():
            if ".self_attn." in key:
                backbone.tp_plan[prefix + key.rpartition(".")[2]] = style
    for part, scope in {"q": plan["qk_norm"], "k": plan["qk_norm"], "v": plan["v_norm"]}.items():
        if scope == "head" and f"{prefix}{part}_proj" in backbone.tp_plan:
            backbone.tp_plan[f"{prefix}{part}_norm"] = "replicated_with_grad_allreduce"


def _check_wirable(backbone: PreTrainedModel, adapter: Adapter) -> None:
    """Raise ValueError if the backbone lacks a part, or its layers do something that rewiring would lose."""
    kind = f"backbone {backbone.config.model_type!r}"
    for name in ("layers", "norm", "embedding_norm", "embeddings"):
        _check_module(backbone, getattr(adapter, name), f"{kind}: {name}")
    layers = backbone.get_submodule(adapter.layers)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{kind}: layers: {adapter.layers!r} is a {type(layers).__name__} (needed: a ModuleList)")
    for index in range(len(layers)):
        for name in ("attention", "feed_forward"):
            _check_module(backbone, f"{adapter.layers}.{index}.{getattr(adapter, name)}", f"{kind}: {name}")
    if adapter.dropout and not hasattr(backbone.config, adapter.dropout):
        raise ValueError(f"{kind}: dropout: its configuration has no field {adapter.dropout!r}")
    for scale in ("residual_multiplier", "scale_depth"):
        if getattr(backbone.config, scale, None) not in (None, 1, 1.0):
            raise ValueError(f"{kind}: its layers scale their branches ({scale}), which wiring them again would lose")
    known = backbone.config.model_type in ADAPTERS
    norm = type(backbone.get_submodule(adapter.norm))
    norms = [child for child in layers[0].children() if "Norm" in type(child).__name__ or type(child) is norm]
    if not known and len(norms) < 2:
        raise ValueError(f"{kind}: its layers have one norm for attention and feed-forward side by side (parallel)")
    if not known:
        logger.warning_once(
            f"{kind} is not among those whose wiring is checked against transformers ({', '.join(ADAPTERS)}): make "
            "sure that its layers do nothing but attention, feed-forward, norms and adds"
        )


def _check_module(backbone: nn.Module, path: str | None, subject: str) -> None:
    """Raise ValueError, which begins with ``subject``, if ``path`` has no module; it names the modules there."""
    module, before = backbone, list[str]()
    for part in path.split(".") if path else ():
        children = dict(module.named_children())
        if part not in children:
            place = f"{'.'.join(before)!r} has" if before else "it has"
            raise ValueError(f"{subject}: there is no module {path!r} ({place}: {', '.join(children) or 'none'})")
        module, before = children[part], [*before, part]


def norm_projections(attention: nn.Module, plan: dict, style: NormStyle, stacked: str | None = None) -> None:
    """Put the plan's norms on an attention's queries, keys and values, beside its projections.

    ``stacked`` names the one projection to all three, where there is one. Raises ValueError, having changed nothing,
    where the attention has no such projections, or norms of its own on them.
    """
    scopes = {"q": plan["qk_norm"], "k": plan["qk_norm"], "v": plan["v_norm"]}
    scopes = {part: scope for part, scope in scopes.items() if scope != "off"}
    module: Any = attention
    dims = {}
    for part, scope in scopes.items():
        name, why = stacked or f"{part}_proj", None
        if hasattr(module, f"{part}_norm"):
            why = f"has a norm of its own on {name!r}"
        elif not isinstance(getattr(module, name, None), nn.Linear):
            why = f"has no projection {name!r}"
        elif scope == "head" and not hasattr(module, "head_dim"):
            why = "has no one width of a head"
        if why is None:
            width = getattr(module, name).out_features // (3 if stacked else 1)
            dims[part] = int(module.head_dim) if scope == "head" else width
            if width % dims[part]:
                why = f"has {name!r} of {width} channels, which heads of {dims[part]} do not divide"
        if why:
            option = "v_norm" if part == "v" else "qk_norm"
            raise ValueError(f"{option}: {scope!r} does not apply, {type(module).__name__} {why}")
    if not dims:
        return
    try:
        normed_attention = normed_class(type(module), tuple(dims), stacked)
    except ValueError as error:
        raise ValueError(f"{'qk_norm' if 'q' in dims else 'v_norm'}: {error}") from None
    spec = plan.get("qkv_norm") or QKV_NORM
    in_head = {**spec, "kind": "rms", "groups": 1} if spec["kind"] == "group" else spec  # a head is a group
    norms = {p: make_norm(in_head if scopes[p] == "head" else spec, dim, style) for p, dim in dims.items()}
    module.__class__ = normed_attention
    for part, norm in norms.items():
        setattr(module, f"{part}_norm", norm)


# The default of a plan without ``qkv_norm``: RMSNorm, as in HybridNorm's code, OLMo 2 and Qwen 3.
QKV_NORM = {"kind": "rms", "initial_gain": 1.0, "learnable_gain": True, "groups": 1}


class LaminaPreTrainedModel(_InitializesPlan, PreTrainedModel):
    """The facts about every Lamina model that transformers needs."""

    config_class = LaminaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class LaminaModel(LaminaPreTrainedModel):
    """A backbone wired by a plan: token ids [batch, tokens] in, states [batch, tokens, hidden_size] out.

    A vision backbone takes ``pixel_values`` [batch, channels, height, width] instead; its tokens are the patches.
    ``hidden_states`` of the output are the stream x^0 .. x^N, the last one before the final norm.
    """

    def __init__(self, config: LaminaConfig):
        super().__init__(config)
        self.backbone, self.embedding_norm = build_backbone(config)
        assert config.plan is not None
        text_config, scale = backbone_of(config), config.plan["embedding_scale"]
        self.embedding_scale = text_config.hidden_size**0.5 if scale == "sqrt_hidden_size" else float(scale)
        self._adapter = adapter_of(text_config)
        self.main_input_name = self._adapter.input
        if self._adapter.embeddings:
            self.backbone.get_submodule(self._adapter.embeddings).register_forward_hook(self._after_embeddings)
        self.post_init()
        if self.embedding_norm is not None or self.embedding_scale != 1.0:
            self._pp_plan = {}  # a later stage takes the stream as embeddings, which would be normed again

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return cast(nn.ModuleList, self.backbone.get_submodule(self._adapter.layers))

    @property
    def norm(self) -> nn.Module:
        """The norm after the last block; Identity if the plan has none."""
        return self.backbone.get_submodule(self._adapter.norm)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def _scaled_and_normed(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _after_embeddings(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        """Hook a backbone that takes no embeddings. A bound method, so that a copied model hooks its own norm."""
        return self._scaled_and_normed(output)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name) is None and getattr(self.config, name, False):
                kwargs[name] = True
        if self._adapter.is_decoder:
            # Off in training: nothing reads it, and its guards would make torch.compile compile every layer anew.
            kwargs["use_cache"] = False if use_cache is None and self.training else use_cache
        if self._adapter.input == "pixel_values":
            if pixel_values is None or input_ids is not None or inputs_embeds is not None:
                raise ValueError("You must specify pixel_values, and neither input_ids nor inputs_embeds")
            return self.backbone(pixel_values=pixel_values, attention_mask=attention_mask, **kwargs)
        if (input_ids is None) == (inputs_embeds is None) or pixel_values is not None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if self.embedding_norm is not None or self.embedding_scale != 1.0:
            x = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
            input_ids, inputs_embeds = None, self._scaled_and_normed(x)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs["position_ids"] = position_ids
        if self._adapter.is_decoder:
            return self.backbone(**inputs, past_key_values=past_key_values, **kwargs)
        # without a cache: the sequence classifier hands one on, and reads one
        output = self.backbone(**inputs, **kwargs)
        return BaseModelOutputWithPast(**output) if isinstance(output, dict) else output


class LaminaWithHead(LaminaPreTrainedModel):
    """The base of the models with a head: the body, where the head fits its backbone; raises ValueError elsewhere."""

    kind: str  # the head's name in HEADS

    def __init__(self, config: LaminaConfig):
        super().__init__(config)
        heads = adapter_of(backbone_of(config)).heads
        if self.kind not in heads:
            model_type = backbone_of(config).model_type
            raise ValueError(
                f"head: {self.kind!r} does not fit the backbone {model_type!r} (allowed: {', '.join(heads)})"
            )
        self.model = LaminaModel(config)


M = TypeVar("M", bound=type[LaminaWithHead])


@dataclass(frozen=True, kw_only=True)
class Head:
    """A model with a head, and the name of transformers' Auto class that loads it."""

    model: type[LaminaWithHead]
    auto_class: str


HEADS: dict[str, Head] = {}


def head(name: str, auto_class: str) -> Callable[[M], M]:
    """Register a model class by the name of its head and by the Auto class that loads it, here and as remote code."""

    def register(model: M) -> M:
        model.kind = name
        HEADS[name] = Head(model=model, auto_class=auto_class)
        AUTO_MAP[auto_class] = f"modeling_lamina.{model.__name__}"
        return model

    return register


class LogitsStyle(NamedTuple):
    """A backbone's changes to its logits: Cohere's factor, Granite's divisor, Gemma 2's soft-cap; None for none."""

    factor: float | None
    divisor: float | None
    softcap: float | None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitsStyle:
        """The style in a backbone's configuration."""
        fields = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return cls(*(getattr(config, name, None) or None for name in fields))

    @property
    def scale(self) -> float:
        """The factor and the divisor as one number."""
        return float(self.factor or 1.0) / float(self.divisor or 1.0)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The backbone's logits from those of the head."""
        if self.factor:
            logits = logits * self.factor
        if self.divisor:
            logits = logits / self.divisor
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


@head("causal_lm", "AutoModelForCausalLM")
class LaminaForCausalLM(LaminaWithHead, GenerationMixin):
    """A LaminaModel with a language-model head: logits [batch, tokens, vocab_size], and a loss with labels.

    If ``linear_loss`` is set, it computes the loss from the last states [batch, tokens, hidden_size], the head and the
    labels. The logits are then None. It returns None if it does not apply.
    """

    linear_loss: Callable[..., torch.Tensor | None] | None = None
    _tied_weights_keys = {"lm_head.weight": "model.backbone.embed_tokens.weight"}  # the usual name

    def __init__(self, config: LaminaConfig):
        super().__init__(config)
        embedding = self.model.get_input_embeddings()
        name = next(name for name, module in self.named_modules() if module is embedding)
        self._tied_weights_keys = {"lm_head.weight": f"{name}.weight"}
        text_config = backbone_of(config)
        self.lm_head = nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=False)
        self.post_init()
        peer = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)  # it says how to shard its head
        self.tp_plan.update(getattr(peer, "_tp_plan", None) or {})

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        # Named one by one: Trainer and TRL keep only the columns whose names are in this signature.
        if kwargs.get("output_router_logits"):
            raise ValueError("output_router_logits: not supported (the router's balance is a loss of its own)")
        loss_kwargs = {k: kwargs.pop(k) for k in ("num_items_in_batch", "shift_labels") if k in kwargs}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden, style = outputs.last_hidden_state, LogitsStyle.of(backbone_of(self.config))
        all_logits = isinstance(logits_to_keep, int) and logits_to_keep == 0
        loss = logits = None
        if labels is not None and all_logits and self.linear_loss is not None:
            scale, softcap = style.scale, style.softcap
            loss = self.linear_loss(hidden, self.lm_head, labels, scale=scale, softcap=softcap, **loss_kwargs)
        if loss is None:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = style.apply(self.lm_head(hidden[:, keep]))
            if labels is not None:
                vocab_size = backbone_of(self.config).vocab_size
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **loss_kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


@head("sequence_classification", "AutoModelForSequenceClassification")
class LaminaForSequenceClassification(GenericForSequenceClassification, LaminaWithHead):
    """A LaminaModel with a score for each sequence, read at its last token (a reward model has num_labels = 1)."""

    def __init__(self, config: LaminaConfig):
        # Not the generic constructor: it would ask AutoModel, which refuses remote code here.
        LaminaWithHead.__init__(self, config)
        self.num_labels = int(config.num_labels or 1)
        self.score = nn.Linear(backbone_of(config).hidden_size, self.num_labels, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Score the last token that the mask [batch, tokens] keeps, or without a mask the last one that is not padding.

        The two differ where the text ends with the token that also pads, as in tokenizers that have one for both.
        """
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        if attention_mask is None or attention_mask.ndim != 2:
            return super().forward(
                input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=use_cache, **kwargs
            )
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache, **kwargs)
        hidden = outputs.last_hidden_state
        places = torch.arange(attention_mask.shape[-1], device=hidden.device)
        last = (places * attention_mask.to(hidden.device).bool()).argmax(-1)
        scores = self.score(hidden[torch.arange(len(hidden), device=hidden.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=scores, labels=labels, pooled_logits=scores, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=scores,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LaminaPredictionHead(nn.Module):
    """ModernBERT's layers between its states and its decoder: norm(activation(dense(x)))."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.act = ACT2FN[config.classifier_activation]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(self.dense(x)))


@head("masked_lm", "AutoModelForMaskedLM")
class LaminaForMaskedLM(LaminaWithHead):
    """A bidirectional LaminaModel with a head that predicts masked tokens.

    Logits [batch, tokens, vocab_size]; the loss is the mean over the labels that are not -100.
    """

    _tied_weights_keys = {"decoder.weight": "model.backbone.embeddings.tok_embeddings.weight"}

    def __init__(self, config: LaminaConfig):
        super().__init__(config)
        text_config = backbone_of(config)
        self.head = LaminaPredictionHead(text_config)
        self.decoder = nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=text_config.decoder_bias)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: object,
    ) -> MaskedLMOutput:
        loss_kwargs = {k: kwargs.pop(k) for k in ("num_items_in_batch",) if k in kwargs}
        kwargs |= {"position_ids": position_ids, "inputs_embeds": inputs_embeds}
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        logits = self.decoder(self.head(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            vocab_size = backbone_of(self.config).vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **loss_kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


@head("image_classification", "AutoModelForImageClassification")
class LaminaForImageClassification(LaminaWithHead):
    """A vision LaminaModel with a linear classifier on its first token: logits [batch, num_labels].

    Labels are classes [batch], or probabilities [batch, num_labels] as mixup makes them; the loss is the cross-entropy.
    A configuration with a ``problem_type`` has transformers' loss for it.
    """

    main_input_name = "pixel_values"
    input_modalities = "image"

    def __init__(self, config: LaminaConfig):
        super().__init__(config)
        self.num_labels = int(config.num_labels or 1)
        self.classifier = nn.Linear(backbone_of(config).hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: object,
    ) -> ImageClassifierOutput:
        items = cast("torch.Tensor | int | None", kwargs.pop("num_items_in_batch", None))
        outputs = self.model(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            **kwargs,
        )
        logits = self.classifier(outputs.last_hidden_state[:, 0])
        loss = None
        if labels is not None and (self.num_labels == 1 or self.config.problem_type is not None):
            loss = self.loss_function(labels, logits, self.config)
        elif labels is not None and items is None:
            loss = nn.functional.cross_entropy(logits, labels)
        elif labels is not None and items is not None:  # of the whole step; a label may be one number per class
            images = items * len(labels) / labels.numel()
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / images
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
