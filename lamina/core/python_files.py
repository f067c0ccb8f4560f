"""Execute a user's Python file. An exception in the file becomes a UserError that names the file."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from lamina.errors import UserError, shortened

logger = logging.getLogger(__name__)
_SAID = "LAMINA_PYTHON_FILES"  # set so that a study's worker processes do not repeat the warning


def run_file(kind: str, path: Path, *, announced: bool = False) -> ModuleType:
    """Run a Python file and return its module. Raises UserError for any exception in the file, including ``sys.exit``.

    Before the first run of a user's file, Lamina logs a warning that the file runs as code. If ``announced`` is true,
    Lamina logs no warning. ``kind`` is the noun for the file's content in messages, such as "placement".
    """
    if not announced:
        _say(kind, path)
    spec = importlib.util.spec_from_file_location(path.name, path)
    assert spec is not None
    assert spec.loader is not None
    with guarded(f"{kind} {str(path)!r}: the file"):
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@contextmanager
def guarded(subject: str) -> Iterator[None]:
    """Convert any exception inside the context into a UserError, and begin the message with ``subject``."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # including SystemExit: a file must not end the process
        reason = shortened(" ".join(str(error).split()), 300)
        raise UserError(f"{subject} raised {type(error).__name__}: {reason}") from error


def _say(kind: str, path: Path) -> None:
    announced = os.environ.get(_SAID, "").split(os.pathsep)
    if (name := str(path.absolute())) in announced:
        return
    os.environ[_SAID] = os.pathsep.join([*filter(None, announced), name])
    logger.warning("%s %r runs as code, with your rights. Use only files that you trust", kind, str(path))
