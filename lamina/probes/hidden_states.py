"""The residual stream by layer: variance, magnitudes, massive activations, and the distance to FP16's limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from lamina.core.frames import Frame
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, lines
from lamina.probes.engine.registry import Probe, probe
from lamina.probes.magnitudes import Seen, as_tokens, moments
from lamina.probes.stream_sentences import FP16_MAX, growth, headroom, massive
from lamina.probes.stream_totals import BAND, StateTotals, Totals
from lamina.probes.structure.outputs import Output
from lamina.probes.structure.sites import Point

_MASSIVE_ROWS = 20


@probe
class HiddenStates(Probe):
    """Statistics of the stream x^l before each layer l and behind the last (state N, before the final norm).

    Rows with role "state" (layer = state l, sublayer "block"), over the whole sample:

    - variance: over all elements (population); its standard error is that of the sequences' own variances.
      token_variance: each token's over its channels, averaged. mean, abs_mean, rms (root of the mean square).
      variance_step: Var(x^(l+1)) - Var(x^l), layer l's (Peri-LN Eq 4: constant for Peri-LN).
    - abs_max: the largest |x|, with ``channel``, ``position`` (of the token in its sequence) and ``token`` (its text).
      top_magnitude: the index-th largest |x| of a sequence (1 is the largest) and median: the exact median |x| of a
      sequence (the lower of the middle two), both averaged over sequences as Sun et al. do. max_to_median: their
      ratio in each sequence, averaged: a normalized stream bounds |x|, so only the ratio is informative there.
    - massive_count: elements of a sequence with |x| > 100 and |x| >= 1000 x its median (Sun et al. 2024), averaged.
      massive_activation: one row per channel and position that has one (the 20 largest of a state): the value,
      signed, that is largest; massive_sequences: in how many sequences it is massive.
    - headroom_factor = 65504 / abs_max and headroom_bits, its log2 (negative: FP16 overflows). top100_min and
      top100_max: the band of the 100 largest |x| of the whole sample (Peri-LN Fig 11).

    Rows with role "contribution" (what a sub-layer adds, behind its out_norm) and "after" (the stream behind the
    addition, behind a post_norm): variance, mean, abs_mean, abs_max; index counts sub-layers of the same kind in a
    layer. Rows with a norm's role, at its input: sigma (standard deviation over the channels, Mix-LN Eq 5-7) and rms
    (what an RMSNorm divides by), averaged over tokens; index counts norms of the same role in the sub-layer.
    Layer -1, sublayer "model": growth_linear_r2 and growth_exponential_r2, the R^2 of straight lines through the
    states' variance and through its logarithm.

    Padding is left out. Trap: HF's hidden_states[-1] is behind the final norm; state N here is before it.
    """

    name = "hidden_states"
    title = "Hidden states"
    summary = "variance and magnitudes of the stream by layer, massive activations, sigma at the norms, FP16 headroom"
    source = "Peri-LN Fig 1, 6, 11, Eq 4; Mix-LN Eq 5-7; massive activations: Sun et al. 2024"
    over_steps = ("variance", "abs_mean", "abs_max")

    def __init__(self, top: int = 3):
        """``top``: how many of each sequence's largest magnitudes are averaged.

        Raises UserError unless ``top`` is a whole number from 1 to 100.
        """
        if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= BAND:
            raise UserError(f"hidden_states: option 'top' is {top!r} (allowed: a whole number from 1 to {BAND})")
        self.top = top

    def begin(self, context: Context) -> None:
        self._context = context
        self._batch = 0
        self._seen = Seen()
        self._buffer = torch.zeros(0)
        self._places: dict[tuple, Point] = {}
        for state, point in context.structure.states().items():
            self._places[state, "block", "state", 0] = point
        for site in context.structure.layers:
            for sublayer in site.sublayers:
                self._place(site.index, sublayer.kind, "contribution", sublayer.contribution)
                self._place(site.index, sublayer.kind, "after", sublayer.after)
        for layer, kind, norm in context.structure.norms():
            self._place(layer, kind, norm.role, norm.input)
        self._totals = {
            key: StateTotals(self.top) if key[2] == "state" else Totals(magnitudes=key[2] in ("contribution", "after"))
            for key in self._places
        }

    def _place(self, layer: int, sublayer: str, role: str, point: Point | None) -> None:
        index = sum(1 for key in self._places if key[:3] == (layer, sublayer, role))
        if point is not None:
            self._places[layer, sublayer, role, index] = point

    def points(self) -> Mapping[tuple, Point]:
        return self._places

    def see(self, key: tuple, value: torch.Tensor) -> None:
        totals, inputs = self._totals[key], self._context.batches[self._batch]
        result = self._seen.get(value)
        if result is not None and totals.magnitudes and result.abs_max is None:
            result = None
        if result is None or isinstance(totals, StateTotals):
            tokens = as_tokens(value, inputs)
            magnitude = self._absolute(tokens.x) if totals.magnitudes else None
            if result is None:
                result = moments(tokens, magnitude)
                self._seen.put(value, result)
            if isinstance(totals, StateTotals):
                assert magnitude is not None
                totals.add_values(tokens, result, magnitude, inputs.get("input_ids"))
        totals.add(result)

    def _absolute(self, x: torch.Tensor) -> torch.Tensor:
        """|x| in reused memory: fresh pages cost more than the arithmetic."""
        if self._buffer.shape != x.shape or self._buffer.dtype != x.dtype or self._buffer.device != x.device:
            self._buffer = torch.empty_like(x)
        return torch.abs(x, out=self._buffer)

    def end_batch(self, inputs: Mapping[str, torch.Tensor], output: Output) -> None:
        self._seen.clear()
        self._batch += 1

    def standard_error(self) -> float | None:
        return max(t.relative_error() for t in self._totals.values() if isinstance(t, StateTotals))

    def finish(self, context: Context) -> pd.DataFrame:
        rows: list[dict[str, object]] = []
        for (layer, sublayer, role, index), totals in self._totals.items():
            place = {"layer": layer, "sublayer": sublayer, "role": role, "index": index}
            if isinstance(totals, StateTotals):
                rows += [place | row for row in self._state_rows(totals, context.tokenizer)]
                continue
            names = ("variance", "mean", "abs_mean", "abs_max") if totals.magnitudes else ("sigma", "rms")
            rows += [place | _row(name, *_average(totals, name)) for name in names]
        variances = [self._totals[state, "block", "state", 0].variance()[0] for state in context.structure.states()]
        for layer, (before, after) in enumerate(itertools.pairwise(variances)):
            place = {"layer": layer, "sublayer": "block", "role": "state", "index": 0}
            rows.append(place | _row("variance_step", after - before))
        place = {"layer": -1, "sublayer": "model", "role": "state", "index": 0}
        rows.append(place | _row("growth_linear_r2", r_squared(variances)))
        logarithms = [math.log(v) if v > 0 else math.nan for v in variances]
        rows.append(place | _row("growth_exponential_r2", r_squared(logarithms)))
        return _frame(rows)

    def _state_rows(
        self, totals: StateTotals, tokenizer: PreTrainedTokenizerBase | None
    ) -> Iterator[dict[str, object]]:
        for name in ("variance", "token_variance", "mean", "abs_mean", "rms"):
            yield _row(name, *_average(totals, name))
        largest = float(totals.abs_max)
        place: dict[str, object] = {}
        if totals.place is not None:
            channel, position, identifier = totals.place
            place = {"channel": channel, "position": position, "token": token_text(tokenizer, identifier)}
        yield _row("abs_max", largest) | place
        for rank, (value, error) in enumerate(
            zip(totals.largest.mean.tolist(), totals.largest.standard_error.tolist(), strict=True), start=1
        ):
            yield _row("top_magnitude", value, error) | {"index": rank}
        for name, running in (("median", totals.medians), ("max_to_median", totals.ratios)):
            yield _row(name, float(running.mean), float(running.standard_error))
        yield _row("massive_count", float(totals.massive.mean), float(totals.massive.standard_error))
        places = sorted(totals.massive_places.items(), key=lambda item: -abs(item[1][0]))
        for (channel, position), (value, sequences, identifier) in places[:_MASSIVE_ROWS]:
            place = {"channel": channel, "position": position, "token": token_text(tokenizer, identifier)}
            yield _row("massive_activation", value) | place
            yield _row("massive_sequences", sequences) | place
        factor = FP16_MAX / largest if largest > 0 else math.inf
        yield _row("headroom_factor", factor)
        yield _row("headroom_bits", math.log2(factor) if factor > 0 else -math.inf)
        if len(totals.band):
            yield _row("top100_min", float(totals.band[-1]))
            yield _row("top100_max", float(totals.band[0]))

    def figures(self, frame: Frame) -> Sequence[tuple[Figure, str]]:
        states = frame[(frame["role"] == "state") & (frame["layer"] >= 0)]
        around = frame[frame["role"].isin(["contribution", "after"]) & (frame["metric"] == "variance")].copy()
        around["what"] = around["sublayer"] + ", " + around["role"]
        sigma = frame[(frame["metric"] == "sigma") & (frame["layer"] >= 0)].copy()
        sigma["norm"] = sigma["sublayer"] + ", " + sigma["role"]
        magnitudes = states["metric"].isin(["abs_max", "top100_min", "abs_mean", "median"])
        drawn = [
            (
                lines(
                    states[states["metric"].isin(["variance", "token_variance"])],
                    *("layer", "value"),
                    color="metric",
                    title="Variance of the hidden states",
                    x_title="state",
                    y_title="variance",
                    log_y=True,
                ),
                "Variance of x^l over all elements, and each token's own, averaged. State 0 is the embedding, the last "
                "state is behind the last layer and before the final norm.",
            ),
            (
                lines(
                    states[magnitudes],
                    *("layer", "value"),
                    color="metric",
                    title="Magnitudes of the hidden states",
                    x_title="state",
                    y_title="|x|",
                    log_y=True,
                ),
                "The largest |x|, the smallest of the 100 largest, the mean and the median. FP16 ends at 65504.",
            ),
            (
                lines(
                    around,
                    *("layer", "value"),
                    color="what",
                    title="Variance of what each sub-layer adds, and of the stream behind it",
                    x_title="layer",
                    y_title="variance",
                    log_y=True,
                ),
                "contribution: what is added to the stream. after: the stream behind the addition.",
            ),
        ]
        if len(sigma):
            figure = lines(
                sigma,
                *("layer", "value"),
                color="norm",
                title="Standard deviation at the norms' inputs",
                x_title="layer",
                y_title="sigma",
                log_y=True,
            )
            drawn.append((figure, "A norm's Jacobian goes as 1 / sigma (Mix-LN Eq 5-7): above 1 it shrinks."))
        return drawn

    def sentences(self, frame: Frame) -> Sequence[str]:
        states = frame[(frame["role"] == "state") & (frame["layer"] >= 0)]
        model = frame[frame["layer"] == -1].set_index("metric")["value"]
        variance = states[states["metric"] == "variance"].set_index("layer")["value"].sort_index()
        text = [growth(variance, model["growth_linear_r2"], model["growth_exponential_r2"])]
        peaks = states[states["metric"] == "abs_max"]
        if peaks["value"].notna().all():
            text.append(headroom(peaks.loc[peaks["value"].idxmax()]))
        text.append(massive(states))
        sigma = frame[(frame["metric"] == "sigma") & (frame["role"] == "pre_norm") & (frame["layer"] >= 0)]
        if len(sigma):
            by_layer = sigma.groupby("layer")["value"].mean()
            text.append(
                f"The standard deviation at the pre-norms' inputs goes from {by_layer.iloc[0]:.3g} in layer "
                f"{by_layer.index[0]} to {by_layer.iloc[-1]:.3g} in layer {by_layer.index[-1]}; a norm's Jacobian goes "
                "with its inverse."
            )
        return text


def r_squared(values: Sequence[float]) -> float:
    """R^2 of the least-squares line through values at 0, 1, 2, ...; NaN for fewer than three, or all equal."""
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 3 or not np.isfinite(y).all() or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(np.arange(len(y)), y)[0, 1] ** 2)


def token_text(tokenizer: PreTrainedTokenizerBase | None, identifier: int | None) -> str | None:
    """The text of a token id; None without a tokenizer or token."""
    if tokenizer is None or identifier is None:
        return None
    return str(tokenizer.decode([identifier]))


def _row(metric: str, value: float, error: float = math.nan) -> dict[str, object]:
    return {"metric": metric, "value": value, "standard_error": error}


def _average(totals: Totals, name: str) -> tuple[float, float]:
    if name == "variance":
        return totals.variance()
    if name == "abs_max":
        return float(totals.abs_max), math.nan
    if name == "rms" and totals.magnitudes:  # of all elements; a norm's is averaged over tokens
        value, error = totals.average("mean_square")
        root = math.sqrt(value)
        return root, error / (2 * root) if root > 0 else math.nan
    return totals.average(name)


def _frame(rows: list[dict[str, object]]) -> pd.DataFrame:
    columns = ["layer", "sublayer", "role", "index", "metric", "value", "standard_error"]
    frame = pd.DataFrame(rows, columns=[*columns, "channel", "position", "token"])
    return frame.astype({"channel": "Int64", "position": "Int64", "token": "string"})
