"""The loss of a bigram table fitted on what a run has read. A model above it has shown nothing of its depth."""

from __future__ import annotations

from lamina.data.blocks import Blocks, Splits, pair_entropy, spread
from lamina.training.optimization.order import TrainOrder
from lamina.training.settings import PretrainSettings

MOST_TOKENS = 2**24
"""The table is fitted on at most so many tokens, the first that the run has read."""


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
