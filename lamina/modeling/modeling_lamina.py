"""The models that transformers' Auto classes load: a backbone with the norms of a placement.

For a checkpoint, transformers copies this file and the other files ``*_lamina.py``.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .configuration_lamina import AUTO_MAP, LaminaConfig, LogitsStyle, backbone_of
from .streams_lamina import Collapse, StatePlan
from .wiring_lamina import SCALES, Block, InitializesPlan, LaminaNorm, NormStyle, Residual, make_norm, norm_projections

logger = logging.get_logger(__name__)


HALVES = ("attention", "feed_forward")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The names of a model type's modules, and the heads that fit the type. A name may be a path ("encoder.layer").

    Args:
        layers: the backbone's list of layers.
        attention: a layer's attention module, or several names ("self_attn|mamba"). Lamina uses the first match.
        feed_forward: a layer's feed-forward module, or several names.
        norm: the backbone's final norm.
        dropout: the configuration's field for dropout on the branches, or None if the modules apply the dropout.
        head_bias: whether the output head has a bias.
        stacked: the projection that computes queries, keys and values together, or None for separate projections.
        embedding_norm: the backbone's norm after the embeddings, or None. The placement's norm replaces this norm.
        input: the name of the model's input.
        embeddings: the module that computes the first hidden state x^0. None if a look-up of token ids is enough.
        is_decoder: whether the model is causal and caches keys and values.
        heads: the heads (names in HEADS) that fit the model type. The first head is the default.
        roles: the roles of weights by their modules' attribute names, in addition to core/architectures.py.
        arguments: keyword arguments of the backbone's constructor.
    """

    layers: str = "layers"
    attention: str = "self_attn|linear_attn|mamba|conv"
    feed_forward: str = "mlp|feed_forward"
    norm: str = "norm"
    dropout: str | None = None
    head_bias: bool = False
    stacked: str | None = None
    embedding_norm: str | None = None
    input: str = "input_ids"
    embeddings: str | None = None
    is_decoder: bool = True
    heads: tuple[str, ...] = ("causal_lm", "sequence_classification")
    roles: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, str]:
        """Map each possible name of the attention and the feed-forward to the module's path in a Block."""
        return {name: f"{half}.module" for half in HALVES for name in getattr(self, half).split("|")}

    def halves(self, layer: nn.Module) -> list[str]:
        have = {name for name, _ in layer.named_modules()}
        names = [getattr(self, half).split("|") for half in HALVES]
        return [next((name for name in every if name in have), every[0]) for every in names]

    @classmethod
    def of(cls, names: object) -> Adapter:
        """Read a configuration's ``lamina_adapter``. Raises ValueError for an invalid field."""
        if not isinstance(names, Mapping):
            raise ValueError(f"adapter: {names!r} is not a mapping. Give a mapping from fields to modules' names.")
        defaults = {f.name: f.default for f in fields(cls) if f.name != "arguments"}  # a file may not set ``arguments``
        for name, value in names.items():
            if name not in defaults:
                raise ValueError(f"adapter: unknown field {name!r} (allowed: {', '.join(defaults)})")
            if name == "heads":
                fits = isinstance(value, list | tuple) and bool(value) and all(str(each) in HEADS for each in value)
                allowed = f"a list of {', '.join(HEADS)}"
            elif name == "roles":
                fits = isinstance(value, Mapping) and all(isinstance(role, str) for role in value.values())
                allowed = "a mapping from a module's name to its weight's role"
            elif name in ("is_decoder", "head_bias"):
                fits, allowed = isinstance(value, bool), "true or false"
            else:
                fits = (isinstance(value, str) and value != "") or (value is None and defaults[name] is None)
                allowed = "a name" if defaults[name] is not None else "a name, or None"
            if not fits:
                raise ValueError(f"adapter: {name}: {value!r} does not fit. Give {allowed}.")
        return cls(**{**names, "heads": tuple(names.get("heads", cls.heads))})


