"""Measure how each layer affects later layers, and the loss with exchanged layers or a linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise

import pandas as pd
import torch

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.core.values import one_of
from lamina.errors import UserError
from lamina.modeling.parts import patched, uncompiled
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart, heat_map
from lamina.probes.engine.layer_calls import rows_of
from lamina.probes.engine.registry import COLUMNS, Probe, Sample, check_most, probe, sample_of
from lamina.probes.engine.statistics import as_tokens, mean_and_error, tied
from lamina.probes.gradients import shared_layers
from lamina.probes.layer_drop import removed
from lamina.probes.structure.hooks import intercept, observe, stream_of
from lamina.probes.structure.sites import LayerSite, Point

METRICS = ("causal_score", "permutation_score", "linear_loss_increase")
_SEQUENCES = 4  # the default for a corpus
_ENOUGH = 4  # tokens per channel to fit a linear map
Inputs = Mapping[str, torch.Tensor]


@probe
class LayerUse(Probe):
    """Measure how a model uses its layers, with the three scores of DepthBench.

    All rows have the role "block".

    ``causal_score``: the norm of the change of a later layer's update if the model skips layer ``layer``, divided by
        the norm of the update. The column ``index`` holds the number of the later layer. A layer's update is the
        layer's output minus the layer's input. Lamina takes norms over the channels of each token, and averages over
        tokens.
    ``permutation_score``: the absolute change of the loss if layer ``layer`` and the next layer change places, divided
        by the loss. A layer's weights, norms, scales and type move with the layer. A mask that depends on the position
        in the stack stays at its position.
    ``linear_loss_increase``: the increase of the loss in nats per token if the best linear map replaces the layer.
        Lamina fits the linear map by least squares, without an intercept. Lamina fits the map on the second half of the
        sequences, and measures the loss on the first half.

    Lamina computes standard errors over sequences. In a model with several residual streams, causal_score uses the mean
    of the streams. For linear_loss_increase, Lamina treats several streams as one vector. If the layers share weights
    or read earlier hidden states, Lamina cannot measure permutation_score.

    Options:

    ``metric``: one of the three scores, or "all" (default).
    ``sequences``: the number of sequences to measure (0 for all). The default is 0 if you give your own text or set
        --sequences or --tolerance. Otherwise, the default is 4.
    """

    name = "layer_use"
    title = "Use of the layers"
    summary = (
        "how much each layer changes later layers' updates, and how the loss changes if layers are swapped or "
        "made linear"
    )
    source = "DepthBench (arXiv 2609.32534); causal score: Csordás et al. 2025 (arXiv 2505.13898)"
    needs = frozenset({"tokens"})
    of_streams = True

    def __init__(self, metric: str = "all", sequences: int | None = None):
        self._wants_all = one_of("metric", metric, (*METRICS, "all")) == "all"
        self.metrics = METRICS if self._wants_all else (metric,)
        self.sequences = check_most(self.name, "sequences", sequences)

    def cost(self, context: Context) -> float:
        tokens = context.tokens(context.most_sequences(self.sequences, _SEQUENCES))
        return context.structure.num_layers * (3 * tokens + _ENOUGH * context.structure.hidden_size)

    def begin(self, context: Context) -> None:
        context.check_head()
        if context.structure.num_layers < 2:
            raise UserError("layer_use: the model has a single layer. Choose a model with 2 layers or more.")

    def finish(self, context: Context) -> pd.DataFrame:
        sequences = [context.on_device(row) for batch in context.batches for row in rows_of(batch)]
        with torch.no_grad(), uncompiled(context.model):
            rows = [row for metric in self.metrics for row in self._rows(context, metric, sequences)]
        return pd.DataFrame(rows, columns=[*COLUMNS, *Sample._fields])

    def _rows(self, context: Context, metric: str, sequences: Sequence[Inputs]) -> Iterator[tuple]:
        few = sequences[: context.most_sequences(self.sequences, _SEQUENCES) or None]
        layers = context.structure.num_layers
        try:
            if metric == "causal_score":
                scores = causal_scores(context, few)
                found = {place: mean_and_error(torch.stack(each)) for place, each in scores.items()}
            else:
                fitted = metric == "linear_loss_increase"
                few = few[: max(1, len(sequences) // 2)] if fitted else few
                changes = linear_maps(context, sequences) if fitted else exchanges(context)
                whole = _losses(context, few)
                found = {}
                for layer, change in enumerate(changes):
                    context.progress(layer, layers, f"{metric} of layer {layer}")
                    with change:
                        mean, error = mean_and_error(_losses(context, few) - whole)
                    loss = float(whole.mean())
                    if guessing := context.no_better_than_guessing(loss):
                        context.note(f"layer_use: {guessing}")
                    found[layer, 0] = (mean, error) if fitted else (abs(mean) / loss, error / loss)
        except UserError as error:
            if not self._wants_all:
                raise
            reason = str(error).removeprefix(f"{metric}: ")
            context.notes.append(f"layer_use: Lamina leaves out {metric}: {reason}")
            return
        for (layer, index), row in found.items():
            yield layer, "block", "block", index, metric, *row, *sample_of(few)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        causal, permuted, linear = (frame[frame["metric"] == metric] for metric in METRICS)
        if len(causal):
            axes = {"x_title": "layer skipped", "y_title": "later layer"}
            yield (
                heat_map(causal, "layer", "index", "value", title="Causal score", **axes),
                "Change of a later layer's update if Lamina skips a layer, relative to the update's norm.",
            )
        caption = "Relative change of the loss if Lamina exchanges the layer and the next layer."
        yield from chart(permuted, "Permutation score", "share of the loss", caption, band="standard_error")
        caption = (
            "Increase of the loss if the best linear map replaces the layer. A low value means a nearly linear layer."
        )
        yield from chart(linear, "Loss with a linear layer", "nats per token", caption, band="standard_error")

    def sentences(self, frame: Frame) -> Iterator[str]:
        texts = {
            METRICS[0]: (
                "Skipping layer {} changes the later layers' updates by {:.3g} of the updates' norm.",
                "Skipping layer {} changes the later layers' updates least ({:.3g} of the updates' norm). Skipping "
                "layer {} changes the updates most ({:.3g}).",
            ),
            METRICS[1]: (
                "Exchanging layer {} with the next layer changes the loss by {:.2%}.",
                "Exchanging a layer with the next layer changes the loss least for layer {} ({:.2%}) and most "
                "for layer {} ({:.2%}).",
            ),
            METRICS[2]: (
                "Replacing layer {} with a linear map increases the loss by {:.3g} nats.",
                "Replacing a layer with a linear map increases the loss least for layer {} ({:.3g} nats), and most for "
                "layer {} ({:.3g} nats).",
            ),
        }
        for metric, (one, several) in texts.items():
            rows = frame[frame["metric"] == metric]
            values = rows.groupby("layer")["value"].mean().dropna()
            if not len(values):
                continue
            text = several if len(values) > 1 else one
            yield text.format(values.idxmin(), values.min(), values.idxmax(), values.max())
            errors = rows.groupby("layer")["standard_error"].mean().reindex(values.index)
            if metric != METRICS[0] and (near := tied(values, errors, [values.idxmin()])):
                yield (
                    f"With {rows['tokens'].iloc[0]:,} tokens, two standard errors cannot tell layers "
                    f"{ranges([values.idxmin(), *near])} apart in this measure."
                )


def _losses(context: Context, sequences: Sequence[Inputs]) -> torch.Tensor:
    return torch.stack([context.token_losses(inputs).double().mean() for inputs in sequences]).cpu()


def causal_scores(context: Context, sequences: Sequence[Inputs]) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Return each sequence's causal scores by (skipped layer, later layer), averaged over tokens."""
    layers, scores = context.structure.num_layers, {}
    for number, inputs in enumerate(sequences):
        whole = _updates(context, inputs)
        for skipped in range(layers - 1):
            context.progress(number * layers + skipped, len(sequences) * layers, f"without layer {skipped}")
            with removed(context, [skipped]):
                other = _updates(context, inputs)
            for layer in range(skipped + 1, layers):
                score = (whole[layer] - other[layer]).norm(dim=-1) / whole[layer].norm(dim=-1)
                scores.setdefault((skipped, layer), []).append(score.mean().double().cpu())
    return scores


