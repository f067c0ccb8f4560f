"""Running a model: without a cache, with its head or without, with attention in plain operations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.probes.structure.outputs import Output
from lamina.probes.structure.sites import Structure


def forward(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Output:
    """Run a model on a batch without a cache."""
    more = {"use_cache": False} if takes_cache(type(model)) else {}
    return model(**inputs, **more)


def takes_cache(cls: type[nn.Module]) -> bool:
    """Whether a model's forward can be told to keep no cache."""
    parameters = inspect.signature(cls.forward).parameters
    # Some take it among their **kwargs and pass it to a model that would otherwise keep a cache.
    return "use_cache" in parameters or ("past_key_values" in parameters)


def base_of(model: nn.Module, structure: Structure, inputs: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model without its head, if that takes the same inputs and holds all layers; else the model itself."""
    base = getattr(model, "base_model", model)
    if not isinstance(base, nn.Module) or base is model:
        return model
    parts = {id(module) for module in base.modules()}
    takes = inspect.signature(type(base).forward).parameters
    whole = all(id(site.module) in parts for site in structure.layers)
    return base if whole and all(name in takes for name in inputs) else model


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Attention in plain operations: its weights can be watched, and it has a forward-mode derivative."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    switch = getattr(model, "set_attn_implementation", None) if before not in (None, "eager") else None
    if switch is not None:
        switch("eager")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if switch is not None:
            switch(before)