# One row per model type whose wiring is tested: its logits equal transformers' own on the same weights. For any
# other backbone, Lamina assumes a decoder. core/architectures.py has more facts about these model types.
DECODER = Adapter()
ADAPTERS: dict[str, Adapter] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "ernie4_5"), DECODER),
    "phi3": Adapter(dropout="resid_pdrop"),
    **dict.fromkeys(("seed_oss", "starcoder2", "arcee", "bitnet", "cwm", "glm", "jais2", "ministral3"), DECODER),
    **dict.fromkeys(("exaone_moe", "glm4_moe", "minimax_m2", "mixtral", "olmoe"), DECODER),
    **dict.fromkeys(("phimoe", "qwen2_moe", "qwen3_moe", "solar_open", "deepseek_v2", "deepseek_v3"), DECODER),
    **dict.fromkeys(("apertus", "exaone4", "olmo2", "olmo3"), DECODER),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "glm4"), DECODER),
    "doge": Adapter(dropout="hidden_dropout"),
    "granite": DECODER,
    "granitemoe": Adapter(feed_forward="block_sparse_moe"),
    **dict.fromkeys(("hyperclovax", "stablelm", "cohere", "cohere2", "minicpm3"), DECODER),
    "gpt_neox": Adapter(attention="attention", norm="final_layer_norm", dropout="hidden_dropout"),
    "phi": Adapter(norm="final_layernorm", dropout="resid_pdrop", head_bias=True),
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
# GPT-2 in nanoGPT's form. The logits equal nanoGPT's own on the same weights.
GPT2_ADAPTER = {"layers": "h", "attention": "attn", "feed_forward": "mlp", "norm": "ln_f", "embeddings": "drop"} | {
    "stacked": "c_attn",
    "roles": {"c_attn": "query_key_value", "attention.c_proj": "attention_out"},
}


def adapter_of(config: PreTrainedConfig) -> Adapter:
    """Return a configuration's ``lamina_adapter``. The default is the adapter of the model type, or of decoders."""
    names = getattr(config, "lamina_adapter", None)
    return ADAPTERS.get(config.model_type, DECODER) if names is None else Adapter.of(names)


def build_backbone(config: LaminaConfig) -> tuple[PreTrainedModel, LaminaNorm | None]:
    """Build a transformers model with the norms of ``config.plan``. Return the model and the embedding norm.

    Raises ValueError if Lamina can't change the layers, or if a norm's projection does not exist.
    """
    backbone_config, plan = backbone_of(config), config.plan
    if plan is None:
        raise ValueError("plan: a Lamina model needs a plan. Make the model with lamina.build.")
    adapter = adapter_of(backbone_config)
    # Not the dtype in the backbone's configuration: backbone, norms and head share the dtype that the user asked for.
    backbone = _backbone_class(backbone_config)._from_config(
        backbone_config, dtype=torch.get_default_dtype(), **adapter.arguments
    )
    _check_wirable(backbone, adapter, plan)
    layers = cast(nn.ModuleList, backbone.get_submodule(adapter.layers))
    style = NormStyle.of(backbone.get_submodule(adapter.norm))
    width = backbone_config.hidden_size
    dropout = float(getattr(backbone_config, adapter.dropout)) if adapter.dropout else 0.0
    scaled = {
        part: [name for name in SCALES if any(w[part].get(name, 1.0) != 1.0 for w in plan["layers"])] for part in HALVES
    }
    state = StatePlan(plan, width, style.eps)
    for index, (layer, wiring) in enumerate(zip(layers, plan["layers"], strict=True)):
        attention, feed_forward = map(layer.get_submodule, adapter.halves(layer))
        sources = wiring.get("sources") or {}
        ways, own_norms = bool(sources.get("multiway")), bool(sources.get("own_norms"))
        norm_projections(attention, plan, style, adapter.stacked, wiring["attention"].get("inner_norm"), ways)
        norm_projections(feed_forward, NO_QKV, style, inner=wiring["feed_forward"].get("inner_norm"))
        block = Block(
            Residual(attention, wiring["attention"], width, style, dropout, scaled["attention"], own_norms),
            Residual(feed_forward, wiring["feed_forward"], width, style, dropout, scaled["feed_forward"]),
            state.of_block(index),
            tuple(inspect.signature(layer.forward).parameters)[1:],  # GPT-2 passes several by position
        )
        if hasattr(layer, "attention_type"):  # some models choose the mask by this attribute
            block.attention_type = layer.attention_type
        layers[index] = block
    norm = make_norm(plan["final_norm"], width, style) or nn.Identity()
    backbone.set_submodule(adapter.norm, state.end(norm) if state.is_more else norm)
    if adapter.embedding_norm:
        backbone.set_submodule(adapter.embedding_norm, nn.Identity())
    _rename_parallel_plans(backbone, adapter, plan)
    return backbone, make_norm(plan["embedding_norm"], width, style)


