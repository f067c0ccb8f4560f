"""FSDP2: a model shared out over the processes, its weights and its optimizer's states written and read by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lamina.errors import UserError
from lamina.modeling.modeling_lamina import LaminaNorm, current_key
from lamina.training.execution.processes import Processes

STATES = "states.safetensors"


def shard(model: nn.Module, processes: Processes, device: str, *, bf16: bool) -> None:
    """Share out a model's parameters by FSDP2: every block a unit, the rest (embedding, final norm, readout) another.

    The optimizer's weights stay in float32. With ``bf16`` the blocks' matrices are gathered in bfloat16 and their
    gradients reduced in float32, which is what autocast computes in one process; norms, learned scales and the stream
    keep float32 (a bfloat16 embedding would make a bfloat16 stream of it).
    """
    mesh = init_device_mesh(device, (processes.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.model.layers:  # type: ignore[union-attr]
        norms = [m for m in block.modules() if isinstance(m, LaminaNorm) and m.weight is not None]  # type: ignore[union-attr]
        apart = {id(norm.weight) for norm in norms}
        matrices = all(p.ndim >= 2 or id(p) in apart for p in block.parameters())  # type: ignore[union-attr]
        if bf16 and matrices:
            if norms:  # one unit, so that one all-gather serves them all
                fully_shard(norms, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))  # type: ignore[arg-type]
            fully_shard(block, mesh=mesh, mp_policy=policy)  # type: ignore[arg-type]
        else:
            fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Whether ``shard`` was called on a model."""
    return isinstance(model, FSDPModule)


def settle(model: nn.Module) -> None:
    """Give back what a forward pass without a backward pass leaves gathered: parameters are their shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without the second name of a tied weight: what is stored, in place."""
    settle(model)
    tied: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), name)
    first, second = set(tied.values()), {n for n, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name in first or name not in second}


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A sharded model's whole tensors, on the CPU of the first process (empty elsewhere); all must call it."""
    settle(model)
    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return state


@contextmanager
def own_class(model: nn.Module) -> Iterator[None]:
    """FSDP2 makes a class of its own of a model's, whose files and name must not be saved as the model's."""
    kind = type(model)
    if isinstance(model, FSDPModule):
        object.__setattr__(model, "__class__", kind.__mro__[kind.__mro__.index(FSDPModule) + 1])
    try:
        yield
    finally:
        object.__setattr__(model, "__class__", kind)


def write_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors of sharded ones into a folder through torch.distributed.checkpoint, a safetensors file a process.

    Raises the first process' error in all, OSError where a disk is full.
    """
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=storage)
    except CheckpointException as failed:  # no Exception, and it hides what happened
        raise next(iter(failed.failures.values()))[0] from None


class _Reader(HuggingFaceStorageReader):
    """Reads the given safetensors files, where its base takes every one that lies in the folder."""

    def __init__(self, files: Sequence[Path]):
        super().__init__(str(files[0].parent) if files else ".")
        self.fs.ls = lambda path: [str(file) for file in files]  # type: ignore[method-assign]


def read_tensors(tensors: dict[str, torch.Tensor], files: Sequence[Path], *, alone: bool) -> None:
    """Fill tensors, whole or sharded, in place from a checkpoint's safetensors files, whole or sharded in any way.

    Names are today's; the files may have a former version's.
    """
    stored = {current_key(name): name for name in _stored(files)}
    tensors = {stored.get(name, name): tensor for name, tensor in tensors.items()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process loads alone is what we asked for
        try:
            load(tensors, storage_reader=_Reader(files), no_dist=alone)
        except CheckpointException as failed:
            raise next(iter(failed.failures.values()))[0] from None


def check_shapes(tensors: Mapping[str, torch.Tensor], files: Sequence[Path], folder: Path) -> None:
    """Raise UserError where a tensor is not in a checkpoint's files, or has another shape there."""
    stored = shapes(files)
    for name, tensor in tensors.items():
        if name not in stored:
            raise UserError(f"resume: {str(folder)!r} holds no {name}: the checkpoint is another model's")
        if tuple(tensor.shape) != stored[name]:
            raise UserError(
                f"resume: {name} in {str(folder)!r} is {list(stored[name])}, the model's is {list(tensor.shape)}: the "
                "checkpoint is another model's"
            )


def shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Name (today's) and whole shape of every tensor in safetensors files."""
    return {current_key(name): shape for name, shape in _stored(files).items()}


def _stored(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    metadata = _Reader(files).read_metadata()
    return {name: tuple(entry.size) for name, entry in metadata.state_dict_metadata.items()}  # type: ignore[union-attr]


def optimizer_tensors(model: nn.Module, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state by its parameters' names: what can be sharded, and the rest (step counts, settings)."""
    settle(model)
    names = _names(model)
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {"state": {}, "groups": []}
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        rest["groups"].append({**{k: v for k, v in group.items() if k != "params"}, "params": members})
        for name, parameter in zip(members, group["params"], strict=True):
            rest["state"][name] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    if isinstance(value, DTensor) and value.shape != parameter.shape:
                        raise UserError(
                            f"trainer.optim: its {key} has not its weight's shape, so it can't be saved sharded "
                            "(allowed with --parallel fsdp2: optimizers like adamw_torch)"
                        )
                    tensors[f"{name}/{key}"] = value
                else:
                    rest["state"][name][key] = value
    return tensors, rest


def load_optimizer(
    model: nn.Module, optimizer: Any, files: Sequence[Path], rest: Mapping[str, Any], *, alone: bool
) -> None:
    """Give an optimizer the state that ``optimizer_tensors`` described. Raises UserError where the weights differ."""
    settle(model)
    names = _names(model)
    kept = {current_key(name): entries for name, entries in rest["state"].items()}
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    wanted: dict[str, torch.Tensor] = {}
    stored = shapes(files) if files else {}
    by_name: dict[str, list[str]] = {}
    for entry in stored:
        by_name.setdefault(entry.rpartition("/")[0], []).append(entry)
    named = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    # Found by name, so their order is free: a former version had another.
    saved_names = [[current_key(name) for name in saved["params"]] for saved in rest["groups"]]
    if [sorted(group) for group in named] != [sorted(group) for group in saved_names]:
        raise UserError("resume: the checkpoint's optimizer has other weights: it is another model's")
    for group, members, saved in zip(optimizer.param_groups, named, rest["groups"], strict=True):
        first = len(state)
        for name, parameter in zip(members, group["params"], strict=True):
            entries = dict(kept[name])
            for entry in by_name.get(name, ()):
                shape = stored[entry]
                made = torch.zeros_like(parameter) if shape == parameter.shape else torch.zeros(shape)
                wanted[entry] = entries[entry.rpartition("/")[2]] = made.detach()
            state[len(state)] = entries
        groups.append({**{k: v for k, v in saved.items() if k != "params"}, "params": list(range(first, len(state)))})
    if wanted:
        read_tensors(wanted, files, alone=alone)
    optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})


def write_whole(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write whole tensors into a folder as one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / STATES)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}
