"""Measure the attention weights and attention logits of each head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.core.frames import Frame
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart, heat_map
from lamina.probes.engine.registry import COLUMNS, Probe, Sample, check_most, probe, sample_of
from lamina.probes.engine.statistics import Running
from lamina.probes.structure.hooks import Args, Kwargs, Output, eager_attention, layers_running
from lamina.probes.structure.sites import LayerSite

METRICS = ("entropy", "entropy_share", "first_token_share")
_SEQUENCES = 16  # the default for a corpus
_FARTHEST = 9000.0  # old models add -10,000 to a masked logit
_aten = torch.ops.aten
_SOFTMAX = {_aten._softmax.default, _aten._safe_softmax.default}


@probe
class Attention(Probe):
    """Measure the attention weights and attention logits of each head.

    ``entropy``: the entropy of the attention weights of one query in nats, averaged over queries.
    ``entropy_share``: the entropy divided by the largest possible entropy, ln(number of visible keys). A value of 1
        means uniform attention. Queries with only one visible key do not count. A causal mask, a sliding window or
        padding can hide keys from a query.
    ``max_logit``: the largest attention logit of a visible key in all measured sequences. An attention logit is an
        input of the softmax, after the scale, a soft-cap and a position bias. This metric has no standard error.
    ``first_token_share``: the attention weight on the sequence's first token (the attention sink), averaged over
        queries. The first query of a causal model has the weight 1. If a sliding window hides the first token, the
        weight is 0.

    Rows with role "head" describe one attention head, and the column ``index`` holds the head's number. Rows with role
    "all" hold the mean over a layer's heads, or the largest value of all heads for max_logit. Lamina averages over the
    queries of each sequence, then over sequences. Lamina computes standard errors over sequences. A learned attention
    sink (GPT-OSS) counts as a key.

    Lamina finds the attention by PyTorch's softmax operation, not by a module's name. To make this operation visible,
    Lamina switches the model to eager attention. Memory must hold the attention weights [batch, heads, queries, keys]
    of one layer at a time.
    """

    name = "attention"
    title = "Attention"
    summary = "attention entropy, largest attention logit and attention to the first token, by layer and head"
    source = "attention sinks: Xiao et al. 2023; entropy collapse: Zhai et al. 2023; logit growth: Dehghani et al. 2023"
    of_streams = True
    over_steps = ("entropy_share", "max_logit", "first_token_share")

    def __init__(self, sequences: int | None = None):
        """Choose the number of sequences to measure (0: all). Raises UserError for an invalid number.

        The default is 16 sequences of a corpus, or all if you set --sequences or --tolerance, or give your own text.
        """
        self.sequences = check_most(self.name, "sequences", sequences)

    def cost(self, context: Context) -> float:
        return 2.0 * context.tokens(context.most_sequences(self.sequences, _SEQUENCES))

    def begin(self, context: Context) -> None:
        self._samples: dict[int, Running] = {}
        self._largest: dict[int, torch.Tensor] = {}

    def measured(self, context: Context) -> Sample:
        return sample_of(context.first(context.most_sequences(self.sequences, _SEQUENCES)))

    def finish(self, context: Context) -> pd.DataFrame:
        batches = context.first(context.most_sequences(self.sequences, _SEQUENCES))
        for number, inputs in enumerate(batches):
            context.progress(number, len(batches), self.name)
            self._add(context, context.on_device(inputs))
        if not self._samples:
            raise UserError("attention: no layer computes a softmax over keys. Choose a model with softmax attention.")
        rows = [row for layer in sorted(self._samples) for row in self._rows(layer)]
        return pd.DataFrame(rows, columns=COLUMNS)

    def _add(self, context: Context, inputs: Mapping[str, torch.Tensor]) -> None:
        batch = next(iter(inputs.values()))
        mask = inputs.get("attention_mask")
        pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        layers = [  # the mixing of streams has a softmax, too
            replace(site, module=site.module.get_submodule("attention.module")) if site.carries_more else site
            for site in context.structure.layers
        ]

        def see(layer: int, logits: torch.Tensor, weights: torch.Tensor) -> None:
            by_batch = _by_sequence(logits, weights, len(batch))
            if by_batch is not None:
                pairs.setdefault(layer, []).append(of_heads(*by_batch, mask))

        with torch.no_grad(), eager_attention(context.model), softmaxes(layers, see):
            context.forward(inputs, head=False)
        for layer, parts in pairs.items():
            samples = torch.cat([samples for samples, _ in parts], dim=1)  # of all softmaxes in the layer
            samples = torch.cat([samples, samples.mean(1, keepdim=True)], dim=1)
            self._samples.setdefault(layer, Running()).add(samples)
            largest = torch.cat([largest for _, largest in parts])
            self._largest[layer] = torch.maximum(self._largest.get(layer, largest), largest)

    def _rows(self, layer: int) -> Iterator[tuple]:
        running, largest = self._samples[layer], self._largest[layer]
        for column, metric in enumerate(METRICS):
            # Add the mean over the heads as a column, because heads of one sequence are not independent.
            *heads, whole = zip(
                running.mean[:, column].tolist(), running.standard_error[:, column].tolist(), strict=True
            )
            yield layer, "attention", "all", 0, metric, *whole
            yield from ((layer, "attention", "head", head, metric, *each) for head, each in enumerate(heads))
        yield layer, "attention", "all", 0, "max_logit", float(largest.max()), math.nan
        for head, logit in enumerate(largest.tolist()):
            yield layer, "attention", "head", head, "max_logit", logit, math.nan

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        every = frame[frame["role"] == "all"]
        heads = frame[(frame["role"] == "head") & (frame["metric"] == "entropy_share")]
        axes = {"x_title": "layer", "y_title": "head", "value_title": "share"}
        yield from chart(
            every[every["metric"].isin(["entropy_share", "first_token_share"])],
            *("How spread out attention is, and the weight on the first token", "share"),
            "Entropy of the attention weights divided by the largest possible entropy, and the weight on the first "
            "token, both averaged over the heads.",
            color="metric",
            band="standard_error",
        )
        yield from chart(
            every[every["metric"] == "max_logit"],
            *("Largest attention logit", "logit"),
            "The largest input of the softmax in each layer, over all heads and the whole sample.",
        )
        yield (
            heat_map(heads, "layer", "index", "value", title="Entropy of each head", **axes),
            "Each head's entropy divided by the largest possible entropy. 0 means attention to one key, and 1 means "
            "equal weights.",
        )

    def sentences(self, frame: Frame) -> Iterator[str]:
        every = frame[frame["role"] == "all"].set_index(["metric", "layer"])["value"]
        spread, first, logit = (every[name] for name in ("entropy_share", "first_token_share", "max_logit"))
        heads = frame[(frame["role"] == "head") & (frame["metric"] == "max_logit")]
        top = heads.loc[heads["value"].idxmax()] if heads["value"].notna().any() else None
        if spread.notna().any():
            yield (
                f"Attention is most concentrated in layer {spread.idxmin()} ({spread.min():.0%} of the maximum "
                f"entropy) and most even in layer {spread.idxmax()} ({spread.max():.0%})."
            )
        if first.notna().any():
            sinks = int((first > 0.5).sum())
            yield (
                f"The first token gets {first.mean():.0%} of the attention on average, and most in layer "
                f"{first.idxmax()} ({first.max():.0%}). The first token gets more than half of the attention in "
                f"{sinks} of {len(first)} layers."
            )
        if top is not None:
            yield (
                f"The largest attention logit is {logit.max():.3g} (layer {top['layer']}, head {top['index']}). The "
                f"median of the layers' largest logits is {logit.median():.3g}."
            )


def of_heads(
    logits: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each head's ``METRICS`` on each sequence, [sequences, heads, metrics], and each head's largest logit.

    Args:
        logits: the softmax's input, [sequences, heads, queries, keys]
        weights: the softmax's output, in the same shape
        mask: 1 for text and 0 for padding, [sequences, tokens], or None if there is no padding
    """
    sequences, heads, queries, keys = logits.shape
    asks = torch.ones(sequences, queries, dtype=torch.bool, device=logits.device)
    first = torch.zeros(sequences, dtype=torch.long, device=logits.device)
    if mask is not None and mask.shape[1] == queries:
        asks = mask.bool().to(logits.device)
    if mask is not None and mask.shape[1] == keys:
        first = mask.to(logits.device).argmax(1)  # with padding on the left, the text begins after the padding
    samples, largest = [], []
    for head in range(heads):
        x = logits[:, head].float()
        p = weights[:, head] if weights.dtype == torch.float32 else x.softmax(-1)
        # A mask adds -inf, the dtype's smallest number, or -10,000 (in old models) to a logit.
        visible = x > (x.amax(-1, keepdim=True) - _FARTHEST).clamp(min=torch.finfo(logits.dtype).min / 2)
        count = visible.sum(-1)
        counts = asks & (count > 0)
        entropy = torch.special.entr(p.double()).sum(-1)
        share = torch.where(asks & (count > 1), entropy / count.clamp(min=2).log(), math.nan)
        on_first = p.gather(2, first.view(-1, 1, 1).expand(-1, queries, 1)).squeeze(2).double()
        each = [entropy.where(counts, math.nan), share, on_first.where(counts, math.nan)]
        samples.append(torch.stack([values.nanmean(1) for values in each], dim=1))
        largest.append(x.masked_fill(~(visible & counts.unsqueeze(-1)), -math.inf).max())
    return torch.stack(samples, dim=1), torch.stack(largest).cpu()


