"""The harness without its remarks."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_harness(bar: bool = False) -> Iterator[list[str]]:
    """The harness's remarks are for its developers: yields its warnings; ``bar``: let its progress bars through."""
    logger, warnings = logging.getLogger("lm_eval"), _Warnings()
    level, spread = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(warnings)
    hidden = contextlib.nullcontext() if bar else contextlib.redirect_stderr(io.StringIO())
    try:
        with hidden, contextlib.redirect_stdout(io.StringIO()):
            yield warnings.texts
    finally:
        logger.removeHandler(warnings)
        logger.setLevel(level)
        logger.propagate = spread


class _Warnings(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
