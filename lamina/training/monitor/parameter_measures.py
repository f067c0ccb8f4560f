"""Measure the gradients, updates, weights and optimizer moments of each sub-layer.

In an unstable run, some layers' updates and first moments rise before the gradient and the loss.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup, get_world_size, is_initialized
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments

from lamina.core.json_types import Json
from lamina.modeling.initialization import weights
from lamina.modeling.parts import body_of
from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import Structure
from lamina.training.checkpointing.sharding import local_part
from lamina.training.monitor.flat_parameters import FlatParameters
from lamina.training.monitor.held_parts import part_of, stored
from lamina.training.monitor.silent_parameters import SilentParameters
from lamina.training.monitor.writers import MODEL, Location, Row
from lamina.training.monitor.zero import ZeroGroups

Owned: TypeAlias = list[tuple[Location, torch.Tensor]]

MOMENTS = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
"""The metrics of Adam's moments, and the names of the moments in the state of torch's optimizers."""
_PIECE = 1024
SIZE, FEWEST = 256, 8  # elements of a sub-layer's sample, and of each of its tensors at least
_ROUNDED = 8.0  # times the resolution of a weight, below which a step may be rounded to nothing
_START = 7919  # of the sample: the same in every run
Optimizers: TypeAlias = Sequence[torch.optim.Optimizer | ZeroGroups]


def owned_parameters(model: nn.Module) -> Owned:
    """List a Lamina model's parameters with their sub-layers. Raises UserError for any other model."""
    body_of(model, "layer monitor")
    return [
        ((w.layer, w.sublayer, "all") if w.layer >= 0 else (-1, "block", w.sublayer), w.parameter)
        for w in weights(cast(PreTrainedModel, model))
    ]


def found_parameters(model: nn.Module, structure: Structure | None, flat: FlatParameters | None = None) -> Owned:
    """List a model's parameters with their sub-layers. Without known layers, the whole model is one part."""
    flat = flat or FlatParameters(model)
    if structure is None:
        return [(MODEL, parameter) for parameter in flat.parameters(model)]
    owners: dict[int, Location] = {}

    def claim(owner: Location, *modules: nn.Module | None) -> None:
        for module in modules:
            for parameter in () if module is None else flat.parameters(module):
                # a parameter that several layers share (ALBERT) belongs to the first layer
                owners.setdefault(id(parameter), owner)

    # a tied parameter belongs to the embedding
    claim((-1, "block", "embedding"), structure.embedding)
    for site in structure.layers:
        for sublayer in site.sublayers:
            modules = (*(module for _, module in sublayer.modules), *(norm.module for norm in sublayer.norms))
            claim((site.index, sublayer.kind, "all"), *modules)
        claim((site.index, "block", "other"), site.module)
    claim((-1, "block", "other"), *(module for role, module in structure.outside if role == "other"))
    claim((-1, "block", "embedding"), *(module for module in model.modules() if isinstance(module, nn.Embedding)))
    for role, module in structure.outside:
        claim((-1, "block", role), module)
    return [(owners.get(id(p), (-1, "block", "readout")), p) for p in flat.parameters(model)]


