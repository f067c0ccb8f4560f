"""Draw the initial weights of a model with an initializer of core/initializers.py.

The name of a weight's module decides the weight's role, such as "query" (core/architectures.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lamina.core.architectures import HIDDEN, ROLES
from lamina.core.initializers import BRANCH_OUT, CUT_AT, INITIALIZERS, NO_SCALES, WITH_GAIN, Facts, check
from lamina.errors import UserError
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import adapter_of
from lamina.modeling.parts import body_of, sublayers, temporary_hooks
from lamina.modeling.streams_lamina import LaminaWiring
from lamina.modeling.wiring_lamina import LaminaNorm, Residual, Terms

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Weight(Facts):
    """A parameter with the properties that initializers need.

    Parameters with the role "wiring" have no initializer and no weight decay.
    """

    name: str
    parameter: torch.Tensor
    sublayer: str  # "attention", "feed_forward", "embedding" or "readout"
    rows: int | None = None  # the output channels of each matrix, if the parameter joins several matrices
    transposed: bool = False  # whether the first axis has the input channels, as in GPT-2's Conv1D

    @property
    def matrix(self) -> torch.Tensor:
        return self.parameter.T if self.transposed else self.parameter

    @property
    def fan_in(self) -> int:
        """Return the number of input channels, or the width for an embedding. Stacked experts count as one matrix."""
        return self.matrix.shape[-1]

    @property
    def fan_out(self) -> int:
        return self.rows or self.matrix.shape[-2]


@torch.no_grad()
def initialize(
    model: PreTrainedModel,
    init: str,
    input_ids: torch.Tensor | None = None,
    base: Mapping[str, tuple[Weight, float]] | None = None,
) -> None:
    """Draw each weight matrix from torch's global generator, and set all biases to 0.

    Norm gains and learned scales keep the values of the norm placement.

    Args:
        model: a Lamina model.
        init: the initializer's name, such as "normal" or "normal(std=0.01)".
        input_ids: the input [batch, tokens] for an initializer that runs the model, such as Admin's (default: random).
        base: for width scaling, a mapping from a weight's name to a pair: the base model's weight, and a factor on the
            standard deviation.
    """
    name, std = check(init)
    std_of, unknown, known_roles = INITIALIZERS[name], 0, (HIDDEN, *BRANCH_OUT, *WITH_GAIN)
    for weight in weights(model):
        if weight.role == "bias":
            weight.parameter.zero_()
        elif weight.role not in ("vector", "wiring"):
            like, factor = (weight, 1.0) if base is None else base[weight.name]
            stds = [std_of(piece, std) * factor for piece in _pieces(like, model)]
            pieces = _pieces(weight, model)
            if weight.role == "key_value" and len(set(stds)) == 1:
                pieces, stds = [weight], stds[:1]  # one draw, as in recorded trials of studies
            for piece, piece_std in zip(pieces, stds, strict=True):
                if name not in CUT_AT:
                    piece.parameter.normal_(0.0, piece_std)
                else:
                    bound = CUT_AT[name] * piece_std
                    nn.init.trunc_normal_(piece.parameter, 0.0, piece_std, -bound, bound)
            unknown += (
                weight.role == HIDDEN and len({std_of(replace(weight, role=role), std) for role in known_roles}) > 1
            )
            module = model.get_submodule(weight.name.rpartition(".")[0])
            if weight.role == "embedding" and isinstance(module, nn.Embedding) and module.padding_idx is not None:
                weight.parameter[module.padding_idx].zero_()
    if unknown:
        logger.warning(
            "init %r: Lamina does not know the roles of %d weights in the blocks, and initializes these weights like "
            "query weights",
            name,
            unknown,
        )
    if name == "admin":
        profile_admin(model, input_ids)


def _pieces(weight: Weight, model: PreTrainedModel) -> list[Weight]:
    """Split a matrix that joins several projections, such as query, key and value, into one Weight per projection."""
    if weight.role == "gate_and_in":
        roles, sizes = ("gate", "feed_forward_in"), [weight.fan_out // 2] * 2
    elif weight.role == "query_key_value":
        config = backbone_of(model.config)
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        key = weight.fan_out * key_heads // (heads + 2 * key_heads)
        roles, sizes = ("query", "key", "value"), [weight.fan_out - 2 * key, key, key]
    elif weight.role == "query_key_value_by_head":  # GPT-NeoX joins query, key and value head by head
        heads = backbone_of(model.config).num_attention_heads
        by_head = weight.parameter.unflatten(-2, (heads, 3, -1)).unbind(-3)
        return [
            replace(weight, role=role, parameter=part, rows=weight.fan_out // 3)
            for role, part in zip(("query", "key", "value"), by_head, strict=True)
        ]
    elif weight.role == "key_value":  # DeepSeek joins key and value head by head
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
    parts = zip(roles, weight.matrix.split(sizes, dim=-2), strict=True)
    return [replace(weight, role=role, parameter=part, transposed=False) for role, part in parts]


def weights(model: PreTrainedModel) -> Iterator[Weight]:
    """Yield every parameter of a Lamina model once, with the parameter's role."""
    base = body_of(model)
    prefix = "" if base is model else "model."
    config = backbone_of(base.config)
    adapter = adapter_of(config)
    roles = {**ROLES, **adapter.roles}
    common = {"num_layers": len(base.layers), "hidden_size": config.hidden_size}
    wirings = {
        f"{prefix}backbone.{adapter.layers}.{index}.{name}": (index, name, residual.sublayer)
        for index, name, residual in sublayers(base)
    }
    depth = len(next(iter(wirings)).split("."))
    modules = dict(model.named_modules())
    gains = {
        name for name, module in modules.items() if type(module).__name__.endswith("Norm")
    }  # the gains of Cohere's norms are matrices
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        holder = owner.rpartition(".")[2] if last in ("weight", "bias") else last
        sublayer_wiring = wirings.get(".".join(name.split(".")[:depth]))
        if isinstance(modules[owner], Residual | LaminaWiring):
            role = "wiring"
        elif isinstance(modules[owner], LaminaNorm) or parameter.ndim < 2 or owner in gains or last.endswith("_bias"):
            role = "bias" if last == "bias" and isinstance(modules[owner], nn.Linear | nn.Conv2d) else "vector"
        elif sublayer_wiring is not None:
            role = roles.get(f"{sublayer_wiring[1]}.{holder}") or roles.get(holder, HIDDEN)
        else:
            embeds = isinstance(modules[owner], nn.Embedding) or name.startswith(f"{prefix}backbone.embeddings.")
            role = "embedding" if embeds else "readout"
        layer, sublayer, wiring = sublayer_wiring or (-1, "embedding" if role == "embedding" else "readout", {})
        where = {"layer": layer, "sublayer": sublayer, "wiring": wiring}
        transposed = parameter.ndim == 2 and isinstance(modules[owner], Conv1D)
        yield Weight(name=name, parameter=parameter, role=role, transposed=transposed, **where, **common)


