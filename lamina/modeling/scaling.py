"""Scale learning rates, initial weights and Adam's epsilon, so that one learning rate suits models of different sizes.

- Width (Everett et al. 2024, arXiv 2407.05872): at width n, a weight has the multiplier n^-a. The initial standard
  deviation is n^-b, and the learning rate is n^-c. Under Adam, the exponents (a, b, c) and (0, a + b, a + c) train the
  same function, up to Adam's epsilon and gradient clipping. So Lamina needs no multiplier.
- Depth (CompleteP, Dey et al. 2025, arXiv 2505.01618, Table 1): let m be depth / base depth. Lamina divides every
  branch by m^alpha. For weights in the blocks, Lamina multiplies the learning rates by m^(alpha - 1), and Adam's
  epsilon by m^-alpha. The placement's option ``depth_scaling`` stores the branches' factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from lamina.core.json_types import Json
from lamina.core.scaling_schemes import DEPTH_SCHEMES, SCHEMES
from lamina.core.values import whole_number
from lamina.errors import UserError, unknown
from lamina.modeling.backbones import resolve_backbone
from lamina.modeling.configuration_lamina import LaminaConfig, backbone_of
from lamina.modeling.initialization import Weight, weights
from lamina.modeling.parts import body_of

Kind = Literal["embedding", "hidden", "readout", "vector"]
KINDS = ("embedding", "hidden", "readout")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How to scale the learning rates and initial weights with width and depth.

    Raises UserError if a scheme is unknown, or if a base size is not a whole number in the allowed range.
    """

    width: str = "none"  # one of SCHEMES, or "none"
    base_width: int = 1  # the hidden size at which you tuned the learning rate
    k_embedding: float = 1.0  # a constant factor on the embedding's learning rate, with width scaling
    k_hidden: float = 1.0  # a constant factor on the hidden weights' learning rates, with width scaling
    k_readout: float = 1.0  # a constant factor on the output head's learning rate, with width scaling
    depth: str = "none"  # one of DEPTH_SCHEMES, or "none"
    base_depth: int = 1  # the number of blocks at which you tuned the learning rate

    def __post_init__(self) -> None:
        for name, value, schemes in (
            ("width_scaling", self.width, SCHEMES),
            ("depth_scaling", self.depth, DEPTH_SCHEMES),
        ):
            if value not in ("none", *schemes):
                raise unknown(name, value, ["none", *schemes])
        whole_number("base_width", self.base_width)
        whole_number("base_depth", self.base_depth)

    @property
    def placement_options(self) -> Json:
        return {} if self.depth == "none" else {"depth_scaling": self.depth, "base_depth": self.base_depth}

    def check_options(self, options: Json) -> None:
        """Raise UserError if a placement's options do not match the depth scaling."""
        if any(options.get(name) != value for name, value in self.placement_options.items()):
            stated = ", ".join(f"{name}={value}" for name, value in self.placement_options.items())
            raise UserError(
                f"depth_scaling is {self.depth!r}, but the placement does not scale its branches. Give the placement "
                f"the options {stated}, or set 'depth_scaling' to 'none'."
            )

    def exponents(self, kind: Kind) -> tuple[float, float]:
        """Return two exponents of the width ratio: for the standard deviation, and for the learning rate."""
        if kind == "vector" or self.width == "none":
            return 0.0, 0.0
        scheme, index = SCHEMES[self.width], KINDS.index(kind)
        multiplier = scheme.multiplier[index]
        return multiplier + scheme.std[index], multiplier + scheme.rate[index]

    def rate(self, kind: Kind, width: float) -> float:
        """Return the factor on a weight's learning rate. ``width`` is the model's width divided by the base width."""
        constant = 1.0 if kind == "vector" else float(getattr(self, f"k_{kind}"))
        return constant * width ** self.exponents(kind)[1]

    def depth_factors(self, weight: Weight) -> tuple[float, float]:
        """Return the factors of depth scaling on a weight's learning rate and on Adam's epsilon (CompleteP, Table 1).

        Let m be depth / base depth. A branch's learned scale starts divided by m^alpha, so the scale's learning rate
        has another factor m^-alpha. The scale's gradient grows by m^alpha, so the epsilon has no factor.
        """
        if self.depth == "none" or weight.layer < 0:
            return 1.0, 1.0
        m, alpha = weight.num_layers / self.base_depth, DEPTH_SCHEMES[self.depth]
        if weight.name.endswith(".out_scale"):
            return m**-1, 1.0
        return m ** (alpha - 1), m**-alpha