def _by_sequence(logits: torch.Tensor, weights: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Reshape a softmax's tensors to [batch, heads, queries, keys]. Return None for a softmax in a router."""
    if logits.ndim == 4 and len(logits) == batch:
        return logits, weights
    if len(logits) % batch:
        return None
    logits, weights = logits.unflatten(0, (batch, -1)), weights.unflatten(0, (batch, -1))
    if logits.ndim == 5:  # an image's windows count as more queries of a head
        return logits.transpose(1, 2).flatten(2, 3), weights.transpose(1, 2).flatten(2, 3)
    if logits.ndim == 4 and logits.shape[1] > 1 and logits.shape[2] == logits.shape[3]:  # batch and heads share an axis
        return logits, weights
    return None


@contextmanager
def softmaxes(layers: Sequence[LayerSite], see: Callable[[int, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Call ``see(layer, input, output)`` whenever a layer runs a softmax over the last axis."""

    class SoftmaxMode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable[..., Output], types: object, args: Args = (), kwargs: Kwargs | None = None
        ) -> Output:
            output = func(*args, **(kwargs or {}))
            if func in _SOFTMAX and inside and args[1] in (-1, args[0].ndim - 1):
                see(inside[-1], args[0], output)
            return output

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # nn.MultiheadAttention's fast path has no separate softmax
    try:
        with layers_running(layers) as inside, SoftmaxMode():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
