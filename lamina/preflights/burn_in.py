"""The burn-in: the first steps of the planned run, at its learning rate, with measurements of the layers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from lamina.data.blocks import Blocks
from lamina.preflights.measuring import Snapshot, take_snapshot
from lamina.preflights.proxy import Proxy, build_model
from lamina.training.optimization.optimizer import rate_factors
from lamina.training.optimization.schedule import planned_shares, with_shorter_warmup
from lamina.training.setting_groups import in_steps
from lamina.training.settings import PretrainSettings
from lamina.training.short_run import ShortRun

MOST_TOKENS = 1_000_000  # maximum number of tokens to estimate token frequencies from


@dataclass(frozen=True, kw_only=True)
class BurnIn:
    """The record of a burn-in.

    ``losses``, ``gradient_norms`` (before clipping) and ``learning_rates`` have one entry per step; ``snapshots`` were
    taken before the first step and after some others; ``stopped`` is why it ended early, or empty.
    """

    proxy: Proxy
    warmup: int
    losses: list[float]
    gradient_norms: list[float]
    learning_rates: list[float]
    snapshots: list[Snapshot]
    stopped: str

    def spent(self, step: int) -> float:
        """The sum of the learning rates of the first ``step`` steps, divided by that of the whole planned run."""
        settings = self.proxy.settings
        return sum(self.learning_rates[:step]) / (settings.learning_rate * rates_until(settings, settings.steps))

    def step_at(self, share: float) -> int:
        """The first step of the planned run by which that share of its summed rates is spent; at most its last."""
        settings = self.proxy.settings
        target = share * rates_until(settings, settings.steps) * (1.0 - 1e-9)
        return min(
            settings.steps, bisect_left(range(settings.steps), target, key=lambda step: rates_until(settings, step))
        )


def warmup_steps(settings: PretrainSettings) -> int:
    """The planned warm-up in steps, as the Trainer counts it."""
    return in_steps(settings.warmup, settings.steps)


def rates_until(settings: PretrainSettings, step: int) -> float:
    """The sum of the planned run's learning rates over its first ``step`` steps, in units of the peak.

    In closed form (for the cosine, Dirichlet's kernel), since a run may have billions of steps.
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
    """A model that takes the first steps of a planned run: call ``train``, then ``record``.

    A planned warm-up longer than ``longest_warmup`` is shortened to that, so that the burn-in reaches the peak rate;
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
        tick: Callable[[], object] = lambda: None,
    ):
        settings = proxy.settings
        self.proxy, self.tick = proxy, tick
        self.model = build_model(proxy, blocks.stats.vocab_size, blocks.train.sample(settings.batch_size))
        probe = blocks.eval.sample(sequences)
        self.unigram, self.probe = unigram_losses(blocks, probe), probe.to(device)
        train = blocks.train.for_run(settings.seed)
        train.load_state_dict(None, verbose=False)  # from the beginning, whatever was read before
        planned = warmup_steps(settings)
        self.warmup = min(planned, longest_warmup)
        schedule = partial(with_shorter_warmup, planned_shares(settings), warmup=self.warmup, planned_warmup=planned)
        self.run = ShortRun(
            settings,
            self.model,
            train,
            in_order=train.in_order,
            device=device,
            rate_factors=None if proxy.scaling is None else rate_factors(self.model, proxy.scaling),
            schedule=None if self.warmup == planned else schedule,
        )
        self.snapshots: list[Snapshot] = []
        self._measure()

    def train(self, stops: Iterator[int]) -> None:
        """Train up to each step that ``stops`` yields, and measure there; the end of ``stops`` ends the burn-in.

        The next stop is requested after the measurement, so it may depend on it. A loss or gradient that is not
        finite also ends the burn-in.
        """
        target = next(stops, None)

        def wants_more(step: int) -> bool:
            nonlocal target
            while target is not None and target <= step:
                self._measure()
                target = next(stops, None)
            return target is not None

        def after_step(step: int) -> bool:
            self.tick()
            return wants_more(step)

        if wants_more(0):
            self.run.train(after_step)

    def _measure(self) -> None:
        step = len(self.run.losses)
        vector = torch.Generator().manual_seed(self.proxy.settings.seed + step)
        with self.run.full_precision():
            self.snapshots.append(take_snapshot(self.model, self.probe, self.unigram, step, vector))

    def record(self) -> BurnIn:
        """The record so far."""
        return BurnIn(
            proxy=self.proxy,
            warmup=self.warmup,
            losses=list(self.run.losses),
            gradient_norms=list(self.run.gradient_norms),
            learning_rates=list(self.run.learning_rates),
            snapshots=list(self.snapshots),
            stopped=self.run.stopped,
        )


def unigram_losses(blocks: Blocks, probe: torch.Tensor) -> torch.Tensor:
    """The unigram loss of each probe sequence in nats per token [sequences], from the train split's frequencies.

    The add-one smoothed frequencies come from a million tokens; in a mix, from a million of each corpus.
    """
    count = max(1, MOST_TOKENS // blocks.stats.sequence_length)
    shares = blocks.train.frequencies(blocks.stats.vocab_size, count)
    return torch.from_numpy(-np.log(shares)[probe[:, 1:].numpy()].mean(axis=1))
