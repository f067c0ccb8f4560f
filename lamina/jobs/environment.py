"""environment.json: the kind of a job and what it ran on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.ledger import LEDGER

ENVIRONMENT = "environment.json"
_WRITTEN = ("studies/records", "docs/results")  # recording one study does not make the next one's code another


def environment(seed: int, kind: str = "") -> Json:
    """What environment.json holds: kind, versions, machine, seed, and git revision of the source tree."""
    versions = {}
    for package in ("lamina", "torch", "transformers", "accelerate", "tokenizers", "numpy", "pyarrow", "trl", "peft"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        **({"kind": str(kind)} if kind else {}),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"platform": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "seed": seed,
        "git_revision": git_revision(),
        "digests": LEDGER,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def git_revision() -> str | None:
    """The revision of the source tree that this package was imported from; None outside a checkout.

    It ends in "-dirty" where a tracked file was changed, other than what studies themselves write (``_WRITTEN``).
    """
    revision = _git("describe", "--always", "--abbrev=12")
    if not revision:
        return None
    changed = _git("diff", "--name-only", "HEAD", "--", ":(top)", *(f":(top,exclude){folder}" for folder in _WRITTEN))
    return f"{revision}-dirty" if changed else revision


def _git(*words: str) -> str | None:
    """What a git command prints in the package's folder; None if it fails."""
    package = Path(__file__).resolve().parent
    try:
        process = subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
