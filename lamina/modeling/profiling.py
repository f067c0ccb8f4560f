"""Admin's profiling pass: the skips' scales from the variances in a forward pass."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from lamina.errors import UserError
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import Terms
from lamina.modeling.parts import body_of, sublayers


@torch.no_grad()
def profile_admin(model: PreTrainedModel, input_ids: torch.Tensor | None = None) -> list[float]:
    """Set the omega of every sub-layer in one forward pass in training mode. Returns them, first to last.

    omega_1 = 1 and omega_{i+1} = sqrt(Var(omega_i x_i) + Var(f_i(x_i))), the variance over all elements of the tensor
    (Liu et al. 2020, arXiv 2004.08249, Eq 5 with the code's leading 1). omega_i is set before sub-layer i runs,
    so x_i is the output of sub-layers that are scaled already.

    ``input_ids`` [batch, tokens], for a vision backbone images [batch, channels, height, width]; without them 8 x 64
    tokens drawn uniformly from the vocabulary, or 8 images of noise, from a separate generator. Raises UserError if a
    skip has no learned scale to set.
    """
    base = body_of(model)
    residuals = [residual for _, _, residual in sublayers(base)]
    if not all(isinstance(r.skip_scale, nn.Parameter) for r in residuals):
        raise UserError(
            "init: 'admin' sets learned skip scales, which this placement does not have (allowed: admin's plan)"
        )
    if input_ids is None:
        input_ids = random_inputs(base, 8, 64, torch.Generator().manual_seed(0))
    omegas = [1.0]
    handles = []

    def before(residual: nn.Module, args: object) -> None:
        assert isinstance(residual.skip_scale, nn.Parameter)
        residual.skip_scale.fill_(omegas[-1])

    def after(terms: Terms) -> None:
        variances = [term.float().var(correction=0) for term in (terms.skip, terms.output)]
        omegas.append(float((variances[0] + variances[1]).sqrt()))

    for residual in residuals:
        handles += [residual.register_forward_pre_hook(before), residual.register_terms_hook(after)]
    was_training = model.training
    model.train()
    try:
        base(**{base.main_input_name: input_ids.to(next(model.parameters()).device)}, use_cache=False)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return omegas[:-1]


def random_inputs(base: PreTrainedModel, items: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """A model's main input: token ids [items, tokens], uniform, or images of noise [items, channels, height, width]."""
    config = backbone_of(base.config)
    if base.main_input_name == "input_ids":
        return torch.randint(0, config.vocab_size, (items, tokens), generator=generator)
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(items, config.num_channels, height, width, generator=generator)
