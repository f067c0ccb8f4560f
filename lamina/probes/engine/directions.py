"""Compare the directions of any two layers' hidden states in a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch

from lamina.core.text import ranges
from lamina.core.values import one_of, whole_number
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.registry import Probe, Sample, sample_of
from lamina.probes.engine.statistics import Ratio
from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import Point

TOKENS = ("last", "first", "all")
# Matrix products of fewer rows than this, and of a multiple of 8, are the fast ones on CPUs.
_TILE = 32
_SMALLEST_BUDGET = 2**26
_SHORTEST = 1e-30  # a vector of zeros (an untrained class token) has no direction: cosine 0 with all others
_NORMED = (
    "The hidden state after {} is a norm's output (Post-LN), so its length is fixed and only its direction changes."
)
_INNER = (
    "A norm inside {} acts on the residual stream, but no norm acts on a layer's output (HybridNorm). Lamina compares "
    "the layers' outputs."
)


class DirectionsProbe(Probe):
    """A probe that compares the directions of a token's hidden states at any two layers.

    Memory holds all hidden states of one batch, as unit vectors in float32. By default, the probe compares all tokens
    of the user's own text. For a corpus, the probe compares as many tokens as fit in a quarter of the model's memory
    (at least 64 MiB), at random positions. The positions differ between batches, but not between a batch's sequences.
    """

    of_streams = True

    def __init__(self, tokens: str | None, tokens_per_batch: int | None):
        self.tokens = None if tokens is None else one_of("tokens", tokens, TOKENS)
        self.limit = None if tokens_per_batch is None else whole_number("tokens_per_batch", tokens_per_batch)
        self.by_pair = Ratio()

    def begin(self, context: Context) -> None:
        self.tokens = self.tokens or ("last" if context.reads_tokens and "step" not in context.state else "all")
        if self.tokens == "last" and not context.reads_tokens:
            raise UserError("tokens: 'last' is invalid for images, whose patches have no order. Choose first or all.")
        self._context, self._states = context, context.structure.states()
        self._bytes = max(sum(p.numel() * p.element_size() for p in context.model.parameters()) // 4, _SMALLEST_BUDGET)
        self._batch_number = self._compared = 0
        self._chosen: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._vectors = torch.zeros(0)
        self._pairs = np.triu_indices(len(self._states), k=1)  # the earlier and the later state of each pair

    def points(self) -> Mapping[int, Point]:
        return self._states

    def measured(self, context: Context) -> Sample:
        return Sample(sample_of(context.batches[: context.forwards]).sequences, self._compared)

    def see(self, key: int, value: torch.Tensor) -> None:
        if key == 0:
            self._choose(value)
        if self.tokens != "all":
            value = value[torch.arange(len(value), device=value.device), self._chosen][:, None]
        elif self._chosen is not None:
            value = value[:, self._chosen]
        if key == 0:
            rows = -(-len(self._states) // 8) * 8
            shape = (len(value), rows, *value.shape[1:])
            if self._vectors.shape != shape or self._vectors.device != value.device:
                self._vectors = torch.zeros(shape, device=value.device)
        norms = torch.linalg.vector_norm(value, dim=-1, keepdim=True, dtype=torch.float32)
        torch.div(value, norms.clamp_min_(_SHORTEST), out=self._vectors[:, key])
        if self._mask is not None:
            self._vectors[:, key].masked_fill_(~self._mask[..., None], 0.0)

    @abstractmethod
    def compare(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch's ``cosines`` or ``angles``."""

    def end_batch(self, inputs: Mapping[str, torch.Tensor], output: Output) -> None:
        totals, counts = self.compare()
        first, second = (torch.from_numpy(index).to(totals.device) for index in self._pairs)
        self.add(totals[:, first, second].double().cpu(), counts.cpu())
        self._batch_number += 1
        self._compared += int(counts.sum())

    def cosines(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines of each two states, summed over tokens (float32 [batch, N + 1, N + 1]), and token counts."""
        vectors = self._vectors.flatten(2)
        rows = vectors.shape[1]
        products = vectors.new_empty(len(vectors), rows, rows)
        for i in range(0, rows, _TILE):
            for j in range(0, i + 1, _TILE):
                tile = vectors[:, i : i + _TILE] @ vectors[:, j : j + _TILE].mT
                products[:, i : i + _TILE, j : j + _TILE] = tile
                products[:, j : j + _TILE, i : i + _TILE] = tile.mT
        return products[:, : len(self._states), : len(self._states)], self._counts()

    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return angles / pi of each two states, summed over tokens (float64 [batch, N + 1, N + 1]), and the counts."""
        batch, _, tokens, _ = self._vectors.shape
        angle_sums = torch.zeros(
            batch, len(self._states), len(self._states), dtype=torch.float64, device=self._vectors.device
        )
        step = max(1, 2**21 // len(self._states) ** 2)
        for sequence in range(batch):
            for start in range(0, tokens, step):
                unit = self._vectors[sequence, : len(self._states), start : start + step].transpose(0, 1).double()
                lengths = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
                unit = unit / lengths.clamp_min(_SHORTEST)  # to 1e-16: near 1 the arc cosine makes 3e-4 of 1e-7
                angles = (unit @ unit.mT).clamp_(-1.0, 1.0).acos_()
                if self._mask is not None:
                    angles[~self._mask[sequence, start : start + step]] = 0.0
                angle_sums[sequence] += angles.sum(0)
        return angle_sums / torch.pi, self._counts()

    def _counts(self) -> torch.Tensor:
        batch, _, tokens, _ = self._vectors.shape
        return torch.full((batch,), float(tokens)) if self._mask is None else self._mask.sum(1).double()

    def _choose(self, state: torch.Tensor) -> None:
        batch, tokens, channels = state.shape
        inputs = self._context.batches[self._batch_number]
        mask = inputs.get("attention_mask")
        if mask is not None:
            mask = mask.to(state.device).bool()
            mask = None if mask.shape != (batch, tokens) or bool(mask.all()) else mask
        self._mask = self._chosen = None
        if self.tokens == "all":
            limit = self.limit or max(batch, self._bytes // (4 * channels * len(self._states)))
            if (each := max(1, limit // batch)) < tokens and (self.limit or not self._context.whole):
                generator = torch.Generator().manual_seed(self._batch_number)
                chosen = torch.randperm(tokens, generator=generator)[:each].sort().values
                self._chosen = chosen.to(state.device)
                self._context.note(
                    f"To save memory, Lamina compares only {each} of the {tokens} tokens of each sequence. "
                    "To compare more tokens, raise tokens_per_batch."
                )
            if mask is not None:
                self._mask = mask if self._chosen is None else mask[:, self._chosen]
            return
        if mask is None:
            mask = torch.ones(batch, tokens, dtype=torch.bool, device=state.device)
        if self.tokens == "first":
            self._chosen = mask.int().argmax(1)
        else:
            self._chosen = tokens - 1 - mask.flip(1).int().argmax(1)

    def add(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add a batch's sums over tokens [sequences, pairs], and the numbers of tokens [sequences]."""
        self.by_pair.add(sums, counts)

    def pair_rows(self, metric: str) -> pd.DataFrame:
        """Return a table with one row per pair of states, sorted by the distance in layers."""
        start, end = self._pairs
        frame = ratio_rows(start, end - start, metric, self.by_pair)
        return frame.sort_values(["size", "start"], ignore_index=True)

    def note_streams(self, context: Context) -> None:
        """Add a note if norms act on the residual stream (Post-LN, HybridNorm)."""
        layers: dict[str, list[int]] = {_NORMED: [], _INNER: []}
        for site in context.structure.layers:
            roles = [[norm.role for norm in sublayer.norms] for sublayer in site.sublayers]
            if any("post_norm" in each for each in roles):
                layers[_NORMED if "post_norm" in roles[-1] else _INNER].append(site.index)
        for text, which in layers.items():
            if which:
                every = len(which) == context.structure.num_layers
                context.note(text.format("every layer" if every else f"the layers {ranges(which)}"))


def ratio_rows(start: np.ndarray | int, size: np.ndarray, metric: str, ratio: Ratio) -> pd.DataFrame:
    value, error = ratio.mean.numpy(), ratio.standard_error.numpy()
    return pd.DataFrame({"start": start, "size": size, "metric": metric, "value": value, "standard_error": error})
