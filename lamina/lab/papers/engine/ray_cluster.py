"""Run a study on a Ray cluster, with one Ray task for each process of a run.

A task starts a separate process, as Lamina does without Ray, so the numbers are the same. If Ray loses a worker, Ray
runs the task again, and training resumes from the last checkpoint. All machines need Lamina and access to the folder of
runs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lamina.core.extras import install
from lamina.core.json_types import Json
from lamina.errors import UserError, one_line
from lamina.jobs.files import read_result
from lamina.studies import processes
from lamina.studies.running import Ended, Executor
from lamina.studies.task import Task
from lamina.studies.worker import BUSY

RETRIES = 3
"""How often Ray repeats a run after the loss of a worker."""
ROUND_SECONDS = 0.5
REACH_SECONDS = 5.0
GRACE_SECONDS = 60.0
_PASSED_ON = ("LAMINA_", "HF_", "OMP_", "MKL_", "TOKENIZERS_", "WANDB_", "TRACKIO_")


def executor(*, address: str | None, gpus: float, processes: int, cpus: int) -> Executor:
    """Return a function that executes runs on a Ray cluster.

    Args:
        address: the cluster's address: HOST:PORT, ray://HOST:PORT, or auto. None starts a cluster on this machine.
        gpus: the number of GPUs per process.
        processes: the number of processes per run.
        cpus: the number of CPUs per process.
    """

    def execute(trials: Mapping[str, Task], *, workers: int, ended: Ended, tick: Callable[[list[str]], None]) -> None:
        with _cluster(address, workers * cpus * processes) as ray:
            _Runs(ray, trials, {"gpus": gpus, "processes": processes, "cpus": cpus}).run(ended, tick)

    return execute


class _Runs:
    def __init__(self, ray: Any, trials: Mapping[str, Task], shares: Json):
        self.ray, self.trials, self.shares = ray, trials, shares
        self.environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        self.running: dict[Any, str] = {}

    def run(self, ended: Ended, tick: Callable[[list[str]], None]) -> None:
        """Execute all runs. At KeyboardInterrupt, running processes first save a checkpoint."""
        for name in self.trials:
            self._submit(name)
        try:
            while self.running:
                done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=ROUND_SECONDS)
                for reference in done:
                    self._collect(reference, ended)
                tick(list(self.running.values()))
        except KeyboardInterrupt:
            self._cancel(ended)
            raise

    def _submit(self, name: str) -> None:
        task, shares = self.trials[name], self.shares
        request = task.to_request()
        request["settings"]["output"] = str(task.folder.resolve())
        request["directory"] = str(Path.cwd())  # paths in the settings are relative to this folder
        alone = shares["processes"] == 1
        remote = self.ray.remote(run_alone if alone else run_together).options(
            max_retries=RETRIES,
            num_cpus=shares["cpus"] if alone else 0,
            num_gpus=shares["gpus"] if alone else 0,
            name=name,
        )
        self.running[remote.remote(request, self.environment, *(() if alone else (shares,)))] = name

    def _collect(self, reference: Any, ended: Ended) -> None:
        name = self.running.pop(reference)
        try:
            code = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            code, why = 1, f"the Ray task failed {RETRIES + 1} times: {type(error).__name__}"
        else:
            why = f"the worker process ended with exit code {code}"
        if code == BUSY:  # another driver, or a lost worker's process, still executes this run
            time.sleep(ROUND_SECONDS)
            return self._submit(name)
        result = read_result(self.trials[name].folder)
        return ended(name, result or {"status": "failed", "reason": why})

    def _cancel(self, ended: Ended) -> None:
        for reference in self.running:
            self.ray.cancel(reference, recursive=True)
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: do not wait
            self.ray.wait(list(self.running), num_returns=len(self.running), timeout=GRACE_SECONDS)
        for name in self.running.values():
            stopped: Json = {"status": "interrupted", "reason": "stopped"}
            ended(name, read_result(self.trials[name].folder) or stopped)


def run_alone(request: Json, environment: Mapping[str, str]) -> int:
    """Execute one process of a run on this node of the cluster. Returns the exit code."""
    process = processes.Alone(
        {
            **request,
            "environment": {**os.environ, **environment},
            "path": list(sys.path),
            "argv": ["lamina"],
            "directory": request["directory"] if Path(request["directory"]).is_dir() else str(Path.cwd()),
        }
    )
    try:
        while (code := process.exit_code()) is None:
            time.sleep(ROUND_SECONDS / 5)
    except BaseException:  # canceled: the trial saves a checkpoint
        process.terminate()
        with contextlib.suppress(BaseException):
            process.process.wait(GRACE_SECONDS)
        raise
    return code


def run_together(request: Json, environment: Mapping[str, str], shares: Json) -> int:
    """Execute a run of several processes, each with its own CPUs and GPUs. Returns the largest exit code."""
    ray = importlib.import_module("ray")
    groups = importlib.import_module("ray.util.placement_group")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    size = int(shares["processes"])
    bundle = {"CPU": shares["cpus"], **({"GPU": shares["gpus"]} if shares["gpus"] else {})}
    group = groups.placement_group([bundle] * size, strategy="PACK")
    try:
        ray.get(group.ready())
        places = [
            {
                "num_cpus": shares["cpus"],
                "num_gpus": shares["gpus"],
                "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            }
            for rank in range(size)
        ]
        nodes = ray.get([ray.remote(_free_place).options(**place).remote() for place in places])
        references = []
        for rank, place in enumerate(places):
            here = [node for node, _ in nodes]
            launched = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(here[:rank].count(here[rank])),
                "LOCAL_WORLD_SIZE": str(here.count(here[rank])),
                "MASTER_ADDR": here[0],
                "MASTER_PORT": str(nodes[0][1]),
            }
            task = ray.remote(run_alone).options(**place, max_retries=0)
            references.append(task.remote(request, {**environment, **launched}))
        return max(ray.get(references), key=abs)
    finally:
        groups.remove_placement_group(group)


def _free_place() -> tuple[str, int]:
    ray = importlib.import_module("ray")
    with socket.socket() as free:
        free.bind(("", 0))
        return ray.util.get_node_ip_address(), free.getsockname()[1]


@contextlib.contextmanager
def _cluster(address: str | None, cpus: int) -> Iterator[Any]:
    """Connect to a running cluster, or start a cluster on this machine if there is no address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise UserError(f"engine: 'ray' is not installed. Use --engine local, or run: {install('ray')}") from None
    if ray.is_initialized():
        yield ray
        return
    options: Json = {"logging_level": "ERROR", "log_to_driver": False, "ignore_reinit_error": True}
    if address is None:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        options |= {"num_cpus": cpus, "include_dashboard": False, "runtime_env": {"env_vars": environment}}
    else:
        _reach(address)
        options["address"] = address
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises a plain Exception if a busy machine starts too slowly
        reason, fix = "engine: 'ray': Lamina could not start a cluster on this machine", "Use --engine local."
        if address is not None:
            reason, fix = f"address: {address!r}: Lamina cannot reach the cluster", "Check the address and the network."
        raise UserError(f"{reason} ({one_line(error)}). {fix}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise UserError if nothing listens at HOST:PORT. Ray itself would repeat the attempt for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=REACH_SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise UserError(
            f"address: {address!r}: Lamina cannot reach the cluster ({error}). Give HOST:PORT, ray://HOST:PORT, or "
            "auto."
        ) from None
