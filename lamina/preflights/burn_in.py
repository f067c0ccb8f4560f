"""Train the first steps of a planned run, or of a narrower model, and measure each layer (the burn-in)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lamina.data.blocks import Blocks
from lamina.errors import UserError
from lamina.modeling.backbones import count_parameters
from lamina.modeling.building import build, recommended
from lamina.modeling.modeling_lamina import LaminaModel
from lamina.modeling.parts import body_of, sublayers, temporary_hooks
from lamina.modeling.scaling import Scaling
from lamina.modeling.wiring_lamina import Residual, Terms
from lamina.placements import Plan
from lamina.probes.structure.hooks import evaluating, observe
from lamina.probes.structure.sites import Point
from lamina.training.monitor.parameter_measures import GradientNorms
from lamina.training.monitor.stream_measures import STATE_METRICS, state_statistics
from lamina.training.monitor.writers import Row
from lamina.training.objectives.text import CausalLM
from lamina.training.optimization.optimizer import planned_shares, scaling_of, step_factors, with_shorter_warmup
from lamina.training.resolve import backbone_config
from lamina.training.setting_groups import in_steps
from lamina.training.settings import PretrainSettings
from lamina.training.short_run import ShortRun
from lamina.training.source import plan_of

NARROWEST, FEWEST_TOKENS = 64, 256
MOST_TOKENS = 1_000_000  # maximum number of tokens to estimate token frequencies from


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """The model that Lamina trains to judge a planned run. The model may be narrower, but has the planned depth."""

    settings: PretrainSettings  # as planned, except for the width, the heads and the blocks per step
    plan: Plan
    hidden_size: int
    planned_hidden_size: int
    planned_blocks: int
    scaling: Scaling | None  # as planned, or the standard parametrization for a narrower model

    @property
    def init(self) -> str:
        return recommended(self.plan) if self.settings.init == "recommended" else self.settings.init

    @property
    def note(self) -> str:
        """The differences between this model and the planned run in words, or "" if there are none."""
        parts = []
        if self.hidden_size != self.planned_hidden_size:
            parts.append(
                f"width {self.hidden_size} instead of {self.planned_hidden_size} (the standard parametrization "
                "of Everett et al. 2024 scales initial weights and learning rates)"
            )
        blocks = self.settings.batch_size * self.settings.gradient_accumulation
        if blocks != self.planned_blocks:
            parts.append(f"{blocks} text blocks per step instead of {self.planned_blocks}")
        return f"measured at {' and '.join(parts)}" if parts else ""


def choose(planned: PretrainSettings, vocab_size: int, steps: int, flops: float) -> Proxy:
    """Reduce the planned run until ``steps`` steps cost at most ``flops`` FLOPs. The depth stays the same."""
    config = backbone_config(planned, vocab_size)
    plan = plan_of(planned, config.num_hidden_layers)
    wide = int(config.hidden_size)
    blocks = planned.batch_size * planned.gradient_accumulation
    fewest = max(1, FEWEST_TOKENS // planned.sequence_length)
    scaling = scaling_of(planned)
    settings = planned
    while True:
        cost = 6.0 * count_parameters(config).active * planned.sequence_length * steps
        # first fewer blocks per step, then half the width
        affordable = min(blocks, max(fewest, int(min(flops / cost, blocks))))
        batch, micro_batches = min(planned.batch_size, affordable), max(1, affordable // planned.batch_size)
        width = int(config.hidden_size)
        if cost * batch * micro_batches <= flops or width % 2 or width // 2 < NARROWEST:
            break
        # a tied tensor cannot have the learning rates of both the embedding and the output head
        narrower = replace(planned, hidden_size=width // 2, num_heads=None, untie_embeddings=True)
        try:
            config = backbone_config(narrower, vocab_size)
        except UserError:
            break
        settings = narrower
        scaling = scaling_of(planned) or Scaling()
        if scaling.width == "none":
            scaling = replace(scaling, width="standard", base_width=wide)
    return Proxy(
        settings=replace(settings, batch_size=batch, gradient_accumulation=micro_batches),
        plan=plan,
        hidden_size=width,
        planned_hidden_size=wide,
        planned_blocks=blocks,
        scaling=scaling,
    )


def build_model(proxy: Proxy, vocab_size: int, profile: torch.Tensor) -> PreTrainedModel:
    """Build the model to measure, with the initial weights of `lamina pretrain`. Raises UserError for a bad width."""
    torch.manual_seed(proxy.settings.seed)
    return build(
        backbone_config(proxy.settings, vocab_size),
        proxy.plan,
        head=CausalLM.head,
        init=proxy.settings.init,
        profile_ids=profile,
        scaling=proxy.scaling,
    )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The measurements of the model at one step, on held-out sequences."""

    step: int
    loss: float  # nats per token
    unigram: float  # the loss of a model that predicts only token frequencies
    error: float  # the standard error of loss - unigram over the sequences (infinite for one sequence)
    context: float  # nats by which the loss is lower than for the mean prediction over all positions
    rows: list[Row]  # layer -1 is the embedding's output

    def series(self, metric: str, sublayer: str = "block") -> dict[int, float]:
        return {row.layer: row.value for row in self.rows if row.metric == metric and row.sublayer == sublayer}


