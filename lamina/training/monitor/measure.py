"""The layer monitor: every layer's gradients, states and norm gains while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lamina.modeling.modeling_lamina import LaminaModel, LaminaNorm
from lamina.modeling.parts import body_of, sublayers
from lamina.training.execution.compiling import uncompiled
from lamina.training.monitor.parameter_owners import Place, Placed, own_part, places_of, share
from lamina.training.monitor.rows import Row

STATE_METRICS = ("hidden_variance", "hidden_mean", "hidden_abs_mean", "hidden_abs_max")
_PIECE = 1024
TOP = 100  # the number of the largest |x| in Peri-LN's Figure 11


class GradientNorms:
    """The gradient's L2 norm by sub-layer and block, and of the embedding and the readout.

    Sharded parameters' (FSDP2) squared local parts are summed over the processes, so the norms are those of one.

    Args:
        model: a Lamina model, or any other with the ``placed`` parameters.
        placed: each parameter with its place, as ``followed_places`` finds them.
        exact: whether a CPU's sums are made in short pieces, which are added in float64: torch's norm of a tensor of
            2**24 floats is off by 7e-4 there. A run's own records keep torch's bits.
    """

    def __init__(self, model: nn.Module, placed: Placed | None = None, *, exact: bool = False):
        self._exact = exact
        keys: dict[Place, int] = {}
        self.parameters: list[torch.Tensor] = []
        self.groups: list[int] = []
        for key, parameter in places_of(model) if placed is None else placed:
            self.parameters.append(parameter)
            self.groups.append(keys.setdefault(key, len(keys)))
        self.keys = list(keys)
        self.sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        self._shares = [share(parameter) if self.sharded else 1.0 for parameter in self.parameters]
        self._sent: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def squares(self) -> torch.Tensor:
        """The squared norm of each group in float64, without waiting for the device; call before clipping."""
        return self.sums([parameter.grad for parameter in self.parameters])

    def sums(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The squared norm of each group, for one tensor like each parameter; None counts as zeros."""
        return self.over_processes(self.local_sums(tensors))

    def local_sums(self, tensors: Sequence[torch.Tensor | None], *, power: int = 2) -> torch.Tensor:
        """This process' share of ``sums``, or of the sums of |x| with ``power`` 1."""
        parts, present = [], []
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                parts.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
                present.append(index)
        if not parts:
            device = own_part(self.parameters[0]).device if self.parameters else None
            return torch.zeros(len(self.keys), dtype=torch.float64, device=device)
        if self._exact and all(part.device.type == "cpu" for part in parts):
            powers = torch.stack([_in_pieces(part.flatten(), power) for part in parts])
        else:
            norms = torch.stack(torch._foreach_norm(parts, power))  # pyright: ignore[reportPrivateImportUsage]
            powers = norms.double().pow(power)
        sums = torch.zeros(len(self.keys), dtype=torch.float64, device=powers.device)
        groups, shares = self._index(present, powers.device)
        return sums.index_add_(0, groups, powers * shares)

    def over_processes(self, sums: torch.Tensor) -> torch.Tensor:
        """The processes' shares added up, in place; of parameters that are not sharded, every process has the whole."""
        if self.sharded:
            torch.distributed.all_reduce(sums)
        return sums

    def _index(self, present: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Groups and shares of the parameters ``present``, on the device; cached: sending them waits for the device."""
        if (key := tuple(present)) not in self._sent:
            groups = torch.tensor([self.groups[index] for index in present], device=device)
            shares = torch.tensor([self._shares[index] for index in present], dtype=torch.float64, device=device)
            self._sent[key] = (groups, shares)
        return self._sent[key]

    def trained(self) -> set[Place]:
        """The places of ``rows`` that have a parameter which requires a gradient now."""
        groups = {group for group, p in zip(self.groups, self.parameters, strict=True) if p.requires_grad}
        places = {self.keys[group] for group in groups}
        return places | {(layer, "block", "all") for layer, _, _ in places if layer >= 0}

    def rows(self, step: int, squares: torch.Tensor) -> list[Row]:
        """The tidy rows of one step's ``squares()``."""
        rows: list[Row] = []
        blocks: dict[int, float] = {}
        for (layer, sublayer, role), square in zip(self.keys, squares.tolist(), strict=True):
            rows.append((step, layer, sublayer, role, 0, "gradient_norm", square**0.5))
            if layer >= 0:
                blocks[layer] = blocks.get(layer, 0.0) + square
        return rows + [(step, layer, "block", "all", 0, "gradient_norm", total**0.5) for layer, total in blocks.items()]


def _in_pieces(x: torch.Tensor, power: int) -> torch.Tensor:
    """The sum of |x|**power in float64, from norms of pieces."""
    whole = x.numel() // _PIECE * _PIECE
    pieces = torch.linalg.vector_norm(x[:whole].view(-1, _PIECE), power, dim=1).double()
    return pieces.pow(power).sum() + torch.linalg.vector_norm(x[whole:], power).double().pow(power)


def state_statistics(x: torch.Tensor) -> torch.Tensor:
    """Variance, mean, mean |x| and largest |x| over all elements of a state [batch, tokens, hidden_size]."""
    x = x.detach().float()
    magnitude = x.abs()
    return torch.stack([x.var(correction=0), x.mean(), magnitude.mean(), magnitude.max()])


def largest_magnitudes(x: torch.Tensor, count: int = TOP) -> torch.Tensor:
    """The ``count`` largest |x| of a state [batch, tokens, hidden_size] (all, if it has fewer), largest first.

    NaN counts as the largest. Does not wait for the device.
    """
    return _statistics(x, count)[1].sort(descending=True).values


def _statistics(x: torch.Tensor, count: int = TOP) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().float()
    magnitude = x.abs().flatten(0, -2)
    peaks = magnitude.amax(-1)
    statistics = torch.stack([x.var(correction=0), x.mean(), magnitude.mean(), peaks.max()])
    # the largest lie in the tokens with the largest peaks, so only those tokens' elements are sorted
    tokens = peaks.topk(min(count, len(peaks)), sorted=False).indices
    values = magnitude.index_select(0, tokens).flatten()
    return statistics, values.topk(min(count, len(values)), sorted=False).values


def hidden_state_rows(model: nn.Module, inputs: torch.Tensor | Mapping[str, torch.Tensor], step: int) -> list[Row]:
    """The statistics of x^0 and of the stream after every sub-layer, for one batch, and the largest |x| of all.

    ``inputs`` are the model's arguments, or only its main input: token ids [batch, tokens] or pixel values [batch,
    channels, height, width]. Runs the model in evaluation mode without gradients, uncompiled and, unless it is sharded
    in bfloat16, in float32; restores its mode.

    The metric ``hidden_top_abs`` is Peri-LN's "global top-100" (Fig 11): the 100 largest |x| among all elements (each
    sequence's tokens and channels) of x^0 and of the stream after every sub-layer; the row with ``index`` 0 is the
    largest. An element that stays large through several sub-layers counts in each of them.
    """
    base = body_of(model, "layer monitor")
    if isinstance(inputs, torch.Tensor):
        inputs = {base.main_input_name: inputs}
    statistics: dict[tuple[int, str], torch.Tensor] = {}
    top: list[torch.Tensor] = []

    def measure(key: tuple[int, str], x: torch.Tensor) -> None:
        statistics[key], largest = _statistics(x)
        top.append(largest)

    def behind(key: tuple[int, str]) -> Callable[..., None]:
        return lambda module, args, output: measure(key, output)

    handles = []
    for index, name, residual in sublayers(base):
        handles.append(residual.register_forward_hook(behind((index, name))))
    handles.append(base.layers[0].register_forward_pre_hook(lambda m, args: measure((-1, "block"), args[0])))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), uncompiled(base):
            if isinstance(model, FSDPModule):  # only its root gathers the embedding; all processes must call it
                model(**inputs, use_cache=False, logits_to_keep=1)
            else:
                base(**inputs, use_cache=False)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    values = torch.cat(top)
    largest = values.topk(min(TOP, len(values))).values
    flat = torch.cat([torch.stack(list(statistics.values())).flatten(), largest]).tolist()  # one wait for the device
    rows: list[Row] = []
    for number, (layer, sublayer) in enumerate(statistics):
        rows += [
            (step, layer, sublayer, "all", 0, metric, flat[number * len(STATE_METRICS) + place])
            for place, metric in enumerate(STATE_METRICS)
        ]
    top_values = flat[len(statistics) * len(STATE_METRICS) :]
    return rows + [(step, -1, "model", "all", rank, "hidden_top_abs", value) for rank, value in enumerate(top_values)]


