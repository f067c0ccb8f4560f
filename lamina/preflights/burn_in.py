"""The burn-in: the first steps of the planned run, with its rate and warm-up, and what the layers do meanwhile."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lamina.data import Blocks
from lamina.preflights.measuring import Snapshot, take_snapshot
from lamina.preflights.proxy import Proxy, build_model, optimizer_groups
from lamina.training.monitoring.experts import ExpertBalance
from lamina.training.monitoring.layers import GradientNorms
from lamina.training.order import TrainOrder
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

    def spent(self, step: int) -> float:
        """The learning rates of the first ``step`` steps, summed, over those of the whole planned run."""
        settings = self.proxy.settings
        return sum(self.learning_rates[:step]) / (settings.learning_rate * rates_until(settings, settings.steps))

    def step_at(self, share: float) -> int:
        """The first step of the planned run by which that share of its summed rates is spent; at most its last."""
        settings = self.proxy.settings
        wanted = share * rates_until(settings, settings.steps) * (1.0 - 1e-9)
        return min(
            settings.steps, bisect_left(range(settings.steps), wanted, key=lambda step: rates_until(settings, step))
        )


def warmup_steps(settings: PretrainSettings) -> int:
    """The planned warm-up in steps, as the Trainer counts it."""
    return int(settings.warmup) if settings.warmup >= 1 else math.ceil(settings.steps * settings.warmup)


def rate_factor(step: int, *, warmup: int, planned_warmup: int, planned_steps: int, low: float) -> float:
    """The share of the peak rate at a step (0-based): linear up to ``warmup``, then the planned run's cosine."""
    if step < warmup:
        return step / warmup
    done = (step - warmup) / max(1, planned_steps - planned_warmup)
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def rates_until(settings: PretrainSettings, step: int) -> float:
    """The planned run's learning rates over its first ``step`` steps, summed, in units of the peak.

    The sum of ``rate_factor`` in closed form (for the cosine, Dirichlet's kernel): a run may have billions of steps.
    """
    warmup = warmup_steps(settings)
    rising = min(step, warmup)
    total = rising * (rising - 1) / (2.0 * warmup) if warmup else 0.0
    count, length, low = step - rising, max(1, settings.steps - warmup), settings.min_learning_rate
    if count:
        cosines = 0.5 + math.sin(math.pi * (count - 0.5) / length) / (2.0 * math.sin(math.pi / (2.0 * length)))
        total += low * count + (1.0 - low) * 0.5 * (count + cosines)
    return total


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
        self.proxy, self.device, self.tick = proxy, device, tick
        self.model: Any = build_model(proxy, blocks.stats.vocab_size, blocks.train.sample(settings.batch_size))
        self.model.to(device)
        self.experts = ExpertBalance(self.model, settings.expert_balance, settings.expert_balance_rate)
        probe = blocks.eval.sample(sequences)
        self.unigram, self.probe = unigram_losses(blocks, probe), probe.to(device)
        self.train = blocks.train.for_run(settings.seed)
        self.train.load_state_dict(None, verbose=False)  # from its beginning, whatever was read before
        self.order = TrainOrder(
            len(self.train),
            steps=settings.steps,
            batch_size=settings.batch_size,
            gradient_accumulation=settings.gradient_accumulation,
            seed=settings.seed,
            shuffled=not self.train.in_order,
        )
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
            group = self.optimizer.param_groups[0]
            self.rates.append(settings.learning_rate * group["lr"] / group["initial_lr"])
            self._step(len(self.losses) + 1)
            self.tick()
        if measure and not self.stopped:
            self._look()

    def _loss(self, step: int, micro_batch: int) -> torch.Tensor:
        batch = [self.train[i]["input_ids"] for i in self.order.micro_batch(step, micro_batch)]
        inputs = torch.stack(batch).to(self.device)
        half = torch.autocast(self.device, torch.bfloat16, enabled=self.proxy.settings.precision == "bf16")
        with self.experts.watch(), half:
            loss = self.model(input_ids=inputs, labels=inputs, use_cache=False).loss
        extra = self.experts.loss(len(inputs))
        return loss if extra is None else loss + extra

    def _step(self, step: int) -> None:
        micro_batches, total = self.proxy.settings.gradient_accumulation, 0.0
        for micro_batch in range(micro_batches):
            loss = self._loss(step, micro_batch) / micro_batches
            loss.backward()
            total += float(loss.detach())
        norm, most = math.sqrt(float(self.gradients.squares().sum())), self.proxy.settings.max_grad_norm
        self.losses.append(total)
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
        self.experts.finish_step()

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


def unigram_losses(blocks: Blocks, probe: torch.Tensor) -> torch.Tensor:
    """Nats a token of each probe sequence's targets under the train split's add-one smoothed frequencies [sequences].

    The frequencies are those of a million tokens, in a mix of a million of each corpus.
    """
    count = max(1, MOST_TOKENS // blocks.stats.sequence_length)
    shares = blocks.train.frequencies(blocks.stats.vocab_size, count)
    return torch.from_numpy(-np.log(shares)[probe[:, 1:].numpy()].mean(axis=1))
