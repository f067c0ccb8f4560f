"""Progress bars on terminals and in notebooks, and plain progress lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping

from lamina.errors import printable

EVERY = 10.0
"""Seconds between two progress lines."""
PACED, PACED_STEPS = 1.0, 3
"""Lamina estimates the remaining time only after this many seconds and steps."""


def has_bars() -> bool:
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", lambda: False)())


class ProgressLines:
    """Write progress lines: one every few seconds, and one at the end. With ``show=False``, write nothing.

    Without ``at_once``, the first line also waits for ``every`` seconds.
    """

    def __init__(self, total: int, *, show: bool = True, every: float = EVERY, at_once: bool = True):
        self.total, self.show, self.every = total, show, every
        self._begun, self._told = time.monotonic(), -1
        self._last = -float("inf") if at_once else self._begun
        self._seen: deque[tuple[float, int]] = deque()  # (time, finished steps), in the later half of the elapsed time

    def see(self, done: int, numbers: Mapping[str, str] | None = None) -> None:
        """Write a line with the finished steps, the numbers and the time left, at most once per ``every`` seconds."""
        now = time.monotonic()
        if done > (self._seen[-1][1] if self._seen else 0):  # the time before the first step is start-up
            self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] <= (self._begun + now) / 2:
            self._seen.popleft()
        if not self.show or done == self._told or (now - self._last < self.every and done < self.total):
            return
        self._last, self._told = now, done
        parts = [f"step {done}/{self.total} ({done / max(1, self.total):.0%})"]
        parts += [f"{name} {value}".strip() for name, value in (numbers or {}).items()]
        if (left := self.seconds_left(done, now)) is not None:
            parts.append(f"{duration(left)} left")
        sys.stderr.write(printable("  ".join(parts)) + "\n")
        sys.stderr.flush()

    def seconds_left(self, done: int, now: float) -> float | None:
        """Estimate the seconds left from the recent speed. Return None in the first steps, and at the end."""
        begun, first = self._seen[0] if self._seen else (now, done)
        if not first + PACED_STEPS <= done < self.total or now - begun < PACED:
            return None
        return (now - begun) / (done - first) * (self.total - done)


def duration(seconds: float) -> str:
    """Format seconds as their two largest units: ``1 h 5 min``, ``3 min 10 s``, ``8 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
