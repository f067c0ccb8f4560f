"""Published recipes of fine-tuning as settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published recipe.

    Attributes:
        source: where it was published, and what it leaves open.
        settings: of `lamina sft`, by name; without the data set where it is on no hub.
    """

    source: str
    settings: Mapping[str, object]


PRESETS: dict[str, Preset] = {
    "commonsense170k": Preset(
        source=(
            "OwLore's script (Li et al. 2024), which Mix-LN Table 2 follows: 1 epoch, learning rate 3e-4, batch 16, "
            "blocks of 512 tokens, AdamW, bf16. It packs the examples and trains on all of their tokens."
        ),
        settings={
            "template": "plain",
            "epochs": 1.0,
            "learning_rate": 3e-4,
            "batch_size": 16,
            "sequence_length": 512,
            "packing": True,
            "loss_on": "all",
        },
    ),
    "commonsense170k-adapters": Preset(
        source=(
            "LLM-Adapters (Hu et al. 2023): batch 16 of micro-batches of 4, 3 epochs, learning rate 3e-4, 256 tokens, "
            "120 held-out examples, 100 steps of warm-up. Its code trains on the question, too, and LoRA's rank is 8."
        ),
        settings={
            "template": "alpaca",
            "epochs": 3.0,
            "learning_rate": 3e-4,
            "batch_size": 4,
            "gradient_accumulation": 4,
            "sequence_length": 256,
            "warmup": 100.0,
            "eval_examples": 120,
            "loss_on": "all",
            "lora_rank": 8,
            "lora_alpha": 16.0,
            "lora_dropout": 0.05,
            "lora_targets": "q_proj,v_proj",
        },
    ),
    "lima": Preset(
        source=(
            "LIMA after pretraining, as in Peri-LN (appendix D.2): 1,000 examples, 15 epochs, batch 128, Adam at 1e-5, "
            "cosine, the best checkpoint by held-out tasks. The micro-batch of 8 is ours."
        ),
        settings={
            "data": "hf:GAIR/lima",
            "template": "chat",
            "epochs": 15.0,
            "learning_rate": 1e-5,
            "batch_size": 8,
            "gradient_accumulation": 16,
            "best_by": "loss",
        },
    ),
}
"""By name."""
