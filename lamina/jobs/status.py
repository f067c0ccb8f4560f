"""The statuses of jobs and runs, from best to worst."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """The statuses of a run in result.json, from best to worst.

    Attributes:
        FINISHED: the run trained to the last step and learned.
        SHORT: the run reached the last step without learning enough, but the loss was still falling.
        STUCK: the run reached the last step, but the eval loss never fell below the unigram entropy minus
            ``stuck_margin``.
        INTERRUPTED: Ctrl-C, a signal, or the end of the study stopped the run. You can resume the run.
        DIVERGED: Lamina stopped the run because training diverged.
        FAILED: an error stopped the run.
    """

    FINISHED = "finished"
    SHORT = "short"
    STUCK = "stuck"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Return whether the run is over, so that a resumed job does not repeat the run."""
        return self not in (Status.INTERRUPTED, Status.FAILED)


ENDED = tuple(status.value for status in Status if status.ended)


def severity(status: str) -> int:
    return list(Status).index(Status(status)) if status in set(Status) else len(Status)
