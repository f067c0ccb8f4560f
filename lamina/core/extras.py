"""Optional dependencies: the modules of each extra in pyproject.toml, and the message for a missing module."""

from __future__ import annotations

import importlib.util
import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lamina.errors import UserError

_REPORT = ("pandas", "pyarrow", "plotly", "jinja2")
_TRAIN = (*_REPORT, "scipy")
_POSTTRAIN = (*_TRAIN, "trl", "peft", "datasets")
NAME = "lamina"
EXTRAS = {"report": _REPORT, "train": _TRAIN, "posttrain": _POSTTRAIN, "qlora": (*_POSTTRAIN, "bitsandbytes")}
"""For each optional extra, the modules that the extra installs and Lamina uses."""


def require(what: str, extra: str) -> None:
    """Raise UserError if modules of an extra are missing. ``what`` is the command or page that needs them."""
    if missing := [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]:
        raise _missing(what, missing, extra)


def missing_extra(what: str, error: ModuleNotFoundError) -> UserError | None:
    """Return an error that names the pip extra to install, or None if no extra of Lamina has the missing module."""
    module = str(error.name).partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules and extra != "report"), None)
    return None if extra is None else _missing(what, [module], extra)


def _missing(what: str, modules: list[str], extra: str) -> UserError:
    return UserError(f"{what}: needs {', '.join(modules)}. Run: {install(extra)}")


def install(extra: str) -> str:
    """Return the pip command that installs an extra of Lamina, from the same checkout, URL or index as Lamina."""
    checkout, wanted = Path(__file__).resolve().parents[2], f"[{extra}]"
    if (checkout / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'{checkout}{wanted}')}"
    try:
        origin = json.loads(metadata.distribution(NAME).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    if not (url := origin.get("url")):
        return f"pip install {shlex.quote(NAME + wanted)}"
    if "dir_info" in origin:
        return f"pip install {shlex.quote(unquote(urlsplit(url).path) + wanted)}"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install {shlex.quote(f'{NAME}{wanted} @ {url}')}"
