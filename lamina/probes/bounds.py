"""Compare both sides of inequalities from papers: Peri-LN's Proposition 3.1 and FuseNorm's Theorem 1."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from lamina.core.frames import Frame
from lamina.core.values import number
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.jacobians import (
    Jacobian,
    largest_gain,
    largest_singular_value,
    norm_scale,
    wirings_of,
)
from lamina.probes.engine.layer_calls import LayerCall, ShortProbe, frozen, record_layer_calls, rows_of
from lamina.probes.engine.registry import COLUMNS, probe
from lamina.probes.engine.statistics import mean_and_error
from lamina.probes.structure.hooks import eager_attention, intercept, observe
from lamina.probes.structure.sites import FeedForward, LayerSite, NormSite, Point, SublayerSite

_TOLD = 0.5  # the largest standard error of an exponent that Lamina reports as a result
_STATEMENTS = {
    "peri_ln_c1": "Peri-LN Prop C.1: no norm after the last down-projection",
    "peri_ln_c2": "Peri-LN Prop C.2: a norm on the last down-projection's output",
    "peri_ln_c3": "Peri-LN Prop C.3: a norm on the last sum",
    "peri_ln_c2_c3": "Peri-LN Prop C.2 and C.3: norms on the last down-projection's output and on the last sum",
    "fusenorm_eq_9": "FuseNorm Eq 9: the Jacobian's distance from the identity",
    "fusenorm_eq_19": "FuseNorm Eq 19, with the paper's approximation",
    "fusenorm_eq_19_chain": "FuseNorm Eq 16-18, with the chain rule's bound",
    "fusenorm_eq_20": "FuseNorm Eq 20: the variance of a sub-layer's sum",
    "fusenorm_eq_21": "FuseNorm Eq 13 and 21: the variance of a sub-layer's output",
}


@dataclass(frozen=True)
class Sides:
    """The left and the right side of an inequality at one layer, each [sequences] in float64."""

    layer: int
    sublayer: str
    role: str
    left: torch.Tensor
    right: torch.Tensor


def variance_sides(block: LayerCall, num_layers: int, constant: float) -> list[Sides]:
    """Measure both sides of FuseNorm's Eq 13, 20 and 21 in one block. ``Bounds`` defines the sides."""
    points: dict[Hashable, Point] = {}
    for index, sublayer in enumerate(block.site.sublayers):
        points["branch", index] = sublayer.contribution
        if (norm := post_norm(block, index)) is not None:
            points["sum", index] = norm.input
    with torch.no_grad():
        _, tensors = block.observe(points, block.stream)
    sides = []
    for index, sublayer in enumerate(block.site.sublayers):
        branch = tensors["branch", index].float() * _factor(sublayer.contribution)
        branch = branch.reshape(block.stream.shape)
        left = _variance(branch)
        right = torch.full_like(left, constant / num_layers)
        sides.append(Sides(block.site.index, sublayer.kind, "fusenorm_eq_21", left, right))
        if ("sum", index) in tensors:
            total = tensors["sum", index].float().reshape(block.stream.shape)
            uncorrelated = _variance(total - branch) + _variance(branch)
            sides.append(Sides(block.site.index, sublayer.kind, "fusenorm_eq_20", _variance(total), uncorrelated))
    return sides


def identity_sides(block: LayerCall, tolerance: float) -> Sides:
    """Return the Jacobian's distance from the identity, and the input's standard deviation (FuseNorm's Eq 9)."""
    distance = Jacobian(block, block.stream).norm(batch_dims=1, identity=1.0, tolerance=tolerance).value
    return Sides(block.site.index, "block", "fusenorm_eq_9", distance, _variance(block.stream).sqrt())


