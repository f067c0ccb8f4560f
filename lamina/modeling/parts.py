"""The parts of a Lamina model that measurements walk through: its body and its sub-layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lamina.errors import UserError
from lamina.modeling.modeling_lamina import LaminaModel, Residual

SUBLAYERS = ("attention", "feed_forward")


def body_of(model: nn.Module, user: str = "model") -> LaminaModel:
    """The LaminaModel under a head, or the model itself. Raises UserError, beginning with ``user``, for any other."""
    body = model if isinstance(model, LaminaModel) else getattr(model, "model", None)
    if not isinstance(body, LaminaModel):
        raise UserError(
            f"{user}: {type(model).__name__} is no Lamina model (allowed: one that lamina.build "
            "makes or lamina convert writes; lamina.probe measures any transformers model)"
        )
    return body


def sublayers(body: LaminaModel) -> Iterator[tuple[int, str, Residual]]:
    """Each sub-layer with its layer's index (0-based) and its name, first to last."""
    for index, block in enumerate(body.layers):
        for name in SUBLAYERS:
            yield index, name, getattr(block, name)
