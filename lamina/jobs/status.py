"""The statuses of jobs, runs and trials, from best to worst. Some of these statuses are final."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """The statuses of a run in result.json, from best to worst.

    Attributes:
        FINISHED: the run trained to the last step and learned.
        SHORT: the run reached the last step without learning enough, but the loss was still falling (too few steps).
        STUCK: the run reached the last step, but the eval loss never fell ``stuck_margin`` below the unigram entropy.
        INTERRUPTED: Ctrl-C, a signal, or the end of the study stopped the run; you can resume it.
        DIVERGED: the divergence guard stopped the run.
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
        """Whether the run is over. A resumed job does not repeat a run that is over."""
        return self not in (Status.INTERRUPTED, Status.FAILED)


ENDED = tuple(status.value for status in Status if status.ended)


def severity(status: str) -> int:
    """Return a status's rank from best (0) to worst. An unknown status has the worst rank."""
    return list(Status).index(Status(status)) if status in set(Status) else len(Status)
