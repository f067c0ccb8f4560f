"""Measure how much a layer, and the layer's residual path alone, stretch a change of the layer's input."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.core.values import number, switch, whole_number
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.jacobians import (
    Jacobian,
    SpectralNorm,
    Wiring,
    block_factor,
    expected_sigmas,
    largest_singular_value,
    norm_scale,
    start_vector,
    wirings_of,
)
from lamina.probes.engine.layer_calls import LayerCall, ShortProbe, frozen, record_layer_calls
from lamina.probes.engine.registry import COLUMNS, probe
from lamina.probes.engine.statistics import mean_and_error
from lamina.probes.structure.hooks import eager_attention

_PATHS = {
    "jacobian": "whole blocks",
    "residual_path": "residual path, measured",
    "keel": "residual path, from gains and scales (Keel Eq 14-19)",
    "fusenorm": "residual path, from sigma (FuseNorm Eq 10, 11, 16)",
    "collapsed": "mean of the streams",
}


@probe
class JacobianProbe(ShortProbe):
    """Measure the Jacobian of each block at the hidden states of real inputs.

    J is the Jacobian of a block's output with respect to the block's input, over all tokens of a short sequence. The
    spectral norm of J is the largest factor by which the block can stretch a small change of its input. The same factor
    bounds how much the block can stretch a gradient in the backward pass. Lamina computes spectral norms by Lanczos
    bidiagonalization. Values are means over sequences, with their standard errors.

    ``norm``: the spectral norm.
    ``log10_product``: log10 of the product of the spectral norms of layers 0 to ``layer``.
    ``typical``: the root mean square factor by which J stretches a random direction, estimated from four directions.
    ``formula``: the spectral norm by a paper's formula.
    ``iterations``, ``residual``: the number of iterations, and the remaining relative error of the spectral norm.

    Rows of a layer (sublayer "block") have one of these roles:

    ``jacobian``: the Jacobian of the whole block.
    ``identity``: J minus the identity. The spectral norm is then the distance of J from the identity (FuseNorm Eq 9). A
        single token with a small norm, often the first token, can make this distance large.
    ``residual_path``: the Jacobian of the residual path, on which gradients flow only through the skips and the norms
        on the skips. The residual path does not mix tokens, so Lamina takes the geometric mean of the tokens' spectral
        norms.
    ``keel``: Keel's formula for the residual path (Eq 14-19), from gains and scales alone. Keel's formula assumes
        post-norms. For placements without post-norms, the result is the scale of the skips.
    ``fusenorm``: FuseNorm's formula for the residual path (Eq 10, 11, 16). The formula is the product of gain / sigma
        over the norms on the path. Here, sigma is the standard deviation of a token before the norm. The row holds the
        geometric mean over tokens.

    In a model with several residual streams, these roles treat all streams as one vector, and Lamina leaves out the
    formulas. Models with several streams have two more roles:

    ``stream``: the Jacobian from stream number ``index`` before the block to the same stream after the block.
    ``collapsed``: the Jacobian from one common change of all streams to the mean of the streams after the block.

    Rows of a sub-layer with role post_norm hold sigma, the number by which the post-norm divides, averaged over tokens.
    Rows of layer -1 hold the log10_product of all layers. The metric log10_total (role jacobian) is log10 of the
    spectral norm of the whole model's Jacobian. This spectral norm is at most the product of all layers' spectral
    norms.

    Options:

    ``sequences``: the number of sequences to measure (0 for all). The default is 0 for your own text. For Lamina's
        embedded corpus, and during training, the default is 1.
    ``tokens``: the number of tokens to measure at the start of each sequence (0 for all). The default is 0 for your own
        text. For Lamina's embedded corpus, and during training, the default is 32.
    ``tolerance``: the relative error of a spectral norm at which Lamina stops the iteration.
    ``iterations``: the largest number of iterations per spectral norm.
    ``total``: whether Lamina also measures the Jacobian of the whole model (log10_total).
    """

    name = "jacobian"
    title = "Jacobians"
    summary = (
        "spectral norm of each block's Jacobian, the product over all blocks, the distance to the identity, and "
        "the residual path's Jacobian"
    )
    source = "Keel (arXiv 2601.19895) Eq 14-19; FuseNorm (SpanNorm, arXiv 2601.22580) Eq 9-11, 16-19"
    over_steps = ("norm",)
    of_streams = True

    def __init__(
        self,
        sequences: int | None = None,
        tokens: int | None = None,
        tolerance: float = 1e-2,
        iterations: int = 100,
        total: bool = True,
    ):
        super().__init__(sequences, tokens)
        self.total = switch("jacobian: option 'total'", total)
        self.options: dict[str, Any] = {
            "tolerance": number("jacobian: option 'tolerance'", tolerance, 0, 1, open_low=True, open_high=True),
            "iterations": whole_number("jacobian: option 'iterations'", iterations),
        }
        self._values: dict[tuple[int, str, str, int, str, int], list[torch.Tensor]] = {}
        self._added: Counter[tuple[int, str, str, int, str]] = Counter()
        self._unfinished = 0

    def cost(self, context: Context) -> float:
        return 400.0 * self.tokens_of(context)

    def begin(self, context: Context) -> None:
        if context.structure.has_memory:
            raise UserError(
                "jacobian: a layer reads earlier states, not only x^l. Leave out this probe, or choose another model."
            )

    def finish(self, context: Context) -> pd.DataFrame:
        self._values, self._unfinished = {}, 0
        self.take(context)
        for batch, inputs in enumerate(self.inputs):
            self._measure(context, inputs, f"Jacobians of {batch + 1}/{len(self.inputs)}")
        sequences, tokens = self.measured(context)
        length = f" of {tokens / sequences:g} tokens" if tokens else ""
        many = "one sequence" if sequences == 1 else f"{sequences} sequences"
        context.notes.append(f"Jacobians: Lamina measured {many}{length}. A Jacobian covers all tokens.")
        if self._unfinished:
            context.notes.append(
                f"Jacobians: after {self.options['iterations']} iterations, {self._unfinished} spectral norms had a "
                f"relative error above {self.options['tolerance']:g} (metric residual). These norms are lower bounds."
            )
        rows = []
        for (layer, sublayer, role, index, metric, _), values in self._values.items():
            ended = metric in ("iterations", "residual")  # the largest number of iterations, and the largest residual
            mean = (float(torch.stack(values).max()), math.nan) if ended else mean_and_error(torch.cat(values))
            rows.append((layer, sublayer, role, index, metric, *mean))
        return pd.DataFrame(rows, columns=COLUMNS)

    def _measure(self, context: Context, inputs: dict[str, torch.Tensor], label: str) -> None:
        self._added.clear()
        with eager_attention(context.model), frozen(context.model):
            blocks = record_layer_calls(context, inputs)
            wirings = [wirings_of(block.site) for block in blocks]
            start = blocks[0].stream.float().square().mean().sqrt().item()
            expected = expected_sigmas(wirings, start)
            logs: dict[str, torch.Tensor] = {}
            bare = [block.site.index for block in blocks if not block.site.sublayers]
            if bare:
                context.note(
                    "Jacobians: Lamina leaves out the residual path, because Lamina did not find the sub-layers of "
                    f"layer {ranges(bare)}."
                )
            norms = {block.site.index: [n for part in block.site.sublayers for n in part.norms] for block in blocks}
            odd = [at for at, own in norms.items() if not all(getattr(n.module, "divides", True) for n in own)]
            if blocks[0].site.carries_more:
                odd = [block.site.index for block in blocks]
            elif odd:
                context.note(
                    f"Jacobians: Lamina leaves out the papers' formulas, because norms of layer {ranges(odd)} do not "
                    "divide by a root mean square."
                )
            for block, wiring, sigmas in zip(blocks, wirings, expected, strict=True):
                norms = self._block(block, path=not bare)
                if not bare and not odd:
                    norms["keel"] = block_factor(wiring, sigmas).reshape(1)
                    norms["fusenorm"] = self._measured_sigmas(block, wiring)
                for role, norm in norms.items():
                    metric = "formula" if role in ("keel", "fusenorm") else "norm"
                    self._add(block.site.index, "block", role, metric, norm)
                    logs[role] = logs.get(role, 0.0) + norm.log10()
                    if role != "identity":
                        self._add(block.site.index, "block", role, "log10_product", logs[role])
                context.progress(block.site.index + 1, len(blocks), label)
            for role in [role for role in _PATHS if role in logs]:
                self._add(-1, "model", role, "log10_product", logs[role])
            if self.total:
                total, search = log10_total_norm(blocks, **self.options)
                self._add(-1, "model", "jacobian", "log10_total", total)
                self._search(-1, "model", "jacobian", search)

    def _block(self, block: LayerCall, *, path: bool) -> dict[str, torch.Tensor]:
        """Measure a block's spectral norms by role, [sequences]. If ``path`` is true, include the residual path."""
        layer, x = block.site.index, block.stream
        jacobian = Jacobian(block, x)
        norms = {}
        for role, identity in (("jacobian", 0.0), ("identity", 1.0)):
            norm = jacobian.norm(batch_dims=1, identity=identity, **self.options)
            self._search(layer, "block", role, norm)
            self._add(layer, "block", role, "typical", jacobian.typical_stretch(identity=identity, batch_dims=1))
            norms[role] = norm.value
        if path:
            norm = Jacobian(block.residual_path, x).norm(batch_dims=2, **self.options)
            norms["residual_path"] = 10 ** norm.value.log10().flatten(1).mean(1)
        if block.site.carries_more:
            for index, stream in enumerate(x.unbind(-2)):
                norm = Jacobian(_of_stream(block, index), stream).norm(batch_dims=1, **self.options)
                self._search(layer, "block", "stream", norm, index)
                self._add(layer, "block", "stream", "norm", norm.value, index)
            alike = Jacobian(lambda z: block(x + z.unsqueeze(-2)).mean(-2), torch.zeros_like(x[..., 0, :]))
            norm = alike.norm(batch_dims=1, **self.options)
            self._search(layer, "block", "collapsed", norm)
            norms["collapsed"] = norm.value
        return norms

    def _measured_sigmas(self, block: LayerCall, wirings: Sequence[Wiring]) -> torch.Tensor:
        """Return FuseNorm's formula for the residual path [sequences], with the measured sigmas of the post-norms."""
        sublayers = enumerate(block.site.sublayers)
        norms = {i: norm for i, sublayer in sublayers for norm in sublayer.norms if norm.role == "post_norm"}
        with torch.no_grad():
            _, inputs = block.observe({index: norm.input for index, norm in norms.items()}, block.stream)
        sigmas: list[torch.Tensor | float] = [1.0] * len(wirings)
        for index, norm in norms.items():
            scale = norm_scale(norm.module, inputs[index]).double().cpu().reshape(block.stream.shape[:-1])
            sigmas[index] = scale
            self._add(
                block.site.index, block.site.sublayers[index].kind, "post_norm", "sigma", scale.flatten(1).mean(1)
            )
        factor = block_factor(wirings, sigmas).expand(block.stream.shape[:-1])
        return 10 ** factor.log10().flatten(1).mean(1)

    def _add(self, layer: int, sublayer: str, role: str, metric: str, values: torch.Tensor, index: int = 0) -> None:
        key = (layer, sublayer, role, index, metric)
        self._values.setdefault((*key, self._added[key]), []).append(values)
        self._added[key] += 1  # a layer may have several sub-layers of one kind

    def _search(self, layer: int, sublayer: str, role: str, norm: SpectralNorm, index: int = 0) -> None:
        self._unfinished += not norm.converged
        self._add(layer, sublayer, role, "iterations", torch.tensor(float(norm.iterations)), index)
        self._add(layer, sublayer, role, "residual", norm.residual.max(), index)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        blocks = frame[frame.sublayer == "block"]
        norms = blocks[blocks.metric.isin(["norm", "formula"])]
        which = norms.role.map({**_PATHS, "identity": "distance to the identity"})
        norms = norms.assign(which=which.fillna("stream " + norms["index"].astype(str)))
        products = blocks[blocks.metric == "log10_product"]
        products = products.assign(which=products.role.map(_PATHS))
        yield from chart(
            norms,
            *("Spectral norms", "norm"),
            "Spectral norms of each block's Jacobian, of the Jacobian minus the identity, and of the residual path.",
            color="which",
            log_y=True,
        )
        yield from chart(
            products,
            *("Products over layers 0 to l", "log10 of the product"),
            "Product over layers 0 to l. For whole blocks, the product is an upper bound of a gradient's growth in the "
            "backward pass.",
            color="which",
        )

    def sentences(self, frame: Frame) -> Iterator[str]:
        norms = frame[(frame.sublayer == "block") & (frame.metric == "norm")].set_index("layer")
        norm, distance = (norms[norms.role == role].value for role in ("jacobian", "identity"))
        model = {(str(row.role), str(row.metric)): float(row.value) for row in frame[frame.layer == -1].itertuples()}
        num_layers = len(norm)
        product = model["jacobian", "log10_product"]
        yield (
            f"The blocks' Jacobians have spectral norms from {norm.min():.3g} (layer {norm.idxmin()}) to "
            f"{norm.max():.3g} (layer {norm.idxmax()}). The product of these norms is {_power(product)}."
        )
        if ("jacobian", "log10_total") in model:
            total = model["jacobian", "log10_total"]
            yield (
                f"The Jacobian of all {num_layers} layers together has the spectral norm {_power(total)}, so the "
                f"product is {_power(product - total)} times as large."
            )
        quarter = max(1, num_layers // 4)
        first, last = distance.iloc[:quarter], distance.iloc[-quarter:]
        typical = frame[(frame.role == "identity") & (frame.metric == "typical")].value
        yield (
            f"In the worst direction, the Jacobians' median distance to the identity is {first.median():.3g} in the "
            f"first quarter of the layers and {last.median():.3g} in the last quarter. In a typical direction, the "
            f"median distances are {typical.iloc[:quarter].median():.3g} (first quarter) and "
            f"{typical.iloc[-quarter:].median():.3g} (last quarter). "
            "A layer with a distance near 0 passes its input on unchanged."
        )
        if ("residual_path", "log10_product") not in model:
            return
        path = model["residual_path", "log10_product"]
        if ("keel", "log10_product") not in model:
            mean = model.get(("collapsed", "log10_product"), math.nan)
            more = f", and for the mean of the streams {_power(mean)}" if math.isfinite(mean) else ""
            yield f"Along the residual path alone, the product of the norms is {_power(path)}{more}."
            return
        keel, fuse = (model[role, "log10_product"] for role in ("keel", "fusenorm"))
        yield (
            f"Along the residual path alone, the product of the norms is {_power(path)}. FuseNorm's formula (measured "
            f"sigma) gives {_power(fuse)}. Keel's formula with only gains and scales (Eq 14-19) gives {_power(keel)}."
        )


def _of_stream(block: LayerCall, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(z: torch.Tensor) -> torch.Tensor:
        streams = [z if i == index else x for i, x in enumerate(block.stream.unbind(-2))]
        return block(torch.stack(streams, dim=-2))[..., index, :]

    return function


def _power(exponent: float) -> str:
    return f"10^{round(exponent, 2) + 0.0:.2f}"


def log10_total_norm(
    blocks: Sequence[LayerCall], *, tolerance: float, iterations: int
) -> tuple[torch.Tensor, SpectralNorm]:
    """Return log10 of the spectral norm of the whole model's Jacobian, [sequences], and how the search ended."""
    jacobians = [Jacobian(block, block.stream) for block in blocks]
    start = start_vector(blocks[0].stream)
    # Many blocks can shrink a vector below the smallest float, so each block's output is divided by a constant.
    scales, v = [], start
    for jacobian in jacobians:
        u = jacobian.forward(v)
        scale = _length(u) / _length(v)
        scales.append(torch.where(scale > 0, scale, torch.ones_like(scale)))
        v = u / scales[-1]

    def forward(v: torch.Tensor) -> torch.Tensor:
        for jacobian, scale in zip(jacobians, scales, strict=True):
            v = jacobian.forward(v) / scale
        return v

    def transpose(u: torch.Tensor) -> torch.Tensor:
        for jacobian, scale in zip(reversed(jacobians), reversed(scales), strict=True):
            u = jacobian.transpose(u) / scale
        return u

    norm = largest_singular_value(forward, transpose, start, batch_dims=1, tolerance=tolerance, iterations=iterations)
    shift = torch.stack([scale.flatten().double().cpu().log10() for scale in scales]).sum(0)
    return shift + norm.value.log10(), norm


def _length(x: torch.Tensor) -> torch.Tensor:
    length = torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True, dtype=torch.float64)
    return length.to(x.dtype)
