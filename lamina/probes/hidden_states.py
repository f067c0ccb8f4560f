"""Measure the residual stream by layer: variance, magnitudes and massive activations."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedTokenizerBase

from lamina.core.frames import Frame
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.registry import COLUMNS, Probe, probe
from lamina.probes.engine.statistics import Ratio, Running, TokenStates, as_tokens, stream_figures
from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import Point

BAND = 100  # the number of values in Peri-LN Fig 11
MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024
_NAMES = ("token_variance", "mean", "abs_mean", "mean_square", "sigma", "rms", "square_of_mean")
_VARIANCE = len(_NAMES)  # the column of a sequence's variance over all elements, after the averages
FP16_MAX = 65504.0
FITS = 0.7  # the smallest R^2 at which Lamina names a curve's shape
_MASSIVE_ROWS = 20
_STATE = {"sublayer": "block", "role": "state", "index": 0}


@probe
class HiddenStates(Probe):
    """Measure the residual stream x^l before each layer l, and the residual stream x^N after the last layer.

    Rows with role "state" (layer = l, sublayer "block") describe x^l. These metrics cover all elements of x^l in all
    sequences:

    ``variance``: the population variance over all elements.
    ``token_variance``: the variance over the channels of one token, averaged over tokens.
    ``mean``, ``abs_mean``, ``rms``: the mean of x, the mean of |x|, and the root mean square of x.
    ``variance_step``: the variance after layer l minus the variance before layer l (Peri-LN Eq 4).
    ``abs_max``: the largest |x|. The columns channel, position and token tell where the largest |x| is.
    ``top100_max``, ``top100_min``: the largest and the smallest of the 100 largest |x| (Peri-LN Fig 11).
    ``headroom_factor``: FP16's limit, 65504, divided by abs_max.
    ``headroom_bits``: the base-2 logarithm of headroom_factor.

    Lamina computes the following metrics for each sequence, and shows the mean over sequences:

    ``top_magnitude``: the largest |x| (``index`` 1), the second largest |x| (``index`` 2), and so on.
    ``median``: the median of |x| (the lower of two middle values).
    ``max_to_median``: the largest |x| divided by the median. If a norm bounds |x|, use this metric to find outliers.
    ``massive_count``: the number of massive activations. An activation is massive if |x| is above 100 and at least 1000
        times the sequence's median (Sun et al. 2024).

    For each state, Lamina reports the largest massive activations at up to 20 pairs of a channel and a token position.
    For each pair, the metric massive_activation is the largest massive activation, with its sign. The metric
    massive_sequences is the number of sequences with a massive activation at this pair.

    Rows with role "contribution" describe the tensor that a sub-layer adds to the residual stream. Rows with role
    "after" describe the residual stream after this addition, and after the post_norm if the sub-layer has a post_norm.

    Rows with a norm's role (such as pre_norm) describe the input of the norm. The metric sigma is the standard
    deviation over the channels (Mix-LN Eq 5-7), and rms is the root mean square. Lamina averages sigma and rms over
    tokens.

    In a model with several residual streams, x^l is the mean of the streams. Rows with role "streams" describe the
    separate streams. The metric stream_cosine is the mean cosine between any two streams of the same token. The metric
    stream_rms is the root mean square of stream number ``index``.

    Two rows of layer -1 (sublayer "model") tell how the variance grows with depth. The metric growth_linear_r2 is the
    R^2 of a straight line through the variances. The metric growth_exponential_r2 is the R^2 of a straight line through
    the logarithms of the variances.

    Padding does not count. The last entry of transformers' hidden_states is after the final norm, but x^N is before the
    final norm.
    """

    name = "hidden_states"
    title = "Hidden states"
    summary = (
        "variance and magnitudes of the residual stream by layer, massive activations, standard deviation before "
        "each norm, distance to FP16's limit"
    )
    source = "Peri-LN Fig 1, 6, 11, Eq 4; Mix-LN Eq 5-7; massive activations: Sun et al. 2024"
    of_streams = True
    over_steps = ("variance", "abs_mean", "abs_max")

    def __init__(self, top: int = 3):
        """Choose how many of a sequence's largest |x| to average. Raises UserError unless ``top`` is from 1 to 100."""
        if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= BAND:
            raise UserError(f"hidden_states: option 'top' is {top!r}. Give a whole number from 1 to {BAND}.")
        self.top = top

    def begin(self, context: Context) -> None:
        self._context = context
        self._batch = 0
        # Several points often share a tensor, such as a layer's output and the next layer's input. The references are
        # weak, because a long-lived tensor between short-lived activations would fragment memory.
        self._seen = WeakIdKeyDictionary()
        self._buffer = torch.zeros(0)
        points: list[tuple[int, str, str, Point | None]] = []
        points += [(state, "block", "state", point) for state, point in context.structure.states().items()]
        several = [state for state, point in context.structure.states().items() if point.collapse]
        points += [(s, "block", "streams", replace(context.structure.states()[s], collapse=False)) for s in several]
        for site in context.structure.layers:
            for s in site.sublayers:
                points += [(site.index, s.kind, "contribution", s.contribution), (site.index, s.kind, "after", s.after)]
        points += [(layer, kind, norm.role, norm.input) for layer, kind, norm in context.structure.norms()]
        self._places: dict[tuple, Point] = {}
        counts: Counter[tuple] = Counter()
        for *place, point in points:
            if point is not None:
                self._places[*place, counts[tuple(place)]] = point
                counts[tuple(place)] += 1
        self._streams = {key: Ratio() for key in self._places if key[2] == "streams"}
        self._totals = {
            key: StateTotals(self.top) if key[2] == "state" else Totals(magnitudes=key[2] in ("contribution", "after"))
            for key in self._places
            if key not in self._streams
        }

    def points(self) -> Mapping[tuple, Point]:
        return self._places

    def see(self, key: tuple, value: torch.Tensor) -> None:
        inputs = self._context.batches[self._batch]
        if key in self._streams:
            add_streams(self._streams[key], value, inputs.get("attention_mask"))
            return
        totals = self._totals[key]
        version = 0 if value.is_inference() else value._version
        result: Moments | None = (self._seen.get(value) or {}).get(version)
        if result is not None and totals.magnitudes and result.abs_max is None:
            result = None
        if result is None or isinstance(totals, StateTotals):
            tokens = as_tokens(value, inputs)
            magnitude = None
            if totals.magnitudes:  # reuse memory for |x|, because new memory takes longer than abs
                buffered = (self._buffer.shape, self._buffer.dtype, self._buffer.device)
                if buffered != (tokens.x.shape, tokens.x.dtype, tokens.x.device):
                    self._buffer = torch.empty_like(tokens.x)
                magnitude = torch.abs(tokens.x, out=self._buffer)
            if result is None:
                result = moments(tokens, magnitude)
                self._seen[value] = {version: result}
            if isinstance(totals, StateTotals):
                assert magnitude is not None
                totals.add_values(tokens, result, magnitude, inputs.get("input_ids"))
        totals.add(result)

    def end_batch(self, inputs: Mapping[str, torch.Tensor], output: Output) -> None:
        self._seen.clear()
        self._batch += 1

    def standard_error(self) -> float | None:
        return max(t.relative_error() for t in self._totals.values() if isinstance(t, StateTotals))

    def finish(self, context: Context) -> pd.DataFrame:
        rows: list[dict[str, object]] = []
        for (layer, sublayer, role, index), totals in self._totals.items():
            key = {"layer": layer, "sublayer": sublayer, "role": role, "index": index}
            if isinstance(totals, StateTotals):
                rows += [key | row for row in _state_rows(totals, context.tokenizer)]
                continue
            names = ("variance", "mean", "abs_mean", "abs_max") if totals.magnitudes else ("sigma", "rms")
            rows += [key | _row(name, *totals.average(name)) for name in names]
        for (layer, sublayer, role, _), ratio in self._streams.items():
            means, errors = ratio.mean.reshape(-1).tolist(), ratio.standard_error.reshape(-1).tolist()
            for index, (mean, error) in enumerate(zip(means, errors, strict=True) if ratio.samples else ()):
                value, name = (mean**0.5, "stream_rms") if index else (mean, "stream_cosine")
                row = _row(name, value, error / (2 * value) if index and value else error)
                rows.append({"layer": layer, "sublayer": sublayer, "role": role, "index": index, **row})
        variances = [
            self._totals[state, *_STATE.values()].average("variance")[0] for state in context.structure.states()
        ]
        for layer, (before, after) in enumerate(itertools.pairwise(variances)):
            rows.append({"layer": layer} | _STATE | _row("variance_step", after - before))
        logarithms = [math.log(v) if v > 0 else math.nan for v in variances]
        for name, values in (("linear", variances), ("exponential", logarithms)):
            key = {"layer": -1} | _STATE | {"sublayer": "model"}
            rows.append(key | _row(f"growth_{name}_r2", r_squared(values)))
        frame = pd.DataFrame(rows, columns=[*COLUMNS, "channel", "position", "token"])
        return frame.astype({"channel": "Int64", "position": "Int64", "token": "string"})

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        states = frame[(frame["role"] == "state") & (frame["layer"] >= 0)]
        named = frame.assign(what=frame["sublayer"] + ", " + frame["role"])
        around = named[named["role"].isin(["contribution", "after"]) & (named["metric"] == "variance")]
        by_state = {"color": "metric", "x_title": "state", "log_y": True}
        by_layer = {"color": "what", "log_y": True}
        yield from chart(
            states[states["metric"].isin(["variance", "token_variance"])],
            *("Variance of the hidden states", "variance"),
            "Variance of x^l over all elements, and the mean of the variances within each token. State 0 is the "
            "embedding, and the last state is after the last layer and before the final norm.",
            **by_state,
        )
        yield from chart(
            states[states["metric"].isin(["abs_max", "top100_min", "abs_mean", "median"])],
            *("Magnitudes of the hidden states", "|x|"),
            "The largest |x|, the smallest of the 100 largest, the mean and the median. FP16's limit is 65504.",
            **by_state,
        )
        yield from chart(
            frame[frame["metric"] == "stream_cosine"],
            *("Collapse of the streams", "cosine"),
            "The mean cosine between two streams of a token. At 1, the two streams have the same direction.",
            x_title="state",
        )
        yield from chart(
            around,
            *("Variance of each sub-layer's contribution, and of the stream after the addition", "variance"),
            '"contribution" is the tensor that the sub-layer adds to the residual stream, and "after" is the '
            "stream after the addition.",
            **by_layer,
        )
        yield from chart(
            named[(named["metric"] == "sigma") & (named["layer"] >= 0)],
            *("Standard deviation at the norms' inputs", "sigma"),
            "A norm's Jacobian scales as 1 / sigma (Mix-LN Eq 5-7), so a sigma above 1 shrinks gradients.",
            **by_layer,
        )

    def sentences(self, frame: Frame) -> Iterator[str]:
        states = frame[(frame["role"] == "state") & (frame["layer"] >= 0)]
        model = frame[frame["layer"] == -1].set_index("metric")["value"]
        variance = states[states["metric"] == "variance"].set_index("layer")["value"].sort_index()
        yield growth(variance, model["growth_linear_r2"], model["growth_exponential_r2"])
        peaks = states[states["metric"] == "abs_max"]
        if peaks["value"].notna().all():
            yield headroom(peaks.loc[peaks["value"].idxmax()])
        yield massive(states)
        cosine = frame[frame["metric"] == "stream_cosine"].set_index("layer")["value"]
        if len(cosine):
            yield (
                f"Two streams of a token have a cosine of {cosine.iloc[0]:.2f} at state {cosine.index[0]} and of "
                f"{cosine.iloc[-1]:.2f} at state {cosine.index[-1]} (1: equal directions)."
            )
        sigma = frame[(frame["metric"] == "sigma") & (frame["role"] == "pre_norm") & (frame["layer"] >= 0)]
        if len(sigma):
            by_layer = sigma.groupby("layer")["value"].mean()
            yield (
                f"The standard deviation at the pre-norms' inputs goes from {by_layer.iloc[0]:.3g} in layer "
                f"{by_layer.index[0]} to {by_layer.iloc[-1]:.3g} in layer {by_layer.index[-1]}. A norm's Jacobian "
                "scales with the inverse of this standard deviation."
            )


