"""Measure how much of each sub-layer's output reaches each later layer through skips and norms alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd
import torch

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart, heat_map
from lamina.probes.engine.layer_calls import ShortProbe, frozen
from lamina.probes.engine.registry import COLUMNS, probe
from lamina.probes.engine.statistics import mean_and_error
from lamina.probes.structure.hooks import forward, intercept, stream_of
from lamina.probes.structure.sites import Point

_DRAWS = 4
_AT_ONCE = 2**22  # the largest number of elements of all directions in one backward pass
_NOTHING = 1e-6


@probe
class DepthMixing(ShortProbe):
    """Measure how much skips and norms scale each sub-layer's output on the way to a later layer.

    Lamina detaches the input of every attention and feed-forward, so gradients flow only through skips, scales and
    norms. Each factor belongs to a Jacobian, such as the Jacobian from a sub-layer's output to a later hidden state.
    The factor is the root mean square factor by which this Jacobian stretches a random direction. In Attention
    Residuals (arXiv 2603.15031, Sec 6.2), these factors are the weights in the depth-mixing matrix.

    ``mixing``: the factor from the output of sub-layer number ``index`` to the hidden state before layer ``layer``. The
        sub-layers have numbers from 0 over the whole model, and the embedding has the number -1. In Pre-LN, all factors
        are 1. The factor is 0 if the output reaches the layer only through other sub-layers, as in FuseNorm's
        attention.
    ``composite_gain`` (index -1): the factor from the hidden state before layer ``layer`` to the last layer's output.
        In Pre-LN, this factor is 1. The mHC paper reports the worst row of the matrix, but Lamina averages over the
        rows.

    In a model with several residual streams or with stored earlier hidden states, each layer reads a combination of
    these tensors. The metric mixing then describes this combination. With several streams, composite_gain treats all
    streams as one long vector. With stored hidden states, composite_gain ends at the input of the final norm.

    Options:

    ``sequences``: the number of sequences to measure (0 for all). The default is 0 for your own text. For Lamina's
        embedded corpus, and during training, the default is 1.
    ``tokens``: the number of tokens to measure at the start of each sequence (0 for all). The default is 0 for your own
        text. For Lamina's embedded corpus, and during training, the default is 32.
    """

    name = "depth_mixing"
    title = "Depth mixing"
    summary = "how much of each sub-layer's output reaches each later layer through skips and norms alone"
    source = "Attention Residuals (arXiv 2603.15031) Sec 6.2; mHC (arXiv 2512.24880)"
    of_streams = True

    def __init__(self, sequences: int | None = None, tokens: int | None = None):
        super().__init__(sequences, tokens)

    def cost(self, context: Context) -> float:
        return 4.0 * self.tokens_of(context)

    def begin(self, context: Context) -> None:
        bare = [site.index for site in context.structure.layers if not site.sublayers]
        if bare:
            raise UserError(
                f"depth_mixing: Lamina did not find the sub-layers of layer {ranges(bare)}. Choose another model."
            )

    def finish(self, context: Context) -> pd.DataFrame:
        self.take(context)
        stretches: dict[tuple[int, int], list[float]] = {}
        for inputs in self.inputs:
            for key, value in self._measure(context, inputs).items():
                stretches.setdefault(key, []).append(value)
        kinds = ["embedding", *(sub.kind for site in context.structure.layers for sub in site.sublayers)]
        rows = []
        for (layer, index), values in stretches.items():
            metric, kind = ("composite_gain", "model") if index < 0 else ("mixing", kinds[index])
            place = max(index - 1, -1)  # sub-layers count from 0, and -1 is the embedding
            rows.append((layer, kind, "residual_path", place, metric, *mean_and_error(torch.tensor(values))))
        return pd.DataFrame(rows, columns=COLUMNS)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        mixing = frame[frame["metric"] == "mixing"]
        axes = {"x_title": "number of the sub-layer (-1: the embedding)", "y_title": "state"}
        yield (
            heat_map(mixing, "index", "layer", "value", title="Depth-mixing matrix", **axes),
            "The factor by which skips and norms scale each sub-layer's output on its way to each later hidden state.",
        )
        gains = frame[frame["metric"] == "composite_gain"]
        yield from chart(
            gains,
            "Composite gain",
            "factor",
            "The factor by which skips and norms scale each hidden state on its way to the last layer's output.",
            x_title="state",
        )

    def sentences(self, frame: Frame) -> Iterator[str]:
        mixing = frame[frame["metric"] == "mixing"]
        last = mixing[mixing["layer"] == mixing["layer"].max()]
        branches = last[last["index"] >= 0]
        nowhere = sorted(int(i) for i in branches.loc[branches["value"] <= _NOTHING, "index"])
        least, most = branches["value"].min(), branches["value"].max()
        yield (
            "On the way to the last layer's output, skips and norms scale the sub-layers' outputs by "
            f"{least:.3g} to {most:.3g}, and the embedding by "
            f"{float(last.loc[last['index'] < 0, 'value'].iloc[0]):.3g}."
        )
        if nowhere:
            yield f"The outputs of sub-layers {ranges(nowhere)} reach the last layer only through later sub-layers."

    def _measure(self, context: Context, inputs: dict[str, torch.Tensor]) -> dict[tuple[int, int], float]:
        """Return factors by (state, sub-layer). Key (state, -1) has the factor from this state to the last state."""
        leaves: dict[int, torch.Tensor] = {}
        states: dict[int, torch.Tensor] = {}
        points: dict[tuple[str, int], Point] = {("state", i): point for i, point in context.structure.states().items()}
        reads: dict[int, torch.Tensor] = {}
        points |= {("read", i): point for i, point in context.structure.reads().items()}
        count, ends = 0, [0]  # ends[l]: the number of sub-layers before state l
        for site in context.structure.layers:
            for sublayer in site.sublayers:
                count += 1
                points["branch", count] = sublayer.contribution
            ends.append(count)

        def change(key: tuple[str, int], tensor: torch.Tensor) -> torch.Tensor | None:
            what, index = key
            if what == "branch" or (what, index) == ("state", 0):
                leaf = leaves[index] = tensor.detach().clone().requires_grad_()
                if what == "state":
                    states[0] = leaf
                return leaf.clone()  # a layer may add to the tensor in place
            (reads if what == "read" else states)[index] = stream_of(tensor)  # the tensor, or the stream in a tuple
            return None

        with frozen(context.model), torch.enable_grad():
            with intercept(points, change, roots=[context.base]):
                forward(context.base, context.on_device(inputs))
            stretches: dict[tuple[int, int], float] = {}
            last = max(states)
            read = {layer: reads.get(layer, states[layer]) for layer in range(1, last + 1)}
            fits = _AT_ONCE // (_DRAWS * max(map(torch.numel, states.values())))
            # A batch of more states would waste time in later layers, on which the states do not depend.
            together = max(1, min(fits, math.isqrt(last)))
            for start in range(1, last + 1, together):
                layers = range(start, min(start + together, last + 1))
                before = [leaves[index] for index in range(ends[max(layers)] + 1)]
                for layer, values in zip(layers, _stretches([read[at] for at in layers], before), strict=True):
                    stretches |= {(layer, index): value for index, value in enumerate(values[: ends[layer] + 1])}
            end = states[last] if states[last].ndim > 3 else read[last]
            (gains,) = _stretches([end], [states[layer] for layer in range(last)])
            return stretches | {(layer, -1): value for layer, value in enumerate(gains)}


def _stretches(states: list[torch.Tensor], sources: list[torch.Tensor]) -> list[list[float]]:
    """Estimate the root mean square stretch of a direction by the Jacobian from each source to each state."""
    directions = []
    for number, state in enumerate(states):
        generator = torch.Generator().manual_seed(0)
        drawn = torch.stack([torch.randint(0, 2, state.shape, generator=generator) for _ in range(_DRAWS)])
        of_all = state.new_zeros(len(states), _DRAWS, *state.shape)
        of_all[number] = drawn.to(state) * 2 - 1
        directions.append(of_all.flatten(0, 1))
    # One batched backward pass for all random directions saves time on small models.
    products = torch.autograd.grad(
        states, sources, directions, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    squares = torch.zeros(len(states), len(sources), dtype=torch.float64)
    for number, product in enumerate(products):
        if product is not None:
            squares[:, number] = product.double().pow(2).flatten(1).sum(1).view(-1, _DRAWS).sum(1)
    sizes = torch.tensor([[state.numel() * _DRAWS] for state in states])
    return (squares / sizes).sqrt().tolist()
