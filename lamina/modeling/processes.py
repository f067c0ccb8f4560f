"""Start, coordinate and end the processes of a distributed job."""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from lamina.errors import UserError, mark_reported
from lamina.jobs.files import disk_full

logger = logging.getLogger(__name__)
T = TypeVar("T")
GONE = "another process of the run has ended"
PATIENCE = timedelta(hours=2)  # a process may wait for another to read a corpus or to write a large checkpoint


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process of a distributed run, with methods to communicate with the other processes.

    The processes agree through CPU collectives, for example on when to stop. So no process waits for a device, or for a
    process that has ended.
    """

    rank: int = 0  # the number of this process
    size: int = 1  # the number of processes
    local_rank: int = 0
    parallel: str = "ddp"
    tensor: int = 1  # the number of processes that split each layer's matrices (tensor parallelism)
    group: Any = None

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        return self.size // self.tensor

    @property
    def first(self) -> bool:
        """Return whether this process writes the run's folder."""
        return self.rank == 0

    def apart(self) -> Processes:
        """Return a copy with separate CPU collectives, for another thread. Call this method in all processes."""
        return self if self.size == 1 else replace(self, group=distributed.new_group(backend="gloo", timeout=PATIENCE))

    def anyone(self, mine: bool) -> bool:
        """Return whether ``mine`` is true in at least one process."""
        if self.size == 1:
            return mine
        flag = torch.tensor([float(mine)])
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def mean(self, value: float) -> float:
        """Return the mean of a number over all processes. The mean is finite only if all numbers are finite."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        distributed.all_reduce(total, group=self.group)
        return float(total) / self.size

    def everyones(self, value: T) -> list[T]:
        """Return the ``value`` of every process, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes on the CPU, concatenated along the first axis."""
        return torch.cat(self.everyones(tensor.detach().cpu()))

    def together(self, act: Callable[[], T]) -> T:
        """Call ``act`` in every process. If ``act`` fails in any process, raise the first error in all processes."""
        answer, error = _attempt(act)
        self._raise_first(error)
        return cast(T, answer)

    def by_first(self, act: Callable[[], T]) -> T:
        """Call ``act`` in the first process. Return the result, or raise the error, in all processes."""
        answer, error = _attempt(act) if self.first else (None, None)
        self._raise_first(error)
        if self.size > 1:
            answers = [answer]
            distributed.broadcast_object_list(answers, group_src=0, group=self.group)
            answer = answers[0]
        return cast(T, answer)

    def first_per_host(self, act: Callable[[], T]) -> T:
        """Call ``act`` in one process per host, which may write files, and then in the other processes of the host."""
        if self.size == 1:
            return act()
        answer, error = _attempt(act) if self.local_rank == 0 else (None, None)
        self._raise_first(error)
        return self.together(act if self.local_rank != 0 else lambda: cast(T, answer))

    def _raise_first(self, mine: BaseException | None) -> None:
        if self.size == 1:
            if mine is not None:
                raise mine
            return
        errors = self.everyones(None if mine is None else _sendable(mine))
        failed = next((rank for rank, error in enumerate(errors) if error is not None), None)
        if failed is None:
            return
        if failed == self.rank and mine is not None:
            if not self.first:
                mark_reported(mine)
            raise mine
        error = errors[failed]
        assert error is not None
        if isinstance(error, UserError) and failed > 0:
            error = UserError(f"process {failed}: {error}")
        if not self.first:
            mark_reported(error)  # the first process prints the error for all
        raise error


ALONE = Processes()


def lost_another(error: BaseException | None) -> bool:
    """Return whether the exception arose because another process ended."""
    while error is not None:
        if isinstance(error, distributed.DistNetworkError) or "gloo/transport" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _attempt(act: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return act(), None
    except (Exception, KeyboardInterrupt) as error:
        return None, error


def _sendable(error: BaseException) -> BaseException:
    """Return an equivalent exception that another process can unpickle."""
    if isinstance(error, UserError):
        return UserError(str(error))
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename)
    if disk_full(error):  # a library's own type may not be picklable
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    return RuntimeError(f"on {socket.gethostname()}: {type(error).__name__}: {error}")


def launched() -> tuple[int, int, int, int]:
    """Return (rank, world size, local rank, local world size) from the environment variables of torchrun or accelerate.

    Raises UserError for invalid values.
    """
    values = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "")):
        text = os.environ.get(name, default) or (os.environ.get("WORLD_SIZE") or "1")
        if not text.isdigit():
            raise UserError(
                f"{name}: {text!r} in the environment is no whole number. Unset {name}, or start with torchrun."
            )
        values.append(int(text))
    rank, size, local_rank, local_size = values
    if size < 1 or rank >= size:
        raise UserError(f"RANK: {rank} does not fit WORLD_SIZE = {size}. Set RANK from 0 to {size - 1}.")
    return rank, size, local_rank, local_size


def reported_once(act: Callable[[], T]) -> T:
    """Call ``act``. If all processes raise UserError, only the first process prints the message."""
    try:
        return act()
    except UserError as error:
        if launched()[0] > 0:
            mark_reported(error)
        raise


def device_of(device: str) -> str:
    """Return "cpu", "cuda" or "mps" for a setting. Raises UserError for a device that this machine does not have."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.insert(0, "cuda")
    if torch.backends.mps.is_available():
        devices.insert(0, "mps")
    if device == "auto":
        return devices[0]
    if device not in devices:
        raise UserError(f"device: this machine has no {device!r} (allowed here: auto, {', '.join(sorted(devices))})")
    return device