@torch.no_grad()
def profile_admin(model: PreTrainedModel, input_ids: torch.Tensor | None = None) -> None:
    """Run the model in training mode, and set the omega of every sub-layer (Liu et al. 2020, arXiv 2004.08249, Eq 5).

        omega_1 = 1,  omega_{i+1} = sqrt(Var(omega_i x_i) + Var(f_i(x_i)))

    The factor omega_i is on the skip, x_i is the input of sub-layer i, and f_i(x_i) is the branch. Var is over all
    elements. ``input_ids`` are token ids [batch, tokens], or images [batch, channels, height, width]. The default is 8
    x 64 random tokens, or 8 images of noise. Raises UserError if a skip has no learned scale.
    """
    base = body_of(model)
    residuals = [residual for _, _, residual in sublayers(base)]
    if not all(isinstance(r.skip_scale, nn.Parameter) for r in residuals):
        raise UserError(NO_SCALES)
    if input_ids is None:
        input_ids = random_inputs(base, 8, 64, torch.Generator().manual_seed(0))
    omegas = [1.0]

    def before(residual: nn.Module, args: object) -> None:
        assert isinstance(residual.skip_scale, nn.Parameter)
        residual.skip_scale.fill_(omegas[-1])

    def after(terms: Terms) -> None:
        variances = [term.float().var(correction=0) for term in (terms.skip, terms.branch)]
        omegas.append(float((variances[0] + variances[1]).sqrt()))

    was_training = model.training
    model.train()
    try:
        with temporary_hooks() as hooks:
            for residual in residuals:
                hooks += [residual.register_forward_pre_hook(before), residual.register_terms_hook(after)]
            base(**{base.main_input_name: input_ids.to(next(model.parameters()).device)}, use_cache=False)
    finally:
        model.train(was_training)


def random_inputs(base: PreTrainedModel, items: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a random input: token ids [items, tokens], or noise images [items, channels, height, width]."""
    config = backbone_of(base.config)
    if base.main_input_name == "input_ids":
        return torch.randint(0, config.vocab_size, (items, tokens), generator=generator)
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(items, config.num_channels, height, width, generator=generator)
