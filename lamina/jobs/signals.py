"""End a job early: after Ctrl-C, after another signal, or because the parent process has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name))
# Slurm can send this signal shortly before a job's time limit.
WARNING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1",) if hasattr(signal, name))


@contextmanager
def interruptible_imports(leave: Callable[[], int]) -> Iterator[None]:
    """Inside the context, Ctrl-C during an import calls ``leave`` and ends the process with the returned exit code.

    Without this context, an import can lose the KeyboardInterrupt, which some libraries convert or only print.
    If the process ignores SIGINT or has a custom handler, this context does nothing.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                os._exit(leave())
            frame = frame.f_back
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def handled(signals: tuple[signal.Signals, ...], handle: Callable[[int], None]) -> Iterator[None]:
    """Inside the context, call ``handle`` with the number of each signal. Do nothing outside the main thread."""
    before: dict[signal.Signals, object] = {}
    try:
        for number in signals:
            before[number] = signal.signal(number, lambda number, frame: handle(number))
    except ValueError:
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned


_parent: int | None = None


def watch_parent(parent: int | None) -> None:
    """Set the process id that ``orphaned`` watches: None for no parent, or -1 for a parent that has already ended."""
    global _parent
    _parent = parent


def orphaned() -> bool:
    return _parent is not None and os.getppid() != _parent
