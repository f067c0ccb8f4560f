"""Measure how many directions each layer's hidden states use, and how many streams stay distinct."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd
import torch
from torch import nn

from lamina.core.frames import Frame
from lamina.modeling.parts import temporary_hooks
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.registry import COLUMNS, Probe, probe
from lamina.probes.engine.statistics import Running, as_tokens
from lamina.probes.structure.hooks import Args, Output
from lamina.probes.structure.sites import Point

METRICS = ("stable_rank", "effective_rank")


@probe
class Ranks(Probe):
    """Measure the stable rank and the effective rank of the hidden states before each layer.

    Rows with role "state" describe the matrix [tokens, channels] of the hidden states of one sequence before a layer.
    Lamina does not center this matrix. Lamina averages the ranks over sequences.

    ``stable_rank``: the sum of the squared singular values, divided by the largest squared singular value.
    ``effective_rank``: the exponential of the entropy of the singular values, which Lamina first divides by their sum
        (Roy & Vetterli 2007).

    In a model with n residual streams, each layer mixes the streams with a matrix [n, n]. Rows with role "streams" hold
    the effective rank of the product of the mixing matrices of layers 0 to ``layer``, averaged over tokens. A rank of 1
    means that the streams are no longer distinct. A rank of n means that all streams are still distinct. Lamina ignores
    norms on the streams.

    A rank of hidden states is at most the number of tokens, so compare only sequences of the same length.
    """

    name = "ranks"
    title = "Ranks"
    summary = (
        "stable and effective rank of the hidden states at each layer, and of the mixing matrices if there are several "
        "streams"
    )
    source = "DepthBench (arXiv 2609.32534); effective rank: Roy & Vetterli 2007"
    of_streams = True

    def cost(self, context: Context) -> float:
        return context.tokens()

    def begin(self, context: Context) -> None:
        self._context, self._batch = context, 0
        self._ranks: dict[tuple[int, str], Running] = {}

    def points(self) -> Mapping[int, Point]:
        return self._context.structure.states()

    def see(self, key: int, value: torch.Tensor) -> None:
        x = as_tokens(value, self._context.batches[self._batch]).x  # padding is 0, which changes no singular value
        finite = bool(x.isfinite().all())  # NaN would raise an error, and stop the other probes
        singular = torch.linalg.svdvals(x) if finite else torch.full((len(x), 1), torch.nan)
        stable = singular.square().sum(-1) / singular[:, 0].square()
        self._ranks.setdefault((key, "state"), Running()).add(torch.stack([stable, effective_rank(singular)], dim=1))

    def end_batch(self, inputs: Mapping[str, torch.Tensor], output: Output) -> None:
        self._batch += 1

    def standard_error(self) -> float | None:
        return max(running.relative_error() for running in self._ranks.values())

    def finish(self, context: Context) -> pd.DataFrame:
        for inputs in context.batches[: context.forwards]:
            for layer, product in composed_maps(context, context.on_device(inputs)).items():
                tokens = as_tokens(effective_rank(torch.linalg.svdvals(product)).unsqueeze(-1), inputs)
                count = tokens.x.shape[1] if tokens.valid is None else tokens.valid.sum(1, keepdim=True)
                self._ranks.setdefault((layer, "streams"), Running()).add(tokens.x.sum(1) / count)
        rows = []
        for (layer, role), running in self._ranks.items():
            metrics = METRICS if role == "state" else METRICS[1:]
            for row in zip(metrics, running.mean.tolist(), running.standard_error.tolist(), strict=True):
                rows.append((layer, "block", role, 0, *row))
        return pd.DataFrame(rows, columns=COLUMNS)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        states, streams = (frame[frame["role"] == role] for role in ("state", "streams"))
        caption = "Number of directions that the tokens of a sequence use."
        axes = {"color": "metric", "x_title": "state", "band": "standard_error"}
        yield from chart(states, "Rank of the states", "rank", caption, **axes)
        caption = "Number of streams that are still distinct after the mixing matrices of layers 0 to l."
        yield from chart(streams, "Rank of the streams' maps", "effective rank", caption, band="standard_error")

    def sentences(self, frame: Frame) -> Iterator[str]:
        table = frame.set_index(["role", "metric", "layer"])["value"].sort_index()
        for metric in METRICS:
            values = table["state", metric]
            yield (
                f"The {metric.replace('_', ' ')} goes from {values.iloc[0]:.3g} (state 0) to "
                f"{values.iloc[-1]:.3g} (state {values.index[-1]}), with the minimum {values.min():.3g} at state "
                f"{values.idxmin()}."
            )
        if ("streams", METRICS[1]) in table.index:
            whole = table["streams", METRICS[1]].iloc[-1]
            yield f"The product of all layers' mixing matrices has an effective rank of {whole:.3g}."


def effective_rank(singular: torch.Tensor) -> torch.Tensor:
    """Return the exponential of the entropy of the singular values [..., count], normalized to the sum 1."""
    shares = singular.double() / singular.double().sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def composed_maps(context: Context, inputs: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the product of the mixing matrices up to each layer, [batch, tokens, n, n], or {} for a single stream."""
    products: dict[int, torch.Tensor] = {}
    if not context.structure.carries_more:
        return products
    halves = [(site.index, part.modules[0][1]) for site in context.structure.layers for part in site.sublayers]
    mixers = {
        half.get_submodule("mixer"): layer
        for layer, half in halves
        if isinstance(getattr(half, "mixer", None), nn.Module)
    }
    shape = next(iter(inputs.values())).shape

    def compose(module: nn.Module, args: Args, output: Output) -> None:
        n = args[0].shape[-2]
        matrix = torch.eye(n, device=args[0].device) if output[1] is None else output[1].detach()
        before = products.get(max(products, default=0))
        products[mixers[module]] = (matrix if before is None else before @ matrix).expand(*shape, n, n)

    with temporary_hooks() as hooks, torch.no_grad():
        hooks += [module.register_forward_hook(compose) for module in mixers]
        context.forward(inputs, head=False)
    return products