def take_snapshot(
    model: PreTrainedModel, input_ids: torch.Tensor, unigram: torch.Tensor, step: int, generator: torch.Generator
) -> Snapshot:
    """Measure the model on held-out token ids [sequences, tokens]. Then restore the mode, and clear the gradients.

    ``unigram`` [sequences] is the loss of a model that predicts only the frequencies of the tokens, in nats per token.

    Rows with the sublayer "block" describe a layer's output, or the embedding's output for layer -1:

    ``token_similarity``: the mean cosine over all pairs of tokens.
    ``state_gradient_norm``: the norm of the loss's gradient with respect to the layer's output.
    ``jacobian_gain``: the root mean square factor by which later layers stretch a change of the layer's output,
    estimated with one random vector.

    Other rows describe a sub-layer:

    ``branch_variance``: the variance of the output of the sub-layer's module.
    ``added_variance``: the variance of the tensor that the sub-layer adds to the skip, after any output norm.
    ``skip_variance``: the variance of the scaled skip.
    ``gradient_norm``: the norm of the weights' gradient.
    """
    base = body_of(model)
    model.zero_grad()
    seen = _LayerNumbers()
    try:
        with evaluating(model), seen.over(base), torch.enable_grad():
            logits = model(input_ids=input_ids, use_cache=False).logits
            losses, context = _losses(logits, input_ids)
            loss = losses.mean()
            assert seen.first is not None
            assert seen.last is not None
            vector = torch.randn(seen.last.shape, generator=generator).to(seen.last)
            seen.metric, seen.factor = "jacobian_gain", 1.0 / float(vector.double().norm())
            torch.autograd.grad(seen.last, seen.first, vector, retain_graph=True)
            seen.metric, seen.factor = "state_gradient_norm", 1.0
            loss.backward()
        norms = GradientNorms(model)
        gradients = norms.rows(step, norms.squares())
    finally:
        model.zero_grad()
    differences = losses.detach().double().cpu() - unigram
    return Snapshot(
        step=step,
        loss=float(loss.detach()),
        unigram=float(unigram.mean()),
        error=float(differences.std() / math.sqrt(len(differences))) if len(differences) > 1 else math.inf,
        context=context,
        rows=[*seen.rows(step), *gradients],
    )


