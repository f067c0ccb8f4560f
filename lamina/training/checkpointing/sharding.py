"""Shard a model over processes with FSDP2, and store its weights and optimizer state by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.modeling.modeling_lamina import LaminaModel
from lamina.modeling.processes import Processes
from lamina.modeling.streams_lamina import LaminaWiring
from lamina.modeling.wiring_lamina import LaminaNorm, Residual

STATES = "states.safetensors"
Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors by name."""
_SCALARS, _TRAINED, _PARTIAL = "_lamina_scalars", "_lamina_only_trained", "_lamina_partial"


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this process holds."""
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def shard(model: PreTrainedModel, processes: Processes, device: str, *, bf16: bool) -> None:
    """Shard a model's parameters with FSDP2, block by block.

    The optimizer's weights stay in float32, as do norms, learned scales, the residual stream and the embedding. Learned
    scalars become vectors of one element, because FSDP2 cannot shard scalars. Checkpoints still store scalars. With
    tensor parallelism, groups of processes first split the matrices of linear layers, as transformers does.

    Args:
        bf16: whether to gather the blocks' matrices in bfloat16, which gives the same result as mixed precision in one
            process.
    """
    whole = init_device_mesh(device, (processes.data_size, processes.tensor), mesh_dim_names=("data", "tensor"))
    if processes.tensor > 1:
        _share_matrices(model, whole["tensor"])
    mesh = whole["data"]
    float32 = MixedPrecisionPolicy(cast_forward_inputs=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    _scalars_to_vectors(model)
    for block in _blocks(model):
        norms: list[nn.Module] = [
            m for m in block.modules() if isinstance(m, LaminaNorm | LaminaWiring) and any(True for _ in m.parameters())
        ]
        sublayers = [m for m in block.modules() if isinstance(m, Residual)]
        scales = {id(p) for sublayer in sublayers for p in sublayer.parameters(recurse=False)}
        small = scales | {id(parameter) for norm in norms for parameter in norm.parameters()}
        if bf16 and all(p.ndim >= 2 or id(p) in small for p in block.parameters()):
            if norms:  # one unit, so that one all-gather serves all norms
                fully_shard(norms, mesh=mesh, mp_policy=float32)
            if scales:  # the block's own unit then has only the scales
                fully_shard([sublayer.module for sublayer in sublayers], mesh=mesh, mp_policy=policy)
            fully_shard(block, mesh=mesh, mp_policy=float32 if scales else policy)
        else:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _share_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the linear layers by columns or rows over the processes, as transformers' tensor parallelism does."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism  # since transformers 5.22

    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_plan="auto", tp_size=mesh.size()))
    # transformers would sum these gradients after each micro-batch, and count the earlier ones again
    inside = {name for name, style in plan.items() if style == "replicated_with_grad_allreduce"}
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name not in inside})
    model.tie_weights()
    setattr(model, _PARTIAL, ([norm for name, norm in model.named_modules() if name in inside], mesh.get_group()))


def sum_partial(model: nn.Module) -> None:
    """Sum the gradients of norms in attention heads over the processes that share a norm, once per step."""
    norms, group = getattr(model, _PARTIAL, ((), None))
    for gradient in [p.grad for norm in norms for p in norm.parameters() if p.grad is not None]:
        torch.distributed.all_reduce(gradient.to_local(), group=group)


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return a Lamina model's blocks, or the modules that a transformers model names in ``_no_split_modules``."""
    if isinstance(body := getattr(model, "model", model), LaminaModel):
        return list(body.layers)
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def _scalars_to_vectors(model: nn.Module) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    for name in names:
        owner, _, own_name = name.rpartition(".")
        scalar = model.get_parameter(name)
        vector = nn.Parameter(scalar.detach().reshape(1), requires_grad=scalar.requires_grad)
        setattr(model.get_submodule(owner), own_name, vector)
    setattr(model, _SCALARS, frozenset(names))


