"""Finding a model's layers from the arguments of its first training step, without leaving a trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lamina.errors import UserError, one_line
from lamina.probes.structure.discovery import find_structure
from lamina.probes.structure.hooks import forward
from lamina.probes.structure.proof import prove
from lamina.probes.structure.sites import Structure
from lamina.training.monitor.scheduled_probes import undisturbed

Inputs = dict[str, torch.Tensor]
_TOKENS = 8  # of the small pass


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A model's layers, or why they could not be followed.

    Attributes:
        structure: None where no layers were found.
        whole: whether the stream itself was proved to be what is watched; the parameters are placed in any case.
        notes: for the user, a line each.
    """

    structure: Structure | None
    whole: bool = False
    notes: list[str] = field(default_factory=list)


def bare(model: nn.Module) -> tuple[nn.Module, str | None]:
    """The model in the usual wrappers (DDP, DataParallel, DeepSpeed, torch.compile); and which wrapper compiles it."""
    compiled = None
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model, compiled = inner, "torch.compile"
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            model = model.module  # type: ignore[assignment]
        else:
            return model, compiled


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is compiled, in place or in a wrapper: hooks inside it are not called."""
    return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())


def named_inputs(model: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> Inputs:
    """The tensors among a call's arguments, by the names of the forward pass' parameters."""
    try:
        signature = inspect.signature(model.forward)
        named = dict(signature.bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        named = dict(kwargs)
    else:
        rest = [name for name, known in signature.parameters.items() if known.kind is known.VAR_KEYWORD]
        for name in rest:  # whatever it is called: **kwargs, **batch
            named |= named.pop(name, {})
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def main_input(model: nn.Module) -> str:
    """The name of a model's first input."""
    names = list(inspect.signature(model.forward).parameters)
    return str(getattr(model, "main_input_name", names[0] if names else "input_ids"))


def called(module: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> tuple[nn.Module, Inputs]:
    """The module that names the tensors of a call, and these: a wrapper may pass on ``*args`` that it has no name for.

    Only a module that holds all of the wrapper's parameters is looked into.
    """
    while not (inputs := named_inputs(module, args, kwargs)):
        count = sum(1 for _ in module.parameters())
        inner = [child for child in module.children() if sum(1 for _ in child.parameters()) == count]
        if len(inner) != 1:
            break
        module = inner[0]
    return module, inputs


def follow(model: nn.Module, inputs: Inputs, *, layers: str | None = None) -> Followed:
    """Find a model's layers with a small part of a batch; never raises, since training goes on in any case.

    The passes run in evaluation mode and leave gradients and random generators as they were. The user's own hooks on
    the model's modules are called by them, too.
    """
    with undisturbed(model), _resharded(model), _uncompiled(model):
        problem = "it was called without a tensor" if not inputs else ""
        for small in _candidates(model, inputs):
            try:
                with torch.no_grad():
                    forward(model, small)
            except Exception as error:
                problem = one_line(error)[:160]
                continue
            found = _found(model, small, layers)
            return replace(found, notes=[_as_setting(note) for note in found.notes])
    kind = type(model).__name__
    return Followed(
        structure=None,
        notes=[f"layers: {kind} could not be run on a part of its own batch ({problem}), so only totals are recorded"],
    )


def _found(model: nn.Module, small: Inputs, layers: str | None) -> Followed:
    try:
        structure = find_structure(model, small, layers=layers)
    except Exception as error:  # any architecture may come: what goes wrong must not end its training
        text = str(error) if isinstance(error, UserError) else f"layers: {one_line(error)}"
        return Followed(structure=None, notes=[f"{text}; only totals recorded"])
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return Followed(structure=structure, whole=True, notes=structure.notes)  # the proof needs a backward pass
    try:
        proved = prove(structure, small, model)
        return Followed(structure=proved, whole=True, notes=proved.notes)
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else one_line(error)
        note = f"the stream is not recorded, gradients and updates are: {reason}"
        return Followed(structure=structure, notes=[*structure.notes, note])


def _as_setting(note: str) -> str:
    """A probe's note with the setting of ``lamina.watch`` in the place of the command line's flag."""
    return note.replace("--layers PATH", "layers=PATH").replace("--layers, another list", "layers=PATH of another list")


def _uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """Run compiled parts as they are written: hooks are called, and nothing is compiled for the small passes."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


@contextmanager
def _resharded(model: nn.Module) -> Iterator[None]:
    """Shard FSDP2's parameters again afterwards: a forward pass alone leaves the root's gathered."""
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _candidates(model: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """The main input alone, all inputs cut small, and all as they are."""
    main = getattr(model, "main_input_name", None)
    names = [main] if main in inputs else list(inputs)[:1]
    small = {name: _small(value) for name, value in inputs.items()}
    for chosen in ({name: small[name] for name in names}, small, inputs):
        if chosen:
            yield chosen


def _small(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    if value.ndim == 2 and not value.is_floating_point():
        return value[:1, :_TOKENS]
    return value[:1] if value.ndim else value


def items_of(inputs: Mapping[str, torch.Tensor]) -> int:
    """The tokens of a batch, or its items if it has none."""
    for value in inputs.values():
        if value.ndim == 2 and not value.is_floating_point():
            return value.numel()
    return len(next(iter(inputs.values()))) if inputs and next(iter(inputs.values())).ndim else 0