def _losses(logits: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return each sequence's loss, and by how many nats the loss is below the loss of the mean prediction."""
    log_p = logits[:, :-1].float().log_softmax(-1).flatten(0, 1)
    targets = input_ids[:, 1:].flatten()
    losses = nn.functional.nll_loss(log_p, targets, reduction="none").unflatten(0, (len(input_ids), -1)).mean(1)
    with torch.no_grad():
        mean = log_p.double().exp().mean(0).clamp_min(1e-30).log()
        context = -mean[targets].mean() - losses.double().mean()
    return losses, float(context)


@dataclass
class _LayerNumbers:
    """Hooks that measure hidden states, branches and gradients, and keep only numbers."""

    values: dict[tuple[int, str, str], torch.Tensor | float] = field(default_factory=dict)
    metric: str = ""  # the metric of the next backward pass
    factor: float = 1.0
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None

    @contextmanager
    def over(self, base: LaminaModel) -> Iterator[None]:
        points = {-1: Point(base.layers[0], "", "input")}
        points |= {index: Point(block, "", "output") for index, block in enumerate(base.layers)}
        with temporary_hooks() as hooks, observe(points, self._state, root=base):
            for index, name, residual in sublayers(base):
                hooks.append(residual.register_terms_hook(partial(self._terms, index, name, residual)))
            yield

    def _state(self, layer: int, state: torch.Tensor) -> None:
        for metric, value in zip(STATE_METRICS, state_statistics(state), strict=True):
            self.values[layer, "block", metric] = value
        flat = state.detach().double().flatten(0, -2)
        self.values[layer, "block", "token_similarity"] = nn.functional.normalize(flat, dim=-1).mean(0).pow(2).sum()
        if layer < 0:
            self.first = state
        self.last = state

        def note(gradient: torch.Tensor) -> None:  # double, because the squares of a tiny gradient would underflow
            self.values[layer, "block", self.metric] = gradient.double().norm() * self.factor

        state.register_hook(note)

    def _terms(self, layer: int, name: str, residual: Residual, terms: Terms) -> None:
        # double before the scale, because a very large or small scale would make the variance imprecise
        skip = residual.scale_skip(terms.source.detach().double())
        tensors = {"branch_variance": terms.output, "added_variance": terms.branch, "skip_variance": skip}
        for metric, tensor in tensors.items():
            self.values[layer, name, metric] = tensor.detach().double().var(correction=0)

    def rows(self, step: int) -> list[Row]:
        order = sorted(self.values, key=lambda key: key[0])
        return [
            Row(step, layer, sub, "all", 0, name, float(self.values[layer, sub, name])) for layer, sub, name in order
        ]


@dataclass(frozen=True, kw_only=True)
class BurnIn:
    """The record of the first steps: one loss, gradient norm (before clipping) and learning rate per step."""

    proxy: Proxy
    warmup: int
    losses: list[float]
    gradient_norms: list[float]
    learning_rates: list[float]
    snapshots: list[Snapshot]
    """The measurements before the first step, and after some later steps."""
    stopped: str
    """The reason why training ended early, or ""."""

    @property
    def planned(self) -> PretrainSettings:
        """The planned run's settings, but with the trained model's width, heads and blocks per step."""
        return self.proxy.settings

    def spent(self, step: int) -> float:
        """Return the sum of the learning rates before ``step``, as a fraction of the planned sum over all steps."""
        whole = self.planned.learning_rate * rates_until(self.planned, self.planned.steps)
        return sum(self.learning_rates[:step]) / whole

    def step_at(self, share: float) -> int:
        """Return the first step at which the summed learning rates reach the fraction ``share`` of the planned sum."""
        steps = self.planned.steps
        target = share * rates_until(self.planned, steps) * (1.0 - 1e-9)
        return min(steps, bisect_left(range(steps), target, key=lambda step: rates_until(self.planned, step)))


def rates_until(settings: PretrainSettings, step: int) -> float:
    """Return the sum of the planned learning rates over the first ``step`` steps, in units of the peak."""
    warmup = in_steps(settings.warmup, settings.steps)
    rising = min(step, warmup)
    total = rising * (rising - 1) / (2.0 * warmup) if warmup else 0.0
    count, length, low = step - rising, max(1, settings.steps - warmup), settings.min_learning_rate
    if count:
        # the cosine schedule's sum in closed form, so that a billion steps cost no time
        cosines = 0.5 + math.sin(math.pi * (count - 0.5) / length) / (2.0 * math.sin(math.pi / (2.0 * length)))
        total += low * count + (1.0 - low) * 0.5 * (count + cosines)
    return total


class BurningIn:
    """A model that takes the first steps of a planned run. Call ``train``, then ``record``.

    Lamina shortens the warm-up to at most ``longest_warmup`` steps, so that training reaches the peak learning rate. A
    shorter warm-up makes training less stable.
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
        train.load_state_dict(None, verbose=False)  # start at the beginning, even if blocks were read before
        planned = in_steps(settings.warmup, settings.steps)
        self.warmup = min(planned, longest_warmup)
        schedule = partial(with_shorter_warmup, planned_shares(settings), warmup=self.warmup, planned_warmup=planned)
        self.run = ShortRun(
            settings,
            self.model,
            train,
            device=device,
            step_factors=None if proxy.scaling is None else step_factors(self.model, proxy.scaling),
            schedule=None if self.warmup == planned else schedule,
        )
        self.snapshots: list[Snapshot] = []
        self._measure()

    def train(self, stops: Iterator[int]) -> None:
        """Train up to each step in ``stops``, and measure the model there. End early if a loss or gradient is not
        finite.
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
    """Return the loss on each held-out sequence, [sequences], of a model that knows only token frequencies."""
    count = max(1, MOST_TOKENS // blocks.stats.sequence_length)
    shares = blocks.train.frequencies(blocks.stats.vocab_size, count)
    return torch.from_numpy(-np.log(shares)[probe[:, 1:].numpy()].mean(axis=1))