def _backbone_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return a global subclass of the backbone's model, so that pickle finds the subclass by name. ``hidden_states``
    are the outputs of the Blocks.
    """
    try:
        base = cast(type[PreTrainedModel], MODEL_MAPPING[type(config)])
    except KeyError:
        raise ValueError(f"backbone {config.model_type!r}: it has no base model. Choose another backbone.") from None
    name = "Lamina" + base.__name__
    while name in globals() and base not in globals()[name].__mro__:  # the name belongs to another class
        name += "_"
    if name not in globals():
        # transformers reads these flags from the file of the class, and caches the answer for subclasses. It also looks
        # up in the class which outputs to record.
        for may_choose in ("_can_set_attn_implementation", "_can_set_experts_implementation"):
            getattr(base, may_choose, bool)()
        record = {**(getattr(base, "_can_record_outputs", None) or {}), "hidden_states": Block}
        attributes = {"_can_record_outputs": record, "_no_split_modules": ["Block"], "__module__": __name__}
        globals()[name] = type(name, (InitializesPlan, base), attributes)
    return globals()[name]


def _rename_parallel_plans(backbone: PreTrainedModel, adapter: Adapter, plan: dict) -> None:
    """Rename modules in the backbone's plans for tensor parallelism, expert parallelism and FSDP.

    The new plans omit the original norms. Lamina's norms need no plan, because each process has all channels there. For
    norms over the full width of queries and keys, the processes gather the projections, as in OLMo 2.
    """
    parts = adapter.parts
    inside = re.compile(rf"({re.escape(adapter.layers)}\.(?:\*|\d+)\.)([^.]+)(?=\.|$)(.*)")
    for name in ("_tp_plan", "_ep_plan", "_fsdp_plan"):
        renamed = {}
        for key, style in (getattr(backbone, name, None) or {}).items():
            if (match := inside.fullmatch(key)) is None:
                renamed[key] = style
            elif match[2] in parts:
                renamed[f"{match[1]}{parts[match[2]]}{match[3]}"] = style
        setattr(backbone, name, renamed)
    prefix = f"{adapter.layers}.*.attention.module."
    if "full" in (plan["qk_norm"], plan["v_norm"]) and f"{prefix}q_proj" in backbone.tp_plan:
        for key, style in (CONFIG_MAPPING["olmo2"].base_model_tp_plan or {}).items():
            if ".self_attn." in key:
                backbone.tp_plan[prefix + key.rpartition(".")[2]] = style
    for half in HALVES:  # a norm before the last projection reads all of its channels
        if any(layer[half].get("inner_norm") for layer in plan["layers"]):
            whole = {"colwise": "colwise_rep", "rowwise": "rowwise_rep"}
            inside_half = f"{adapter.layers}.*.{half}.module."
            styles = {k: style for k, style in backbone.tp_plan.items() if k.startswith(inside_half)}
            backbone.tp_plan.update({key: whole.get(style, style) for key, style in styles.items()})
    for part, scope in {"q": plan["qk_norm"], "k": plan["qk_norm"], "v": plan["v_norm"]}.items():
        if scope == "head" and f"{prefix}{part}_proj" in backbone.tp_plan:
            backbone.tp_plan[f"{prefix}{part}_norm"] = "replicated_with_grad_allreduce"
    backbone.tp_plan.update({name: STYLES.get(style, style) for name, style in backbone.tp_plan.items()})


# Some of transformers' styles have two names. Serving engines know the second name.
STYLES = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
ENGINES = ("vllm", "vllm_mla", "sglang")  # their attention implementations
NO_QKV = {"qk_norm": "off", "v_norm": "off"}
PARALLEL = ("use_parallel_residual", "parallel_attn")  # fields of GPT-NeoX, Falcon and similar models


def _check_wirable(backbone: PreTrainedModel, adapter: Adapter, plan: dict) -> None:
    """Raise ValueError if the backbone lacks a module, or if a Block would lose something that the layers compute."""
    kind = f"backbone {backbone.config.model_type!r}"
    for name in ("layers", "norm", "embedding_norm", "embeddings"):
        _check_module(backbone, getattr(adapter, name), f"{kind}: {name}")
    layers = backbone.get_submodule(adapter.layers)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{kind}: layers: {adapter.layers!r} is a {type(layers).__name__}. Name a ModuleList.")
    for index, layer in enumerate(layers):
        for name, path in zip(HALVES, adapter.halves(layer), strict=True):
            _check_module(backbone, f"{adapter.layers}.{index}.{path}", f"{kind}: {name}")
            if isinstance(layer.get_submodule(path), nn.ModuleList):
                raise ValueError(f"{kind}: {name}: {path!r} is a ModuleList. Give the name of one module.")
    if adapter.dropout and not hasattr(backbone.config, adapter.dropout):
        raise ValueError(f"{kind}: dropout: the configuration has no field {adapter.dropout!r}. Name a field.")
    known = backbone.config.model_type in ADAPTERS  # the placements of these types include the branches' factors
    halves = [layer[half] for layer in plan["layers"] for half in HALVES]
    scaled = all("out_scale" in half or "out_scale_learned" in half for half in halves)  # absent if it is 1
    for scale in ("residual_multiplier", "scale_depth"):
        if not (scaled or known) and getattr(backbone.config, scale, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{kind}: the layers scale the branches ({scale}), but the placement would drop the scale. Use a "
                "placement with an out_scale, such as granite or minicpm."
            )
    norm = type(backbone.get_submodule(adapter.norm))
    used = {(layer, path.partition(".")[0]) for layer in layers for path in adapter.halves(layer)}
    modules = {key: one for layer in layers for key, one in layer.named_children() if (layer, key) not in used}
    norms = {key for key, one in modules.items() if "Norm" in type(one).__name__ or type(one) is norm}
    parallel = all(layer["feed_forward"].get("read") == "block_input" for layer in plan["layers"])
    beside = len(norms) < 2 or any(getattr(backbone.config, name, False) for name in PARALLEL)
    if beside and not (parallel or known):
        raise ValueError(f"{kind}: the layers run attention and feed-forward in parallel. Add wiring=parallel.")
    if not known and not (backbone.config.model_type == "gpt2" and adapter == Adapter.of(GPT2_ADAPTER)):
        lost = [key for key, one in modules.items() if key not in norms and any(True for _ in one.parameters())]
        near = ", ".join(difflib.get_close_matches(backbone.config.model_type, ADAPTERS) or ["llama"])
        logger.warning_once(
            f"{kind}: Lamina is not tested with this model type, but with {near} and others (`lamina backbones` lists "
            "all). Make sure that its layers contain only attention, feed-forward, norms and additions"
            + (f". Lamina leaves out these modules of the layers: {', '.join(lost)}" if lost else "")
        )


def _check_module(backbone: nn.Module, path: str | None, subject: str) -> None:
    module, before = backbone, list[str]()
    for part in path.split(".") if path else ():
        children = dict(module.named_children())
        if part not in children:
            beginning = f"{'.'.join(before)!r} has" if before else "it has"
            raise ValueError(f"{subject}: there is no module {path!r} ({beginning}: {', '.join(children) or 'none'})")
        module, before = children[part], [*before, part]


class LaminaPreTrainedModel(InitializesPlan, PreTrainedModel):
    """The base class of all Lamina models, with the flags that transformers reads."""

    config_class = LaminaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = _supports_sdpa = _supports_flex_attn = _supports_attention_backend = True

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. Trainer calls this method in every step, so the method returns early if
        nothing changes.
        """
        waiting: list[nn.Module] = [self]
        for module in waiting:
            waiting += filter(None, module._modules.values())
        return self if all(module.training == mode for module in waiting) else super().train(mode)


