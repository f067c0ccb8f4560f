"""The loss of a bigram table fitted on what a run has read. A model above it has shown nothing of its depth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from lamina.data.blocks import Blocks, Splits, pair_entropy, spread
from lamina.modeling.backbones import resolve_backbone
from lamina.training.objectives.objective import objective_of
from lamina.training.optimization.order import TrainOrder, order_of
from lamina.training.settings import PretrainSettings

MOST_TOKENS = 2**24
"""The table is fitted on at most so many tokens, the first that the run has read."""
_DECIDING = (
    *("corpus", "tokenizer", "sequence_length", "eval_fraction", "text_field", "streaming", "shuffle_buffer"),
    *("backbone", "objective", "eval_blocks", "steps", "batch_size", "gradient_accumulation", "seed"),
)


def bigram_entropy(settings: PretrainSettings | Mapping[str, Any]) -> float | None:
    """Return the bigram table's loss for a run of these settings that trains all steps without a rollback.

    For results that were stored without it. The text is read from the cache of prepared text; the value is remembered
    for all runs that read the same blocks. None for a run that does not predict the next token.

    Raises UserError for a text that can't be read.
    """
    values = settings.to_dict() if isinstance(settings, PretrainSettings) else dict(settings)
    return _of_settings(tuple((name, values[name]) for name in _DECIDING if name in values))


def entropy_of(splits: Splits, settings: PretrainSettings, order: TrainOrder, steps: int) -> float | None:
    """Return the loss in nats, on the run's held-out blocks, of the table of the first ``steps`` steps.

    A block that the run has read several times counts once. Of a stream, the table has the text that its unigram
    entropy has, too. None where no next token is predicted, or nothing was read.
    """
    if not isinstance(splits, Blocks) or steps < 1:
        return None
    batch = order.batch_size * order.gradient_accumulation
    steps = min(steps, max(1, MOST_TOKENS // (batch * splits.stats.sequence_length)))
    micro_batches = (order.micro_batch(s, m) for s in range(1, steps + 1) for m in range(order.gradient_accumulation))
    train = splits.train.for_run(settings.seed).rows([index for batch in micro_batches for index in batch])
    held_out = splits.eval.rows(spread(len(splits.eval), settings.eval_blocks or len(splits.eval)))
    return pair_entropy(train, held_out, splits.stats.vocab_size)


@lru_cache(maxsize=1024)
def _of_settings(deciding: tuple[tuple[str, Any], ...]) -> float | None:
    settings = PretrainSettings(**dict(deciding))
    config = resolve_backbone(settings.backbone)
    objective = objective_of(config, settings.objective)
    if objective.head != "causal_lm":
        return None  # its data need not be read
    splits, _ = objective.read(settings, config, bar=False)
    return entropy_of(splits, settings, order_of(settings, splits.train.for_run(settings.seed)), settings.steps)
