"""The objectives for text: predict the next token, or predict masked tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lamina.core.json_types import Json
from lamina.data.blocks import Blocks, BlockStats, Splits, Stats, bits_per_byte, perplexity
from lamina.data.encoding import vocab_size_of
from lamina.data.masked_blocks import MaskedBlocks, with_mask_token
from lamina.data.packed import prepare_blocks, whole_blocks
from lamina.data.streamed import stream_blocks
from lamina.errors import renamed_setting
from lamina.modeling.backbones import PRESETS, resolve_backbone
from lamina.training import source
from lamina.training.objectives.objective import Objective, Processor, objective
from lamina.training.settings import PretrainSettings


class TextObjective(Objective):
    """An objective whose items are blocks of tokens."""

    def fit(self, config: PreTrainedConfig, settings: PretrainSettings) -> None:
        # A preset gets the run's number of positions. A folder keeps the number, because windows and RoPE depend on it.
        if settings.backbone in PRESETS or settings.sequence_length > config.max_position_embeddings:
            config.max_position_embeddings = settings.sequence_length

    def item_tokens(self, config: PreTrainedConfig, settings: PretrainSettings) -> int:
        return settings.sequence_length

    def read(self, settings: PretrainSettings, config: PreTrainedConfig, *, bar: bool) -> tuple[Splits, Processor]:
        return read_text(settings, bar)

    def complete(
        self, config: PreTrainedConfig, splits: Splits, processor: Processor, from_model: str | None
    ) -> PreTrainedConfig:
        tokenizer = cast(PreTrainedTokenizerBase, processor)
        has_padding = getattr(config, "pad_token_id", None) is not None
        config = with_vocabulary(config, vocab_size_of(tokenizer), from_model)
        if from_model is None and has_padding:  # the backbone's padding id may be a text token in the new vocabulary
            config.pad_token_id = padding_of(tokenizer)
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        return config

    def facts(self, settings: PretrainSettings, stats: Stats) -> dict[str, object]:
        assert isinstance(stats, BlockStats)
        return {
            "corpus": settings.corpus,
            "tokenizer": f"{settings.tokenizer}, {stats.vocab_size:,} tokens",
            **({} if settings.packing == "on" else {"packing": "off (padding does not count as tokens)"}),
            "tokens to train on": f"{stats.train_tokens:,}",
            "tokens held out": f"{stats.eval_tokens:,}",
            "unigram entropy": f"{stats.unigram_entropy:.3f} nats per token",
            "fingerprint": stats.fingerprint,
        }


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the padding token's id, or None if the end-of-text token is used for padding."""
    padding = tokenizer.pad_token_id
    return padding if isinstance(padding, int) and padding != tokenizer.eos_token_id else None


def with_vocabulary(config: PreTrainedConfig, vocab_size: int, from_model: str | None = None) -> PreTrainedConfig:
    """Copy a configuration with a vocabulary size. Raises UserError if a checkpoint's vocabulary is too small."""
    if from_model is None:
        return resolve_backbone(config, vocab_size=vocab_size)
    source.check_vocabulary(config, vocab_size, from_model)
    return resolve_backbone(config)


def read_text(settings: PretrainSettings, bar: bool) -> tuple[Blocks, PreTrainedTokenizerBase]:
    """Read the text blocks of a run's corpora, and the tokenizer."""
    read: Json = {
        "corpus": settings.corpus,
        "tokenizer_spec": settings.tokenizer,
        "sequence_length": settings.sequence_length,
        "eval_fraction": settings.eval_fraction,
        "text_field": settings.text_field,
    }
    padded = settings.packing == "off"
    if settings.streaming:
        held_out, buffer = settings.eval_blocks, settings.shuffle_buffer
        blocks, tokenizer = stream_blocks(**read, eval_blocks=held_out, buffer=buffer, seed=settings.seed)
    else:
        blocks, tokenizer = prepare_blocks(**read, padded=padded, progress=bar)
    if settings.eval_corpus is None:
        return blocks, tokenizer
    with renamed_setting("corpus", "eval_corpus"):
        field, length = settings.text_field, settings.sequence_length
        second = whole_blocks(settings.eval_corpus, tokenizer, length, text_field=field, padded=padded, progress=bar)
    return replace(blocks, second=second), tokenizer


@objective
class CausalLM(TextObjective):
    """Predict each token of a text from the tokens before it."""

    head = "causal_lm"
    own = frozenset({"eval_tasks", "eval_task_limit", "eval_data_dir", "run_code"})

    def derived(self, loss: float, stats: Stats) -> dict[str, float]:
        return {"perplexity": perplexity(loss), "bits_per_byte": bits_per_byte(loss, cast(BlockStats, stats))}


@objective
class MaskedLM(TextObjective):
    """Predict the masked tokens of a text from all other tokens."""

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
        config.pad_token_id = padding_of(tokenizer)  # the backbone's ids belong to another vocabulary
        for name in ("cls_token_id", "sep_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        return config

    def derived(self, loss: float, stats: Stats) -> dict[str, float]:
        return {"perplexity": perplexity(loss)}  # no bits per byte, because the loss is only over masked tokens

    def scores(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fraction of masked tokens that the model predicts correctly, for each text block."""
        chosen = labels != -100
        right = (logits.argmax(-1) == labels) & chosen
        return {"accuracy": right.sum(-1) / chosen.sum(-1)}
