"""Masked tokens: a bidirectional language model, as BERT (Devlin et al. 2019) and ModernBERT (Warner et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lamina.data.blocks import Splits, Stats, perplexity
from lamina.data.masked_blocks import MaskedBlocks, with_mask_token
from lamina.training.objectives.objective import Processor, objective
from lamina.training.objectives.text import TextObjective, padding_of, read_text

if TYPE_CHECKING:
    from lamina.training.settings import PretrainSettings


@objective
class MaskedLM(TextObjective):
    """Predict the tokens of a text that are masked, from all others."""

    head = "masked_lm"
    own = frozenset({"mask_ratio"})

    def read(self, settings: PretrainSettings, config: PreTrainedConfig, *, bar: bool) -> tuple[Splits, Processor]:
        blocks, tokenizer = read_text(settings, bar)
        tokenizer = with_mask_token(tokenizer)
        train, held_out, second = (
            None if part is None else MaskedBlocks(part, tokenizer, settings.mask_ratio)
            for part in (blocks.train, blocks.eval, blocks.second)
        )
        assert train is not None
        assert held_out is not None
        return Splits(train=train, eval=held_out, stats=blocks.stats, second=second), tokenizer

    def complete(
        self, config: PreTrainedConfig, splits: Splits, processor: Processor, from_model: str | None
    ) -> PreTrainedConfig:
        tokenizer = cast(PreTrainedTokenizerBase, processor)
        config = super().complete(config, splits, processor, from_model)
        config.pad_token_id = padding_of(tokenizer)  # the backbone's own ids are those of another vocabulary
        for name in ("cls_token_id", "sep_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        return config

    def derived(self, loss: float, stats: Stats) -> dict[str, float]:
        return {"perplexity": perplexity(loss)}  # of the masked tokens: not of the text, so no bits per byte

    def scores(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The share of a block's masked tokens that are predicted right."""
        chosen = labels != -100
        right = (logits.argmax(-1) == labels) & chosen
        return {"accuracy": right.sum(-1) / chosen.sum(-1)}
