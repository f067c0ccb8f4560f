"""Token blocks with masked tokens, for masked language models."""

from __future__ import annotations

import torch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from lamina.data.blocks import EVAL_SEED, DrawnItems, ItemSource, TokenBlock

MASK = "<|mask|>"
REPLACED, RANDOM = 0.8, 0.1  # fractions of the tokens to predict, as in BERT; the rest stays unchanged


class MaskedBlocks(DrawnItems[TokenBlock]):
    """Token blocks in which random tokens are masked, as in BERT. The model learns to predict these tokens.

    Of the tokens to predict, 80 % become the mask token, 10 % become a random token, and 10 % stay unchanged. All other
    tokens have the label -100. Lamina never masks special tokens.

    Args:
        source: the blocks before masking.
        tokenizer: a tokenizer with a mask token (see :func:`with_mask_token`).
        mask_ratio: the fraction of tokens to predict (ModernBERT: 0.3, BERT: 0.15).
        seed: the seed for the order of the blocks and for the masks.
        training: see :class:`DrawnItems`.
    """

    def __init__(
        self,
        source: ItemSource[TokenBlock],
        tokenizer: PreTrainedTokenizerBase,
        mask_ratio: float,
        seed: int = EVAL_SEED,
        *,
        training: bool = False,
    ):
        super().__init__(source, seed, training=training)
        self.tokenizer, self.mask_ratio = tokenizer, mask_ratio
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        self.masking = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=mask_ratio, mask_replace_prob=REPLACED, random_replace_prob=RANDOM
        )

    def for_run(self, seed: int) -> MaskedBlocks:
        return MaskedBlocks(self.source.for_run(seed), self.tokenizer, self.mask_ratio, seed, training=True)

    def __getitem__(self, index: int) -> TokenBlock:
        """Return a block with at least one masked token, because a loss over no tokens is undefined."""
        block = self.source[self.number(index)]
        ids = block["input_ids"]
        special = torch.isin(ids, self.special)
        self.masking.generator = self.generator(index)
        masked, labels = self.masking.torch_mask_tokens(ids[None].clone(), special[None])
        masked, labels = masked[0], labels[0]
        if bool((labels == -100).all()) and not bool(special.all()):
            first = int(torch.nonzero(~special)[0])
            masked[first], labels[first] = int(self.tokenizer.mask_token_id), ids[first]  # type: ignore[arg-type]
        return {**block, "input_ids": masked, "labels": labels}


def with_mask_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Add a mask token to the tokenizer if it has none, and return the tokenizer."""
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
    return tokenizer