def add_streams(total: Ratio, streams: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Add streams [sequences, tokens, n, width] to a mean of ``stream_figures``. Ignore a single stream."""
    if streams.ndim < 4:
        return
    values = stream_figures(streams.detach().double())
    valid = torch.ones(values.shape[:2], device=values.device) if mask is None else mask.to(values.device)
    total.add((values * valid.unsqueeze(-1)).sum(1), valid.sum(1))


def r_squared(values: Sequence[float]) -> float:
    """Return R^2 of the least-squares line through values at 0, 1, ... (NaN for equal values, or fewer than three)."""
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 3 or not np.isfinite(y).all() or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(np.arange(len(y)), y)[0, 1] ** 2)


def _row(metric: str, value: float, error: float = math.nan) -> dict[str, object]:
    return {"metric": metric, "value": value, "standard_error": error}


def _state_rows(totals: StateTotals, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[dict[str, object]]:
    def at(channel: int, position: int, identifier: int | None) -> dict[str, object]:
        text = str(tokenizer.decode([identifier])) if tokenizer is not None and identifier is not None else None
        return {"channel": channel, "position": position, "token": text}

    for name in ("variance", "token_variance", "mean", "abs_mean", "rms"):
        yield _row(name, *totals.average(name))
    largest = float(totals.abs_max)
    yield _row("abs_max", largest) | (at(*totals.place) if totals.place is not None else {})
    ranks = zip(totals.largest.mean.tolist(), totals.largest.standard_error.tolist(), strict=True)
    for rank, (value, error) in enumerate(ranks, start=1):
        yield _row("top_magnitude", value, error) | {"index": rank}
    for name, running in (
        ("median", totals.medians),
        ("max_to_median", totals.ratios),
        ("massive_count", totals.massive),
    ):
        yield _row(name, float(running.mean), float(running.standard_error))
    places = sorted(totals.massive_places.items(), key=lambda item: -abs(item[1][0]))
    for (channel, position), (value, sequences, identifier) in places[:_MASSIVE_ROWS]:
        yield _row("massive_activation", value) | at(channel, position, identifier)
        yield _row("massive_sequences", sequences) | at(channel, position, identifier)
    factor = FP16_MAX / largest if largest > 0 else math.inf
    yield _row("headroom_factor", factor)
    yield _row("headroom_bits", math.log2(factor) if factor > 0 else -math.inf)
    if len(totals.band):
        yield _row("top100_min", float(totals.band[-1]))
        yield _row("top100_max", float(totals.band[0]))


@dataclass(frozen=True)
class Moments:
    """The moments of each token over its channels, in float64 [sequences, tokens]."""

    valid: torch.Tensor | None
    mean: torch.Tensor
    mean_square: torch.Tensor
    variance: torch.Tensor
    abs_mean: torch.Tensor | None = None
    abs_max: torch.Tensor | None = None


def moments(tokens: TokenStates, magnitude: torch.Tensor | None = None) -> Moments:
    """Return the moments of all tokens, including padding. ``abs_mean`` and ``abs_max`` need the magnitudes |x|."""
    x = tokens.x
    channels = x.shape[-1]
    mean = x.sum(-1).double() / channels
    mean_square = torch.linalg.vector_norm(x, 2, -1).double().square() / channels
    variance = mean_square - mean.square()
    # float32 lost digits or overflowed, so repeat in float64
    again = ~(variance > 0.01 * mean_square)
    if bool(again.any()):
        rows = x[again].double()
        mean[again], mean_square[again] = rows.mean(-1), rows.square().mean(-1)
        variance[again] = rows.var(-1, correction=0)
    if magnitude is None:
        return Moments(tokens.valid, mean, mean_square, variance)
    abs_mean = magnitude.sum(-1).double() / channels
    return Moments(tokens.valid, mean, mean_square, variance, abs_mean, magnitude.amax(-1).double())


def medians(tokens: TokenStates, magnitude: torch.Tensor) -> torch.Tensor:
    """Return each sequence's median magnitude (the lower middle value) in float64. On the CPU, ``magnitude`` is
    reordered.
    """
    each = list(magnitude)
    if tokens.valid is not None:
        each = [m[v] for m, v in zip(magnitude, tokens.valid, strict=True)]
    if magnitude.device.type != "cpu":
        return torch.tensor([float(m.flatten().median()) if m.numel() else math.nan for m in each]).double()
    arrays = [m.reshape(-1).numpy() for m in each]
    if torch.get_num_threads() < 2:
        return torch.tensor([_lower_median(array) for array in arrays], dtype=torch.float64)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy's partition releases the GIL
        return torch.tensor(list(pool.map(_lower_median, arrays)), dtype=torch.float64)


def _lower_median(values: np.ndarray) -> float:
    if not len(values):
        return math.nan
    middle = (len(values) - 1) // 2
    values.partition(middle)
    highest = values[middle:].max()  # NaN sorts last, so the median may not show it
    return float(values[middle]) if highest == highest else math.nan


def largest(x: torch.Tensor, abs_max: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` largest |x| of each sequence in descending order, [sequences, count]."""
    tokens = abs_max.topk(min(count, abs_max.shape[1]), dim=1).indices
    rows = x.gather(1, tokens.unsqueeze(-1).expand(-1, -1, x.shape[-1])).abs().flatten(1)
    return rows.topk(min(count, rows.shape[1]), dim=1).values


class Totals:
    """A sample's averages over tokens, the averages' standard errors over sequences, and the largest |x|."""

    def __init__(self, *, magnitudes: bool = True):
        self.magnitudes = magnitudes
        self.tokens = 0
        self.sums = torch.zeros(len(_NAMES), dtype=torch.float64)
        self.samples = Running()
        self.abs_max = torch.tensor(0.0, dtype=torch.float64)

    def add(self, moments: Moments) -> None:
        valid = moments.valid
        abs_mean = torch.zeros_like(moments.mean) if moments.abs_mean is None else moments.abs_mean
        mean, square = moments.mean, moments.mean_square
        each = [moments.variance, mean, abs_mean, square, moments.variance.sqrt(), square.sqrt(), mean.square()]
        table = torch.stack(each)  # [names, sequences, tokens]
        if valid is None:
            self.tokens += table[0].numel()
            self.sums += table.sum((1, 2)).cpu()
            samples = table.mean(2).T
        else:
            table = table.masked_fill(~valid, 0.0)
            lengths = valid.sum(1)
            self.tokens += int(lengths.sum())
            self.sums += table.sum((1, 2)).cpu()
            samples = (table.sum(2) / lengths).T[lengths > 0]
        variance = samples[:, 0] + samples[:, 6] - samples[:, 1].square()
        self.samples.add(torch.cat([samples, variance.unsqueeze(1)], dim=1))
        if moments.abs_max is not None:
            self.abs_max = torch.maximum(self.abs_max, moments.abs_max.max().cpu())

    def average(self, name: str) -> tuple[float, float]:
        """Return the mean of a metric over all tokens, and its standard error over sequences (NaN for abs_max)."""
        if name == "abs_max":
            return float(self.abs_max), math.nan
        if name == "variance":  # the mean of the tokens' variances, plus the variance of the tokens' means
            inner, mean, square = (self.average(each)[0] for each in ("token_variance", "mean", "square_of_mean"))
            return inner + max(square - mean**2, 0.0), float(self.samples.standard_error[_VARIANCE])
        if name == "rms" and self.magnitudes:  # over all elements. A norm input's rms is averaged over tokens
            value, error = self.average("mean_square")
            root = math.sqrt(value)
            return root, error / (2 * root) if root > 0 else math.nan
        index = _NAMES.index(name)
        return float(self.sums[index]) / max(self.tokens, 1), float(self.samples.standard_error[index])

    def relative_error(self) -> float:
        """Return the relative standard error of the variance, or infinity for fewer than two sequences."""
        mean = float(self.samples.mean[_VARIANCE]) if self.samples.count else 0.0
        error = float(self.samples.standard_error[_VARIANCE]) if self.samples.count else math.inf
        return error / mean if mean > 0 else 0.0 if error == 0 else math.inf


class StateTotals(Totals):
    """The totals of a hidden state, with its median, its massive activations and its largest magnitudes."""

    def __init__(self, top: int):
        super().__init__()
        self.top = top
        self.largest, self.medians, self.ratios, self.massive = Running(), Running(), Running(), Running()
        self.band = torch.zeros(0, dtype=torch.float64)
        self.place: tuple[int, int, int | None] | None = None  # channel, position and token id of the largest |x|
        # (channel, position) -> largest massive activation, number of sequences with one, token id
        self.massive_places: dict[tuple[int, int], tuple[float, int, int | None]] = {}

    def add_values(
        self, tokens: TokenStates, moments: Moments, magnitude: torch.Tensor, input_ids: torch.Tensor | None
    ) -> None:
        """Add one batch's magnitudes, and reorder ``magnitude``. Call this method before ``add``."""
        assert moments.abs_max is not None
        peaks = moments.abs_max if tokens.valid is None else moments.abs_max.masked_fill(~tokens.valid, 0.0)
        self.largest.add(largest(tokens.x, peaks, self.top))
        self._extend_band(tokens.x, peaks)
        if float(peaks.max()) > float(self.abs_max):
            sequence, token = divmod(int(peaks.argmax()), peaks.shape[1])
            channel = int(tokens.x[sequence, token].abs().argmax())
            position = token if tokens.valid is None else int(tokens.valid[sequence, : token + 1].sum()) - 1
            self.place = (channel, position, _identifier(input_ids, peaks, sequence, token))
        middle = medians(tokens, magnitude)
        highest = peaks.amax(1).double().cpu()
        real = ~torch.isnan(middle) | torch.isnan(highest)  # a sequence that is only padding has no median
        self.medians.add(middle[real])
        self.ratios.add((highest / middle)[real])
        counts = torch.zeros(len(middle))
        if bool(((highest > MASSIVE) & (highest >= TIMES_MEDIAN * middle)).any()):
            counts = self._note_massive(tokens, peaks, middle, input_ids)
        self.massive.add(counts[real])

    def _extend_band(self, x: torch.Tensor, peaks: torch.Tensor) -> None:
        """Update the 100 largest |x|, which only the tokens with the 100 largest peaks can hold."""
        least = float(self.band[-1]) if len(self.band) == BAND else -1.0
        flat = peaks.flatten()
        rows = (flat > least).nonzero().flatten()
        if len(rows) > BAND:
            rows = rows[flat[rows].topk(BAND).indices]
        if len(rows):
            values = x.flatten(0, 1)[rows].abs().flatten()
            values = torch.cat([self.band, values.topk(min(BAND, len(values))).values.double().cpu()])
            self.band = values.topk(min(BAND, len(values))).values

    def _note_massive(
        self, tokens: TokenStates, peaks: torch.Tensor, middle: torch.Tensor, input_ids: torch.Tensor | None
    ) -> torch.Tensor:
        least = (TIMES_MEDIAN * middle).to(peaks.device)
        chosen = (peaks > MASSIVE) & (peaks >= least.unsqueeze(1))
        sequence, token = chosen.nonzero(as_tuple=True)
        rows = tokens.x[sequence, token].double()
        magnitude = rows.abs()
        row, channel = ((magnitude > MASSIVE) & (magnitude >= least[sequence].unsqueeze(1))).nonzero(as_tuple=True)
        values = rows[row, channel].cpu().numpy()
        sequence, token = sequence[row], token[row]
        token_index = token if tokens.valid is None else (tokens.valid.cumsum(1) - 1)[sequence, token]
        width = tokens.x.shape[-1]
        code, inverse, counts = np.unique(
            (token_index * width + channel).cpu(), return_inverse=True, return_counts=True
        )
        best = np.zeros(len(code), dtype=np.int64)
        order = np.argsort(np.abs(values), kind="stable")
        best[inverse[order]] = order  # the largest value overwrites smaller values
        for place_code, at, count in zip(code.tolist(), best.tolist(), counts.tolist(), strict=True):
            key = (place_code % width, place_code // width)
            value, times, identifier = self.massive_places.get(key, (0.0, 0, None))
            if abs(float(values[at])) > abs(value):
                value = float(values[at])
                identifier = _identifier(input_ids, peaks, int(sequence[at]), int(token[at]))
            self.massive_places[key] = (value, times + count, identifier)
        return torch.bincount(sequence.cpu(), minlength=len(middle)).float()


def _identifier(input_ids: torch.Tensor | None, peaks: torch.Tensor, sequence: int, token: int) -> int | None:
    if input_ids is None or input_ids.shape != peaks.shape:
        return None
    return int(input_ids[sequence, token])


def growth(variance: Frame, linear: float, exponential: float) -> str:
    """Return a sentence on the variance by state. ``linear`` and ``exponential`` are the R^2 of the two curves."""
    last = variance.index[-1]
    if not np.isfinite(variance).all():
        return f"The hidden states are not finite from state {variance.index[~np.isfinite(variance)][0]} on."
    if variance.min() > 0 and variance.max() < 4 * variance.min():
        return f"The hidden states' variance stays between {variance.min():.3g} and {variance.max():.3g}."
    goes = "grows" if variance.iloc[-1] > variance.iloc[0] else "goes"
    text = f"The hidden states' variance {goes} from {variance.iloc[0]:.3g} (state 0) to {variance.iloc[-1]:.3g} "
    text += f"(state {last}), largest at state {variance.idxmax()} with {variance.max():.3g}"
    if math.isnan(linear) or math.isnan(exponential):
        return text + "."
    fits = f"(R^2 {linear:.2f} linear, {exponential:.2f} exponential)"
    if max(linear, exponential) < FITS:
        return text + f". Neither a linear nor an exponential curve fits {fits}."
    if f"{linear:.2f}" == f"{exponential:.2f}":
        return text + f". A linear and an exponential curve fit equally well {fits}."
    kind = "A linear" if linear >= exponential else "An exponential"
    return text + f". {kind} curve fits better {fits}."


def headroom(peak: Frame) -> str:
    token = f" ({peak['token']!r})" if isinstance(peak["token"], str) else ""
    text = f"The largest |x| is {peak['value']:.4g}, in state {peak['layer']} at channel {peak['channel']}, token "
    text += f"{peak['position']}{token}: "
    if not peak["value"] > 0:
        return text + "the residual stream is 0."
    factor = FP16_MAX / peak["value"]
    if factor < 1:
        return text + f"{1 / factor:.3g} times FP16's limit of 65504, which overflows."
    text += f"FP16's limit of 65504 is {factor:.3g} times this value ({math.log2(factor):.1f} bits of headroom in the "
    return (
        text + "residual stream alone). Run low_precision to check the activations inside the layers and the weights."
    )


def massive(states: Frame) -> str:
    activations = states[states["metric"] == "massive_activation"]
    ratio = states[states["metric"] == "max_to_median"].sort_values("value").iloc[-1]
    if activations.empty:
        return (
            "The states have no massive activations (|x| > 100 and at least 1000 times the median). The largest |x| is "
            f"at most {ratio['value']:.3g} times its sequence's median (state {ratio['layer']})."
        )
    layers = sorted(activations["layer"].unique())
    most = activations.loc[activations["value"].abs().idxmax()]
    channels = activations["channel"].nunique()
    several = f"{len(layers)} states, {layers[0]} to {layers[-1]}, have"
    return (
        f"{several if len(layers) > 1 else f'State {layers[0]} has'} massive activations (|x| > 100 and at least 1000 "
        f"times the median) in {channels} channel{'s' * (channels > 1)}. The largest is {most['value']:.4g} at "
        f"channel {most['channel']}, token {most['position']} (state {most['layer']})."
    )
