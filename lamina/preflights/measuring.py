"""Measurements of a model on one batch: states, branches, gradients and Jacobian by layer, and its use of the input.

One forward pass and two backward passes. Only the states x^0 and x^N are kept; hooks reduce everything else to numbers
during the passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from lamina.modeling.modeling_lamina import LaminaModel, Residual, Terms
from lamina.modeling.parts import body_of, sublayers
from lamina.training.monitor.parameter_measures import GradientNorms
from lamina.training.monitor.rows import Row
from lamina.training.monitor.stream_measures import STATE_METRICS, state_statistics

FP16_MAX = 65504.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A model at one step of the burn-in.

    Attributes:
        loss: nats per token on the held-out sequences.
        unigram: the loss of a constant prediction with the corpus's token frequencies on the same sequences.
        error: the standard error of their difference over the sequences (infinite for a single one).
        context: by how many nats the model's predictions beat their own mean over all positions.
        variation: their mean Kullback-Leibler divergence from that mean; 0 if the output ignores the input.
        rows: tidy: (step, layer, sublayer, role, index, metric, value), layer 0-based, -1 for the embedding's output.
    """

    step: int
    loss: float
    unigram: float
    error: float
    context: float
    variation: float
    rows: list[Row]

    def series(self, metric: str, sublayer: str = "block") -> dict[int, float]:
        """A metric by layer."""
        return {row[1]: row[6] for row in self.rows if row[5] == metric and row[2] == sublayer}


def take_snapshot(
    model: PreTrainedModel, input_ids: torch.Tensor, unigram: torch.Tensor, step: int, generator: torch.Generator
) -> Snapshot:
    """Measure ``model`` on held-out token ids [sequences, tokens]; restores its mode and clears its gradients.

    ``unigram`` [sequences]: the loss of a constant prediction on each, in nats per token.

    By block (sublayer "block", layer l for x^{l+1}, -1 for x^0): the state's statistics; ``token_similarity``, the mean
    cosine over all pairs of tokens; ``state_gradient_norm``, the norm of the loss's gradient with respect to the state;
    ``jacobian_gain``, the root mean square gain of the Jacobian from that state to x^N (its Frobenius norm over the
    root of its rows, estimated with one random vector v as |J^T v| / |v|). By sub-layer: ``branch_variance``, the
    variance of the module's output, ``added_variance``, that of the sum's branch term (after an output norm),
    ``skip_variance``, that of the scaled skip, ``gradient_norm`` of its weights.
    """
    base = body_of(model)
    was_training = model.training
    model.eval()
    model.zero_grad()
    watch = _Watch()
    try:
        with watch.over(base), torch.enable_grad():
            logits = model(input_ids=input_ids, use_cache=False).logits
            losses, context, variation = _losses(logits, input_ids)
            loss = losses.mean()
            assert watch.first is not None
            assert watch.last is not None
            vector = torch.randn(watch.last.shape, generator=generator).to(watch.last)
            watch.collect("jacobian_gain", 1.0 / float(vector.double().norm()))
            torch.autograd.grad(watch.last, watch.first, vector, retain_graph=True)
            watch.collect("state_gradient_norm", 1.0)
            loss.backward()
        norms = GradientNorms(model)
        gradients = norms.rows(step, norms.squares())
    finally:
        model.zero_grad()
        model.train(was_training)
    return Snapshot(
        step=step,
        loss=float(loss.detach()),
        unigram=float(unigram.mean()),
        error=_standard_error(losses.detach().double().cpu() - unigram),
        context=context,
        variation=variation,
        rows=[*watch.rows(step), *gradients],
    )


def _losses(logits: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """Each sequence's cross-entropy, its gain over the mean prediction's, and the divergence from that prediction."""
    log_p = logits[:, :-1].float().log_softmax(-1).flatten(0, 1)
    targets = input_ids[:, 1:].flatten()
    losses = nn.functional.nll_loss(log_p, targets, reduction="none").unflatten(0, (len(input_ids), -1)).mean(1)
    with torch.no_grad():
        p = log_p.double().exp()
        mean = p.mean(0).clamp_min(1e-30).log()
        context = -mean[targets].mean() - losses.double().mean()
        variation = (p * (log_p.double() - mean)).sum(-1).mean()
    return losses, float(context), float(variation)


def _standard_error(differences: torch.Tensor) -> float:
    return float(differences.std() / math.sqrt(len(differences))) if len(differences) > 1 else math.inf


@dataclass
class _Watch:
    """Hooks that reduce states, branches and gradients to numbers."""

    values: dict[tuple[int, str, str], torch.Tensor | float] = field(default_factory=dict)
    metric: str = ""
    factor: float = 1.0
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def collect(self, metric: str, factor: float) -> None:
        """Name the metric that the next backward pass measures at the states."""
        self.metric, self.factor = metric, factor

    @contextmanager
    def over(self, base: LaminaModel) -> Iterator[None]:
        handles = [base.layers[0].register_forward_pre_hook(lambda module, args: self._state(-1, args[0]))]
        for index, block in enumerate(base.layers):
            handles.append(block.register_forward_hook(partial(self._output, index)))
        for index, name, residual in sublayers(base):
            handles.append(residual.register_terms_hook(partial(self._terms, index, name, residual)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _output(self, layer: int, block: nn.Module, args: object, output: torch.Tensor) -> None:
        self._state(layer, output)

    def _state(self, layer: int, state: torch.Tensor) -> None:
        for metric, value in zip(STATE_METRICS, state_statistics(state), strict=True):
            self.values[layer, "block", metric] = value
        flat = state.detach().double().flatten(0, -2)
        self.values[layer, "block", "token_similarity"] = nn.functional.normalize(flat, dim=-1).mean(0).pow(2).sum()
        if layer < 0:
            self.first = state
        self.last = state
        state.register_hook(partial(self._gradient, layer))

    def _gradient(self, layer: int, gradient: torch.Tensor) -> None:
        # double: the squares of a vanishing gradient would underflow
        self.values[layer, "block", self.metric] = gradient.double().norm() * self.factor

    def _terms(self, layer: int, name: str, residual: Residual, terms: Terms) -> None:
        # double before the scale: a large or small one would cost the variance its digits
        skip = residual.scale_skip(terms.source.detach().double())
        tensors = {"branch_variance": terms.output, "added_variance": terms.branch, "skip_variance": skip}
        for metric, tensor in tensors.items():
            self.values[layer, name, metric] = tensor.detach().double().var(correction=0)

    def rows(self, step: int) -> list[Row]:
        """The measurements as tidy rows, layer by layer."""
        order = sorted(self.values, key=lambda key: key[0])
        return [(step, layer, sub, "all", 0, name, float(self.values[layer, sub, name])) for layer, sub, name in order]
