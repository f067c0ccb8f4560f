"""The content of a run's result.json."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from lamina.core.json_types import Json
from lamina.jobs import columns
from lamina.jobs.run_folder import RunFolder
from lamina.jobs.status import Status
from lamina.modeling.backbones.presets import used_by_a_token
from lamina.modeling.building import recommended
from lamina.modeling.configuration_lamina import backbone_of
from lamina.placements import Plan
from lamina.training.monitor.guard import Diverged
from lamina.training.monitor.loss_trend import still_falling
from lamina.training.monitor.step_series import spike_columns
from lamina.training.objectives.bigram import entropy_of

if TYPE_CHECKING:
    from lamina.training.run import TrainingRun


def outcome(run: TrainingRun, status: Status, reason: str) -> Json:
    """The numbers of a run that ended with ``status``: one value per measured column of ``lamina.jobs.columns``."""
    settings, plan, recorder, stats = run.settings, run.resolved.plan, run.recorder, run.splits.stats
    steps = run.trainer.state.global_step
    tokens = steps * recorder.tokens_per_step
    timed = recorder.training_steps * recorder.tokens_per_step
    last = recorder.evaluation
    loss = last.loss if math.isfinite(last.loss) else math.nan
    parameters = sum(p.numel() for p in run.model.parameters())
    init = recommended(plan) if settings.init == "recommended" else settings.init
    init = init if settings.from_model is None else "checkpoint"
    mix = recorder.mix(steps)
    spikes = run.processes.by_first(lambda: spike_columns(run.folder))
    result: dict[str, object] = {
        "status": str(status),
        "eval_loss": loss,
        "perplexity": None,
        "bits_per_byte": None,
        **run.resolved.objective.derived(loss, stats),
        **last.scores,
        "unigram_entropy": stats.unigram_entropy,
        "bigram_entropy": run.processes.by_first(lambda: entropy_of(run.splits, settings, run.order, steps)),
        **spikes,
        "tokens": tokens,
        "steps": steps,
        "tokens_per_second": timed / recorder.training_seconds if recorder.training_seconds else None,
        "parameters": parameters,
        "flops": training_flops(run.model, plan, run.resolved.item_tokens) * tokens,
        "init": init,
        **({} if settings.from_model is None else {"from": settings.from_model}),
        **({} if mix is None else {"mix": mix}),
        "reason": reason,
    }
    if run.splits.second is not None:
        result["eval_corpus_loss"] = last.second
    if settings.eval_tasks is not None:
        result["tasks"] = last.tasks
    branches = {"branches": run.branches.rows} if run.branches.rows else {}
    return {**columns.checked(result), "rollbacks": run.rollbacks.to_list(), **branches, **run.guard.outcome(status)}


def verdict(run: TrainingRun, complete: bool) -> tuple[Status, str] | Diverged:
    """How a run ended, and why; ``complete``: it trained all its steps."""
    settings, recorder, step = run.settings, run.recorder, run.trainer.state.global_step
    if recorder.interrupted and not complete:
        return Status.INTERRUPTED, f"{recorder.interrupted} at step {step}"
    if not math.isfinite(loss := recorder.evaluation.loss):
        return Diverged(step, f"the eval loss is {loss}; {run.guard.first_to_leave()}")
    entropy, margin = run.splits.stats.unigram_entropy, settings.stuck_margin
    guess = run.resolved.objective.guess
    if recorder.best_eval <= entropy - margin:
        return Status.FINISHED, ""
    falling = still_falling(RunFolder(run.folder).metrics, settings.steps, entropy + margin)
    if falling is not None:
        return Status.SHORT, (
            f"{settings.steps} steps are too few to tell: {falling}, and its best of {recorder.best_eval:.3f} "
            f"is not {margin:g} nats below {guess} of {entropy:.3f} yet"
        )
    return Status.STUCK, (
        f"the eval loss never got {margin:g} nats below {guess} of {entropy:.3f} "
        f"(best: {recorder.best_eval:.3f} in {settings.steps} steps)"
    )


def training_flops(model: PreTrainedModel, plan: Plan, sequence_length: int) -> float:
    """Forward and backward FLOPs per token: 6 per weight outside the embedding and 12 N d T for full attention.

    Of routed experts, those that one token uses.
    """
    config = backbone_of(model.config)
    embedding = model.get_input_embeddings()
    # A parameter with a first axis of 1 is added to every item: a position's embedding, the class token.
    matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.ndim >= 2 and p.shape[0] > 1]
    weights = sum(int(size * used_by_a_token(name, config)) for name, size in matrices)
    if isinstance(embedding, torch.nn.Embedding) and not config.tie_word_embeddings:
        weights -= embedding.weight.numel()  # looked up; images are multiplied by theirs
    return 6.0 * weights + 12.0 * plan.num_layers * config.hidden_size * sequence_length
