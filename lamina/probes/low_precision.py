"""Measure, by layer, the error of rounding the residual stream to FP16, BF16, FP8 or INT8."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import pandas as pd
import torch

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.core.values import one_of, switch
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.registry import COLUMNS, Probe, Sample, check_most, probe, sample_of
from lamina.probes.engine.statistics import Running, as_tokens
from lamina.probes.structure.hooks import Output, intercept
from lamina.probes.structure.sites import Point

_FLOATS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# The smallest |x| that FP8 rounds out of range: half a step above the largest value, which rounds to the even one.
_FP8_EDGE = {"fp8_e4m3": (464.0, False), "fp8_e5m2": (61440.0, True)}
_SEQUENCES = 4  # of a corpus, by default
FORMATS = (*_FLOATS, "int8_tensor", "int8_token")


def round_trip(x: torch.Tensor, kind: str, *, scaled: bool = True) -> torch.Tensor:
    """Round a tensor [..., tokens, channels] to a format, and convert it back to float32. An overflow becomes inf.

    The formats fp16 and bf16 round to nearest even. The format fp8_e4m3 is OCP e4m3fn. If ``scaled`` is true, Lamina
    first scales the tensor's largest magnitude to the FP8 format's largest value. INT8 is symmetric. The scale of INT8
    is the largest magnitude of a sequence (int8_tensor) or of a token (int8_token), divided by 127.
    """
    x = x.float()
    if kind.startswith("int8"):
        peak = torch.linalg.vector_norm(x, math.inf, -1 if kind == "int8_token" else (-2, -1), keepdim=True)
        step = torch.where(peak > 0, peak / 127, torch.ones_like(peak))
        return (x / step).round_().clamp_(-127, 127).mul_(step)
    dtype = _FLOATS[kind]
    if kind not in _FP8_EDGE:
        return x.to(dtype).float()
    limit = torch.finfo(dtype).max
    if scaled:
        peak = torch.linalg.vector_norm(x, math.inf, (-2, -1), keepdim=True)
        scale = torch.where(peak > 0, limit / peak, torch.ones_like(peak))
        return (x * scale).clamp_(-limit, limit).to(dtype).float().div_(scale)
    edge, rounds_up = _FP8_EDGE[kind]
    over = x.abs() >= edge if rounds_up else x.abs() > edge  # whether the cast itself saturates depends on the device
    return torch.where(over, x.sign() * math.inf, x.clamp(-limit, limit).to(dtype).float())


@probe
class LowPrecision(Probe):
    """Measure the error of rounding the hidden states and the feed-forward's activations to formats of fewer bits.

    The column ``format`` is fp16, bf16, fp8_e4m3, fp8_e5m2, int8_tensor or int8_token (see ``round_trip``). The column
    ``role`` names the tensor x: "state" for the hidden state before a layer, "contribution" for the tensor that a
        sub-layer adds to the residual stream, and "activation" for the input of a dense feed-forward's down-projection.
        Each sequence has its own scale.

    ``relative_error``: the norm of the rounding error divided by the norm of x, over a sequence, averaged over
        sequences.
    ``token_error``: the same ratio for each token, averaged over tokens.
    ``max_error``: the largest absolute rounding error of the sample.
    ``share_lost``: the share of elements that become 0 by rounding.
    ``overflow_share``: the share of elements that become inf. The errors are then infinite.
    ``loss`` (layer -1, role "state"): the loss in nats per token if Lamina rounds the hidden states of all layers. The
        format "none" has the loss without rounding.
    ``loss_increase``: the loss with rounding minus the loss without rounding.

    Per-tensor INT8 divides by the largest |x|, so one massive activation (Sun et al. 2024) leaves almost no steps for
    the other elements. The metrics token_error and share_lost show this damage. The metric relative_error hides it,
    because the massive activation is most of the norm.
    """

    name = "low_precision"
    title = "Low precision"
    summary = "relative error by layer if the residual stream or feed-forward is rounded to FP16, BF16, FP8 or INT8"
    source = "OCP 8-bit floating point (e4m3, e5m2); absmax INT8: Dettmers et al. 2022; Peri-LN Fig 11 (FP16's limit)"
    of_streams = True
    over_steps = ("token_error",)

    def __init__(
        self, fp8_scaling: Literal["tensor", "none"] = "tensor", loss: bool = True, sequences: int | None = None
    ):
        """Set the options of the probe. Raises UserError for an invalid value.

        ``fp8_scaling``: "tensor" to scale each tensor to FP8's largest value, or "none" to cast directly.
        ``loss``: whether to measure the loss.
        ``sequences``: the number of sequences, rounded up to whole batches (0 for all). The default is all of your own
            text, or 4 sequences of a corpus.
        """
        self.sequences = check_most(self.name, "sequences", sequences)
        self.scaled = one_of("low_precision: option 'fp8_scaling'", fp8_scaling, ("tensor", "none")) == "tensor"
        self.loss = switch("low_precision: option 'loss'", loss)

    def cost(self, context: Context) -> float:
        return 12.0 * context.tokens(context.most(self.sequences, _SEQUENCES))

    def begin(self, context: Context) -> None:
        self._context, self._batch, self._sequences = context, 0, 0
        self._most = context.most(self.sequences, _SEQUENCES)
        self._places: dict[tuple, Point] = {}
        if context.structure.carries_more:
            context.notes.append(
                "low_precision: Lamina skips the hidden states and their loss, because the model's layers read "
                f"{'earlier states' if context.structure.has_memory else 'several streams'}."
            )
        else:
            self._places = {(i, "block", "state", 0): point for i, point in context.structure.states().items()}
        for site in context.structure.layers:
            for sublayer in site.sublayers:
                index = sum(1 for key in self._places if key[:3] == (site.index, sublayer.kind, "contribution"))
                self._places[site.index, sublayer.kind, "contribution", index] = sublayer.contribution
                if sublayer.feed_forward is not None:
                    self._places[site.index, sublayer.kind, "activation", index] = sublayer.feed_forward.post
        self._errors = {(key, kind): Running() for key in self._places for kind in FORMATS}
        self._worst = dict.fromkeys(self._errors, 0.0)
        self._counts = {key: torch.zeros(2, dtype=torch.int64) for key in self._errors}  # overflowed, rounded to 0
        self._elements = dict.fromkeys(self._places, 0)

    def points(self) -> Mapping[tuple, Point]:
        return self._places

    def see(self, key: tuple, value: torch.Tensor) -> None:
        if self._enough():
            return
        tokens = as_tokens(value, self._context.batches[self._batch])
        x = tokens.x.float()
        count = x.numel() if tokens.valid is None else int(tokens.valid.sum()) * x.shape[-1]
        self._elements[key] += count
        size = _norms(x, tokens.valid)
        nonzero, infinite = int(torch.count_nonzero(x)), not bool(size.isfinite().all()) and bool(x.isinf().any())
        for kind in FORMATS:
            back = round_trip(x, kind, scaled=self.scaled)
            lost = nonzero - int(torch.count_nonzero(back))  # what is 0 comes back as 0
            error = back.sub_(x).abs_()
            worst = float(error.max())
            self._worst[key, kind] = float(np.maximum(self._worst[key, kind], worst))  # NaN stays
            # Only what overflowed has an infinite error: what was infinite before has none (inf - inf is NaN).
            over = int(torch.count_nonzero(error.isinf())) if not math.isfinite(worst) or infinite else 0
            self._counts[key, kind] += torch.tensor([over, lost])
            relative = torch.where(size == 0, 0.0, _norms(error, tokens.valid) / size)  # 0 comes back as 0
            self._errors[key, kind].add(torch.stack([relative[:, 0], relative[:, 1:].nanmean(1)], dim=1))

    def end_batch(self, inputs: Mapping[str, torch.Tensor], output: Output) -> None:
        self._sequences += sample_of([inputs]).sequences
        self._batch += 1

    def _enough(self) -> bool:
        return bool(self._most) and self._sequences >= self._most

    def _batches(self, context: Context) -> Sequence[Mapping[str, torch.Tensor]]:
        batches, sequences = context.batches[: context.forwards], 0
        for number, batch in enumerate(batches):
            if self._most and sequences >= self._most:
                return batches[:number]
            sequences += sample_of([batch]).sequences
        return batches

    def measured(self, context: Context) -> Sample:
        return sample_of(self._batches(context))

    def standard_error(self) -> float | None:
        if self._enough():
            return None  # no text is added to these
        finite = [e for e in self._errors.values() if not e.count or bool(e.mean.isfinite().all())]
        return max((e.relative_error() for e in finite), default=None)

    def finish(self, context: Context) -> pd.DataFrame:
        rows: list[tuple] = []
        for (key, kind), errors in self._errors.items():
            overflowed, lost = (int(n) / max(self._elements[key], 1) for n in self._counts[key, kind])
            means, spread = errors.mean.tolist(), errors.standard_error.tolist()
            for name, value, error in zip(("relative_error", "token_error"), means, spread, strict=True):
                if overflowed:  # inf in some sequences: their mean is inf
                    value, error = math.inf, math.nan
                rows.append((*key, kind, name, value, error))
            rows.append((*key, kind, "max_error", self._worst[key, kind], math.nan))
            rows.append((*key, kind, "share_lost", lost, math.nan))
            if kind == "fp16" or (kind in _FP8_EDGE and not self.scaled):
                rows.append((*key, kind, "overflow_share", overflowed, math.nan))
        if self.loss and not context.structure.carries_more:
            rows += _losses(context, self._batches(context), self.scaled)
        return pd.DataFrame(rows, columns=[*COLUMNS[:4], "format", *COLUMNS[4:]])

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        for role, title in (("state", "stream"), ("activation", "feed-forward's activations")):
            rows = frame[(frame["role"] == role) & (frame["metric"] == "relative_error")]
            yield from chart(
                rows[rows["value"] > 0].replace(math.inf, math.nan),
                *(f"Relative error of the {title} in low precision", "||q(x) - x|| / ||x||"),
                f"Rounding error of the {title} by format. A gap means an overflow to inf.",
                color="format",
                x_title="state" if role == "state" else "layer",
                log_y=True,
            )

    def sentences(self, frame: Frame) -> Iterator[str]:
        states = frame[(frame["role"] == "state") & (frame["layer"] >= 0)]
        if states.empty:
            return
        errors = states[states["metric"] == "token_error"]
        largest = [
            f"{kind} {part['value'].max():.2g} (state {part.loc[part['value'].idxmax(), 'layer']})"
            for kind, part in errors.groupby("format", sort=False)
            if part["value"].notna().any()
        ]
        yield f"The largest errors of a state, relative to a token's norm, are {', '.join(largest)}."
        over = states[(states["metric"] == "overflow_share") & (states["value"] > 0)]
        for kind, part in over.groupby("format", sort=False):
            yield f"{kind} overflows to inf in states {ranges(part['layer'])}."
        table = errors.pivot_table(index="layer", columns="format", values="value")
        broken = table.index[table["int8_tensor"] > 5 * table["int8_token"]]
        if len(broken):
            worst = table.loc[broken, "int8_tensor"].idxmax()
            lost = states[(states["metric"] == "share_lost") & (states["format"] == "int8_tensor")]
            share = lost.loc[lost["layer"] == worst, "value"].iloc[0]
            yield (
                f"In states {ranges(broken)}, a few massive values break per-tensor INT8. In state {worst}, INT8 "
                f"rounds {share:.0%} of the elements to 0. The error is {table.loc[worst, 'int8_tensor']:.2g} of a "
                f"token's norm, and {table.loc[worst, 'int8_token']:.2g} with one scale per token."
            )
        losses = frame[frame["metric"] == "loss_increase"]
        if len(losses):
            each = ", ".join(f"{r.format} {r.value:+.3g}" for r in losses.itertuples())
            yield f"Rounding every state increases the loss by these nats per token: {each}."


def _norms(x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return each sequence's L2 norm, then its tokens' L2 norms: [sequences, 1 + tokens], with NaN for padding."""
    each = torch.linalg.vector_norm(x, 2, -1).double()
    whole = each.square().sum(1, keepdim=True).sqrt()
    return torch.cat([whole, each if valid is None else each.where(valid, math.nan)], dim=1)


def _losses(context: Context, batches: Sequence[Mapping[str, torch.Tensor]], scaled: bool) -> Iterator[tuple]:
    of_model = (-1, "model", "state", 0)
    try:
        with torch.no_grad():
            plain = _loss(context, batches)
    except UserError as error:
        context.notes.append(f"low_precision: Lamina leaves out the loss: {error}")
        return
    yield (*of_model, "none", "loss", plain, math.nan)

    def rounded(kind: str, state: int, x: torch.Tensor) -> torch.Tensor:
        return round_trip(x, kind, scaled=scaled).to(x.dtype)

    for kind in FORMATS:
        with torch.no_grad(), intercept(context.structure.states(), partial(rounded, kind), roots=context.roots):
            value = _loss(context, batches)
        yield (*of_model, kind, "loss", value, math.nan)
        yield (*of_model, kind, "loss_increase", value - plain, math.nan)


def _loss(context: Context, batches: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Return the mean loss over the predicted tokens of all batches."""
    total = predicted = 0.0
    for batch in batches:
        losses = context.token_losses(context.on_device(batch))
        if len(batches) == 1:
            return float(losses.mean())
        total, predicted = total + float(losses.double().sum()), predicted + losses.numel()
    return total / predicted
