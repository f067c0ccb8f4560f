"""Share code between the benchmarks: model sizes, facts about the machine, reference speeds, and worker processes."""

from __future__ import annotations

import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "smoke": {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64},
    "nano": {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 32, "num_heads": 2, "vocab_size": 257},
    "8m": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_heads": 4, "vocab_size": 4096},
    "30m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_heads": 8, "vocab_size": 4096},
    # 8 blocks and 50M parameters on a vocabulary of 8192, as karpathy/autoresearch trains them.
    "50m": {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8, "num_heads": 5, "vocab_size": 8192},
    "71m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12, "num_heads": 8},
    "130m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_heads": 12},
    "400m": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_heads": 8,
        "vocab_size": 50_280,
    },
}
# The folder of the packages that only the peers need. `make bench-peers` installs these packages.
PEERS = Path(os.environ.get("PEERS") or Path.home() / ".cache" / "lamina" / "bench-peers")


def sizes_of(size: str) -> dict[str, int]:
    return {"vocab_size": 32_000, **SIZES[size]}


def llama_config(size: str, sequence_length: int) -> Any:
    """Return a LlamaConfig with untied embeddings, and with as many heads for keys and values as for queries."""
    from transformers import LlamaConfig

    sizes = sizes_of(size)
    heads = sizes.pop("num_heads")
    return LlamaConfig(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max(sequence_length, 256),
        tie_word_embeddings=False,
    )


def flops_per_token(size: str, sequence_length: int) -> float:
    """Return the FLOPs of forward and backward: 6 per weight outside the embedding, 12 N d T for full attention."""
    s = sizes_of(size)
    d, layers = s["hidden_size"], s["num_hidden_layers"]
    weights = layers * (4 * d * d + 3 * d * s["intermediate_size"]) + d * s["vocab_size"]
    return 6.0 * weights + 12.0 * layers * d * sequence_length


def high_water_mark() -> float:
    """Return the peak memory of this process in MiB."""
    # ru_maxrss would also count the memory of the parent process before exec
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Products:
    """Time square matrix products between the contenders' turns. ``rates`` has the median GFLOP/s by precision."""

    def __init__(self, device: str):
        import torch

        self.device = torch.device(device)
        self.turns: dict[str, list[float]] = {"fp32": [], "bf16": []}
        self.factors = {}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            size, most = 256, 8192 if self.device.type == "cuda" else 2048
            while True:
                # On zeros or ones, a GPU would draw less power and run faster.
                factor = torch.randn(size, size, device=self.device).to(dtype)
                self._seconds(factor, 1)
                if size == most or self._seconds(factor, 1) > 0.06:  # the next size would take more than half a second
                    break
                size *= 2
            self.factors[name] = factor

    def turn(self) -> None:
        for name, factor in self.factors.items():
            repeats = 10 if self.device.type == "cuda" else 1
            seconds = min(self._seconds(factor, repeats) for _ in range(3)) / repeats
            self.turns[name].append(2.0 * len(factor) ** 3 / seconds / 1e9)

    @property
    def rates(self) -> dict[str, float]:
        return {name: statistics.median(turns) for name, turns in self.turns.items()}

    def _seconds(self, factor: Any, repeats: int) -> float:
        wait_for(self.device)
        start = time.perf_counter()
        for _ in range(repeats):
            factor @ factor
        wait_for(self.device)
        return time.perf_counter() - start


def wait_for(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize()


class Contender:
    """A worker process (``benchmarks/worker.py``) that trains one model, and waits between turns."""

    def __init__(self, name: str, precision: str, compile: str, shape: dict[str, Any], threads: int | None):
        self.name, self.precision, self.compile = name, precision, compile
        self.seconds: list[float] = []
        command = [sys.executable, str(ROOT / "benchmarks" / "worker.py")]
        command += [json.dumps({"name": name, "precision": precision, "compile": compile, "threads": threads, **shape})]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    @cached_property
    def ready(self) -> dict[str, Any]:
        """Return the first answer of the worker. Raises Absent if a package is missing or the model cannot run here."""
        return self._answer()

    @property
    def label(self) -> str:
        return f"{self.name}, {self.precision}, {'compiled' if self.compile == 'on' else 'eager'}"

    def turn(self, steps: int) -> None:
        """Train for some steps, and keep the mean seconds per step."""
        self._say({"steps": steps})
        self.seconds.append(self._answer()["seconds"] / steps)

    def stop(self) -> dict[str, Any]:
        """End the process. Return the last answer, which has the peak memory."""
        self._say({"steps": 0})
        last = self._answer()
        self.process.communicate()
        return last

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _say(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):  # any other line is output of a library
                answer = json.loads(line[1:])
                if "absent" in answer:
                    self.process.communicate()
                    raise Absent(answer["absent"])
                return answer
        raise Absent(f"its process ended with code {self.process.wait()}")


class Absent(Exception):
    """A contender cannot take part. The message gives the reason."""


def settings_of_machine() -> dict[str, Any]:
    """Return the date, the revision, the machine and the versions of torch and transformers."""
    import torch
    import transformers

    from lamina.jobs.environment import environment

    where = environment(0)
    machine = {**where["machine"], "cores": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    else:
        machine["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return {
        "date": datetime.date.today().isoformat(),
        "revision": where["git_revision"],
        "machine": machine,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
