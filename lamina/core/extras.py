"""The extras of the package, as pyproject.toml names them: what each brings, and the line that says what to install."""

from __future__ import annotations

import importlib.util

from lamina.errors import UserError

_REPORT = ("pandas", "pyarrow", "plotly", "jinja2")
_TRAIN = (*_REPORT, "scipy")
_POSTTRAIN = (*_TRAIN, "trl", "peft", "datasets")
EXTRAS = {"report": _REPORT, "train": _TRAIN, "posttrain": _POSTTRAIN, "qlora": (*_POSTTRAIN, "bitsandbytes")}
"""The modules of the extras that commands need, each with those of the extras that it contains."""


def require(what: str, extra: str) -> None:
    """Raise UserError for the modules of an extra that are missing; ``what`` needs them."""
    if missing := [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]:
        raise _missing(what, missing, extra)


def missing_extra(what: str, error: ModuleNotFoundError) -> UserError | None:
    """Return the line in place of an error that says that a module of an extra is missing; None for another module."""
    module = str(error.name).partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules and extra != "report"), None)
    return None if extra is None else _missing(what, [module], extra)


def _missing(what: str, modules: list[str], extra: str) -> UserError:
    them = "it" if len(modules) == 1 else "them"
    return UserError(f"{what}: needs {', '.join(modules)} (to install {them}: pip install 'lamina[{extra}]')")
