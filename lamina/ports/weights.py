"""Convert a model's weights to a trainer's names and layout, and back.

A conversion uses each tensor exactly once. Otherwise, a UserError names the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lamina.errors import UserError
from lamina.modeling.backbones.conversion import in_pairs
from lamina.modeling.backbones.loading import refuse_tensors
from lamina.modeling.backbones.presets import head_dim_of
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import LaminaForCausalLM, adapter_of
from lamina.placements import Plan
from lamina.placements.plan import POSITIONS
from lamina.placements.resolution import map_norms
from lamina.ports.port import Port, nameless
from lamina.ports.targets import target_of

_SCALES = ("skip_scale", "pre_scale", "out_scale", "gate")


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The position of a Lamina tensor in the trainer's tensor ``name``, which concatenates ``parts`` tensors."""

    name: str
    part: int = 0
    parts: int = 1
    paired: bool = False
    transposed: bool = False


class Names:
    """The trainer's names for the weights of a model."""

    def __init__(self, model: LaminaForCausalLM, target: str, *, writes: bool = True):
        self.model, self.target = model, target_of(target)
        plan = Plan.from_dict(model.config.plan or {})
        plan = plan if writes else _without_wiring(plan)
        self.port = Port(nameless(plan), plan, self.target)
        config = backbone_of(model.config)
        self.heads = config.num_attention_heads
        self.key_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim = head_dim_of(config)
        layers = re.escape(adapter_of(config).layers)
        self._layer = re.compile(rf"model\.backbone\.{layers}\.(\d+)\.(attention|feed_forward)\.(?:module\.)?(.+)")

    def place(self, key: str) -> _Place:
        """Return the position of a Lamina tensor in the trainer's tensors. Raises UserError if there is none."""
        table, match = self.target.weights, self._layer.fullmatch(key)
        owner, _, last = key.rpartition(".")
        transposed = last == "weight" and isinstance(self.model.get_submodule(owner), Conv1D)
        if match is None:
            name = table.get(owner.rpartition(".")[2])
            if name is None:
                raise self._without_place(key)
            return _Place(name=f"{name}.{last}", transposed=transposed)
        layer, half, rest = match.groups()
        block = table["layers"].format(layer=layer)
        if rest in _SCALES:
            return _Place(name=f"{block}.{self.port.factors[half, rest].name}")
        module, _, last = rest.rpartition(".")
        if module in POSITIONS:
            return _Place(name=f"{block}.{self.port.norm_names[half, module]}.{last}")
        name = table[half].get(module)
        if name is None:
            raise self._without_place(key)
        parts = self.target.stacks.get(name, [module])
        paired = self.target.pairs and module in ("q_proj", "k_proj", "q_norm", "k_norm")
        part_facts = {"part": parts.index(module), "parts": len(parts), "paired": paired, "transposed": transposed}
        return _Place(name=f"{block}.{name}.{last}", **part_facts)

    def stored_names(self, wiring: Collection[str] = ()) -> set[str]:
        """Return the trainer's names for the model's tensors, without the tensors in ``wiring``."""
        return {self.place(key).name for key in self.model.state_dict() if key not in wiring}

    def _without_place(self, key: str) -> UserError:
        return UserError(
            f"tensor {key!r}: {self.target.title} has no such weight. Choose a model with the backbone "
            "that the generated test builds."
        )

    def to_theirs(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, dict[int, torch.Tensor]] = {}
        for key, value in state.items():
            place = self.place(key)
            value = value.T if place.transposed else value
            if place.paired:
                value = in_pairs(value, self.head_dim)
            found.setdefault(place.name, {})[place.part] = value.reshape(1) if value.ndim == 0 else value
        return {name: self._stacked(name, [parts[i] for i in sorted(parts)]) for name, parts in found.items()}

    def to_ours(
        self, theirs: Mapping[str, torch.Tensor], wiring: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Convert the trainer's tensors to Lamina's names and layout. Raises UserError for a missing or unused tensor.

        The tensors in ``wiring`` already have Lamina's names.
        """
        expected, used, tensors = self.model.state_dict(), set[str](), dict(wiring)
        refuse_tensors("extra", wiring.keys() - expected.keys(), "does not exist in Lamina's model")
        for key, tensor in wiring.items():
            self._check_shape(key, tensor.shape, expected[key].shape)
        places = {key: self.place(key) for key in expected if key not in wiring}
        refuse_tensors("missing", {p.name for p in places.values()} - theirs.keys(), "is not in the checkpoint")
        for key, place in places.items():
            tensor = theirs[place.name]
            used.add(place.name)
            if place.parts > 1:
                sizes = [0] * place.parts
                for other, its in places.items():
                    if its.name == place.name:
                        sizes[its.part] = len(expected[other])
                tensor = self._unstacked(tensor, sizes)[place.part]
            if place.paired:
                tensor = in_halves(tensor, self.head_dim)
            tensor = tensor.T if place.transposed else tensor
            shape = expected[key].shape
            self._check_shape(place.name, tensor.shape, shape)
            tensors[key] = tensor.reshape(shape).contiguous()
        refuse_tensors("extra", theirs.keys() - used, "does not exist in Lamina's model")
        return tensors

    @staticmethod
    def _check_shape(name: str, shape: torch.Size, expected: torch.Size) -> None:
        if shape != expected and not shape.numel() == expected.numel() == 1:
            sizes = (
                f"{list(shape)}, but the configuration asks for {list(expected)}. Give the checkpoint's own "
                "configuration"
            )
            raise UserError(f"tensor {name!r}: its shape is {sizes}")

    def _stacked(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0].contiguous()
        if len(parts) == 3 and self.target.layout == "groups":
            groups = [part.unflatten(0, (self.key_heads, -1)) for part in parts]
            return torch.cat(groups, dim=1).flatten(0, 1)
        return torch.cat(list(parts))

    def _unstacked(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        if sum(sizes) != len(tensor):
            raise UserError(
                f"the checkpoint stacks {len(tensor)} channels, but the configuration asks for {sum(sizes)}. Give "
                "the checkpoint's configuration."
            )
        if len(sizes) == 3 and self.target.layout == "groups":
            rows = [size // self.key_heads for size in sizes]
            groups = tensor.unflatten(0, (self.key_heads, -1)).split(rows, dim=1)
            return [group.flatten(0, 1) for group in groups]
        return list(tensor.split(list(sizes)))


def _without_wiring(plan: Plan) -> Plan:
    """Return the placement with one residual stream and default epsilons, which is enough for the weights' names."""
    layers = [layer.map(lambda half: replace(half, streams=None, read="stream")) for layer in plan.layers]
    layers = [replace(layer, boundary=False, inner_boundary=False, sources=None) for layer in layers]
    plan = replace(plan, layers=tuple(layers), readout=None, final_sources=None)
    return map_norms(plan, lambda norm: replace(norm, eps=0.0))


def in_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows [heads * head_dim, ...] of a rotary projection, so that rotated pairs are half a head apart."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def weights_for(model: PreTrainedModel, target: str, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Return a model's weights or gradients in a trainer's names and layout. Raises UserError if that is impossible."""
    causal = _causal(model)
    state = (
        {name: p.grad for name, p in causal.named_parameters() if p.grad is not None}
        if gradients
        else causal.state_dict()
    )
    return Names(causal, target).to_theirs(state)


@torch.no_grad()
def load_weights(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    target: str,
    wiring: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Copy the weights of a trainer's model into a Lamina model of the same sizes and norm placement, in place.

    ``wiring`` has Lamina's names, for weights that are not in the trainer's table. Raises UserError for a missing,
    unused or wrongly shaped tensor.
    """
    ours = Names(_causal(model), target, writes=False).to_ours(weights, wiring)
    for name, value in model.state_dict().items():
        value.copy_(ours[name])


def _causal(model: nn.Module) -> LaminaForCausalLM:
    if not isinstance(model, LaminaForCausalLM):
        raise UserError(f"model: a {type(model).__name__}. Give a LaminaForCausalLM.")
    return model
