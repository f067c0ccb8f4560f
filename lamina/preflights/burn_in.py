"""The burn-in: the first steps of the planned run, with its rate and warm-up, and what the layers do meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lamina.data import Blocks
from lamina.preflights.measuring import Snapshot, take_snapshot
from lamina.preflights.proxy import Proxy, build_model, optimizer_groups
from lamina.training.monitor import GradientNorms
from lamina.training.pretrain import spread
from lamina.training.settings import PretrainSettings

MOST_TOKENS = 1_000_000  # for the frequencies of tokens


@dataclass(frozen=True, kw_only=True)
class BurnIn:
    """What the burn-in showed.

    ``losses``, ``gradient_norms`` (before clipping) and ``learning_rates`` have an entry a step; ``snapshots`` were
    taken before the first step and after some others; ``stopped`` says why it ended early, where it did.
    """

    proxy: Proxy
    steps: int
    warmup: int
    losses: list[float]
    gradient_norms: list[float]
    learning_rates: list[float]
    snapshots: list[Snapshot]
    stopped: str


def warmup_steps(settings: PretrainSettings) -> int:
    """The planned warm-up in steps, as the Trainer counts it."""
    return int(settings.warmup) if settings.warmup >= 1 else math.ceil(settings.steps * settings.warmup)


def rate_factor(step: int, *, warmup: int, planned_warmup: int, planned_steps: int, low: float) -> float:
    """The share of the peak rate at a step (0-based): linear up to ``warmup``, then the planned run's cosine."""
    if step < warmup:
        return step / warmup
    done = (step - warmup) / max(1, planned_steps - planned_warmup)
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def burn_in(
    proxy: Proxy,
    blocks: Blocks,
    *,
    steps: int,
    sequences: int,
    snapshots_at: Collection[int] = (),
    device: str = "cpu",
    tick: Callable[[], None] = lambda: None,
) -> BurnIn:
    """Take the run's first steps with AdamW and measure before, between and after.

    Where the planned warm-up is longer than half of the burn-in it is shortened to that half, so that the peak rate is
    seen; that is harder on the model than the run itself. A loss or gradient that is not finite ends it.
    """
    settings = proxy.settings
    vocab_size = blocks.stats.vocab_size
    ids = torch.stack([blocks.train[i]["input_ids"] for i in spread(len(blocks.train), settings.batch_size)])
    model: Any = build_model(proxy, vocab_size, ids)
    model.to(device)
    probe = torch.stack([blocks.eval[i]["input_ids"] for i in spread(len(blocks.eval), sequences)])
    unigram = unigram_loss(blocks, probe)
    draw = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(blocks.train), generator=draw).tolist()
    planned_warmup = warmup_steps(settings)
    warmup = min(planned_warmup, steps // 2)
    optimizer = torch.optim.AdamW(
        optimizer_groups(model, proxy), betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: rate_factor(
            step,
            warmup=warmup,
            planned_warmup=planned_warmup,
            planned_steps=settings.steps,
            low=settings.min_learning_rate,
        ),
    )
    snapshots, losses, norms, rates, stopped = [], [], [], [], ""

    def look(step: int) -> None:
        vector = torch.Generator().manual_seed(settings.seed + step)
        snapshots.append(take_snapshot(model, probe.to(device), unigram, step, vector))

    look(0)
    model.train()
    gradients = GradientNorms(model)
    for step in range(1, steps + 1):
        batch = [order[(step * settings.batch_size + i) % len(order)] for i in range(settings.batch_size)]
        inputs = torch.stack([item["input_ids"] for item in blocks.train.__getitems__(batch)]).to(device)
        rates.append(settings.learning_rate * schedule.get_last_lr()[0] / optimizer.param_groups[0]["initial_lr"])
        loss, norm = _step(model, inputs, optimizer, gradients, settings.max_grad_norm)
        schedule.step()
        losses.append(loss)
        norms.append(norm)
        tick()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            stopped = f"the {'gradient' if math.isfinite(loss) else 'loss'} was not finite at step {step}"
            break
        if step in snapshots_at or step in (steps // 2, steps):
            look(step)
    return BurnIn(
        proxy=proxy,
        steps=steps,
        warmup=warmup,
        losses=losses,
        gradient_norms=norms,
        learning_rates=rates,
        snapshots=snapshots,
        stopped=stopped,
    )


def _step(
    model: nn.Module,
    inputs: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    gradients: GradientNorms,
    max_norm: float,
) -> tuple[float, float]:
    loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
    loss.backward()
    norm = math.sqrt(float(gradients.squares().sum()))
    if math.isfinite(norm):
        if 0 < max_norm < norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), norm


def unigram_loss(blocks: Blocks, probe: torch.Tensor) -> float:
    """Nats a token of the probe's targets under the train split's add-one smoothed frequencies (a million tokens')."""
    rows = spread(len(blocks.train), max(1, MOST_TOKENS // blocks.train.shape[1]))
    tokens = np.asarray(blocks.train.array[rows]).ravel()
    counts = np.bincount(tokens, minlength=blocks.stats.vocab_size).astype(np.float64) + 1.0
    return float(-np.log(counts / counts.sum())[probe[:, 1:].flatten().numpy()].mean())
