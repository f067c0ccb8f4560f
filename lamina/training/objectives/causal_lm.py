"""The next token: a causal language model."""

from __future__ import annotations

from typing import cast

from lamina.data.blocks import BlockStats, Stats, bits_per_byte, perplexity
from lamina.training.objectives.objective import objective
from lamina.training.objectives.text import TextObjective


@objective
class CausalLM(TextObjective):
    """Predict each token of a text from those before it."""

    head = "causal_lm"
    own = frozenset({"eval_tasks", "eval_task_limit", "eval_data_dir"})

    def derived(self, loss: float, stats: Stats) -> dict[str, float]:
        return {"perplexity": perplexity(loss), "bits_per_byte": bits_per_byte(loss, cast(BlockStats, stats))}