def _scalars(model: nn.Module) -> frozenset[str]:
    return getattr(model, _SCALARS, frozenset())


def _scalar(vector: torch.Tensor) -> torch.Tensor:
    return (vector.full_tensor() if isinstance(vector, DTensor) else vector).detach().reshape(())


def _set_scalar(vector: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    local_part(vector).fill_(value.item())  # the part is empty in most processes
    return vector


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Reshard parameters that stay gathered after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict, with each tied weight only once. All processes must call this function.

    The tensors are the model's own, except that scalars are copies. After you change scalars, call ``set_scalars``. If
    ``only_trained`` was called, the result has only the trained weights.
    """
    reshard(model)
    tied: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), name)
    first, second = set(tied.values()), {n for n, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {name: value for name, value in model.state_dict().items() if name in first or name not in second}
    if is_only_trained(model):
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in tensors.items() if name in trained}
    return tensors | {name: _scalar(tensors[name]) for name in sorted(_scalars(model))}


def only_trained(model: nn.Module) -> None:
    """Let checkpoints store only the trained weights, because a run loads frozen weights from their source."""
    setattr(model, _TRAINED, True)


def is_only_trained(model: nn.Module) -> bool:
    return getattr(model, _TRAINED, False)


def set_scalars(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy scalars from the result of ``model_tensors`` into a sharded model."""
    for name in _scalars(model):
        _set_scalar(model.get_parameter(name), tensors[name])


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather a sharded model's tensors on the first process's CPU. All processes must call this function."""
    reshard(model)
    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value.reshape(()) if name in _scalars(model) else value for name, value in state.items()}


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the CPU, and gather sharded tensors. All processes must call this function."""
    parts = {name: tensor.detach() for name, tensor in tensors.items()}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).cpu().contiguous() for name, p in parts.items()}


@torch.no_grad()
def set_whole(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into a tensor that may be sharded. All processes must call this function."""
    value = value.reshape(tensor.shape)  # a sharded scalar is a vector
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(value)


@contextmanager
def own_class(model: nn.Module) -> Iterator[None]:
    """Give a model its original class inside the context, because the class from FSDP2 must not be saved."""
    kind = type(model)
    if isinstance(model, FSDPModule):
        object.__setattr__(model, "__class__", kind.__mro__[kind.__mro__.index(FSDPModule) + 1])
    try:
        yield
    finally:
        object.__setattr__(model, "__class__", kind)


def copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Copy tensors to the CPU, or this process's part of sharded tensors. Copy a tensor with two names only once."""
    copied: dict[tuple[int, torch.Size], torch.Tensor] = {}
    made: Tensors = {}
    for name, tensor in tensors.items():
        key = (local_part(tensor).data_ptr(), tensor.shape)
        if key not in copied or not tensor.numel():
            copied[key] = tensor.detach().to("cpu", copy=True)
        made[name] = copied[key]
    return made


def write_shards(tensors: Mapping[str, torch.Tensor], folder: Path, group: ProcessGroup | None = None) -> None:
    """Write sharded tensors, with one safetensors file per process. If one process fails, all raise the same error."""
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=storage, process_group=group)
    except CheckpointException as failed:  # CheckpointException is not an Exception, and hides the cause
        raise next(iter(failed.failures.values()))[0] from None


class _Reader(HuggingFaceStorageReader):
    """Read only the given safetensors files, and not all files in the folder."""

    def __init__(self, files: Sequence[Path]):
        super().__init__(str(files[0].parent) if files else ".")
        self.fs.ls = lambda path: [str(file) for file in files]  # type: ignore[method-assign]


