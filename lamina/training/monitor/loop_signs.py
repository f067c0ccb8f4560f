"""Detect when a training loop skips, freezes or replaces layers, or keeps gradients.

Changes of layers are mostly intentional, for example in LayerDrop, gradual unfreezing or LISA. Lamina writes a note
about each change, and adjusts the alarm rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lamina.probes.structure.sites import Structure
from lamina.training.checkpointing.sharding import local_part
from lamina.training.monitor.held_parts import HeldPart
from lamina.training.monitor.parameter_measures import GradientNorms
from lamina.training.monitor.writers import Location, Row

CHANGES = 3  # notes about changes of the trained parameters
_SHOWN = 4  # names in a note


@dataclass(frozen=True, kw_only=True)
class StepSigns:
    """Signs that a training loop skipped, froze or replaced layers in a step."""

    trained: frozenset[Location] = frozenset()  # the sub-layers and other parts of the model with trainable parameters
    left_out: tuple[tuple[int, str], ...] = ()  # the sub-layers that earlier steps called and this step did not call
    # the number of parameters that the loop froze or unfroze in each part (1 for replaced parameters)
    changed: Mapping[Location, int] = field(default_factory=dict)

    def rows(self, step: int) -> list[Row]:
        rows = [Row(step, layer, sublayer, "all", 0, "not_called", 1.0) for layer, sublayer in self.left_out]
        return rows + [Row(step, *owner, 0, "trained_changed", float(count)) for owner, count in self.changed.items()]


@dataclass(frozen=True, eq=False)
class _Mark:
    """A hook that adds a called sub-layer to a set. The hooks of a copied model use a copy of the set."""

    called: set[tuple[int, str]]
    layer: int
    kind: str

    def __call__(self, module: nn.Module, args: tuple) -> None:
        self.called.add((self.layer, self.kind))


class LoopSigns:
    """Detect skipped, frozen and replaced layers.

    Args:
        norms: the gradient norms, which list the watched parameters.
        hooks: whether hooks inside the model run (false for a compiled model).
    """

    def __init__(self, norms: GradientNorms, structure: Structure | None, *, hooks: bool, note: Callable[[str], None]):
        self.norms, self.note = norms, note
        self._mask: tuple[bool, ...] = ()
        self._trained: dict[tuple[bool, ...], frozenset[Location]] = {}
        self._called: set[tuple[int, str]] = set()
        self._ever: set[tuple[int, str]] = set()
        self._replaced: set[Location] = set()
        self._noted = False  # whether a note named skipped layers
        self._changes = 0
        self._handles: list[RemovableHandle] = []
        for site in structure.layers if structure is not None and hooks else ():
            for sublayer in site.sublayers:
                for _, module in sublayer.modules:
                    self._handles.append(
                        module.register_forward_pre_hook(_Mark(self._called, site.index, sublayer.kind))
                    )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def replaced(self, owners: Iterable[Location]) -> None:
        """Mark parts with new parameters, for the next call of ``end_step``."""
        self._replaced |= set(owners)

    def end_step(self, step: int, *, passed: bool) -> StepSigns:
        """Return the step's signs. ``passed`` says whether the step had a forward pass of the model."""
        left_out = tuple(sorted(self._ever - self._called)) if passed else ()
        self._ever |= self._called
        self._called.clear()
        if left_out and not self._noted:
            self._noted = True
            layers = ", ".join(map(str, sorted({layer for layer, _ in left_out})))
            self.note(
                f"step {step}: the model skipped layer {layers}, or a sub-layer (LayerDrop, stochastic depth, an "
                "early exit). Lamina checks a layer only at steps that call the layer"
            )
        mask = tuple(parameter.requires_grad for parameter in self.norms.parameters)
        changed = dict.fromkeys(self._replaced, 1)
        self._replaced = set()
        if self._mask and mask != self._mask:
            moved = [index for index, (now, was) in enumerate(zip(mask, self._mask, strict=True)) if now != was]
            for index in moved:
                owner = self.norms.keys[self.norms.groups[index]]
                changed[owner] = changed.get(owner, 0) + 1
            unfrozen = sum(mask[index] for index in moved)
            self._tell(step, unfrozen, len(moved) - unfrozen, changed)
        self._mask = mask
        if mask not in self._trained:
            self._trained = {mask: frozenset(self.norms.trained())}
        return StepSigns(trained=self._trained[mask], left_out=left_out, changed=changed)

    def _tell(self, step: int, unfrozen: int, frozen: int, owners: Iterable[Location]) -> None:
        self._changes += 1
        if self._changes > CHANGES:
            return
        what = [f"{frozen} more parameters are frozen"] * (frozen > 0)
        what += [f"{unfrozen} more are trained"] * (unfrozen > 0)
        more = "; Lamina will not report later changes" if self._changes == CHANGES else ""
        self.note(
            f"step {step}: from this step on {' and '.join(what)} ({places(owners)}). Lamina raises no "
            f"alarm, and no longer compares these parts with earlier steps{more}"
        )


def places(owners: Iterable[Location]) -> str:
    """List layers and other parts of a model in a short form, such as "layers 0 to 3, embedding"."""
    owners = list(owners)
    layers = sorted({layer for layer, _, _ in owners if layer >= 0})
    whole = layers == list(range(layers[0], layers[-1] + 1)) if layers else False
    inside = f"{layers[0]} to {layers[-1]}" if whole and len(layers) > 2 else ", ".join(map(str, layers))
    words = [f"layer{'s' * (len(layers) > 1)} {inside}"] if layers else []
    return ", ".join([*words, *sorted({role for layer, _, role in owners if layer < 0})])


def named(model: nn.Module, parameters: Sequence[torch.Tensor]) -> str:
    """List the paths of the given parameters, at most 4."""
    wanted = {id(getattr(parameter, "parameter", parameter)) for parameter in parameters}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in wanted]
    names += [parameter.path for parameter in parameters if isinstance(parameter, HeldPart) and parameter.path]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def kept_square(optimizers: Sequence[torch.optim.Optimizer]) -> torch.Tensor | None:
    """Return the squared norm of the gradients that the optimizers' parameters have now, or None without gradients."""
    parameters = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    gradients = [p.grad for p in parameters if p.grad is not None]
    gradients = [gradient for gradient in gradients if not gradient.is_sparse]
    if not gradients or any(gradient.device != gradients[0].device for gradient in gradients):
        return None
    return torch.stack([local_part(gradient).norm().double() for gradient in gradients]).square().sum()
