"""The initial weights of a model, drawn as an initializer says (core/initializers.py).

Roles are read off the modules' own attribute names by a table (core/architectures.py), never guessed from substrings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from lamina.core.architectures import HIDDEN, ROLES
from lamina.core.initializers import BRANCH_OUT, INITIALIZERS, WITH_GAIN, Initializer, check
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.initialization import profile_admin
from lamina.modeling.modeling_lamina import LaminaNorm, adapter_of
from lamina.modeling.parts import body_of, sublayers

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter and the facts that an initializer may need.

    ``layer`` is 0-based, -1 outside the blocks; ``sublayer`` is "attention", "feed_forward", "embedding" or "readout";
    ``wiring`` is the sub-layer's part of the plan; ``num_layers`` counts blocks; ``rows`` the
    channels out of a part that is not one matrix.
    """

    name: str
    parameter: torch.Tensor
    role: str
    layer: int
    sublayer: str
    wiring: dict[str, Any]
    num_layers: int
    hidden_size: int
    rows: int | None = None

    @property
    def fan_in(self) -> int:
        """Channels in (experts stacked in one tensor count on their own); an embedding's is its width."""
        return self.parameter.shape[-1]

    @property
    def fan_out(self) -> int:
        return self.rows or self.parameter.shape[-2]


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
    entry, unknown = INITIALIZERS.get(name), 0
    for weight in weights(model):
        if weight.role == "bias":
            weight.parameter.zero_()
        elif weight.role != "vector":
            like, factor = (weight, 1.0) if base is None else base[weight.name]
            stds = [entry.function(piece, std) * factor for piece in _pieces(like, model)]
            pieces = _pieces(weight, model)
            if weight.role == "key_value" and len(set(stds)) == 1:
                pieces, stds = [weight], stds[:1]  # one draw, as trials of studies were drawn
            for piece, piece_std in zip(pieces, stds, strict=True):
                _draw(piece.parameter, piece_std, entry.truncated)
            unknown += weight.role == HIDDEN and _depends_on_role(entry.function, weight, std)
            if weight.role == "embedding" and (row := _padding_row(model, weight)) is not None:
                weight.parameter[row].zero_()
    if unknown:
        logger.warning(
            "init %r: %d weights of the blocks have names that Lamina does not know, and are drawn like queries",
            name,
            unknown,
        )
    if name == "admin":
        profile_admin(model, input_ids)


def _depends_on_role(function: Initializer, weight: Weight, std: float) -> bool:
    return len({function(replace(weight, role=role), std) for role in (HIDDEN, *BRANCH_OUT, *WITH_GAIN)}) > 1


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
    elif weight.role == "key_value":  # DeepSeek's: by head, its key's rows and then its value's
        config = backbone_of(model.config)
        width = config.qk_nope_head_dim + config.v_head_dim
        heads = weight.fan_out // width
        by_head = weight.parameter.unflatten(-2, (heads, width))
        key, value = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=-2)
        return [
            replace(weight, role=role, parameter=part, rows=heads * part.shape[-2])
            for role, part in (("key", key), ("value", value))
        ]
    else:
        return [weight]
    parts = weight.parameter.split(sizes, dim=-2)
    return [replace(weight, role=role, parameter=part) for role, part in zip(roles, parts, strict=True)]


def weights(model: PreTrainedModel) -> Iterator[Weight]:
    """Every parameter of a Lamina model with its role, each once."""
    base = body_of(model)
    prefix = "" if base is model else "model."
    config = backbone_of(base.config)
    adapter = adapter_of(config)
    roles = {**ROLES, **adapter.roles}
    common = {"num_layers": len(base.layers), "hidden_size": config.hidden_size}
    wirings = {
        f"{prefix}backbone.{adapter.layers}.{index}.{name}.": (index, name, residual.sublayer)
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
            role = roles.get(f"{place[1]}.{holder}") or roles.get(holder, HIDDEN)
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
