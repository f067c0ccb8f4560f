"""The running sums for each place in the stream while text passes: never the states themselves."""

from __future__ import annotations

import math

import numpy as np
import torch

from lamina.probes.engine.statistics import Running
from lamina.probes.magnitudes import Moments, Tokens, largest, medians

BAND = 100  # as many as Peri-LN Fig 11 shows
MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024
_NAMES = ("token_variance", "mean", "abs_mean", "mean_square", "sigma", "rms", "square_of_mean")
_VARIANCE = len(_NAMES)  # a sequence's variance over all its elements, behind the averages


class Totals:
    """Averages over the tokens of a sample, their standard errors over its sequences, and the largest |x|."""

    def __init__(self, *, magnitudes: bool = True):
        self.magnitudes = magnitudes
        self.tokens = 0
        self.sums = torch.zeros(len(_NAMES), dtype=torch.float64)
        self.samples = Running()
        self.abs_max = torch.tensor(0.0, dtype=torch.float64)

    def add(self, moments: Moments) -> None:
        """Add one batch's tokens."""
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
        """The mean over all tokens of a column of the table, and its standard error."""
        index = _NAMES.index(name)
        return float(self.sums[index]) / max(self.tokens, 1), float(self.samples.standard_error[index])

    def relative_error(self) -> float:
        """The standard error of the sequences' variance over its mean; infinite for fewer than two."""
        mean = float(self.samples.mean[_VARIANCE]) if self.samples.count else 0.0
        error = float(self.samples.standard_error[_VARIANCE]) if self.samples.count else math.inf
        return error / mean if mean > 0 else 0.0 if error == 0 else math.inf

    def variance(self) -> tuple[float, float]:
        """Over all elements: the tokens' mean variance and the variance of their means."""
        inner, mean, square = (self.average(name)[0] for name in ("token_variance", "mean", "square_of_mean"))
        return inner + max(square - mean**2, 0.0), float(self.samples.standard_error[_VARIANCE])


class StateTotals(Totals):
    """Of a state x^l, also the magnitudes: the largest and where they are, the median, the massive ones."""

    def __init__(self, top: int):
        super().__init__()
        self.top = top
        self.largest, self.medians, self.ratios, self.massive = Running(), Running(), Running(), Running()
        self.band = torch.zeros(0, dtype=torch.float64)
        self.place: tuple[int, int, int | None] | None = None  # channel, position, token id of the largest
        # (channel, position) -> the value, in how many sequences it is massive, the token's id
        self.massive_places: dict[tuple[int, int], tuple[float, int, int | None]] = {}

    def add_values(
        self, tokens: Tokens, moments: Moments, magnitude: torch.Tensor, input_ids: torch.Tensor | None
    ) -> None:
        """Before ``add`` of the same batch. Leaves ``magnitude`` out of order."""
        assert moments.abs_max is not None
        peaks = moments.abs_max if tokens.valid is None else moments.abs_max.masked_fill(~tokens.valid, 0.0)
        self.largest.add(largest(tokens.x, peaks, self.top))
        self._extend_band(tokens.x, peaks)
        if float(peaks.max()) > float(self.abs_max):
            self._locate(tokens, peaks, input_ids)
        middle = medians(tokens, magnitude)
        highest = peaks.amax(1).double().cpu()
        real = ~torch.isnan(middle) | torch.isnan(highest)  # a sequence of padding alone has no median
        self.medians.add(middle[real])
        self.ratios.add((highest / middle)[real])
        hot = (highest > MASSIVE) & (highest >= TIMES_MEDIAN * middle)
        counts = torch.zeros(len(middle))
        if bool(hot.any()):
            counts = self._note_massive(tokens, peaks, middle, hot, input_ids)
        self.massive.add(counts[real])

    def _extend_band(self, x: torch.Tensor, peaks: torch.Tensor) -> None:
        """The largest |x| so far: they lie in the tokens with the largest peaks, above the smallest of the band."""
        least = float(self.band[-1]) if len(self.band) == BAND else -1.0
        flat = peaks.flatten()
        rows = (flat > least).nonzero().flatten()
        if len(rows) > BAND:
            rows = rows[flat[rows].topk(BAND).indices]
        if len(rows):
            values = x.flatten(0, 1)[rows].abs().flatten()
            values = torch.cat([self.band, values.topk(min(BAND, len(values))).values.double().cpu()])
            self.band = values.topk(min(BAND, len(values))).values

    def _locate(self, tokens: Tokens, peaks: torch.Tensor, input_ids: torch.Tensor | None) -> None:
        sequence, token = divmod(int(peaks.argmax()), peaks.shape[1])
        channel = int(tokens.x[sequence, token].abs().argmax())
        position = token if tokens.valid is None else int(tokens.valid[sequence, : token + 1].sum()) - 1
        self.place = (channel, position, _identifier(input_ids, peaks, sequence, token))

    def _note_massive(
        self,
        tokens: Tokens,
        peaks: torch.Tensor,
        middle: torch.Tensor,
        hot: torch.Tensor,
        input_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        least = (TIMES_MEDIAN * middle).to(peaks.device)
        chosen = (peaks > MASSIVE) & (peaks >= least.unsqueeze(1)) & hot.to(peaks.device).unsqueeze(1)
        sequence, token = chosen.nonzero(as_tuple=True)
        rows = tokens.x[sequence, token].double()
        magnitude = rows.abs()
        row, channel = ((magnitude > MASSIVE) & (magnitude >= least[sequence].unsqueeze(1))).nonzero(as_tuple=True)
        values = rows[row, channel].cpu().numpy()
        sequence, token = sequence[row], token[row]
        place = token if tokens.valid is None else (tokens.valid.cumsum(1) - 1)[sequence, token]
        width = tokens.x.shape[-1]
        code, inverse, counts = np.unique((place * width + channel).cpu(), return_inverse=True, return_counts=True)
        best = np.zeros(len(code), dtype=np.int64)
        order = np.argsort(np.abs(values), kind="stable")
        best[inverse[order]] = order  # the largest is written last
        for place_code, at, count in zip(code.tolist(), best.tolist(), counts.tolist(), strict=True):
            key = (place_code % width, place_code // width)
            before, times, identifier = self.massive_places.get(key, (0.0, 0, None))
            value = float(values[at])
            if abs(value) > abs(before):
                identifier = _identifier(input_ids, peaks, int(sequence[at]), int(token[at]))
            else:
                value = before
            self.massive_places[key] = (value, times + count, identifier)
        return torch.bincount(sequence.cpu(), minlength=len(middle)).float()


def _identifier(input_ids: torch.Tensor | None, peaks: torch.Tensor, sequence: int, token: int) -> int | None:
    """The token's id, where the state's tokens are those of the input."""
    if input_ids is None or input_ids.shape != peaks.shape:
        return None
    return int(input_ids[sequence, token])