@dataclass(frozen=True, kw_only=True)
class StepFactors:
    """Factors on a parameter's learning rate and on Adam's epsilon."""

    rate: float = 1.0  # on the learning rate
    # The part of ``rate`` from width scaling. Lamina divides the weight decay by this factor, because AdamW multiplies
    # the decay by the learning rate.
    width_rate: float = 1.0
    epsilon: float = 1.0
    muon: bool = False  # whether Muon updates the parameter, instead of AdamW


@dataclass(frozen=True, kw_only=True)
class ScaledWeight:
    """A weight with the scale factors, and the base model's weight with the same name."""

    weight: Weight
    base: Weight
    kind: Kind
    std: float  # the factor on the base model's initial standard deviation
    factors: StepFactors


def scaled_weights(model: PreTrainedModel, scaling: Scaling) -> Iterator[ScaledWeight]:
    """Yield every parameter of a Lamina model once, with the parameter's factors.

    The learning rate depends on hidden size / base width. The standard deviation depends on the weight's fan-in / the
    base weight's fan-in. Weights with a constant fan-in, such as after MLA's latent, keep the base model's learning
    rate and standard deviation.

    Raises UserError for tied embeddings or an impossible base width under width scaling. Under depth scaling, raises
    UserError if the placement does not divide the branches.
    """
    scaling.check_options(model.config.plan["options"])
    base = base_model(model, scaling)
    m = backbone_of(model.config).hidden_size / backbone_of(base.config).hidden_size
    growth = embedding_scale(model) / embedding_scale(base)
    for weight, narrow in zip(weights(model), weights(base), strict=True):
        kind = kind_of(weight)
        if kind == "readout" and weight.fan_out != narrow.fan_out:
            kind = "hidden"  # both sides of the matrix grow, as in the head of a masked language model
        width = 1.0 if kind == "vector" else weight.fan_in / narrow.fan_in
        std = width ** scaling.exponents(kind)[0]
        width_rate = scaling.rate(kind, m if width != 1.0 else 1.0)
        if kind == "embedding":
            std, width_rate = std / growth, width_rate / growth
        depth_rate, epsilon = scaling.depth_factors(weight)
        if scaling.depth != "none":
            narrow = replace(narrow, num_layers=scaling.base_depth)
        factors = StepFactors(rate=width_rate * depth_rate, width_rate=width_rate, epsilon=epsilon)
        yield ScaledWeight(weight=weight, base=narrow, kind=kind, std=std, factors=factors)


def kind_of(weight: Weight) -> Kind:
    """Return a weight's kind: "vector" for gains, biases and residual paths, "hidden" for other weights of blocks."""
    kinds: dict[str, Kind] = {
        **dict.fromkeys(("bias", "vector", "wiring"), "vector"),
        "embedding": "embedding",
        "readout": "readout",
    }
    return kinds.get(weight.role, "hidden")


def base_model(model: PreTrainedModel, scaling: Scaling) -> PreTrainedModel:
    """Return the model at the base width on the meta device, or the model itself without width scaling."""
    outer = model.config
    if scaling.width == "none":
        return model
    if outer.tie_word_embeddings:
        raise UserError(
            "width_scaling: the backbone ties its output head to its embedding, but head and embedding need "
            "different learning rates. Add --untie-embeddings, or set --width-scaling none."
        )
    try:
        config = resolve_backbone(backbone_of(outer), hidden_size=scaling.base_width)
        with torch.device("meta"):
            return type(model)(LaminaConfig(backbone_config=config, plan=outer.plan))
    except ValueError as error:
        raise UserError(
            f"base_width: Lamina cannot build this model with width {scaling.base_width} ({error}). Choose another "
            "base_width."
        ) from error


def embedding_scale(model: PreTrainedModel) -> float:
    """Return the factor on the embedding in the forward pass: the placement's factor times the backbone's factor."""
    base = body_of(model)
    return base.embedding_scale * float(getattr(base.get_input_embeddings(), "scalar_embed_scale", 1.0))