class LaminaModel(LaminaPreTrainedModel):
    """A backbone with a norm placement and without a head, from token ids to states [batch, tokens, hidden_size].

    A vision backbone takes ``pixel_values`` [batch, channels, height, width], and the tokens are image patches. The
    output's ``hidden_states`` are the residual stream x^0 .. x^N. The final norm is not applied to x^N.
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
        if self.embedding_norm is not None or self.embedding_scale != 1.0 or isinstance(self.norm, Collapse):
            self._pp_plan = {}  # a later stage would normalize its input like an embedding, and gets one stream only

    @property
    def layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.backbone.get_submodule(self._adapter.layers))

    @property
    def norm(self) -> nn.Module:
        """Return the norm after the last block, or an Identity if the placement has no such norm."""
        return self.backbone.get_submodule(self._adapter.norm)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def _check_whole(self) -> None:
        if not (self._pp_plan or all(isinstance(layer, Block) for layer in self.layers)):
            raise ValueError(
                "plan: a model cannot be split into pipeline stages if it scales or normalizes the embedding, or "
                "has several streams. Set the pipeline parallel size to 1."
            )
        plan = self.config.plan or {}
        inner = any(layer[half].get("inner_norm") for layer in plan["layers"] for half in HALVES)
        if not (inner or "full" in (plan["qk_norm"], plan["v_norm"])):
            return
        if any((getattr(module, "tp_size", None) or 1) > 1 for module in self.modules()):
            raise ValueError(
                "plan: a norm over all heads, or a norm before a module's last projection, needs channels from "
                "other devices. Set the tensor parallel size to 1."
            )

    def _scaled_and_normed(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _after_embeddings(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
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
        if self.config._attn_implementation in ENGINES:
            self._check_whole()
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name) is None and getattr(self.config, name, False):
                kwargs[name] = True
        if self._adapter.is_decoder:
            # No cache in training: nothing reads it, and its guards would make torch.compile recompile every layer.
            kwargs["use_cache"] = False if use_cache is None and self.training else use_cache
        if self._adapter.input == "pixel_values":
            if pixel_values is None or input_ids is not None or inputs_embeds is not None:
                raise ValueError("You must specify pixel_values, and neither input_ids nor inputs_embeds")
            return self.backbone(pixel_values=pixel_values, attention_mask=attention_mask, **kwargs)
        if (input_ids is None) == (inputs_embeds is None) or pixel_values is not None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        plain = self.embedding_norm is None and self.embedding_scale == 1.0
        if not (plain or self._adapter.embeddings):
            x = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
            input_ids, inputs_embeds = None, self._scaled_and_normed(x)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs["position_ids"] = position_ids
        if self._adapter.is_decoder:
            return self.backbone(**inputs, past_key_values=past_key_values, **kwargs)
        # An encoder has no cache, but the sequence classifier reads a field past_key_values of the output.
        output = self.backbone(**inputs, **kwargs)
        return BaseModelOutputWithPast(**output) if isinstance(output, dict) else output


class LaminaWithHead(LaminaPreTrainedModel):
    """The base class of models with a head. Raises ValueError if the head does not fit the backbone."""

    kind: str  # the head's name in HEADS

    def __init__(self, config: LaminaConfig):
        super().__init__(config)
        heads = adapter_of(backbone_of(config)).heads
        if self.kind not in heads:
            model_type = backbone_of(config).model_type
            raise ValueError(
                f"head: {self.kind!r} does not work with the backbone {model_type!r} (allowed: {', '.join(heads)})"
            )
        self.model = LaminaModel(config)


M = TypeVar("M", bound=type[LaminaWithHead])


@dataclass(frozen=True, kw_only=True)
class Head:
    """A model class with a head, and the Auto class that loads the model class."""

    model: type[LaminaWithHead]
    auto_class: str


HEADS: dict[str, Head] = {}


def head(name: str, auto_class: str) -> Callable[[M], M]:
    """Register the decorated model class as a head that ``auto_class`` loads, also from a checkpoint's own code."""

    def register(model: M) -> M:
        model.kind = name
        HEADS[name] = Head(model=model, auto_class=auto_class)
        AUTO_MAP[auto_class] = f"modeling_lamina.{model.__name__}"
        return model

    return register