def read_tensors(tensors: dict[str, torch.Tensor], files: Sequence[Path], *, alone: bool) -> None:
    """Fill tensors in place from safetensors files, which any number of processes may have written."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that only one process loads
        try:
            load(tensors, storage_reader=_Reader(files), no_dist=alone)
        except CheckpointException as failed:
            raise next(iter(failed.failures.values()))[0] from None


def check_shapes(tensors: Mapping[str, torch.Tensor], files: Sequence[Path], folder: Path) -> None:
    """Raise UserError if a checkpoint's files lack a tensor, or hold a tensor of another shape."""
    stored = shapes(files)
    for name, tensor in tensors.items():
        if name not in stored:
            raise UserError(
                f"resume: {str(folder)!r} has no tensor {name}, so the checkpoint belongs to another model. Give "
                "another --output."
            )
        if tuple(tensor.shape) != stored[name]:
            raise UserError(
                f"resume: {name} in {str(folder)!r} has the shape {list(stored[name])}, but the model has "
                f"{list(tensor.shape)}, so the checkpoint belongs to another model. Give another --output."
            )


def shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    metadata = _Reader(files).read_metadata()
    return {name: tuple(entry.size) for name, entry in metadata.state_dict_metadata.items()}  # type: ignore[union-attr]


def optimizer_tensors(model: nn.Module, optimizer: Any) -> tuple[dict[str, torch.Tensor], Json]:
    """Return an optimizer's state by parameter name: first the shardable tensors, then all other values."""
    reshard(model)
    names, scalars = _names(model), _scalars(model)
    tensors: dict[str, torch.Tensor] = {}
    rest: Json = {"state": {}, "groups": []}
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        rest["groups"].append({**{k: v for k, v in group.items() if k != "params"}, "params": members})
        for name, parameter in zip(members, group["params"], strict=True):
            rest["state"][name] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    if isinstance(value, DTensor) and value.shape != parameter.shape:
                        raise UserError(
                            f"trainer.optim: sharded checkpoints can't hold the optimizer's {key}, because the shapes "
                            f"of {key} and the weight differ. Use adamw_torch, or --parallel ddp."
                        )
                    if name in scalars:
                        rest["state"][name][key] = _scalar(value).cpu()
                    else:
                        tensors[f"{name}/{key}"] = value
                else:
                    rest["state"][name][key] = value
    return tensors, rest


def load_optimizer(
    model: nn.Module, optimizer: Any, files: Sequence[Path], rest: Mapping[str, Any], *, alone: bool
) -> None:
    """Restore an optimizer from the result of ``optimizer_tensors``. Raises UserError for another model's optimizer."""
    reshard(model)
    names, scalars = _names(model), _scalars(model)
    state: dict[int, Json] = {}
    groups: list[Json] = []
    tensors: dict[str, torch.Tensor] = {}
    stored = shapes(files) if files else {}
    by_name: dict[str, list[str]] = {}
    for entry in stored:
        by_name.setdefault(entry.rpartition("/")[0], []).append(entry)
    named = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if named != [list(saved["params"]) for saved in rest["groups"]]:
        raise UserError(
            "resume: the checkpoint belongs to another model, because the checkpoint's optimizer has other weights. "
            "Give another --output."
        )
    for group, members, saved in zip(optimizer.param_groups, named, rest["groups"], strict=True):
        first = len(state)
        for name, parameter in zip(members, group["params"], strict=True):
            entries = dict(rest["state"][name])
            for key, value in entries.items() if name in scalars else ():
                if isinstance(value, torch.Tensor) and key != "step":
                    entries[key] = _set_scalar(torch.zeros_like(parameter).detach(), value)
            for entry in by_name.get(name, ()):
                shape = stored[entry]
                tensor = torch.zeros_like(parameter) if shape == parameter.shape else torch.zeros(shape)
                tensors[entry] = entries[entry.rpartition("/")[2]] = tensor.detach()
            state[len(state)] = entries
        groups.append({**{k: v for k, v in saved.items() if k != "params"}, "params": list(range(first, len(state)))})
    if tensors:
        read_tensors(tensors, files, alone=alone)
    optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})


def write_whole(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / STATES)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}
