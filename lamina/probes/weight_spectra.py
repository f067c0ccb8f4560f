"""The spectra probe's numbers from weights alone: the embedding's eigenvalues, the projections' condition numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.ranks import condition_number, row_covariance_eigenvalues
from lamina.probes.structure.sites import FeedForward, LayerSite

Row = tuple[int, str, str, int, str, float, float]


def embedding_rows(context: Context) -> list[Row]:
    """The eigenvalues of the covariance of the embedding's rows, absolute and over their median; index = rank."""
    weight = getattr(context.structure.embedding, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        context.notes.append("spectra: the model has no embedding of tokens, so there are no eigenvalues of one")
        return []
    if len(weight) <= weight.shape[1]:
        context.notes.append(
            f"spectra: the embedding has {len(weight)} rows of {weight.shape[1]} channels, so its covariance has "
            f"at most {len(weight) - 1} eigenvalues above 0"
        )
    values = row_covariance_eigenvalues(weight)
    if not bool(values.isfinite().all()):
        raise UserError("spectra: the embedding's covariance is not finite: its weights hold NaN or infinity")
    median = float(values.quantile(0.5))
    rows = []
    for rank, value in enumerate(values.tolist()):
        rows.append((-1, "model", "embedding", rank, "eigenvalue", value, math.nan))
        ratio = value / median if median > 0 else math.inf
        rows.append((-1, "model", "embedding", rank, "eigenvalue_over_median", ratio, math.nan))
    return rows


def inner_width(feed_forward: FeedForward) -> int:
    """D_ff: how many channels the down-projection reads."""
    down: Any = feed_forward.down[1]
    return int(down.in_features if hasattr(down, "in_features") else down.weight.shape[0])


def condition_rows(site: LayerSite) -> list[Row]:
    """s_max / s_min of each projection of a layer's dense feed-forwards; of gate and up in one matrix each half's."""
    rows: list[Row] = []
    for feed_forward in (sublayer.feed_forward for sublayer in site.sublayers if sublayer.feed_forward is not None):
        for path, module in (*feed_forward.up, feed_forward.down):
            weight = getattr(module, "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
                continue
            name, parts = path.removeprefix(site.path + "."), (weight,)
            side = stacked_side(feed_forward, module)
            if side is not None:
                parts = weight.chunk(2, side)
            for number, part in enumerate(parts):
                role = name if side is None else f"{name}[{number}]"
                value = condition_number(part)
                rows.append((site.index, "feed_forward", role, 0, "condition_number", value, math.nan))
    return rows


def stacked_side(feed_forward: FeedForward, module: torch.nn.Module) -> int | None:
    """The axis along which a weight stacks gate and up, twice D_ff long; None where it is one projection."""
    if module is feed_forward.down[1] or len(feed_forward.up) != 1:
        return None
    weight: Any = module.weight
    # A projection is [out, in] or, in GPT-2's Conv1D, [in, out].
    out = 0 if hasattr(module, "in_features") else 1
    return out if weight.shape[out] == 2 * inner_width(feed_forward) else None
