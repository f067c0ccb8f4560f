"""The content of environment.json: the job's kind, the machine, and the versions of the packages."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from lamina.core.json_types import Json

_DRIVER = Path("/proc/driver/nvidia/gpus")
_WRITTEN = ("studies/records", "docs/results")  # files that studies write, which do not make the revision dirty


def environment(seed: int, kind: str = "") -> Json:
    versions = {"lamina": sys.modules["lamina"].__version__}  # a checkout has a version even if it is not installed
    for package in ("torch", "transformers", "accelerate", "tokenizers", "numpy", "pyarrow", "trl", "peft"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    gpus = {"gpus": names} if (names := gpu_names()) else {}
    program = Path(sys.argv[0])
    program = program.parent if program.name == "__main__.py" else program  # python -m lamina
    return {
        **({"kind": str(kind)} if kind else {}),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"platform": platform.platform(), "processor": _processor(), "cores": os.cpu_count(), **gpus},
        "seed": seed,
        "git_revision": git_revision(),
        "command": " ".join([program.name, *sys.argv[1:]]),
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def git_revision() -> str | None:
    """Return the git revision of Lamina's source, with "-dirty" if files have changed, or None outside a checkout."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--"]
    command += [":(top)", *(f":(top,exclude){folder}" for folder in _WRITTEN)]
    try:
        package = Path(__file__).resolve().parent
        status = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    revision = re.search(r"^# branch\.oid ([0-9a-f]{12})", status, re.MULTILINE)
    changed = any(not line.startswith("#") for line in status.splitlines())
    return None if revision is None else revision[1] + "-dirty" * changed


def gpu_names() -> list[str]:
    """Return the names of the NVIDIA GPUs from the driver's files, without torch."""
    told = [path.read_text(encoding="utf-8") for path in sorted(_DRIVER.glob("*/information"))]
    return [name[1] for text in told if (name := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE))]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