def _updates(context: Context, inputs: Inputs) -> list[torch.Tensor]:
    """Return each layer's update x^(l+1) - x^l [tokens, channels] for one sequence, without padding."""
    states: dict[int, torch.Tensor] = {}

    def see(state: int, value: torch.Tensor) -> None:
        tokens = as_tokens(value, inputs)
        # The clone keeps the tensor if a layer adds to the tensor in place.
        states[state] = tokens.x[0].clone() if tokens.valid is None else tokens.x[0, tokens.valid[0]]

    with observe(context.structure.states(), see, root=context.base):
        context.forward(inputs, head=False)
    return [states[layer + 1] - states[layer] for layer in range(context.structure.num_layers)]


def exchanges(context: Context) -> Iterator[AbstractContextManager]:
    """Yield one context per layer, which exchanges the layer and the next layer. Raises UserError for shared layers."""
    sites = context.structure.layers
    if context.structure.has_memory or shared_layers(context.structure):
        raise UserError("permutation_score: the layers share weights, or read earlier states. Choose another metric.")
    for first, second in pairwise(sites):
        yield _exchanged(context, first, second)


@contextmanager
def _exchanged(context: Context, first: LayerSite, second: LayerSite) -> Iterator[None]:
    places = [site.path.rpartition(".") for site in (first, second)]
    holders = [(context.model.get_submodule(holder)._modules, name) for holder, _, name in places]
    # In a Lamina model, the first layer makes the streams.
    counts = [vars(site.module).get("streams") for site in (second, first)]
    with ExitStack() as stack:
        if counts[0] is not None:
            for site, streams in zip((first, second), counts, strict=True):
                stack.enter_context(patched(site.module, streams=streams))
        for (modules, name), site in zip(holders, (second, first), strict=True):
            modules[name] = site.module
        try:
            yield
        finally:
            for (modules, name), site in zip(holders, (first, second), strict=True):
                modules[name] = site.module


