"""Ctrl-C and similar signals: handled while a job runs; the old handlers are restored when it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name))
# Slurm can be configured to send this before a job's time is up.
WARNING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1",) if hasattr(signal, name))


@contextmanager
def handled(signals: tuple[signal.Signals, ...], handle: Callable[[int], None]) -> Iterator[None]:
    """Call ``handle`` with the number of each of ``signals`` that arrives; it may raise KeyboardInterrupt.

    Outside the main thread, nothing is handled: the caller handles signals.
    """
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