def jacobian_sides(block: LayerCall, tolerance: float) -> list[Sides]:
    """Measure both sides of FuseNorm's Eq 19 in a block with FuseNorm's structure.

    Both bounds use the attention's measured Jacobian and the norms' measured gains. The paper sets the gains to 1.

    ``fusenorm_eq_19``: the paper's approximation, with the mean sigma of the tokens. The spectral norm of W_2 W_1
        replaces the feed-forward's Jacobian. W_1 is the up-projection, without the gate.
    ``fusenorm_eq_19_chain``: a bound that always holds, with the tokens' smallest sigma and the feed-forward's measured
        Jacobian.
    """
    attention, feed_forward = block.site.sublayers
    norms = [norm for norm in (post_norm(block, 0), post_norm(block, 1)) if norm is not None]
    wirings = wirings_of(block.site)
    whole = Jacobian(block, block.stream).norm(batch_dims=1, tolerance=tolerance).value
    points = {"after": norms[0].output, 0: norms[0].input, 1: norms[1].input}
    with torch.no_grad():
        _, tensors = block.observe(points, block.stream)
    sigmas = [norm_scale(norms[i].module, tensors[i]).double().cpu().flatten(1) for i in (0, 1)]
    gains = [largest_gain(norm) for norm in norms]

    def branch(x: torch.Tensor) -> torch.Tensor:
        return block.observe({0: attention.contribution}, x)[1][0] * _factor(attention.contribution)

    def inner(y: torch.Tensor) -> torch.Tensor:
        end = feed_forward.contribution
        return block.between(norms[0].output, end, y) * _factor(end)

    mixing = Jacobian(branch, block.stream).norm(batch_dims=1, tolerance=tolerance).value
    measured = Jacobian(inner, tensors["after"]).norm(batch_dims=1, tolerance=tolerance).value
    scales = [abs(wiring.skip_scale) for wiring in wirings]

    def bound(inverse: Sequence[torch.Tensor], jacobian: Any) -> torch.Tensor:
        first = gains[0] * inverse[0] * (scales[0] + mixing)
        return gains[1] * inverse[1] * (scales[1] + jacobian * first)

    sides = [
        Sides(
            *(block.site.index, "block", "fusenorm_eq_19_chain", whole),
            bound([1 / sigma.amin(1) for sigma in sigmas], measured),
        )
    ]
    if feed_forward.feed_forward is not None:
        product = product_norm(block, feed_forward.feed_forward) * abs(wirings[1].out_scale * wirings[1].pre_scale)
        right = bound([1 / sigma.mean(1) for sigma in sigmas], product)
        sides.append(Sides(block.site.index, "block", "fusenorm_eq_19", whole, right))
    return sides


def fused(block: LayerCall) -> bool:
    """Return whether a block has FuseNorm's structure: norms on both sums, and the block's input as the last skip."""
    wirings = wirings_of(block.site)
    return len(wirings) == 2 and all(w.post_gain is not None for w in wirings) and wirings[1].skip == "block_input"


def unnormed(block: LayerCall) -> bool:
    """Return whether a block has sub-layers but no norm on the residual stream."""
    return bool(block.site.sublayers) and all(
        post_norm(block, index) is None for index in range(len(block.site.sublayers))
    )


def post_norm(block: LayerCall, index: int) -> NormSite | None:
    return next((norm for norm in block.site.sublayers[index].norms if norm.role == "post_norm"), None)


