"""Width scaling: learning rates and initial weights by width, so that a rate tuned narrow holds wide.

Everett et al. 2024 (arXiv 2407.05872): with width n a weight is multiplied by n^-a, starts with the standard deviation
n^-b and learns at the rate n^-c. The multiplier is folded into the other two: under Adam, whose steps don't depend on
the gradient's size, (a, b, c) and (0, a + b, a + c) train the same function (up to Adam's epsilon and gradient
clipping), and a checkpoint stays a plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from lamina.core.width_schemes import PARAMETRIZATIONS, SCHEMES
from lamina.errors import UserError, unknown
from lamina.modeling.backbones import resolve_backbone
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.initialization import Weight, weights
from lamina.modeling.parts import body_of

Kind = Literal["embedding", "hidden", "readout", "vector"]
KINDS = ("embedding", "hidden", "readout")


@dataclass(frozen=True, kw_only=True)
class WidthScaling:
    """A scheme, the width at which the learning rate was chosen, and a constant for each kind of weight.

    Args:
        scheme: one of SCHEMES.
        base_width: hidden size at which nothing changes.
        k_embedding: factor on the embedding's learning rate; k_hidden and k_readout likewise.
    """

    scheme: str
    base_width: int
    k_embedding: float = 1.0
    k_hidden: float = 1.0
    k_readout: float = 1.0

    def __post_init__(self) -> None:
        """Raise UserError for an unknown scheme."""
        if self.scheme not in SCHEMES:
            raise unknown("width_scaling", self.scheme, ["none", *SCHEMES])

    def exponents(self, kind: Kind) -> tuple[float, float]:
        """Return the exponents of standard deviation and learning rate, with the multiplier folded into both."""
        if kind == "vector":
            return 0.0, 0.0
        name, alignment = SCHEMES[self.scheme]
        table, index = PARAMETRIZATIONS[name], KINDS.index(kind)
        multiplier = table.multiplier[index]
        return multiplier + table.std[index], multiplier + getattr(table, alignment)[index]

    def rate(self, kind: Kind, width: float) -> float:
        """Return the factor on the learning rate of a kind whose fan-in is ``width`` times that of the base."""
        constant = 1.0 if kind == "vector" else float(getattr(self, f"k_{kind}"))
        return constant * width ** self.exponents(kind)[1]


@dataclass(frozen=True, kw_only=True)
class ScaledWeight:
    """A weight, the same one at the base width (on the meta device), and the scheme's factors.

    ``rate`` is the factor on its learning rate; ``std`` is the factor on the standard deviation that its initializer
    gives it at the base width.
    """

    weight: Weight
    base: Weight
    kind: Kind
    rate: float
    std: float


def scaled_weights(model: PreTrainedModel, scaling: WidthScaling) -> Iterator[ScaledWeight]:
    """Every parameter of a Lamina model with its factors, each once.

    A hidden weight's or readout's learning rate goes by m = hidden size / base width, its standard deviation by the
    ratio of its own fan-ins; one whose fan-in does not grow with the width (what leaves MLA's latent, whose rank is
    fixed) keeps both. An embedding that the model multiplies by the square root of the width loses that factor again.

    Raises UserError for tied embeddings and for a base width that the backbone or the placement cannot have.
    """
    if model.config.tie_word_embeddings:
        raise UserError(
            "width_scaling: the backbone ties its readout to its embedding, and the two need rates of their own "
            "(allowed: --untie-embeddings, or --width-scaling none)"
        )
    base = base_model(model, scaling)
    config = backbone_of(model.config)
    m = config.hidden_size / scaling.base_width
    growth = embedding_scale(model) / embedding_scale(base)
    for weight, narrow in zip(weights(model), weights(base), strict=True):
        kind = kind_of(weight)
        if kind == "readout" and weight.fan_out != narrow.fan_out:
            kind = "hidden"  # a matrix of the head whose both sides grow, such as a masked language model's
        width = 1.0 if kind == "vector" else weight.fan_in / narrow.fan_in
        std = width ** scaling.exponents(kind)[0]
        rate = scaling.rate(kind, m if width != 1.0 else 1.0)
        if kind == "embedding":
            std, rate = std / growth, rate / growth
        yield ScaledWeight(weight=weight, base=narrow, kind=kind, rate=rate, std=std)


def kind_of(weight: Weight) -> Kind:
    """Return a weight's kind: "vector" are gains, biases and the wiring, "hidden" all other weights of blocks."""
    kinds: dict[str, Kind] = {
        **dict.fromkeys(("bias", "vector", "wiring"), "vector"),
        "embedding": "embedding",
        "readout": "readout",
    }
    return kinds.get(weight.role, "hidden")


def base_model(model: PreTrainedModel, scaling: WidthScaling) -> PreTrainedModel:
    """Return the same model at the base width on the meta device: shapes only. Raises UserError if it cannot exist."""
    outer = model.config
    try:
        config = resolve_backbone(backbone_of(outer), hidden_size=scaling.base_width)
        with torch.device("meta"):
            return type(model)(LaminaConfig(backbone_config=config, plan=outer.plan))
    except ValueError as error:
        raise UserError(f"base_width: {scaling.base_width} cannot be this model's width ({error})") from error


def embedding_scale(model: PreTrainedModel) -> float:
    """Return the factor on the embedding in the forward pass: the plan's times the backbone's (Gemma's sqrt(d))."""
    base = body_of(model)
    return base.embedding_scale * float(getattr(base.get_input_embeddings(), "scalar_embed_scale", 1.0))
