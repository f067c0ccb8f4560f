"""Admin's profiling pass: the skips' scales from the variances that a forward pass shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lamina.errors import UserError
from lamina.modeling.modeling_lamina import LaminaModel, Residual


def _tensor(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def profile_admin(model: PreTrainedModel, input_ids: torch.Tensor | None = None) -> list[float]:
    """Set every sub-layer's omega in one forward pass in training mode; returns them, first to last.

    omega_1 = 1 and omega_{i+1} = sqrt(Var(omega_i x_i) + Var(f_i(x_i))), the variance over all elements of the tensor
    (Liu et al. 2020, arXiv 2004.08249, Eq 5 with the code's leading 1). omega_i is in force while sub-layer i is
    profiled, so x_i is what the already scaled sub-layers before it give.

    ``input_ids`` [batch, tokens], for a vision backbone images [batch, channels, height, width]; without them 8 x 64
    tokens drawn evenly from the vocabulary, or 8 images of noise, by a generator of their own. Raises UserError for a
    model whose skips have no learned vector to set.
    """
    base: Any = model if isinstance(model, LaminaModel) else model.model
    residuals: list[Residual] = [r for block in base.layers for r in (block.attention, block.feed_forward)]
    if not all(isinstance(r.skip_scale, nn.Parameter) for r in residuals):
        raise UserError("init: 'admin' sets learned skip scales, which this placement has not (allowed: admin's plan)")
    if input_ids is None:
        input_ids = _made_up(base)
    omegas = [1.0]
    handles = []

    def before(residual: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(residual.skip_scale, nn.Parameter)
        residual.skip_scale.fill_(omegas[-1])

    def after(residual: nn.Module, args: tuple[torch.Tensor, ...], branch: torch.Tensor) -> None:
        carried = (omegas[-1] * args[0]).float().var(correction=0)
        omegas.append(float((carried + branch.float().var(correction=0)).sqrt()))

    for residual in residuals:
        branches: list[torch.Tensor] = []
        keep = residual.module.register_forward_hook(lambda _, __, output, kept=branches: kept.append(_tensor(output)))
        use = residual.register_forward_hook(lambda module, args, _, kept=branches: after(module, args, kept.pop()))
        handles += [residual.register_forward_pre_hook(before), keep, use]
    was_training = model.training
    model.train()
    try:
        base(**{base.main_input_name: input_ids.to(next(model.parameters()).device)}, use_cache=False)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return omegas[:-1]


def _made_up(base: LaminaModel) -> torch.Tensor:
    config: Any = base.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    if base.main_input_name == "input_ids":
        return torch.randint(0, config.vocab_size, (8, 64), generator=generator)
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(8, config.num_channels, height, width, generator=generator)