def gain_rows(model: nn.Module, step: int) -> list[Row]:
    """Mean and largest magnitude of every norm's gain, and of every learned scale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass alone leaves the root's parameters gathered
    return rows_of_gains(_gains(body_of(model, "layer monitor")), step)


def rows_of_gains(gains: Iterable[tuple[int, str, str, int, float, torch.Tensor]], step: int) -> list[Row]:
    """The rows of norms' gains: layer, sub-layer, role, index, what the norm adds to the stored values, parameter."""
    keys, sums, magnitudes, mesh = [], [], [], None
    for *key, offset, parameter in gains:
        keys.append(key)
        value, whole = parameter.detach(), parameter.numel()
        if isinstance(value, DTensor):
            mesh, value = value.device_mesh, value.to_local()
        value = value.float() + offset if offset else value.float()
        sums.append(value.sum() / whole)
        magnitudes.append(value.abs().max() if value.numel() else value.new_zeros(()))
    if not keys:
        return []
    means, largests = torch.stack(sums), torch.stack(magnitudes)
    if mesh is not None:
        torch.distributed.all_reduce(means, group=mesh.get_group())
        torch.distributed.all_reduce(largests, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    rows: list[Row] = []
    for (layer, sublayer, role, index), mean, largest in zip(keys, means.tolist(), largests.tolist(), strict=True):
        rows += [
            (step, layer, sublayer, role, index, "gain_mean", mean),
            (step, layer, sublayer, role, index, "gain_abs_max", largest),
        ]
    return rows


def _gains(base: LaminaModel) -> Iterator[tuple[int, str, str, int, float, torch.Tensor]]:
    for index, name, residual in sublayers(base):
        for role in ("pre_norm", "out_norm", "post_norm"):
            norm = getattr(residual, role)
            if isinstance(norm, LaminaNorm) and norm.weight is not None:
                yield index, name, role, 0, 0.0, norm.weight
        for role in ("skip_scale", "pre_scale"):
            if isinstance(scale := getattr(residual, role), nn.Parameter):
                yield index, name, role, 0, 0.0, scale
    for role, norm in (("embedding_norm", base.embedding_norm), ("final_norm", base.norm)):
        if isinstance(norm, LaminaNorm) and norm.weight is not None:
            yield -1, "block", role, 0, 0.0, norm.weight