@contextmanager
def join_processes(device: str, parallel: str, tensor: int = 1) -> Iterator[Processes]:
    """Join the processes that torchrun or accelerate launch has started. Leave the group when the context ends.

    Args:
        device: "auto", "cpu", "cuda" (one GPU per process) or "mps".
        parallel: "auto", "ddp" or "fsdp2".
        tensor: the number of processes that split each layer's matrices (tensor parallelism).

    Raises:
        UserError: for more processes than GPUs, for several processes on "mps", or if the processes cannot connect.
        OSError: if another process has ended. The other process has printed the reason.
    """
    rank, size, local_rank, local_size = launched()
    device, parallel = reported_once(lambda: (device_of(device), parallel_of(parallel)))
    if tensor > 1 and (size % tensor or parallel != "fsdp2"):
        raise UserError(
            f"tensor_parallel: {tensor} does not work with {size} processes and {parallel}. Give a divisor of {size}, "
            "and set --parallel fsdp2."
        )
    if size == 1:
        if {"MASTER_PORT", "ACCELERATE_USE_CPU"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
            logger.warning(
                "accelerate launch --cpu has started a single process. To start several processes, use torchrun or "
                "docs/accelerate/ddp.yaml."
            )
        yield ALONE
        return
    if device == "mps":
        raise UserError("device: 'mps' trains in only one process. Start one process, or set device to cpu or cuda.")
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if local_size > gpus:
            fix = f"Start at most {gpus}, or add --device cpu."
            raise UserError(f"WORLD_SIZE: this host has {local_size} processes, but only {gpus} GPUs. {fix}")
        torch.cuda.set_device(local_rank)
    ours = not distributed.is_initialized()
    atexit.unregister(_settle)
    atexit.register(_settle)
    if ours:
        try:
            distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
        except (RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise UserError(f"WORLD_SIZE: {size} processes did not connect ({why}). Check MASTER_ADDR.") from error
    group = distributed.new_group(backend="gloo", timeout=PATIENCE) if device == "cuda" else None
    failed = True
    try:
        ranks = {"rank": rank, "size": size, "local_rank": local_rank}
        yield Processes(**ranks, parallel=parallel, tensor=tensor, group=group)
        failed = False
    except Exception as error:
        if not lost_another(error):
            raise
        raise OSError(errno.ECONNRESET, GONE) from error
    finally:
        if failed:  # leave at once: the other processes may wait in another collective
            atexit.unregister(_leave)
        elif ours:  # DTensor's caches keep FSDP2's group, and a later run in another group would hang
            atexit.register(_leave) if parallel == "fsdp2" else _leave()


def _leave() -> None:
    if distributed.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            distributed.destroy_process_group()


def _settle() -> None:
    """Wait until gloo's threads are idle, before the interpreter ends.

    A thread that still releases a collective's tensors would abort the process, and torchrun would report a failure.
    """
    gc.collect()  # an unreferenced process group waits for its own threads
    time.sleep(0.2)  # DTensor's caches keep FSDP2's group; the group's threads need a millisecond


def parallel_of(parallel: str) -> str:
    """Return "ddp" or "fsdp2". The setting "auto" means FSDP if the configuration of accelerate launch asks for FSDP.

    Also turn off accelerate's own sharding, because Lamina shards the model before Trainer sees the model. Raises
    UserError if accelerate's configuration has other plugins.
    """
    switches = {name: os.environ.pop(f"ACCELERATE_USE_{name}", "") for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM")}
    requested = [name for name, value in switches.items() if value.lower() in ("1", "true", "yes")]
    if requested and requested != ["FSDP"]:
        raise UserError(
            f"accelerate's configuration asks for {', '.join(requested)}. Remove the plugin from the configuration, "
            "or choose FSDP version 2."
        )
    if requested and (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UserError(f"fsdp_version: {version!r} in accelerate's configuration. Set fsdp_version to 2.")
    if requested and parallel == "ddp":
        raise UserError("parallel: 'ddp', but accelerate's configuration asks for FSDP. Set parallel to auto or fsdp2.")
    if parallel != "auto":
        return parallel
    return "fsdp2" if requested else "ddp"
