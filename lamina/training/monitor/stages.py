"""Find the processes of a pipeline stage, and the number of its first layer in the whole model."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from torch import distributed, nn

from lamina.errors import UserError
from lamina.modeling.processes import Processes
from lamina.training.monitor.writers import WatchSettings


def processes_of(model: nn.Module, settings: WatchSettings) -> tuple[Processes, distributed.ProcessGroup | None]:
    """Return the processes that train the same layers, and their group (None if all do). Call this in all processes."""
    if not (distributed.is_available() and distributed.is_initialized() and (size := distributed.get_world_size()) > 1):
        return Processes(), None
    group = None if distributed.get_backend() == "gloo" else distributed.new_group(backend="gloo")
    processes = Processes(rank=distributed.get_rank(), size=size, group=group)
    names = [name for name, _ in model.named_parameters()] if isinstance(model, nn.Module) else []
    part = settings.first_layer, sha256(" ".join(names).encode()).hexdigest()
    every = processes.everyones((settings.output, part))
    if len({part for _, part in every}) == 1:
        return processes, None
    folders = dict.fromkeys(folder for folder, _ in every)
    if len(set(every)) > len(folders):
        raise UserError(
            f"output: processes that train different layers share {settings.output!r}. Give each pipeline stage its "
            'own folder: output=f"runs/mine/stage-{stage}"'
        )
    groups = {at: [rank for rank, (folder, _) in enumerate(every) if folder == at] for at in folders}
    made: dict[str, tuple[Any, Any]] = {
        at: (distributed.new_group(ranks, backend="gloo"), distributed.new_group(ranks)) for at, ranks in groups.items()
    }
    ranks, (group, tensors) = groups[settings.output], made[settings.output]
    return Processes(rank=ranks.index(processes.rank), size=len(ranks), group=group), tensors


def first_number(model: nn.Module, path: str) -> int:
    """Return the number in the path of a stage's first layer, or 0 if there is none or a smaller one exists."""
    holder, _, name = path.rpartition(".")
    if not name.isdecimal():
        return 0
    # stages may use None or Identity in place of other stages' layers
    others = [
        other for other, module in model.get_submodule(holder).named_children() if type(module) is not nn.Identity
    ]
    return 0 if any(other.isdecimal() and int(other) < int(name) for other in others) else int(name)
