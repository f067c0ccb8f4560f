"""Measure, by layer, what rounding to FP16, BF16, FP8 or INT8 does to a model, and which values are too large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import nn

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.core.values import one_of, switch
from lamina.errors import UserError, one_line
from lamina.modeling.parts import uncompiled
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
HALF = ("fp16", "bf16")  # the formats in which Lamina runs the whole model
_TOO_LARGE = 0.1  # an error of a token's norm, from which a sentence names it
_WORDS = {"contribution": "output", "activation": "activation", "weight": "weights"}


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
    """Round hidden states and activations to low-precision formats, measure the rounding errors, and find overflows.

    The column ``format`` is fp16, bf16, fp8_e4m3, fp8_e5m2, int8_tensor or int8_token (see ``round_trip``). The column
    ``role`` names the tensor x that Lamina rounds:

    "state": the hidden state before a layer.
    "contribution": the tensor that a sub-layer adds to the residual stream.
    "activation": the input of the down-projection in a dense feed-forward.

    Lamina scales FP8 (by default) and int8_tensor for each sequence, and int8_token for each token. These metrics
    describe the rounding of one tensor:

    ``relative_error``: the norm of the rounding error of a sequence divided by the norm of x, averaged over sequences.
    ``token_error``: the norm of the rounding error of a token divided by the norm of the token, averaged over tokens.
    ``max_error``: the largest absolute rounding error in all sequences.
    ``share_lost``: the fraction of elements that rounding turns from nonzero values into 0.
    ``overflow_share``: the fraction of elements that rounding turns into inf. The errors are then infinite.

    These metrics describe the whole model (layer -1):

    ``loss`` (role "state"): the loss in nats per token if Lamina rounds the hidden states of all layers. Rows with
        format "none" hold the loss without rounding.
    ``loss_increase`` (role "state"): the loss with rounding minus the loss without rounding.
    ``model_loss`` (role "model"): the loss in nats per token if the whole model runs in fp16 or bf16. An overflow
        anywhere, such as in the attention's queries, makes the loss NaN.
    ``model_loss_increase`` (role "model"): model_loss minus the loss without rounding. While a model trains, Lamina
        leaves out model_loss and model_loss_increase.

    These metrics describe the weights w of a sub-layer (role "weight"). Layer -1 has the weights outside of the layers.

    ``abs_max`` (format "none"): the largest |w|.
    ``overflow_share``: the fraction of weights that rounding turns into inf.

    Per-tensor INT8 (int8_tensor) has one scale for all elements of x. If one massive activation (Sun et al. 2024) sets
    this scale, rounding leaves almost no distinct values for the other elements. The metrics token_error and share_lost
    show this loss. The metric relative_error hides this loss, because the massive activation makes up most of the norm
    of x.
    """

    name = "low_precision"
    title = "Low precision"
    summary = "values that overflow FP16, and the error by layer and the loss in FP16, BF16, FP8 or INT8"
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
        halves = 10.0 if context.device.type == "cpu" else 2.0  # CPUs multiply slowly in FP16
        return (12.0 + halves * self.loss) * context.tokens(context.most_sequences(self.sequences, _SEQUENCES))

    def begin(self, context: Context) -> None:
        self._context, self._batch, self._sequences = context, 0, 0
        self._most = context.most_sequences(self.sequences, _SEQUENCES)
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
        rows += _weights(context, self.scaled)
        if self.loss:
            rows += _losses(context, self._batches(context), self.scaled)
        return pd.DataFrame(rows, columns=[*COLUMNS[:4], "format", *COLUMNS[4:]])

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        for role, title in (("state", "stream"), ("activation", "feed-forward's activations")):
            yield from chart(
                frame[(frame["role"] == role) & (frame["metric"] == "relative_error")],
                *(f"Relative error of the {title} in low precision", "||q(x) - x|| / ||x||"),
                f"Rounding error of the {title} by format.",
                color="format",
                x_title="state" if role == "state" else "layer",
                log_y=True,
            )

    def urgent(self, frame: Frame) -> bool:
        return bool(_overflows(frame))

    def sentences(self, frame: Frame) -> Iterator[str]:
        yield from _verdict(frame)
        states = frame[(frame["role"] == "state") & (frame["layer"] >= 0)]
        lost = frame[(frame["metric"] == "share_lost") & (frame["value"] >= 0.5)]
        for kind, part in lost.groupby("format", sort=False):
            yield f"{kind} rounds up to {part['value'].max():.1%} of the elements to 0 in {_places(part)}."
        errors = states[states["metric"] == "token_error"]
        largest = [
            f"{kind} {part['value'].max():.2g} (state {part.loc[part['value'].idxmax(), 'layer']})"
            for kind, part in errors.groupby("format", sort=False)
            if part["value"].notna().any()
        ]
        if largest:
            yield f"The largest errors of a state, relative to a token's norm, are {', '.join(largest)}."
            table = errors.pivot_table(index="layer", columns="format", values="value")
            tensor, token = table["int8_tensor"], table["int8_token"]
            if len(worse := table.index[(tensor > 5 * token) & (tensor > _TOO_LARGE)]):
                worst = tensor[worse].idxmax()
                yield (
                    f"A few large values make per-tensor INT8 inaccurate in states {ranges(worse)}. In state {worst}, "
                    f"the error is {tensor[worst]:.2g} of a token's norm, and {token[worst]:.2g} with one scale per "
                    "token."
                )
        for metric, what in (("model_loss_increase", "Running the whole model in"), ("loss_increase", "Rounding only")):
            rows = frame[frame["metric"] == metric]
            if metric == "loss_increase" and (frame["metric"] == "model_loss_increase").any():
                rows = rows[~rows["format"].isin(HALF)]
            if len(rows):
                numbers = zip(rows["format"], rows["value"], strict=True)
                each = ", ".join(
                    f"{kind} {number:{'+.3g' if math.isfinite(number) else 'g'}}" for kind, number in numbers
                )
                what += " a format" if metric == "model_loss_increase" else " the hidden states"
                yield f"{what} changes the loss by these nats per token: {each}."


def _overflows(frame: Frame) -> dict[str, list[str]]:
    """Map each sentence about an overflow to the formats that overflow, or to [] if the model itself is not finite."""
    finite = np.isfinite(frame["value"])
    # A scaled format overflows only if the tensor itself is not finite.
    own = frame[
        ~finite
        & ((frame["metric"] == "abs_max") | (frame["metric"].eq("max_error") & frame["format"].eq("int8_token")))
    ]
    place = ["layer", "sublayer", "role", "index"]
    known = pd.MultiIndex.from_frame(frame[place]).isin(pd.MultiIndex.from_frame(own[place]))
    over = ((frame["metric"] == "overflow_share") & (frame["value"] > 0)) | ((frame["metric"] == "max_error") & ~finite)
    losses = frame[frame["metric"] == "model_loss"].set_index("format")["value"]
    plain = frame.loc[(frame["metric"] == "loss") & (frame["format"] == "none"), "value"]
    texts: dict[str, list[str]] = {f"in {_places(own)}": []} if len(own) else {}
    for kind in FORMATS:
        rows = frame[over & ~known & (frame["format"] == kind)]
        value = float(losses.get(kind, 0.0))
        text = f"to inf in {_places(rows)}" if len(rows) else ""
        if not math.isfinite(value) and np.isfinite(plain).all():
            inner = "" if text else "inside a sub-layer, such as in the attention's queries"
            text += f"{inner}, and the model's loss in {kind} is {value:g}"
        if text:
            texts.setdefault(text, []).append(kind)
    return texts


def _verdict(frame: Frame) -> Iterator[str]:
    """Yield whether a value is too large for a format, then which tensors and formats Lamina checked."""
    texts = _overflows(frame)
    for text, kinds in texts.items():
        several = f"{' and '.join(kinds)} overflow{'s' * (len(kinds) == 1)}"
        yield f"{several if kinds else 'Without any rounding, the model holds inf or NaN'} {text}."
    if [] in texts.values():
        return
    scaled = not frame.loc[frame["metric"] == "overflow_share", "format"].isin(_FP8_EDGE).any()
    held = [
        kind for kind in (*HALF, *(() if scaled else _FP8_EDGE)) if not any(kind in each for each in texts.values())
    ]
    run = (frame["metric"] == "model_loss").any()
    if held:
        yield (
            f"On this text, nothing overflows in {' or '.join(held)} (checked: hidden states, the sub-layers' outputs, "
            f"the inputs of dense down-projections, weights{', and the loss of the whole model' * bool(run)})."
        )
    yield (
        f"Lamina scales {'FP8 and ' * scaled}INT8 by the largest value of each sequence, or of each token in "
        f"int8_token, so {'they do' if scaled else 'INT8 does'} not overflow. Lamina does not round the tensors inside "
        f"the attention{' to these formats' if run else ''}."
    )


def _places(rows: Frame) -> str:
    texts = []
    for (role, sublayer), part in rows.groupby(["role", "sublayer"], sort=False):
        layers = ranges(part["layer"])
        if role == "state":
            texts.append(f"states {layers}")
        elif sublayer == "model":
            texts.append("the weights outside of the layers")
        else:
            of = "layers" if part["layer"].nunique() > 1 else "layer"
            texts.append(f"the {str(sublayer).replace('_', '-')}'s {_WORDS[str(role)]} in {of} {layers}")
    return " and ".join(texts)


def _weights(context: Context, scaled: bool) -> Iterator[tuple]:
    """Yield rows with the largest weight of each sub-layer, and with the share of weights that become inf."""
    owners: dict[int, tuple[int, str]] = {}
    for site in reversed(context.structure.layers):  # layers may share weights
        owners |= {id(weight): (site.index, "block") for weight in site.module.parameters()}
        for sublayer in site.sublayers:
            for _, module in sublayer.modules:
                owners |= {id(weight): (site.index, sublayer.kind) for weight in module.parameters()}
    groups: dict[tuple[int, str], list[torch.Tensor]] = {}
    for weight in context.model.parameters():
        if weight.is_floating_point() and weight.numel():
            groups.setdefault(owners.get(id(weight), (-1, "model")), []).append(weight.detach())
    for key, weights in groups.items():
        peaks = [float(torch.linalg.vector_norm(weight, math.inf)) for weight in weights]
        yield (*key, "weight", 0, "none", "abs_max", float(np.max(peaks)), math.nan)
        for kind in HALF if scaled else _FLOATS:
            limit, over = torch.finfo(_FLOATS[kind]).max, 0
            for weight, peak in zip(weights, peaks, strict=True):
                if not peak <= limit:
                    over += int((~round_trip(weight, kind, scaled=False).isfinite()).sum())
            share = over / sum(weight.numel() for weight in weights)
            yield (*key, "weight", 0, kind, "overflow_share", share, math.nan)


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
    for kind in HALF if "step" not in context.state else ():
        try:
            with torch.no_grad(), uncompiled(context.model), _running_in(context.model, _FLOATS[kind]):
                value = _loss(context, batches)
        except (RuntimeError, TypeError) as error:  # an operation that this device cannot do in half precision
            context.notes.append(f"low_precision: Lamina leaves out the model's loss in {kind}: {one_line(error)}")
            continue
        yield (-1, "model", "model", 0, kind, "model_loss", value, math.nan)
        yield (-1, "model", "model", 0, kind, "model_loss_increase", value - plain, math.nan)
    if context.structure.carries_more:
        return

    def rounded(kind: str, state: int, x: torch.Tensor) -> torch.Tensor:
        return round_trip(x, kind, scaled=scaled).to(x.dtype)

    for kind in FORMATS:
        with torch.no_grad(), intercept(context.structure.states(), partial(rounded, kind), roots=context.roots):
            value = _loss(context, batches)
        yield (*of_model, kind, "loss", value, math.nan)
        yield (*of_model, kind, "loss_increase", value - plain, math.nan)


@contextmanager
def _running_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast the model's weights, except those that transformers keeps in float32. Restore the weights at the end."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    # Buffers that a checkpoint lacks keep their dtype, as after loading in this dtype.
    wide = {part for name in names for part in getattr(model, name, None) or ()}
    tensors = {
        id(tensor): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and wide.isdisjoint(name.split("."))
    }
    values = [(tensor, tensor.data) for tensor in tensors.values()]
    try:
        for tensor, value in values:
            tensor.data = value.to(dtype)
        yield
    finally:
        for tensor, value in values:
            tensor.data = value


def _loss(context: Context, batches: Sequence[Mapping[str, torch.Tensor]]) -> float:
    total = predicted = 0.0
    for batch in batches:
        losses = context.token_losses(context.on_device(batch))
        if len(batches) == 1:
            return float(losses.mean())
        total, predicted = total + float(losses.double().sum()), predicted + losses.numel()
        if not math.isfinite(total):
            break
    return total / predicted
