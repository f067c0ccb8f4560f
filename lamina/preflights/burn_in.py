"""The burn-in: the first steps of the planned run, with its rate and warm-up, and what the layers do meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lamina.data import Blocks
from lamina.preflights.measuring import Snapshot, take_snapshot
from lamina.preflights.proxy import Proxy, build_model, optimizer_groups
from lamina.training.line import spread
from lamina.training.monitor import GradientNorms
from lamina.training.settings import PretrainSettings

MOST_TOKENS = 1_000_000  # for the frequencies of tokens


@dataclass(frozen=True, kw_only=True)
class BurnIn:
    """What the burn-in showed.

    ``losses``, ``gradient_norms`` (before clipping) and ``learning_rates`` have an entry a step; ``snapshots`` were
    taken before the first step and after some others; ``stopped`` says why it ended early, where it did.
    """

    proxy: Proxy
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


class BurningIn:
    """A model that takes the first steps of a planned run: ``advance`` as far as wanted, then ``seen``.

    Where the planned warm-up is longer than ``longest_warmup`` it is shortened to that, so that the peak rate is seen;
    that is harder on the model than the run itself. ``tick`` is called after each step.
    """

    def __init__(
        self,
        proxy: Proxy,
        blocks: Blocks,
        *,
        sequences: int,
        longest_warmup: int,
        device: str = "cpu",
        tick: Callable[[], None] = lambda: None,
    ):
        settings = proxy.settings
        self.proxy, self.blocks, self.device, self.tick = proxy, blocks, device, tick
        ids = torch.stack([blocks.train[i]["input_ids"] for i in spread(len(blocks.train), settings.batch_size)])
        self.model: Any = build_model(proxy, blocks.stats.vocab_size, ids)
        self.model.to(device)
        probe = torch.stack([blocks.eval[i]["input_ids"] for i in spread(len(blocks.eval), sequences)])
        self.unigram, self.probe = unigram_loss(blocks, probe), probe.to(device)
        self.order = torch.randperm(len(blocks.train), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        planned = warmup_steps(settings)
        self.warmup = min(planned, longest_warmup)
        self.optimizer = torch.optim.AdamW(
            optimizer_groups(self.model, proxy),
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )
        schedule = {"warmup": self.warmup, "planned_warmup": planned, "planned_steps": settings.steps}
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rate_factor(step, low=settings.min_learning_rate, **schedule)
        )
        self.gradients = GradientNorms(self.model)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.snapshots: list[Snapshot] = []
        self.stopped = ""
        self._look()

    def advance(self, to: int, *, measure: bool = True) -> None:
        """Train up to step ``to`` and measure there. A loss or gradient that is not finite ends it."""
        settings = self.proxy.settings
        self.model.train()
        while len(self.losses) < to and not self.stopped:
            step = len(self.losses)
            batch = [self.order[(step * settings.batch_size + i) % len(self.order)] for i in range(settings.batch_size)]
            inputs = torch.stack([item["input_ids"] for item in self.blocks.train.__getitems__(batch)])
            group = self.optimizer.param_groups[0]
            self.rates.append(settings.learning_rate * group["lr"] / group["initial_lr"])
            self._step(inputs.to(self.device))
            self.tick()
        if measure and not self.stopped:
            self._look()

    def _step(self, inputs: torch.Tensor) -> None:
        loss = self.model(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        norm, most = math.sqrt(float(self.gradients.squares().sum())), self.proxy.settings.max_grad_norm
        self.losses.append(float(loss.detach()))
        self.norms.append(norm)
        if not (math.isfinite(self.losses[-1]) and math.isfinite(norm)):
            what = "gradient" if math.isfinite(self.losses[-1]) else "loss"
            self.stopped = f"the {what} was not finite at step {len(self.losses)}"
            return
        if 0 < most < norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def _look(self) -> None:
        step = len(self.losses)
        vector = torch.Generator().manual_seed(self.proxy.settings.seed + step)
        self.snapshots.append(take_snapshot(self.model, self.probe, self.unigram, step, vector))

    def seen(self) -> BurnIn:
        """What there was to see up to now."""
        return BurnIn(
            proxy=self.proxy,
            warmup=self.warmup,
            losses=list(self.losses),
            gradient_norms=list(self.norms),
            learning_rates=list(self.rates),
            snapshots=list(self.snapshots),
            stopped=self.stopped,
        )


def unigram_loss(blocks: Blocks, probe: torch.Tensor) -> float:
    """Nats a token of the probe's targets under the train split's add-one smoothed frequencies (a million tokens')."""
    rows = spread(len(blocks.train), max(1, MOST_TOKENS // blocks.train.shape[1]))
    tokens = np.asarray(blocks.train.array[rows]).ravel()
    counts = np.bincount(tokens, minlength=blocks.stats.vocab_size).astype(np.float64) + 1.0
    return float(-np.log(counts / counts.sum())[probe[:, 1:].flatten().numpy()].mean())
