"""Find a model's layers from the arguments of its first training step, without changing the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeGuard, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lamina.errors import UserError, one_line
from lamina.probes.structure.discovery import find_structure
from lamina.probes.structure.hooks import Output, forward, forwards, undisturbed
from lamina.probes.structure.proof import prove
from lamina.probes.structure.sites import Point, Structure
from lamina.training.checkpointing.sharding import reshard
from lamina.training.monitor.flat_parameters import reshard_root
from lamina.training.monitor.gain_measures import Gain, gains_of, rows_of_gains
from lamina.training.monitor.graph_hooks import is_compiled
from lamina.training.monitor.stages import first_number
from lamina.training.monitor.stream_measures import Spot, stream_points, stream_rows
from lamina.training.monitor.writers import Row

Inputs = dict[str, torch.Tensor]
Arguments = Mapping[str, object]  # the arguments of a forward method, by name
_TOKENS = 8  # the number of tokens in the small pass
# In notes, settings of ``lamina.watch`` replace the flags of the command line.
_FLAGS = {"--layers PATH": "layers=PATH", "--layers, another list": "layers=PATH of another list"}


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A model's layers, or the reason why Lamina could not find them."""

    structure: Structure | None
    # whether the watched tensor is the residual stream. Lamina cannot verify this for sharded models
    whole: bool = False
    # the layers of further stacks (such as a decoder) in which Lamina could not verify the residual stream
    unproved: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)

    @property
    def points(self) -> dict[Spot, Point]:
        """The points of the model at which Lamina measures the residual stream. Unverified layers have no points."""
        points = stream_points(self.structure) if self.structure is not None and self.whole else {}
        return {spot: point for spot, point in points.items() if spot[0] not in self.unproved}

    def gains(self, model: nn.Module) -> list[Gain]:
        return [] if self.structure is None else gains_of(self.structure)

    def rows(self, model: nn.Module, inputs: torch.Tensor, step: int) -> list[Row]:
        """Measure the norms' gains. Run the model on the inputs, and measure the residual stream."""
        if self.structure is None:
            return []
        return stream_rows(model, model, self.points, inputs, step) + rows_of_gains(self.gains(model), step)


def follow(
    model: nn.Module, arguments: Arguments, *, layers: str | None = None, first_layer: int | None = None
) -> Followed:
    """Find a model's layers by passes over a small part of a batch. Raises no error, so that training continues."""
    problem = "" if arguments else "the model was called without arguments"
    eager = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    flat = nullcontext()
    if any(map(_holds_tensors, arguments.values())):  # the batch is one mapping: its tensors become arguments
        flat = forwards({model: partial(_unflattened, model.forward, arguments)})
        arguments = batch_of(arguments)
    # gradients and random states stay unchanged, but the user's own hooks also run
    with undisturbed(model), eager, flat:
        try:
            for small in _calls(model, arguments):
                try:
                    with torch.no_grad():
                        forward(model, small)
                except Exception as error:
                    problem = one_line(error)[:160]
                    continue
                followed = _numbered(_followed(model, small, layers), model, first_layer)
                for flag, setting in _FLAGS.items():
                    followed.notes[:] = [note.replace(flag, setting) for note in followed.notes]
                return followed
        finally:
            reshard(model)
            reshard_root(model)
    note = f"{type(model).__name__} failed on its training batch ({problem})"
    return Followed(structure=None, notes=[f"layers: {note}, so Lamina records only totals of the whole model"])


