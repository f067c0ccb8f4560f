"""The layer monitor: what every layer's gradients, states and norm gains do while a model trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lamina.modeling.initialization import weights
from lamina.modeling.modeling_lamina import LaminaModel, LaminaNorm, Residual
from lamina.training.compiling import uncompiled

Row = tuple[int, int, str, str, int, str, float]
STATE_METRICS = ("hidden_variance", "hidden_mean", "hidden_abs_mean", "hidden_abs_max")


class GradientNorms:
    """The gradient's L2 norm by sub-layer and block, and of the embedding and the readout.

    Under FSDP2 each parameter's squared local part is summed over the mesh, so the norms are those of one process.
    """

    def __init__(self, model: nn.Module):
        keys: dict[tuple[int, str, str], int] = {}
        self.parameters: list[torch.Tensor] = []
        self.groups: list[int] = []
        for weight in weights(model):  # type: ignore[arg-type]
            key = (weight.layer, weight.sublayer, "all") if weight.layer >= 0 else (-1, "block", weight.sublayer)
            self.parameters.append(weight.parameter)
            self.groups.append(keys.setdefault(key, len(keys)))
        self.keys = list(keys)
        self._sent: tuple[list[int], torch.Tensor] | None = None

    def squares(self) -> torch.Tensor:
        """The squared norm of each group in float64, without waiting for the device; call before clipping."""
        gradients, groups, mesh = [], [], None
        for parameter, group in zip(self.parameters, self.groups, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                mesh, gradient = gradient.device_mesh, gradient.to_local()
            gradients.append(gradient)
            groups.append(group)
        if not gradients:
            return torch.zeros(len(self.keys), dtype=torch.float64)
        norms = torch.stack(torch._foreach_norm(gradients)).double()  # pyright: ignore[reportPrivateImportUsage]
        sums = torch.zeros(len(self.keys), dtype=torch.float64, device=norms.device)
        sums.index_add_(0, self._index(groups, norms.device), norms * norms)
        if mesh is not None:
            torch.distributed.all_reduce(sums, group=mesh.get_group())
        return sums

    def _index(self, groups: list[int], device: torch.device) -> torch.Tensor:
        """``groups`` on the device; kept, as sending them there waits for it."""
        if self._sent is None or self._sent[0] != groups:
            self._sent = (groups, torch.tensor(groups, device=device))
        return self._sent[1]

    def rows(self, step: int, squares: torch.Tensor) -> list[Row]:
        """The tidy rows of one step's ``squares()``."""
        rows: list[Row] = []
        blocks: dict[int, float] = {}
        for (layer, sublayer, role), square in zip(self.keys, squares.tolist(), strict=True):
            rows.append((step, layer, sublayer, role, 0, "gradient_norm", square**0.5))
            if layer >= 0:
                blocks[layer] = blocks.get(layer, 0.0) + square
        return rows + [(step, layer, "block", "all", 0, "gradient_norm", total**0.5) for layer, total in blocks.items()]


def state_statistics(x: torch.Tensor) -> torch.Tensor:
    """Variance and mean over all elements, mean |x|, largest |x| of a state [batch, tokens, hidden_size]."""
    x = x.detach().float()
    magnitude = x.abs()
    return torch.stack([x.var(correction=0), x.mean(), magnitude.mean(), magnitude.max()])


def hidden_state_rows(model: nn.Module, input_ids: torch.Tensor, step: int) -> list[Row]:
    """The statistics of x^0 and of the stream after every sub-layer, for one batch of token ids [batch, tokens].

    Runs the model in evaluation mode without gradients, uncompiled; leaves its mode as it was.
    """
    base = _base(model)
    found: dict[tuple[int, str], torch.Tensor] = {}
    handles = []
    for index, block in enumerate(base.layers):
        for name in ("attention", "feed_forward"):
            handles.append(getattr(block, name).register_forward_hook(_recorder(found, (index, name))))
    handles.append(base.layers[0].register_forward_pre_hook(_first_recorder(found)))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), uncompiled(base):
            if isinstance(model, FSDPModule):  # only its root gathers the embedding; all processes must be here
                model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
            else:
                base(input_ids=input_ids, use_cache=False)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    rows: list[Row] = []
    values = torch.stack(list(found.values())).tolist()
    for (layer, sublayer), statistics in zip(found, values, strict=True):
        rows += [
            (step, layer, sublayer, "all", 0, metric, value)
            for metric, value in zip(STATE_METRICS, statistics, strict=True)
        ]
    return rows


def gain_rows(model: nn.Module, step: int) -> list[Row]:
    """Mean and largest magnitude of every norm's gain, and of every learned scale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass alone leaves the root's parameters gathered
    keys, sums, magnitudes, mesh = [], [], [], None
    for layer, sublayer, role, parameter in _gains(_base(model)):
        keys.append((layer, sublayer, role))
        value, whole = parameter.detach(), parameter.numel()
        if isinstance(value, DTensor):
            mesh, value = value.device_mesh, value.to_local()
        value = value.float()
        sums.append(value.sum() / whole)
        magnitudes.append(value.abs().max() if value.numel() else value.new_zeros(()))
    if not keys:
        return []
    means, largests = torch.stack(sums), torch.stack(magnitudes)
    if mesh is not None:
        torch.distributed.all_reduce(means, group=mesh.get_group())
        torch.distributed.all_reduce(largests, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    rows: list[Row] = []
    for (layer, sublayer, role), mean, largest in zip(keys, means.tolist(), largests.tolist(), strict=True):
        rows += [
            (step, layer, sublayer, role, 0, "gain_mean", mean),
            (step, layer, sublayer, role, 0, "gain_abs_max", largest),
        ]
    return rows


def _gains(base: LaminaModel) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    for index, block in enumerate(base.layers):
        for name in ("attention", "feed_forward"):
            residual: Residual = getattr(block, name)
            for role in ("pre_norm", "out_norm", "post_norm"):
                norm: Any = getattr(residual, role)
                if isinstance(norm, LaminaNorm) and norm.weight is not None:
                    yield index, name, role, norm.weight
            for role in ("skip_scale", "pre_scale"):
                if isinstance(scale := getattr(residual, role), nn.Parameter):
                    yield index, name, role, scale
    for role, norm in (("embedding_norm", base.embedding_norm), ("final_norm", base.norm)):
        if isinstance(norm, LaminaNorm) and norm.weight is not None:
            yield -1, "block", role, norm.weight


def _base(model: nn.Module) -> LaminaModel:
    base = model if isinstance(model, LaminaModel) else model.model
    assert isinstance(base, LaminaModel)
    return base


def _recorder(found: dict[tuple[int, str], torch.Tensor], key: tuple[int, str]):
    def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        found[key] = state_statistics(output)

    return hook


def _first_recorder(found: dict[tuple[int, str], torch.Tensor]):
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        found[-1, "block"] = state_statistics(args[0])

    return hook
