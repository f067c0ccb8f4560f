"""The initial weights of a model: an initializer maps each weight, by its role, to a standard deviation.

Roles are read off the modules' own attribute names by a table (core/architectures.py), never guessed from substrings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from lamina.core import specs
from lamina.core.architectures import ROLES
from lamina.core.registry import Registry
from lamina.core.values import is_finite
from lamina.errors import UserError
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import LaminaNorm
from lamina.modeling.parts import body_of, sublayers
from lamina.modeling.profiling import profile_admin

T = TypeVar("T")
BRANCH_OUT = ("attention_out", "feed_forward_out")
_WITH_STD = ("normal", "scaled", "deepnorm", "xavier", "admin")
WITH_GAIN = ("value", "attention_out", "feed_forward_in", "feed_forward_out")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter and the facts that an initializer may need.

    ``layer`` is 0-based, -1 outside the blocks; ``sublayer`` is "attention", "feed_forward", "embedding" or "readout";
    ``wiring`` is the sub-layer's part of the plan; ``num_layers`` counts blocks.
    """

    name: str
    parameter: torch.Tensor
    role: str
    layer: int
    sublayer: str
    wiring: dict[str, Any]
    num_layers: int
    hidden_size: int

    @property
    def fan_in(self) -> int:
        """Channels in (experts stacked in one tensor count on their own); an embedding's is its width."""
        return self.parameter.shape[-1]

    @property
    def fan_out(self) -> int:
        return self.parameter.shape[-2]


