"""Count the token ids that a model accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lamina.probes.structure.hooks import undisturbed

_IDS = ((1, 1, 0), (1, 1, 1))  # a pattern that position ids and token types never have
_LOOKUPS = (functional.embedding, torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select)


class _Lookups(TorchFunctionMode):
    """Record the number of rows of the first matrix that the model indexes with token ids."""

    def __init__(self, ids: torch.Tensor):
        super().__init__()
        self.ids, self.rows = ids.flatten().sort().values, 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        every = [*args, *(kwargs or {}).values()] if func in _LOOKUPS else []
        given = [value for value in every if isinstance(value, torch.Tensor)]
        table = next((value for value in given if value.is_floating_point() and value.ndim == 2), None)
        whole = (v.flatten().sort().values for v in given if not v.is_floating_point() and v.numel() == len(self.ids))
        if not self.rows and table is not None and any(torch.equal(ids.to(self.ids), self.ids) for ids in whole):
            self.rows = len(table)
        return func(*args, **(kwargs or {}))


def text_config(model: nn.Module) -> Any:
    """Return the text part of a transformers configuration, or the module's own ``config`` (None without a config)."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config


def token_rows(model: nn.Module) -> int | None:
    """Return the number of token ids in the model's config or embedding table, or None if both are missing."""
    size = getattr(text_config(model), "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    ids = torch.tensor(_IDS, device=next((p.device for p in model.parameters()), None))
    lookups = _Lookups(ids)
    with suppress(Exception), torch.no_grad(), undisturbed(model), lookups:
        model(ids)  # the caller's own forward pass will raise the error
    return lookups.rows or None