@head("causal_lm", "AutoModelForCausalLM")
class LaminaForCausalLM(LaminaWithHead, GenerationMixin):
    """A LaminaModel with a language-model head: logits [batch, tokens, vocab_size], and the loss if there are labels.

    ``linear_loss`` computes the loss from the last states [batch, tokens, hidden_size], the head and the labels. The
    output then has no logits. If ``linear_loss`` is None or returns None, the model computes the loss from the logits.
    """

    linear_loss: Callable[..., torch.Tensor | None] | None = None
    _tied_weights_keys = {"lm_head.weight": "model.backbone.embed_tokens.weight"}  # the usual name

    def __init__(self, config: LaminaConfig):
        super().__init__(config)
        embedding = self.model.get_input_embeddings()
        name = next(name for name, module in self.named_modules() if module is embedding)
        self._tied_weights_keys = {"lm_head.weight": f"{name}.weight"}
        text_config = backbone_of(config)
        bias = adapter_of(text_config).head_bias
        self.lm_head = nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=bias)
        self.post_init()
        peer = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)  # its plan says how to shard the head
        of_head = getattr(peer, "_tp_plan", None) or {}
        self.tp_plan.update({name: STYLES.get(style, style) for name, style in of_head.items()})

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
            raise ValueError(
                "output_router_logits: not supported. Leave out the argument: Lamina adds the router's balance loss."
            )
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
            logits = style.apply(self.lm_head, hidden[:, keep])
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
    """A LaminaModel that scores each sequence at the last token. A reward model has num_labels = 1."""

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
        """Score the last token in the attention mask [batch, tokens]. Without a mask, score the last token that is no
        padding.

        The two tokens can differ if the tokenizer pads with the end-of-text token.
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


@head("masked_lm", "AutoModelForMaskedLM")
class LaminaForMaskedLM(LaminaWithHead):
    """A bidirectional LaminaModel with a head that predicts masked tokens: logits [batch, tokens, vocab_size].

    The loss is the mean over the labels that are not -100.
    """

    _tied_weights_keys = {"decoder.weight": "model.backbone.embeddings.tok_embeddings.weight"}

    def __init__(self, config: LaminaConfig):
        from transformers import ModernBertConfig
        from transformers.models.modernbert.modeling_modernbert import ModernBertPredictionHead

        super().__init__(config)
        text_config = backbone_of(config)
        self.head = ModernBertPredictionHead(cast(ModernBertConfig, text_config))
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
    """A vision LaminaModel with a linear classifier on the first token: logits [batch, num_labels].

    Labels are classes [batch], or probabilities [batch, num_labels] from mixup. The loss is the cross-entropy, or
    transformers' loss for the configuration's ``problem_type``.
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