Initializer = Callable[[Weight, float], float]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A registered initializer: (weight, base std) -> std, one line of help, where its distribution is cut off."""

    function: Initializer
    help: str
    truncated: float | None


INITIALIZERS: Registry[_Entry] = Registry("init")
names = INITIALIZERS.names


def initializer(name: str, help: str, truncated: float | None = None) -> Callable[[Initializer], Initializer]:
    """Register a function (weight, base std) -> standard deviation of the weight's normal distribution.

    ``truncated`` cuts the distribution off at so many standard deviations.
    """

    def register(function: Initializer) -> Initializer:
        INITIALIZERS.add(name, _Entry(function=function, help=help, truncated=truncated))
        return function

    return register


def help_of(name: str) -> str:
    """One line about an initializer."""
    return INITIALIZERS.get(name).help


@initializer("normal", "N(0, std^2) everywhere, std 0.02")
def _normal(weight: Weight, std: float) -> float:
    return std


@initializer("scaled", "Megatron: N(0, std^2), attention-out and FFN-out divided by sqrt(2 * num_layers)")
def _scaled(weight: Weight, std: float) -> float:
    return std / math.sqrt(2 * weight.num_layers) if weight.role in BRANCH_OUT else std


@initializer(
    "deepnorm", "Xavier normal with gain beta on value, attention-out and FFN weights, 1 elsewhere (DeepNet Fig 2)"
)
def _deepnorm(weight: Weight, std: float) -> float:
    if weight.layer < 0:
        return std
    gain = 1.0
    if weight.role in WITH_GAIN:
        gain = weight.wiring["weight_gain"]
    elif weight.role == "gate":
        gain = weight.wiring["gate_gain"]
    return gain * math.sqrt(2 / (weight.fan_in + weight.fan_out))


@initializer("xavier", "Xavier normal (variance 2 / (fan_in + fan_out)) in the blocks, std elsewhere")
def _xavier(weight: Weight, std: float) -> float:
    return std if weight.layer < 0 else math.sqrt(2 / (weight.fan_in + weight.fan_out))


@initializer("small", "SmallInit (Nguyen & Salazar): variance 2 / (5 * hidden_size)")
def _small(weight: Weight, std: float) -> float:
    return math.sqrt(2 / (5 * weight.hidden_size))


@initializer(
    "small_scaled",
    "HybridNorm's: SmallInit cut off at 3 std, attention-out and FFN-out divided by sqrt(2 * num_layers)",
    truncated=3.0,
)
@initializer(
    "small_scaled_uncut",
    "Mix-LN Table 8's Scaled Initialization: small_scaled, not cut off (for weights other than attention-out and "
    "FFN-out the paper states none; SmallInit's is the natural reading)",
)
def _small_scaled(weight: Weight, std: float) -> float:
    return _scaled(weight, _small(weight, std))


@initializer("admin", "N(0, std^2), then Admin's profiling pass sets every omega (Liu et al. 2020)")
def _admin(weight: Weight, std: float) -> float:
    return std


for _name, _variance in (("he", 2.0), ("lecun", 1.0), ("10/d", 10.0), ("1/(10d)", 0.1)):

    @initializer(_name, f"variance {_variance:g} / hidden_size everywhere (Peri-LN Table 9)")
    def _over_width(weight: Weight, std: float, variance: float = _variance) -> float:
        return math.sqrt(variance / weight.hidden_size)


def check(init: str) -> tuple[str, float]:
    """Split "name" or "name(std=0.01)" into name and base std. Raises UserError for anything else."""
    if init in names():  # some names have brackets of their own
        return init, 0.02
    name, options = specs.parse(init, "init")
    INITIALIZERS.get(name, other_names=("recommended",))
    if name not in _WITH_STD:
        raise UserError(f"init: {init!r}, but {name!r} takes no std (allowed: {name})")
    std = options.get("std")
    if list(options) != ["std"] or not (isinstance(std, float | int) and is_finite(std) and std > 0):
        raise UserError(f"init: {init!r} (allowed: {name} or {name}(std=NUMBER), the number above 0)")
    return name, float(std)


@torch.no_grad()
def initialize(
    model: PreTrainedModel,
    init: str,
    input_ids: torch.Tensor | None = None,
    base: Mapping[str, tuple[Weight, float]] | None = None,
) -> None:
    """Draw every weight matrix anew, in the order of the parameters, from torch's global generator.

    Norm gains and learned scales keep the values that the plan gives them; biases are 0. ``input_ids``
    [batch, tokens] is the input of an initializer that profiles the model (Admin's); random tokens by default.
    ``base`` (for width scaling) maps each weight's name to the weight whose standard deviation is used instead, and a
    factor on it.
    """
    name, std = check(init)
    entry = INITIALIZERS.get(name)
    for weight in weights(model):
        if weight.role == "bias":
            weight.parameter.zero_()
        elif weight.role != "vector":
            like, factor = (weight, 1.0) if base is None else base[weight.name]
            for piece, model_piece in zip(_pieces(weight, model), _pieces(like, model), strict=True):
                _draw(piece.parameter, entry.function(model_piece, std) * factor, entry.truncated)
            if weight.role == "embedding" and (row := _padding_row(model, weight)) is not None:
                weight.parameter[row].zero_()
    if name == "admin":
        profile_admin(model, input_ids)


def _draw(parameter: torch.Tensor, std: float, truncated: float | None) -> None:
    if truncated is None:
        parameter.normal_(0.0, std)
    else:
        nn.init.trunc_normal_(parameter, 0.0, std, -truncated * std, truncated * std)


def _padding_row(model: PreTrainedModel, weight: Weight) -> int | None:
    embedding = model.get_submodule(weight.name.rpartition(".")[0])
    return embedding.padding_idx if isinstance(embedding, nn.Embedding) else None


def _pieces(weight: Weight, model: PreTrainedModel) -> list[Weight]:
    """The projections that some backbones stack in one matrix, each with its own role."""
    if weight.role == "gate_and_in":
        roles, sizes = ("gate", "feed_forward_in"), [weight.fan_out // 2] * 2
    elif weight.role == "query_key_value":
        config = backbone_of(model.config)
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        key = weight.fan_out * key_heads // (heads + 2 * key_heads)
        roles, sizes = ("query", "key", "value"), [weight.fan_out - 2 * key, key, key]
    else:
        return [weight]
    parts = weight.parameter.split(sizes, dim=-2)
    return [replace(weight, role=role, parameter=part) for role, part in zip(roles, parts, strict=True)]


def weights(model: PreTrainedModel) -> Iterator[Weight]:
    """Every parameter of a Lamina model with its role, each once."""
    base = body_of(model)
    prefix = "" if base is model else "model."
    config = backbone_of(base.config)
    common = {"num_layers": len(base.layers), "hidden_size": config.hidden_size}
    wirings = {
        f"{prefix}backbone.layers.{index}.{name}.": (index, name, residual.sublayer)
        for index, name, residual in sublayers(base)
    }
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        holder = owner.rpartition(".")[2] if last in ("weight", "bias") else last
        place = next((w for p, w in _prefixes(name, wirings)), None)
        if isinstance(modules[owner], LaminaNorm) or parameter.ndim < 2:
            role = "bias" if last == "bias" and isinstance(modules[owner], nn.Linear | nn.Conv2d) else "vector"
        elif place is not None:
            role = ROLES.get(f"{place[1]}.{holder}") or ROLES.get(holder, "hidden")
        else:
            embeds = isinstance(modules[owner], nn.Embedding) or name.startswith(f"{prefix}backbone.embeddings.")
            role = "embedding" if embeds else "readout"
        layer, sublayer, wiring = place or (-1, "embedding" if role == "embedding" else "readout", {})
        yield Weight(name=name, parameter=parameter, role=role, layer=layer, sublayer=sublayer, wiring=wiring, **common)


def _prefixes(name: str, wirings: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        key = ".".join(parts[:end]) + "."
        if key in wirings:
            yield key, wirings[key]
