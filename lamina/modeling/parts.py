"""Helpers for measurements: find a Lamina model's body and sub-layers, and change a model temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, masking_utils
from transformers.models.convnext.modeling_convnext import ConvNextDropPath

from lamina.errors import UserError
from lamina.modeling.modeling_lamina import LaminaModel
from lamina.modeling.streams_lamina import LaminaWiring
from lamina.modeling.wiring_lamina import LaminaNorm, Residual

SUBLAYERS = ("attention", "feed_forward")


def body_of(model: nn.Module, user: str = "model") -> LaminaModel:
    """Return the LaminaModel inside a model, or raise UserError. The error message begins with ``user``."""
    body = model if isinstance(model, LaminaModel) else getattr(model, "model", None)
    if not isinstance(body, LaminaModel):
        raise UserError(
            f"{user}: {type(model).__name__} is not a Lamina model. Make a Lamina model with lamina.build or lamina "
            "convert. To measure any transformers model, use lamina.probe."
        )
    return body


def sublayers(body: LaminaModel) -> Iterator[tuple[int, str, Residual]]:
    """Yield the layer index (from 0), the name and the module of each sub-layer, in order."""
    for index, block in enumerate(body.layers):
        for name in SUBLAYERS:
            yield index, name, getattr(block, name)


@contextmanager
def temporary_hooks() -> Iterator[list[RemovableHandle]]:
    """Yield an empty list for hook handles. When the context ends, remove all hooks in the list."""
    hooks: list[RemovableHandle] = []
    try:
        yield hooks
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def patched(holder: object, **attributes: object) -> Iterator[None]:
    """Set attributes of an object inside the context, and restore the old values afterwards."""
    before = {name: vars(holder)[name] for name in attributes if name in vars(holder)}
    for name, value in attributes.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(holder, name, before[name])
            else:
                delattr(holder, name)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run compiled modules without compilation inside the context."""
    # Compiled modules skip the hooks of inner modules, and recompile for each new shape.
    calls = {module: call for module in model.modules() if (call := module._compiled_call_impl) is not None}
    for module in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call


def one_sequence_each() -> AbstractContextManager[None]:
    """Return a context in which transformers treats each row of a batch as one sequence."""
    # transformers would look for several sequences in a row, and the CPU would wait for the device.
    return patched(masking_utils, find_packed_sequence_indices=lambda position_ids: None)


def decaying(model: nn.Module) -> list[str]:
    """Return the names of the parameters for weight decay: all weight matrices, except in norms and residual paths."""
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Residual | LaminaWiring | LaminaNorm) or type(module).__name__.endswith("Norm")
        for parameter in module.parameters(recurse=False)
    }
    matrices = (name for name, p in model.named_parameters() if p.ndim >= 2 and id(p) not in kept)
    return [name for name in matrices if not name.endswith("bias")]  # the biases of experts are matrices


def drop_branches(model: PreTrainedModel, rate: float) -> None:
    """Drop branches at random for each item of a training batch, as in DeiT and ConvNeXt.

    The drop probability p of layer l (of N, from 0) is rate * l / (N - 1). Lamina divides the kept branches by 1 - p.
    The drop follows the branch's output norm. The model gets no new weights, and evaluation does not change.
    """
    body = body_of(model, "drop_path")
    last = max(1, len(body.layers) - 1)
    for layer, _, residual in sublayers(body):
        if probability := rate * layer / last:
            drop: nn.Module = ConvNextDropPath(probability)
            residual.dropout = drop if residual.dropout is None else nn.Sequential(residual.dropout, drop)
