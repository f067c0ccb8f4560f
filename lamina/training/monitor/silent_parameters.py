"""Find single parameters of a layer that get no gradient, such as a detached projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina.probes.structure.sites import Structure

Peers: TypeAlias = dict[tuple[str, ...], list[int]]


def named_alike(layer: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield name, module and parameter for each parameter of a layer, except for numbered experts."""
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not any(part.isdigit() for part in path.split(".")):
                yield f"{path}.{name}", module, parameter


class SilentParameters:
    """Find parameters that get no gradient, unlike the same parameters of most other layers.

    A layer may skip a module on purpose, such as the key projection if layers share keys. Hooks therefore check whether
    the modules run.

    Args:
        groups: the number of each parameter's sub-layer.
    """

    def __init__(self, structure: Structure | None, parameters: Sequence[torch.Tensor], groups: Sequence[int]):
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._groups, self._peers, self._modules = groups, Peers(), dict[int, nn.Module]()
        for site in structure.layers if structure is not None else ():
            for name, module, parameter in named_alike(site.module):
                if (place := places.get(id(parameter))) is not None:
                    self._peers.setdefault((type(site.module).__name__, name), []).append(place)
                    self._modules[place] = module
        self._hooks: dict[int, RemovableHandle] = {}
        self._called: set[int] = set()

    def found(self, gradients: Sequence[float], trained: set[int]) -> list[int]:
        """Return the indices of parameters that get no gradient.

        Args:
            gradients: the largest magnitude of each parameter's gradient.
            trained: the indices of the trained parameters.
        """
        living = {self._groups[place] for place, gradient in enumerate(gradients) if gradient > 0}
        suspects: list[int] = []
        for places in self._peers.values():
            peers = [place for place in places if place in trained]
            silent = [place for place in peers if gradients[place] == 0 and self._groups[place] in living]
            suspects += silent if sum(gradients[place] > 0 for place in peers) > len(peers) / 2 else []
        called = [place for place in suspects if id(self._modules[place]) in self._called]
        self._called.clear()
        modules = {id(self._modules[place]): self._modules[place] for place in suspects}
        for key in self._hooks.keys() - modules.keys():
            self._hooks.pop(key).remove()
        for key in modules.keys() - self._hooks.keys():
            self._hooks[key] = modules[key].register_forward_pre_hook(lambda m, args: self._called.add(id(m)))
        return called

    def close(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