def product_norm(block: LayerCall, feed_forward: FeedForward) -> float:
    """Return the spectral norm of W_2 W_1: the down-projection times the up-projection (without the gate)."""
    down = _matrix(feed_forward.down[1])
    module = _up_projection(block, feed_forward)
    up = _matrix(module)
    if feed_forward.stacked_side(module) is not None:
        up = up.chunk(2)[1]  # the first half is the gate, in every model that stacks gate and up-projection
    start = torch.randn(up.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(up.device)
    norm = largest_singular_value(lambda v: down @ (up @ v), lambda u: up.T @ (down.T @ u), start, tolerance=1e-4)
    return float(norm.value)


def _up_projection(block: LayerCall, feed_forward: FeedForward) -> nn.Module:
    """Return the up-projection. The other projection is the gate, because the nonlinearity reads its output."""
    modules = [module for _, module in feed_forward.up]
    if len(modules) == 1 or feed_forward.pre is None:
        return modules[-1]
    points: dict[int | str, Point] = {"pre": feed_forward.pre}
    for index, (path, module) in enumerate(feed_forward.up):
        points[index] = Point(module, path, "output", feed_forward.post.call)
    with torch.no_grad():
        _, tensors = block.observe(points, block.stream)
    candidates = [m for n, m in enumerate(modules) if not torch.equal(tensors[n], tensors["pre"])]
    return candidates[-1]


def _matrix(module: nn.Module) -> torch.Tensor:
    """Return a projection's weight as [out, in] in float64. GPT-2's Conv1D stores the transpose."""
    stored: Any = module.weight
    weight = stored.detach().double()
    return weight if hasattr(module, "in_features") else weight.T


def _variance(x: torch.Tensor) -> torch.Tensor:
    """Return the variance over each token's channels, averaged over tokens: [sequences], float64."""
    return x.detach().float().var(-1, correction=0).double().mean(-1).cpu()


def _factor(point: Point) -> float | torch.Tensor:
    return 1.0 if point.factor is None else point.factor


@probe
class Bounds(ShortProbe):
    """Measure both sides of inequalities from papers on your model.

    The column ``role`` names the inequality. The metric ``left`` is the inequality's left side, ``right`` is the right
    side, and ``ratio`` is left divided by right. Values are means over sequences, with their standard errors.

    Peri-LN's Proposition 3.1 bounds the gradient of W_2, the down-projection of the last layer's feed-forward. The left
    side is the Frobenius norm of this gradient. The function ``last_layer_sides`` defines the right side. The paper
    uses a toy model, but Lamina uses the loss of your model. The role tells which norms follow W_2 in the last layer:

    ``peri_ln_c1``: no norm follows W_2.
    ``peri_ln_c2``: a norm acts on the output of W_2.
    ``peri_ln_c3``: a norm acts on the sum of the skip and the output of W_2.
    ``peri_ln_c2_c3``: one norm acts on the output of W_2, and another norm acts on the sum.
    ``peri_ln_c1_token``, ``peri_ln_c2_token`` and so on: both sides at the token with the largest ratio. This ratio is
        at most 1.

    FuseNorm's Theorem 1 gives the following roles at each layer. J is the block's Jacobian, and F is the output of a
    sub-layer.

    ``fusenorm_eq_9``: the left side is the spectral norm of J minus the identity. The right side is c / sigma, and
        sigma is the standard deviation of the block's input. Lamina chooses the constant c so that the geometric mean
        of the ratios is 1. Lamina measures this role only in blocks without a norm on the residual stream.
    ``fusenorm_eq_21``: the left side is the variance of F. The right side is the option ``constant`` divided by the
        number of blocks. The paper states only the order of magnitude, so only a ratio that grows with the number of
        blocks contradicts the paper. Rows of layer -1 hold the mean over the layers.
    ``fusenorm_eq_20``: the left side is the variance of the sum of the skip and F. The right side is the variance of
        the skip plus the variance of F. Both sides are equal if the skip and F are uncorrelated. Lamina measures this
        role only in sub-layers with a norm after the sum.
    ``fusenorm_eq_19``: the left side is the spectral norm of J, and the right side is the paper's approximate bound.
        Lamina measures this role only in blocks with FuseNorm's structure.
    ``fusenorm_eq_19_chain``: the left side is the spectral norm of J, and the right side is a bound from the chain
        rule. The ratio is at most 1. Lamina measures this role only in blocks with FuseNorm's structure.

    Rows of layer -1 with the next two roles describe how J's distance from the identity changes from layer to layer.
    The left side is the slope of a line through the measured distances in a log-log plot. The right side is the paper's
    slope.

    ``fusenorm_eq_9``: the slope of the distance against sigma. The paper's slope is -1.
    ``fusenorm_eq_9_depth``: the slope of the distance against the layer's number (from 1). The paper's slope is -1/2 if
        the variance grows linearly with depth.
    """

    name = "bounds"
    title = "Bounds"
    summary = "measured values of both sides of the inequalities in Peri-LN's Proposition 3.1 and FuseNorm's Theorem 1"
    source = (
        "Peri-LN (arXiv 2502.02732) Prop 3.1, C.1-C.3; FuseNorm (SpanNorm, arXiv 2601.22580) Thm 1, Eq 9, 13, 19-21"
    )

    of_streams = True

    def __init__(
        self, sequences: int | None = None, tokens: int | None = None, constant: float = 1.0, tolerance: float = 1e-2
    ):
        super().__init__(sequences, tokens)
        self.constant = number("bounds: option 'constant'", constant, 0, open_low=True)
        self.tolerance = number("bounds: option 'tolerance'", tolerance, 0, 1, open_low=True, open_high=True)
        self._rows: list[tuple[int, str, str, int, str, float, float]] = []

    def cost(self, context: Context) -> float:
        return 150.0 * self.tokens_of(context)

    def finish(self, context: Context) -> pd.DataFrame:
        self._rows = []
        self.take(context)
        if context.structure.carries_more:
            context.notes.append(
                "bounds: Lamina measured only FuseNorm's Eq 21, because the other inequalities need a single residual "
                "stream."
            )
            with frozen(context.model):
                self._add_all([self._branches(context, inputs) for inputs in self.inputs])
            return pd.DataFrame(self._rows, columns=COLUMNS)
        try:
            self._last_layer(context)
        except UserError as error:  # no dense feed-forward or no loss, which only Peri-LN's proposition needs
            context.notes.append(f"bounds: Lamina leaves out Proposition 3.1: {error}")
        with eager_attention(context.model), frozen(context.model):
            self._blocks(context)
        return pd.DataFrame(self._rows, columns=COLUMNS)

    def _last_layer(self, context: Context) -> None:
        last = LastLayer.of(context)
        role, layer = f"peri_ln_{last.statement}", last.site.index
        left, right, worst = [], [], (0.0, 0.0, -math.inf)
        for sequence in (row for batch in self.inputs for row in rows_of(batch)):
            sides = last_layer_sides(context, last, sequence)
            left.append(sides.left)
            right.append(sides.right)
            measured = sides.right_by_token > 0  # both sides are 0 at a token that does not affect the loss
            for a, b in zip(
                sides.left_by_token[measured].tolist(), sides.right_by_token[measured].tolist(), strict=True
            ):
                worst = max(worst, (a, b, a / b), key=lambda each: each[2])
        doubles = [torch.tensor(values, dtype=torch.float64) for values in (left, right)]
        self._add(Sides(layer, "feed_forward", role, *doubles))
        for metric, value in zip(("left", "right", "ratio"), worst, strict=True):
            self._rows.append((layer, "feed_forward", f"{role}_token", 0, metric, value, math.nan))

    def _blocks(self, context: Context) -> None:
        measured: list[list[Sides]] = []
        for batch, inputs in enumerate(self.inputs):
            measured.append([])
            blocks = record_layer_calls(context, inputs)
            for block in blocks:
                measured[-1] += variance_sides(block, len(blocks), self.constant)
                measured[-1] += jacobian_sides(block, self.tolerance) if fused(block) else []
                measured[-1] += [identity_sides(block, self.tolerance)] if unnormed(block) else []
                done = batch * len(blocks) + block.site.index + 1
                context.progress(done, len(self.inputs) * len(blocks), "bounds")
        self._add_all(measured)

    def _branches(self, context: Context, inputs: Mapping[str, torch.Tensor]) -> list[Sides]:
        """Return both sides of FuseNorm's Eq 21 in a model whose layers return more than the residual stream."""
        sublayers = [(site.index, part) for site in context.structure.layers for part in site.sublayers]
        found: dict[int, torch.Tensor] = {}
        points = {at: part.contribution for at, (_, part) in enumerate(sublayers)}
        with torch.no_grad(), observe(points, found.__setitem__, root=context.base):
            context.forward(context.on_device(inputs), head=False)
        sides = []
        for at, (layer, part) in enumerate(sublayers):
            left = _variance(found[at])
            right = torch.full_like(left, self.constant / context.structure.num_layers)
            sides.append(Sides(layer, part.kind, "fusenorm_eq_21", left, right))
        return sides

    def _add_all(self, measured: list[list[Sides]]) -> None:
        by_role: dict[tuple[str, str], list[Sides]] = {}
        for parts in zip(*measured, strict=True):
            left, right = (torch.cat([getattr(part, side) for part in parts]) for side in ("left", "right"))
            sides = replace(parts[0], left=left, right=right)
            by_role.setdefault((sides.role, sides.sublayer), []).append(sides)
            if sides.role != "fusenorm_eq_9":  # the constant of fusenorm_eq_9 depends on all layers
                self._add(sides)
        for (role, kind), group in by_role.items():
            if role == "fusenorm_eq_21":
                left = torch.stack([sides.left for sides in group]).mean(0)
                self._add(Sides(-1, kind, role, left, group[0].right))
        if ("fusenorm_eq_9", "block") in by_role:
            self._near_identity(by_role["fusenorm_eq_9", "block"])

    def _near_identity(self, plain: Sequence[Sides]) -> None:
        from scipy import stats  # here, because the import takes a second

        constant = float(torch.stack([(sides.left * sides.right).log() for sides in plain]).mean().exp())
        for sides in plain:
            self._add(replace(sides, right=constant / sides.right))
        if len(plain) < 3:
            return
        distances = np.log([float(sides.left.mean()) for sides in plain])
        sigmas = np.log([float(sides.right.mean()) for sides in plain])
        depths = np.log([sides.layer + 1 for sides in plain])
        for role, x, expected in (("fusenorm_eq_9", sigmas, -1.0), ("fusenorm_eq_9_depth", depths, -0.5)):
            if np.ptp(x) > 0 and np.isfinite(distances).all():
                line: Any = stats.linregress(x, distances)
                slope, error = float(line.slope), float(line.stderr)
                for metric, value, spread in (
                    ("left", slope, error),
                    ("right", expected, math.nan),
                    ("ratio", slope / expected, error / abs(expected)),
                ):
                    self._rows.append((-1, "model", role, 0, metric, value, spread))

    def _add(self, sides: Sides) -> None:
        for metric, values in (("left", sides.left), ("right", sides.right), ("ratio", sides.left / sides.right)):
            self._rows.append((sides.layer, sides.sublayer, sides.role, 0, metric, *mean_and_error(values)))

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        layers = frame[(frame.layer >= 0) & frame.role.str.startswith("fusenorm") & (frame.metric != "ratio")]
        side = np.where(layers.sublayer == "block", layers.metric, layers.sublayer + ", " + layers.metric)
        for role, part in layers.assign(side=side).groupby("role", sort=False):
            title = _STATEMENTS[str(role)]
            caption = f"{title}: both sides by layer."
            yield from chart(part, title, "side", caption, color="side", log_y=True)

    def sentences(self, frame: Frame) -> Iterator[str]:
        indexed = frame.set_index(["role", "metric", "layer", "sublayer"])
        values, errors = indexed.value, indexed.standard_error
        layers = frame[frame.role == "fusenorm_eq_9"].layer.max() + 1
        for role, part in frame[frame.metric == "ratio"].groupby("role", sort=False):
            ratios = part[part.layer >= 0].value
            if str(role).startswith("peri_ln") and not str(role).endswith("_token"):
                sublayer_key = (part.layer.iloc[0], "feed_forward")
                left, right = values[role, "left", *sublayer_key], values[role, "right", *sublayer_key]
                yield (
                    f"{_STATEMENTS[str(role)]}: the gradient norm of the last down-projection is {left:.3g}, and the "
                    f"bound is {right:.3g}. The norm is {left / right:.3g} times the bound, and for a single "
                    f"token at most {values[f'{role}_token', 'ratio', *sublayer_key]:.3g} times the bound."
                )
            elif role in _STATEMENTS and len(ratios):
                yield (
                    f"{_STATEMENTS[str(role)]}: the left side divided by the right side is {ratios.min():.3g} to "
                    f"{ratios.max():.3g} over the layers (median {ratios.median():.3g})."
                )
        for role, bound in (("fusenorm_eq_9", "sigma_l"), ("fusenorm_eq_9_depth", "(l + 1)")):
            if (role, "left", -1, "model") in values.index:
                slope, expected = values[role, "left", -1, "model"], values[role, "right", -1, "model"]
                error = errors[role, "left", -1, "model"]
                distance = "Jacobian's distance from the identity"
                if error < _TOLD:
                    exponent = f"({slope:.2f} ± {error:.2f})"
                    yield f"The {distance} scales as {bound}^{exponent}. The paper's exponent is {expected:g}."
                else:
                    yield (
                        f"{layers} layers are too few to tell how the {distance} scales with {bound}. The exponent is "
                        f"{slope:.2g} ± {error:.2g}, and the paper's exponent is {expected:g}."
                    )


@dataclass(frozen=True)
class LastLayer:
    """The last layer's feed-forward, and the norms between its down-projection and the layer's output."""

    site: LayerSite
    sublayer: SublayerSite
    feed_forward: FeedForward
    norms: tuple[NormSite, ...]
    statement: str

    @classmethod
    def of(cls, context: Context) -> LastLayer:
        """Find the last layer's feed-forward and norms. Raises UserError if the layer has no dense feed-forward."""
        site = context.structure.layers[-1]
        for sublayer in reversed(site.sublayers):
            if sublayer.feed_forward is not None:
                norms = tuple(norm for norm in sublayer.norms if norm.role in ("out_norm", "post_norm"))
                roles = [norm.role for norm in norms]
                names = [name for name, role in (("c2", "out_norm"), ("c3", "post_norm")) if role in roles]
                return cls(site, sublayer, sublayer.feed_forward, norms, "_".join(names) or "c1")
        raise UserError(
            "bounds: Proposition 3.1 needs a dense feed-forward, but the last layer has none. Choose a model "
            "without experts in the last layer."
        )


@dataclass(frozen=True)
class LastLayerSides:
    """Both sides of Peri-LN's Proposition 3.1 for one batch, in float64."""

    left: float
    right: float
    left_by_token: torch.Tensor
    right_by_token: torch.Tensor


def last_layer_sides(context: Context, last: LastLayer, inputs: Mapping[str, torch.Tensor]) -> LastLayerSides:
    """Measure both sides of Peri-LN's Proposition 3.1 on one batch.

    The left side is the Frobenius norm of the loss's gradient with respect to the last down-projection W. The right
    side is a sum over tokens. Each token contributes a product: the norm of W's input, times the norm of the loss's
    gradient with respect to the layer's output, times a factor for each norm after W. The factor is twice the norm's
    largest gain, divided by the root mean square of the norm's input at the token.

    Peri-LN's Eq 21 and 37 replace the norm of the gradient with respect to the output by 2, because the output is the
    toy model's logits. Without a norm after W, both sides are equal at each token (Eq 11).
    """
    down_path, down = last.feed_forward.down
    points: dict[str, Point] = {
        "h": last.feed_forward.post,
        "a": Point(down, down_path, "output", last.feed_forward.post.call),
        "o": last.site.output,
    }
    points |= {f"norm{index}": norm.input for index, norm in enumerate(last.norms)}
    tensors: dict[str, torch.Tensor] = {}

    def change(key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if key == "a":  # the graph starts here, so no earlier tensor stays in memory
            tensors[key] = tensor.detach().requires_grad_()
            return tensors[key].clone()  # Falcon adds to this tensor in place
        tensors[key] = tensor
        return None

    with frozen(context.model), torch.enable_grad(), intercept(points, change, roots=[context.model]):
        loss = context.loss(inputs)
        by_a, by_o = torch.autograd.grad(loss, [tensors["a"], tensors["o"]])
    h, by_a, by_o = (t.detach().flatten(0, -2).double().cpu() for t in (tensors["h"], by_a, by_o))
    stretch = torch.as_tensor(_factor(last.sublayer.contribution)).detach().abs().max()
    right = h.norm(dim=-1) * by_o.norm(dim=-1) * float(stretch)
    for index, norm in enumerate(last.norms):
        scale = norm_scale(norm.module, tensors[f"norm{index}"]).double().cpu().flatten()
        right = right * 2 * largest_gain(norm) / scale
    left = h.norm(dim=-1) * by_a.norm(dim=-1)
    return LastLayerSides(float((h.T @ by_a).norm()), float(right.sum()), left, right)
