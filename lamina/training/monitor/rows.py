"""What a run's records hold: rows of layers/, and the last evaluation. Loads neither torch nor transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Row: TypeAlias = tuple[int, int, str, str, int, str, float]
"""step, layer (-1 outside the layers), sub-layer, role, index, metric, value"""

LOSS, NORM = "step_loss", "step_gradient_norm"
"""The metrics of every step."""


@dataclass(frozen=True, kw_only=True)
class LastEvaluation:
    """What the last evaluation measured.

    Attributes:
        step: after which it took place; -1: there was none yet.
        loss: on the held-out blocks, in nats per token.
        second: the loss on the second corpus.
        scores: the objective's further measures.
        tasks: the scores on eval_tasks.
    """

    step: int = -1
    loss: float = math.inf
    second: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, float] | None = None
