"""What result.json says of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from lamina.data import Blocks
from lamina.data import bits_per_byte as bits_per_byte_of
from lamina.jobs import columns
from lamina.jobs.status import Status
from lamina.modeling.building import recommended
from lamina.placements import Plan
from lamina.training.monitoring.recorder import RunRecorder, safe_exp
from lamina.training.monitoring.series import spike_columns
from lamina.training.settings import PretrainSettings


def outcome(
    settings: PretrainSettings,
    status: Status,
    reason: str,
    trainer: Trainer,
    recorder: RunRecorder,
    blocks: Blocks,
    model: torch.nn.Module,
    plan: Plan,
) -> dict[str, Any]:
    """The numbers of a run that ended with ``status``: a value for each measured column of ``lamina.jobs.columns``."""
    steps = trainer.state.global_step
    tokens = steps * recorder.tokens_per_step
    timed = recorder.training_steps * recorder.tokens_per_step
    loss = recorder.last_eval if math.isfinite(recorder.last_eval) else math.nan
    parameters = sum(p.numel() for p in model.parameters())
    init = recommended(plan) if settings.init == "recommended" else settings.init
    init = init if settings.from_model is None else "checkpoint"
    mix = recorder.mix(steps)
    spikes = recorder.processes.by_first(lambda: spike_columns(Path(settings.output)))
    result: dict[str, object] = {
        "status": status,
        "eval_loss": loss,
        "perplexity": safe_exp(loss),
        "bits_per_byte": bits_per_byte_of(loss, blocks.stats),
        "unigram_entropy": blocks.stats.unigram_entropy,
        **spikes,
        "tokens": tokens,
        "steps": steps,
        "tokens_per_second": timed / recorder.training_seconds if recorder.training_seconds else None,
        "parameters": parameters,
        "flops": training_flops(model, plan, settings.sequence_length) * tokens,
        "init": init,
        **({} if settings.from_model is None else {"from": settings.from_model}),
        **({} if mix is None else {"mix": mix}),
        "reason": reason,
    }
    return columns.checked(result)


def training_flops(model: torch.nn.Module, plan: Plan, sequence_length: int) -> float:
    """Model FLOPs a token of forward and backward: 6 a weight outside the embedding and 12 N d T for full attention."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr]
    embedding = model.get_input_embeddings().weight.numel()  # type: ignore[operator,union-attr]
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    if not config.tie_word_embeddings:
        weights -= embedding
    return 6.0 * weights + 12.0 * plan.num_layers * config.hidden_size * sequence_length