def _followed(model: nn.Module, small: Inputs, layers: str | None) -> Followed:
    try:
        structure = find_structure(model, small, layers=layers)
    except Exception as error:  # an error for an unknown architecture must not end the training
        text = str(error) if isinstance(error, UserError) else f"layers: {one_line(error)}"
        return Followed(
            structure=None, notes=[f"{text.removesuffix('.')}. Lamina records only totals of the whole model"]
        )
    main, whole = _proved(model, small, structure)
    if not whole and structure.others:  # of two equally long towers, the first may read images
        main, whole = _proved(model, small, structure, reads_tokens=False)
    stacks, unproved = [main], frozenset[int]()
    for path in structure.others:
        try:
            found = find_structure(model, small, layers=path)
            other, proved = _proved(model, small, found, reads_tokens=False)
        except Exception:  # the stack keeps the role "other", and a note says so
            continue
        first = sum(stack.num_layers for stack in stacks)
        unproved |= frozenset() if proved else frozenset(range(first, first + other.num_layers))
        stacks.append(other)
    if len(stacks) == 1:
        return Followed(structure=main, whole=whole, notes=main.notes)
    starts = [sum(stack.num_layers for stack in stacks[:at]) for at in range(len(stacks))]
    sites = [
        replace(site, index=start + site.index)
        for start, stack in zip(starts, stacks, strict=True)
        for site in stack.layers
    ]
    ends = [f"{start} to {start + stack.num_layers - 1}" for start, stack in zip(starts, stacks, strict=True)]
    paths = [stack.layers[0].path.rpartition(".")[0] for stack in stacks]
    told = "; ".join(f"layers {which} are {path}" for which, path in zip(ends, paths, strict=True))
    notes = [note for stack in stacks for note in stack.notes if "lie outside of the chain" not in note]
    structure = replace(main, layers=tuple(sites), starts=tuple(starts[1:]))
    return Followed(
        structure=structure,
        whole=whole,
        unproved=unproved,
        notes=[f"the model has {len(stacks)} stacks: {told}", *notes],
    )


def _numbered(followed: Followed, model: nn.Module, first: int | None) -> Followed:
    """Number a pipeline stage's layers as in the whole model. By default, read ``first`` from the layers' path."""
    if (structure := followed.structure) is None:
        return followed
    first = first_number(model, structure.layers[0].path) if first is None else first
    layers = tuple(replace(site, index=first + site.index) for site in structure.layers)
    structure = replace(structure, layers=layers, starts=tuple(first + start for start in structure.starts))
    unproved = frozenset(first + layer for layer in followed.unproved)
    return replace(followed, structure=structure, unproved=unproved)


def _proved(
    model: nn.Module, small: Inputs, structure: Structure, *, reads_tokens: bool = True
) -> tuple[Structure, bool]:
    """Return the layers with added notes, and ``Followed.whole``."""
    sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    if not sharded and not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):  # ZeRO 3
        # The proof needs a backward pass.
        try:
            structure = prove(structure, small, model, reads_tokens=reads_tokens)
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else one_line(error)
            note = f"Lamina does not record the residual stream: {reason}"
            return replace(structure, notes=[*structure.notes, note]), False
    return structure, True


def _calls(model: nn.Module, arguments: Arguments) -> Iterator[Inputs]:
    """Yield arguments for trial calls of the model: first small parts of the batch, last the whole batch."""
    inputs, main = tensors_of(arguments), getattr(model, "main_input_name", None)
    cut = {
        name: value[:1, :_TOKENS] if is_tokens(value) else value[:1] if value.ndim else value
        for name, value in ((name, value.detach()) for name, value in inputs.items())
    }
    first = {name: cut[name] for name in ([main] if main in inputs else list(inputs)[:1])}
    towers = any(value.is_floating_point() and value.ndim > 2 for name, value in inputs.items() if name not in first)
    yield from filter(None, (cut, inputs, first) if towers else (first, cut, inputs))
    if len(inputs) < len(arguments):
        yield cast(Inputs, dict(arguments))  # the proof handles the other arguments


def tensors_of(arguments: Arguments) -> Inputs:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def batch_of(arguments: Arguments) -> Inputs:
    """Return the tensors among a call's arguments, including tensors inside mappings."""
    nested = [tensors_of(value) for value in arguments.values() if isinstance(value, Mapping)]
    return {name: value for inputs in (tensors_of(arguments), *nested) for name, value in inputs.items()}


def _holds_tensors(value: object) -> TypeGuard[MutableMapping[str, object]]:
    return isinstance(value, MutableMapping) and bool(tensors_of(value))


def _unflattened(forward: Callable[..., Output], arguments: Arguments, /, **inputs: torch.Tensor) -> Output:
    """Call a model with the original arguments, but replace tensors by the given tensors with the same names."""
    given = {}
    for name, value in arguments.items():
        if _holds_tensors(value):
            value = copy.copy(value)
            value.update({key: inputs[key] for key in tensors_of(value) if key in inputs})
        given[name] = inputs.get(name, value)
    return forward(**given)


def is_tokens(value: torch.Tensor) -> bool:
    return value.ndim == 2 and not value.is_floating_point()