def linear_maps(context: Context, sequences: Sequence[Inputs]) -> Iterator[AbstractContextManager]:
    """Yield one context per layer, in which a linear map replaces the layer. Raises UserError for too few tokens."""
    kept: dict[str, torch.Tensor] = {}

    def keep(key: str, value: torch.Tensor) -> None:
        kept[key] = stream_of(value).clone()  # a layer may add to the tensor in place

    for site in context.structure.layers:
        points = {"input": site.input, "output": site.output}
        gram = product = torch.zeros(())
        count = width = 0
        for inputs in sequences[len(sequences) // 2 :]:
            with intercept(points, keep, roots=context.roots):
                context.forward(inputs, head=False)
            real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            x, y = (kept[key].flatten(2)[real].double() for key in points)
            gram, product, count, width = gram + x.T @ x, product + x.T @ y, count + len(x), x.shape[1]
            if count >= _ENOUGH * width:
                break
        if count <= width or len(sequences) < 2:
            raise UserError(
                f"linear_loss_increase: {count} tokens are too few for {width} channels. Raise --sequences."
            )
        yield _linear(context, points, torch.linalg.pinv(gram, hermitian=True) @ product)


@contextmanager
def _linear(context: Context, points: Mapping[str, Point], weight: torch.Tensor) -> Iterator[None]:
    kept: list[torch.Tensor] = []

    def change(key: str, value: torch.Tensor) -> torch.Tensor | None:
        if key == "input":
            kept.append(stream_of(value).flatten(2).double() @ weight)
            return None
        return kept.pop().to(value).view_as(value)

    with intercept(points, change, roots=context.roots):
        yield