def _share(tensor: torch.Tensor) -> float:
    """Return the factor on this process's part in a sum over processes: 1 for a shard, 1 / n for one of n copies."""
    if not is_initialized():
        return 1.0
    world = get_world_size()
    if not isinstance(tensor, DTensor):
        return 1.0 / world
    sizes = [
        tensor.device_mesh.size(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()
    ]
    return math.prod(sizes) / world


def clip(model: nn.Module, limit: float) -> torch.Tensor:
    """Clip a sharded model's gradients, even on several device meshes. Return the gradient norm before clipping."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    parts = [local_part(gradient) for gradient in gradients]
    squares = torch.stack([part.norm() ** 2 * _share(g) for part, g in zip(parts, gradients, strict=True)]).sum()
    torch.distributed.all_reduce(squares)
    norm = squares.sqrt()
    for part in parts:
        part.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


class GradientNorms:
    """Measure the L2 norm of the gradient in each sub-layer, block, embedding and output head.

    Sharded parameters (FSDP, ZeRO) give the same norms as one process.

    Args:
        owned: the parameters with their sub-layers, from ``found_parameters`` (may be omitted for a Lamina model).
        exact: whether to sum in float64 on a CPU. On a CPU, torch's norm of 2**24 floats has a relative error of 7e-4.
        flat: the model's flat parameters (default: the flat parameters of FSDP1, if there are any).
        group: the processes that share the model or the pipeline stage (default: all processes).
    """

    def __init__(
        self,
        model: nn.Module,
        owned: Owned | None = None,
        *,
        exact: bool = False,
        flat: FlatParameters | None = None,
        group: ProcessGroup | None = None,
    ):
        self._exact, self.group = exact, group
        keys: dict[Location, int] = {}
        self.parameters: list[torch.Tensor] = []
        self.groups: list[int] = []
        for key, parameter in owned_parameters(model) if owned is None else owned:
            if not parameter.is_floating_point():
                continue  # a quantized weight, which nothing trains
            self.parameters.append(parameter)
            self.groups.append(keys.setdefault(key, len(keys)))
        self.keys = list(keys)
        flat = flat or FlatParameters(model)
        self.fleeting = bool(flat.zero)  # whether a step frees the gradients
        self.device = next((parameter.device for parameter in model.parameters()), None)
        self.sharded = bool(flat) or any(isinstance(parameter, DTensor) for parameter in self.parameters)
        self._all = list(map(id, self.parameters)) == list(map(id, model.parameters()))
        shares = [flat.share(parameter) for parameter in self.parameters]
        others = 1.0 if group is None else get_world_size() / get_world_size(group)
        self._shares = [
            1.0 if not self.sharded else others * (_share(parameter) if share is None else share)
            for parameter, share in zip(self.parameters, shares, strict=True)
        ]
        self._sent: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def squares(self) -> torch.Tensor:
        """Return each sub-layer's squared gradient norm before clipping, in float64 and without a device sync."""
        return self.over_processes(self.local_sums([parameter.grad for parameter in self.parameters]))

    def clips(self) -> bool:
        """Return whether ``clip`` works: all gradients are unsharded, on one device and of one dtype."""
        kinds = {(parameter.device, parameter.dtype) for parameter in self.parameters if parameter.grad is not None}
        return self._all and len(kinds) == 1 and not (self.sharded or self._exact)

    @torch.no_grad()
    def clip(self, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip the gradients. Return the total norm and the squared norms by sub-layer, both before clipping."""
        present = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        parameters = [self.parameters[index] for index in present]
        gradients = [cast(torch.Tensor, parameter.grad) for parameter in parameters]
        # bit-identical to separate calls, but reads the gradients only once
        norms = torch.stack(torch._foreach_norm(gradients, 2))  # pyright: ignore[reportPrivateImportUsage]
        total = torch.linalg.vector_norm(norms)
        nn.utils.clip_grads_with_norm_(parameters, limit, total)
        return total, self.summed(norms.double().pow(2), present)

    def local_sums(self, tensors: Sequence[torch.Tensor | None], *, power: int = 2) -> torch.Tensor:
        """Sum |x|^power by sub-layer, over this process's parts of the tensors. None counts as 0."""
        present = [index for index, tensor in enumerate(tensors) if tensor is not None]
        parts = [local_part(tensor) for tensor in tensors if tensor is not None]
        if not parts:
            return torch.zeros(len(self.keys), dtype=torch.float64, device=self.device)
        if self._exact and all(part.device.type == "cpu" for part in parts):
            powers = _in_pieces([part.flatten() for part in parts], power)
        else:
            powers = _norms(parts, power).pow(power)
        return self.summed(powers, present)

    def summed(self, parts: torch.Tensor, present: list[int] | None = None) -> torch.Tensor:
        """Sum ``parts`` by sub-layer. ``parts`` has a number for each parameter index in ``present`` (default: all)."""
        key = tuple(range(len(self.groups)) if present is None else present)
        if key not in self._sent:  # sending them waits for the device
            groups = torch.tensor([self.groups[index] for index in key], device=parts.device)
            shares = torch.tensor([self._shares[index] for index in key], dtype=torch.float64, device=parts.device)
            self._sent[key] = groups, shares
        groups, shares = self._sent[key]
        sums = torch.zeros(len(self.keys), dtype=torch.float64, device=parts.device)
        return sums.index_add_(0, groups, parts * shares)

    def anywhere(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Return whether any of the tensors is not None. Take all processes of a sharded model into account."""
        there = any(tensor is not None for tensor in tensors)
        if not (self.sharded and is_initialized()):  # one process may have ended its group before its last record
            return there
        flag = torch.tensor(float(there), device=self.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(flag)

    def over_processes(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum over a sharded model's processes. Without sharding, the sums stay unchanged."""
        if self.sharded and is_initialized():
            sums = sums.to(self.device)  # ZeRO may keep its parts on the CPU
            torch.distributed.all_reduce(sums, group=self.group)
        return sums

    def trained(self) -> set[Location]:
        """Return the parts of the model with a parameter that requires a gradient now."""
        groups = {group for group, p in zip(self.groups, self.parameters, strict=True) if p.requires_grad}
        owners = {self.keys[group] for group in groups}
        return owners | {(layer, "block", "all") for layer, _, _ in owners if layer >= 0}

    def totals(self, sums: Sequence[float]) -> Iterator[tuple[Location, float]]:
        """Yield the sum of each part of the model, then the sum of each whole block."""
        blocks: dict[int, float] = {}
        for (layer, sublayer, role), value in zip(self.keys, sums, strict=True):
            yield (layer, sublayer, role), value
            if layer >= 0:
                blocks[layer] = blocks.get(layer, 0.0) + value
        for layer, total in blocks.items():
            yield (layer, "block", "all"), total

    def rows(self, step: int, squares: torch.Tensor) -> list[Row]:
        return [Row(step, *owner, 0, "gradient_norm", total**0.5) for owner, total in self.totals(squares.tolist())]


def reading_waits(tensor: torch.Tensor) -> bool:
    """Return whether reading a tensor's value makes the CPU wait for the device."""
    return tensor.device.type != "cpu"


class FirstFailure:
    """Find the first step with a gradient norm that is NaN or infinite.

    On a GPU, a run reads gradient norms only at recorded steps. By then, every weight may be NaN.
    """

    def __init__(self) -> None:
        self._step: torch.Tensor | None = None
        self._squares = torch.zeros(0)

    def see(self, step: int, norm: torch.Tensor, squares: torch.Tensor) -> None:
        """Check a step's total norm without a device sync. Keep ``squares`` of the first failed step."""
        failed = ~torch.isfinite(norm)
        if self._step is None:
            self._step, self._squares = failed * step, squares
            return
        new = failed & (self._step == 0)
        self._step, self._squares = self._step + new * step, torch.where(new, squares, self._squares)

    def read(self) -> tuple[int, torch.Tensor]:
        """Return the first failed step, and the squared norms of this step. Step 0 means that no step failed."""
        return (0 if self._step is None else int(self._step)), self._squares


def _norms(parts: list[torch.Tensor], power: int) -> torch.Tensor:
    norms = torch._foreach_norm(parts, power)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).double()


def _in_pieces(parts: Sequence[torch.Tensor], power: int) -> torch.Tensor:
    """Sum |x|^power over each part in short pieces, and add the pieces in float64."""
    ends = [part.numel() // _PIECE * _PIECE for part in parts]
    long = [at for at, end in enumerate(ends) if end]
    cut = [at for at, end in enumerate(ends) if end < parts[at].numel()]
    sums = torch.zeros(len(parts), dtype=torch.float64)
    if long:
        pieces = [torch.linalg.vector_norm(parts[at][: ends[at]].view(-1, _PIECE), power, dim=1) for at in long]
        powers = torch.cat(pieces).double().pow(power).split([len(each) for each in pieces])
        sums[long] = torch.stack([each.sum() for each in powers])
    if cut:
        sums[cut] += _norms([parts[at][ends[at] :] for at in cut], power).pow(power)
    return sums


def is_recorded(step: int, args: Arguments) -> bool:
    """Return whether a step is recorded: step 1, and each multiple of ``logging_steps``."""
    return step == 1 or step % max(1, int(args.logging_steps)) == 0


def estimate_of(group: Mapping[str, Output]) -> float | None:
    """Return the estimate by which Prodigy or D-Adaptation multiplies a group's learning rate, or None."""
    estimate = group.get("d")
    return float(estimate) if isinstance(estimate, int | float) else None


def largest_rate(optimizers: Optimizers) -> float | None:
    """Return the largest learning rate of all groups, or None without learning rates (Adafactor)."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [(group.get("lr"), estimate_of(group)) for group in groups]
    return max((float(rate) * (1.0 if d is None else d) for rate, d in rates if rate is not None), default=None)


class Samples:
    """Compare a fixed sample of weights and moments between steps, to find changes that no optimizer made.

    Only ``rows`` waits for the device.

    Metrics:
        written_ratio: the norm of the weight changes that no optimizer made, divided by the weights' norm.
        moved_ratio: the distance that the optimizer moved the weights since other code changed them, divided by the
            weights' norm.
        forgotten_share: the largest fraction of the norm that a tensor in the optimizer's state lost between two steps,
            or 1 if a tensor is missing.

    Attributes:
        resumed: whether the run has earlier steps. In a run with earlier steps, an optimizer with an empty state has
            lost the state.
    """

    resumed = False

    def __init__(self, groups: GradientNorms):
        self.groups, counts = groups, Counter(groups.groups)
        self._sizes = [max(FEWEST, SIZE // counts[group]) for group in groups.groups]
        self.choose()
        self._keys: list[tuple[int, str]] = []  # of these moments: the parameter's place, and the key in its state
        self._tensors: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._addresses: list[int] = []  # of the tensors whose views these are
        self._arrays: list[np.ndarray] = []  # the same views, if all are fp32 on the CPU
        self._last: torch.Tensor | None = None
        self._drift: torch.Tensor | None = None
        self._anchor: torch.Tensor | None = None  # the weights at the last such change, or at first
        self._moved: torch.Tensor | None = None  # squares of how far they were from there, at changes since a record
        self._begun = False

    def choose(self) -> None:
        """Choose the parameters for the comparison of moments: the largest trained parameter of each sub-layer."""
        parameters, groups = self.groups.parameters, self.groups.groups
        by_size = sorted(range(len(groups)), key=lambda at: (parameters[at].requires_grad, parameters[at].numel()))
        self._seen = sorted({groups[index]: index for index in by_size}.values())

    def before_step(self, optimizers: Optimizers) -> None:
        """Find changes of the sample before a step of the optimizers."""
        self._begun = True
        self.resumed &= self._last is not None or not any(len(optimizer.state) for optimizer in optimizers)
        self.compare(optimizers)

    def compare(self, optimizers: Optimizers) -> None:
        """Find changes of the sample since the last call or optimizer step. The method ``rows`` returns the changes."""
        if self._last is None:
            return
        now = self._take({(index, key): value for index, key, value in self._moments(optimizers)})
        if now is None or now.shape != self._last.shape:
            return
        if now.device.type != "cpu" or not torch.equal(now, self._last):  # comparing on a GPU would wait for it
            change, count = now - self._last, self._count
            change[count:] = (now[count:].abs() - self._last[count:].abs()).clamp(max=0.0)  # what grows is not lost
            self._drift = change if self._drift is None else self._drift + change
            anchor = self._last[:count] if self._anchor is None else self._anchor
            wrote = (change[:count] != 0).any()
            moved = (self._last[:count] - anchor).square() * wrote
            self._moved = moved if self._moved is None else self._moved + moved
            self._anchor = torch.where(wrote, now[:count], anchor)
            self._last = now

    def after_step(self, optimizers: Optimizers) -> None:
        """Keep the sample's values after the step, if ``before_step`` was called for this step."""
        if not self._begun:
            return
        moments = {(index, key): value for index, key, value in self._moments(optimizers)}
        if self._drift is None or not {*moments} <= {*self._keys}:  # else lost moments without a gradient are kept
            self._keys, self._drift = [*moments], None
        self._begun = False
        self._last = self._take(moments)
        if self._anchor is None and self._last is not None:
            self._anchor = self._last[: self._count]
        if self.resumed and moments and self._last is not None:
            self._drift = torch.cat([torch.zeros_like(self._last[: self._count]), self._last[self._count :]])
        self.resumed &= not moments

    @property
    def _count(self) -> int:
        """The number of weights in the sample. The sample's other elements are moments."""
        return sum(map(len, self._views[: len(self._sizes)]))

    def _moments(self, optimizers: Optimizers) -> Iterator[tuple[int, str, torch.Tensor]]:
        for index in self._seen:
            parameter = self.groups.parameters[index]
            kept = stored(parameter)
            state: Json = next((found for each in optimizers if (found := each.state.get(kept)) is not None), {})
            for key, value in state.items():
                if (part := part_of(parameter, value)) is not None:
                    yield index, key, local_part(part) if self.groups.sharded else part

    @torch.no_grad()
    def _take(self, moments: dict[tuple[int, str], torch.Tensor]) -> torch.Tensor | None:
        """Return the sample's current values, with 0 for lost moments, or None for tensors on several devices."""
        parameters = self.groups.parameters
        weights = [local_part(parameter) for parameter in parameters] if self.groups.sharded else parameters
        kept = [moments[key] if key in moments else torch.zeros_like(weights[key[0]]) for key in self._keys]
        tensors = [*weights, *kept]
        if (addresses := [tensor.data_ptr() for tensor in tensors]) != self._addresses:  # else the views are right
            if any(tensor.device != tensors[0].device for tensor in tensors):
                return None
            sizes = [*self._sizes, *[SIZE] * len(kept)]
            self._tensors, self._views = tensors, list(map(_spread, tensors, sizes))
            self._addresses = addresses  # the views keep this memory, so no other tensor can have its addresses
            plain = all(view.dtype == torch.float32 and view.device.type == "cpu" for view in self._views)
            self._arrays = [view.detach().numpy() for view in self._views] if plain else []
        if self._arrays:  # a third of torch.cat's time, where small tensors are many
            return torch.from_numpy(np.concatenate(self._arrays))
        return torch.cat(self._views).float()

    def rows(self, step: int, *, recorded: bool) -> list[Row]:
        """Return the changes since the last record that no optimizer made. Call this in all processes."""
        drift, moved, count, last = self._drift, self._moved, len(self._sizes), self._last
        self._drift, self._moved = (None, None) if recorded else (drift, moved)
        if last is None or (drift is None and not self.groups.sharded):
            return []
        both = [torch.zeros_like(last) if drift is None else drift, last]
        lengths = [len(view) for view in self._views]
        norms = torch.stack([part.double().norm() for share in both for part in share.split(lengths)]).view(2, -1)
        scale = [tensor.numel() / max(1, length) for tensor, length in zip(self._tensors, lengths, strict=True)]
        squares = (norms**2 * torch.tensor(scale, device=norms.device))[:, :count]
        moved = last.new_zeros(self._count) if moved is None else moved
        away = torch.stack([part.double().sum() for part in moved.split(lengths[:count])])
        squares = torch.cat([squares, (away * torch.tensor(scale[:count], device=norms.device))[None]])
        sums = self.groups.over_processes(torch.stack([self.groups.summed(part) for part in squares]))
        lost = norms.new_zeros(len(self.groups.keys))
        owners = torch.tensor([self.groups.groups[place] for place, _ in self._keys], device=norms.device).long()
        lost.scatter_reduce_(0, owners, norms[0, count:] / norms.amax(0)[count:].clamp(min=1e-30), "amax")
        found = {
            "written_ratio": (sums[0] / sums[1]).sqrt().tolist(),
            "moved_ratio": ((sums[2] / sums[1]).sqrt() * (sums[0] > 0)).tolist(),
            "forgotten_share": lost.tolist(),
        }
        return [
            Row(step, *owner, 0, metric, value)
            for metric, values in found.items()
            for owner, value in zip(self.groups.keys, values, strict=True)
            if 0 < value < math.inf
        ]


def _spread(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return a view of evenly spread elements of a tensor, or an empty tensor if the tensor is noncontiguous."""
    if not tensor.is_contiguous():
        return tensor.new_empty(0)
    stride = max(1, tensor.numel() // size)
    stride -= stride > 2 and stride % 2 == 0  # else they could all be of few columns
    return tensor.view(-1)[_START % stride :: stride][:size]


class UpdateRatios(TrainerCallback):
    """Measure the updates of recorded optimizer steps by sub-layer.

    The update is the change of the weights in the optimizer's step. The update therefore includes clipping, the
    learning rate and weight decay. During a recorded step, memory holds a copy of the weights. Only ``rows`` waits for
    the device.

    Metrics:
        update_norm, weight_norm, update_ratio: the norms of update and weights, and the ratio of these norms.
        first_moment, second_moment: the norms of Adam's m and sqrt(v).
        unmoved_parameters: the number of parameters with a gradient but no update.
        without_gradient: the number of parameters that ``SilentParameters`` finds.
        rate_ratio: a sub-layer's learning rate divided by the optimizer's median learning rate (only if above 1).
        rate_estimate: an optimizer's own estimate of the learning rate (Prodigy, D-Adaptation).

    Args:
        structure: the model's layers. None disables the search for parameters without a gradient.

    Attributes:
        rate: the largest learning rate of the last measured step.
        still: the parameters that got a gradient but did not change at the last recorded step.
        missing: whether the parameters in ``still`` are in no optimizer.
        silent: the parameters that got no gradient at the last recorded step.
        resting: the parameters that got a gradient but have a learning rate of 0 (empty if no parameter changed).
    """

    rate: float | None = None
    missing = False

    def __init__(self, groups: GradientNorms, structure: Structure | None = None):
        self.groups = groups
        self._silent = SilentParameters(structure, self.groups.parameters, self.groups.groups)
        self.samples = Samples(self.groups)
        self._ratios: dict[Location, float] = {}
        self._estimates: list[float] = []
        self._before: list[torch.Tensor] = []
        self._frozen: set[int] = set()  # the places of weights that stay as they are, such as LoRA's base
        self._sums: dict[str, torch.Tensor] = {}  # by metric: of each group, before the root is taken
        self.still: list[torch.Tensor] = []
        self.silent: list[torch.Tensor] = []
        self.resting: list[torch.Tensor] = []
        self._gradients: torch.Tensor | None = None  # the largest |gradient| of each parameter, where steps free them
        self._largest: torch.Tensor | None = None  # |update|, |gradient| of each parameter [2, parameters]
        self._group_of: dict[int, tuple[int, float | None]] = {}  # by parameter: its optimizer and learning rate

    def on_pre_optimizer_step(self, args: Arguments, state: State, control: object, **kwargs: Output) -> None:
        self._sums = {}
        self.before_step([kwargs["optimizer"]], recorded=is_recorded(state.global_step + 1, args))

    def on_optimizer_step(self, args: object, state: object, control: object, **kwargs: Output) -> None:
        self.after_step([kwargs["optimizer"]])

    @torch.no_grad()
    def before_step(self, optimizers: Optimizers = (), *, recorded: bool = True) -> None:
        """Keep a copy of the weights if the step is recorded."""
        self.samples.before_step(optimizers)
        if not recorded:
            return
        self._frozen = {index for index, p in enumerate(self.groups.parameters) if not p.requires_grad}
        self._before = [local_part(p).clone() if p.requires_grad else local_part(p) for p in self.groups.parameters]
        self._gradients = self._peaks([p.grad for p in self.groups.parameters]) if self.groups.fleeting else None

    @torch.no_grad()
    def after_step(self, optimizers: Optimizers = ()) -> None:
        """Measure the step if ``before_step`` kept the weights."""
        self.samples.after_step(optimizers)
        if not self._before:
            return
        before, self._before = self._before, []
        self.rate, self._ratios = largest_rate(optimizers), self._rate_ratios(optimizers)
        self._estimates = [d for each in optimizers for group in each.param_groups if (d := estimate_of(group))]
        sums = {"weight_norm": self.groups.local_sums(before)}
        moved = [None if index in self._frozen else old for index, old in enumerate(before)]
        pairs = [(old, local_part(p)) for old, p in zip(moved, self.groups.parameters, strict=True) if old is not None]
        if pairs:
            torch._foreach_sub_(*map(list, zip(*pairs, strict=True)))  # pyright: ignore[reportPrivateImportUsage]
        sums["update_norm"] = self.groups.local_sums(moved)
        self._largest = self._largest_of(moved)
        self._group_of = {
            id(p): (number, group.get("lr"))
            for number, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        state = {
            id(p): optimizer.state[p]
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if "betas" in group and p in optimizer.state  # else the average's length changes, as in Adafactor
        }
        for metric, key in MOMENTS.items():
            moments = [part_of(p, state.get(id(stored(p)), {}).get(key)) for p in self.groups.parameters]
            if self.groups.anywhere(moments):  # an optimizer may compress them to another shape
                sums[metric] = self.groups.local_sums(moments, power=1 if metric == "second_moment" else 2)
        self._sums = dict(zip(sums, self.groups.over_processes(torch.stack(list(sums.values()))), strict=True))

    def _peaks(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the largest magnitude in each tensor, or 0 for a missing tensor, without waiting for the device."""
        there = [at for at, x in enumerate(tensors) if x is not None and not x.is_sparse and local_part(x).numel()]
        parts = [local_part(cast(torch.Tensor, tensors[at])) for at in there]
        peaks = torch.zeros(len(tensors), device=parts[0].device if parts else self.groups.device)
        if parts and all(part.device == peaks.device for part in parts):
            real = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
            ends = [torch.aminmax(part) for part in real]  # faster than norms, where tensors are many
            peaks[there] = torch.stack([torch.maximum(end.max, -end.min).float() for end in ends])
        return peaks.to(self.groups.device)

    def _largest_of(self, moved: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the largest magnitudes of each parameter's update and gradient, without waiting for the device."""
        if (gradients := self._gradients) is None:
            pairs = zip(moved, self.groups.parameters, strict=True)
            gradients = self._peaks([None if old is None else p.grad for old, p in pairs])
        self._gradients, largest = None, torch.stack([self._peaks(moved), gradients])
        if self.groups.sharded:
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self.groups.group)
        return largest

    def _unmoved(self) -> list[int]:
        """Return the indices of parameters with a gradient but with an update of exactly 0."""
        if self._largest is None:
            return []
        updates, gradients = self._largest.tolist()
        parameters, unmoved = self.groups.parameters, []
        self.resting = []
        stepped = {
            self._group_of[id(stored(p))][0]
            for p, size in zip(parameters, updates, strict=True)
            if size and id(stored(p)) in self._group_of
        }
        for index, (parameter, update, gradient) in enumerate(zip(parameters, updates, gradients, strict=True)):
            # skipped steps, learning rates of 0 and updates that round to 0 do not count
            if update or not 0 < gradient < math.inf:
                continue
            number, rate = self._group_of.get(id(stored(parameter)), (-1, 1.0))
            if number < 0:
                unmoved.append(index)
            elif stepped and rate == 0:
                self.resting.append(parameter)
            elif number in stepped and rate:
                size = float(local_part(parameter).abs().max()) if parameter.numel() else 0.0
                if float(rate) * min(1.0, gradient) > _ROUNDED * size * torch.finfo(parameter.dtype).eps:
                    unmoved.append(index)
        return unmoved

    def _without_gradient(self) -> list[int]:
        if self._largest is None:
            return []
        ids = [id(stored(parameter)) for parameter in self.groups.parameters]
        trained = {place for place, key in enumerate(ids) if key in self._group_of and place not in self._frozen}
        return self._silent.found(self._largest[1].tolist(), trained)

    def close(self) -> None:
        self._silent.close()

    def _rate_ratios(self, optimizers: Optimizers) -> dict[Location, float]:
        owners: dict[int, list[Location]] = {}
        for parameter, group in zip(self.groups.parameters, self.groups.groups, strict=True):
            owners.setdefault(id(stored(parameter)), []).append(self.groups.keys[group])
        ratios: dict[Location, float] = {}
        for optimizer in optimizers:
            groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
            usual = statistics.median_low([float(group["lr"]) for group in groups for _ in group["params"]] or [0.0])
            for group in groups if usual > 0 else ():
                ratio = float(group["lr"]) / usual
                ratios |= {owner: ratio for p in group["params"] if ratio > 1 for owner in owners.get(id(p), ())}
        return ratios

    def rows(self, step: int) -> list[Row]:
        """Return and forget the recorded step's measurements. A step that a loss scaler skipped has no measurements."""
        rows = self.samples.rows(step, recorded=True)
        if not self._sums:
            return rows
        values = dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))
        self._sums, self.still = {}, []
        if not any(values["update_norm"]):
            return rows
        rows += [Row(step, *owner, 0, "rate_ratio", ratio) for owner, ratio in self._ratios.items()]
        rows += [Row(step, *MODEL, 0, "rate_estimate", max(self._estimates))] if self._estimates else []
        places = self._unmoved()
        self.still = [self.groups.parameters[place] for place in places]
        self.missing = not any(id(stored(parameter)) in self._group_of for parameter in self.still)
        silent = self._without_gradient()
        self.silent = [self.groups.parameters[place] for place in silent]
        for metric, found in (("unmoved_parameters", places), ("without_gradient", silent)):
            counts = Counter(self.groups.keys[self.groups.groups[place]] for place in found)
            rows += [Row(step, *owner, 0, metric, float(count)) for owner, count in counts.items()]
        for totals in zip(*(self.groups.totals(sums) for sums in values.values()), strict=True):
            by_metric = dict(zip(values, (total for _, total in totals), strict=True))
            owner: Location = totals[0][0]
            rows += [Row(step, *owner, 0, metric, total**0.5) for metric, total in by_metric.items()]
            if weight := by_metric["weight_norm"]:
                rows.append(Row(step, *owner, 0, "update_ratio", (by_metric["update_norm"] / weight) ** 0.5))
        return rows
