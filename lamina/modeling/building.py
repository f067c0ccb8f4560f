"""Build a model from a backbone and a norm placement, or a block from plain modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lamina.core import initializers
from lamina.core.architectures import UNCONVERTED
from lamina.core.registry import refuse_namesake
from lamina.core.values import number, text, whole_number
from lamina.errors import UserError, one_line, shortened, unknown
from lamina.modeling import initialization
from lamina.modeling.backbones import PRESETS, resolve_backbone
from lamina.modeling.backbones.loading import check_adapter
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.modeling_lamina import ADAPTERS, HEADS, NO_QKV, LaminaForCausalLM, adapter_of
from lamina.modeling.scaling import Scaling, scaled_weights
from lamina.modeling.wiring_lamina import NORMS, Block, LaminaNorm, NormStyle, Residual, norm_projections
from lamina.placements import Layer, Plan, resolve
from lamina.placements.plan import OWN_KINDS

_CGROUP = Path("/sys/fs/cgroup")  # the memory limit of a container


def build(
    backbone: str | Path | PreTrainedConfig,
    placement: str | Plan,
    *,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    vocab_size: int | None = None,
    head: str | None = None,
    num_labels: int | None = None,
    init: str = "recommended",
    profile_ids: torch.Tensor | None = None,
    scaling: Scaling | None = None,
    adapter: Mapping[str, object] | None = None,
    **placement_options: object,
) -> PreTrainedModel:
    """Build a model from a backbone's attention and feed-forward modules, with norms at the placement's positions.

    Args:
        backbone: a preset's name (``lamina.modeling.backbones.names()``), a transformers configuration or its folder,
            or a name on the hub. Lamina does not load the weights. To keep the weights, use `lamina convert`.
        placement: a registered name, a YAML or Python file with a placement, or a Plan.
        num_layers: the number of blocks (default: the backbone's number).
        hidden_size: the width (default: the backbone's width).
        num_heads: the number of heads (default: the backbone's number).
        vocab_size: the vocabulary's size (default: the backbone's size).
        head: "causal_lm", "masked_lm", "sequence_classification" or "image_classification" (default: the backbone's
            first head in ``ADAPTERS``).
        num_labels: a classifier's number of classes. The default is the backbone's number for images, and 1 for
            sequences, as in a reward model.
        init: an initializer's name or ``"name(std=0.01)"``. "recommended" is the initializer of the paper's main runs.
        profile_ids: token ids [batch, tokens] or images for an initializer that runs the model (default: random).
        scaling: a ``lamina.modeling.scaling.Scaling``, which scales the initial weights and the branches.
        adapter: a mapping from fields of ``lamina.modeling.modeling_lamina.Adapter`` to names of the backbone's
            modules, such as ``{"attention": "attn", "norm": "ln_f"}`` (default: the configuration's
            ``lamina_adapter``).
        placement_options: options of this placement, or of every placement (final_norm, norm, qk_norm, wiring, ...).

    Returns:
        A float32 model of the head's class, such as LaminaForCausalLM. To seed the weights, call ``torch.manual_seed``.

    Raises:
        UserError: (a ValueError) for an unknown name or option, an invalid size, a Plan with another number of layers,
            or a head that does not fit the backbone.
    """
    config = resolve_backbone(
        backbone, num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, vocab_size=vocab_size
    )
    head = _checked_head(config, head, adapter)
    multiplier = {} if scaling is None or isinstance(placement, Plan) else scaling.placement_options
    plan = make_plan(placement, config.num_hidden_layers, **{**placement_options, **multiplier})
    name = recommended(plan) if text("init", init) == "recommended" else init
    initializers.check(name)
    model = _wired(config, plan, head, num_labels)
    scaled = [] if scaling is None else scaled_weights(model, scaling)
    initialization.initialize(model, name, profile_ids, {s.weight.name: (s.base, s.std) for s in scaled} or None)
    from_file = not isinstance(backbone, PreTrainedConfig) and str(backbone) not in PRESETS
    if from_file or config.model_type not in ADAPTERS:
        _check_runs(model)
    return model


def _checked_head(config: PreTrainedConfig, head: str | None, adapter: Mapping[str, object] | None) -> str:
    """Store ``adapter`` in the configuration, and return the name of the model's head. Raises UserError for invalid
    values.
    """
    if adapter is not None:
        config.lamina_adapter = adapter
    check_adapter(config, "")
    if config.model_type in UNCONVERTED:
        raise UserError(f"backbone {config.model_type!r}: {UNCONVERTED[config.model_type]}. Choose another backbone.")
    if torch.get_default_device().type != "meta":
        fields, width = "hidden_size, num_layers, vocab_size", config.hidden_size
        # at least one square matrix per block, and the embedding
        fewest = config.num_hidden_layers * width * width + getattr(config, "vocab_size", 0) * width
        refuse_beyond_memory(fields, "a model of these sizes needs", 4.0 * fewest)
    head = str(head or adapter_of(config).heads[0])
    if head not in HEADS:
        raise unknown("head", head, HEADS)
    return head


def _wired(config: PreTrainedConfig, plan: Plan, head: str, num_labels: int | None) -> PreTrainedModel:
    if num_labels is None:
        labels: dict[str, Any] = {"num_labels": 1} if head == "sequence_classification" else {}
    elif not head.endswith("classification"):
        raise UserError(
            f"num_labels: {num_labels!r} has no effect on the head {head!r}. Leave 'num_labels' out, or choose a "
            "classifier's head."
        )
    else:
        labels = {"num_labels": whole_number("num_labels", num_labels)}
    try:
        outer = LaminaConfig(backbone_config=config, plan=plan.to_dict(), **labels)
        outer._attn_implementation = config._attn_implementation  # the outer configuration decides for both
        return HEADS[head].model(outer)
    except ValueError as error:
        raise UserError(str(error)) from error
    except (AssertionError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        raise UserError(
            f"backbone {config.model_type!r}: Lamina cannot build this backbone ({one_line(error)}). Choose another "
            "backbone."
        ) from error


@torch.no_grad()
def _check_runs(model: PreTrainedModel) -> None:
    """Raise UserError if a built model does not run, or if the key-value cache changes the logits."""
    if model.main_input_name != "input_ids" or any(p.is_meta for p in model.parameters()):
        return
    text_config = backbone_of(model.config)
    ids = torch.arange(1, 5, device=next(model.parameters()).device).remainder(text_config.vocab_size)[None]
    subject, training = f"backbone {text_config.model_type!r}: with a placement, the model", model.training
    try:
        with torch.random.fork_rng(devices=[]):
            runs: Any = model.eval()
            logits = runs(input_ids=ids).logits
            if isinstance(model, LaminaForCausalLM):
                first = runs(input_ids=ids[:, :3], use_cache=True)
                cached = runs(input_ids=ids[:, 3:], past_key_values=first.past_key_values, use_cache=True).logits
                runs.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
                logits, cached = logits[:, -1], cached[:, -1]
                if not torch.allclose(logits, cached, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
                    raise UserError(
                        f"{subject} gives different logits with and without a cache. Choose another backbone."
                    )
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{subject} does not run ({one_line(error)}). Choose another backbone.") from error
    finally:
        model.train(training)


def recommended(plan: Plan) -> str:
    """Return the placement's initializer, or "normal" if the placement has none."""
    return plan.initialization or "normal"


def make_plan(placement: str | Plan, num_layers: int, **options: object) -> Plan:
    """Return a placement's Plan for ``num_layers`` layers. Return a Plan unchanged.

    Raises UserError for options with a Plan, or for a Plan with another number of layers.
    """
    if not isinstance(placement, Plan):
        return resolve(placement, num_layers, **options)
    if options:
        raise UserError(
            f"placement: a Plan takes no options ({', '.join(options)}). Pass the options to lamina.placements.resolve."
        )
    if placement.num_layers != num_layers:
        raise UserError(
            f"placement: the Plan is for {placement.num_layers} layers, but the backbone has {num_layers}. Set "
            f"num_layers to {placement.num_layers}."
        )
    return placement


def wire(
    attention: nn.Module, feed_forward: nn.Module, layer_plan: Layer, hidden_size: int, *, eps: float = NormStyle.eps
) -> Block:
    """Combine plain attention and feed-forward modules into a block with the norms of a placement.

    Args:
        attention: a module that takes [batch, tokens, hidden_size] and the keyword arguments of the Block's call. The
            output is a tensor of the same shape, or a tuple that starts with such a tensor.
        feed_forward: a module that takes and returns [batch, tokens, hidden_size].
        layer_plan: an entry of ``Plan.layers``.
        hidden_size: the width of the residual stream.
        eps: the epsilon of every norm without an epsilon in ``layer_plan`` (default: 1e-6).

    Returns:
        A Block. Norms of kind "backbone" become RMSNorms.
    """
    for name, value, kind in (
        ("attention", attention, nn.Module),
        ("feed_forward", feed_forward, nn.Module),
        ("layer_plan", layer_plan, Layer),
    ):
        if not isinstance(value, kind):
            raise UserError(f"{name}: {shortened(repr(value), 200)} has the wrong type. Give a {kind.__name__}.")
    whole_number("hidden_size", hidden_size)
    number("eps", eps, 0.0, open_low=True)
    halves = (layer_plan.attention, layer_plan.feed_forward)
    if layer_plan.sources or layer_plan.boundary or any(half.streams or half.reads_memory for half in halves):
        raise UserError(
            "layer_plan: one block cannot have several streams or read earlier layers. Use lamina.build instead."
        )
    wiring = Plan(placement="wire", layers=(layer_plan,)).to_dict()["layers"][0]
    style = NormStyle(eps=float(eps))
    try:
        for name, module in (("attention", attention), ("feed_forward", feed_forward)):
            norm_projections(module, NO_QKV, style, inner=wiring[name].get("inner_norm"))
    except ValueError as error:
        raise UserError(str(error)) from None
    return Block(
        Residual(attention, wiring["attention"], hidden_size, style),
        Residual(feed_forward, wiring["feed_forward"], hidden_size, style),
    )


N = TypeVar("N", bound=type[LaminaNorm])


def norm(kind: str) -> Callable[[N], N]:
    """Register a subclass of LaminaNorm as a kind of norm, for every placement's option ``norm``.

    Raises UserError for an invalid name, or for a name that another module has registered.
    """
    if not str(kind).isidentifier():
        raise UserError(f"norm: {kind!r} is not a name. Give a valid Python identifier.")

    def register(cls: N) -> N:
        holder = LaminaNorm if kind == "backbone" else NORMS.get(kind)
        refuse_namesake("norm", kind, cls.__module__, holder and holder.__module__)
        if not issubclass(cls, LaminaNorm):
            raise UserError(f"norm: {cls.__name__} is not a subclass of LaminaNorm. Derive the class from LaminaNorm.")
        NORMS[kind] = cls
        OWN_KINDS.add(kind)
        return cls

    return register


def available_memory(device: str = "cpu") -> int:
    """Return the free bytes of the GPU (device "cuda"), or of RAM and swap within the container's limit."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such limit
        return free
    return min(free, limit - used + int(stat.get("inactive_file", 0)))


def refuse_beyond_memory(fields: str, what: str, needed: float, device: str = "cpu") -> None:
    """Raise UserError if fewer than ``needed`` bytes are free. The error message begins with ``fields``."""
    if needed <= (free := available_memory(device)):
        return
    owner = "the GPU" if device == "cuda" else "this machine"
    raise UserError(
        f"{fields}: {what} at least {needed / 2**30:,.1f} GiB of memory, and {owner} has {free / 2**30:,.1f} GiB "
        "free. Give lower values."
    )
