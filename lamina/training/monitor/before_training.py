"""A training setup before the first step of training, and the checks that examine the setup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch import nn

from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import Structure
from lamina.training.monitor.first_pass import FirstPass
from lamina.training.monitor.loss_targets import offset_of

NARROW = 0.03  # the smallest usual standard deviation, times sqrt(inputs)
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake in a training setup: the fault, why it matters, what to do, and the name of the check.

    Attributes:
        note: whether the fault is often intentional.
    """

    what: str
    why: str
    do: str
    name: str = ""
    note: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.do}."


@dataclass(kw_only=True)
class BeforeTraining:
    """The training setup that the checks examine."""

    model: nn.Module  # the model without wrappers
    optimizers: Sequence[torch.optim.Optimizer] = ()  # the optimizers (empty if unknown)
    structure: Structure | None = None  # the model's layers, or None if Lamina did not find any
    # the batch's tensors, by the names of the model's arguments (empty without a batch)
    batch: Mapping[str, torch.Tensor] = field(default_factory=dict)
    trial: FirstPass | None = None  # the result of one forward and backward pass, or None without a batch or a loss
    scaler: bool | None = None  # whether a GradScaler scales the loss, or None if unknown
    scaler_is_off: bool = False  # whether a GradScaler exists but is disabled
    half: bool = False  # whether autocast computes in float16
    running: bool = False  # whether Lamina checks the setup during the first training step
    recording: bool = True  # whether autograd records operations
    failed: dict[str, str] = field(default_factory=dict)  # the exception texts of failed checks, by the check's name

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the parameters, by the parameters' ids."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @cached_property
    def modules(self) -> dict[int, str]:
        """The paths of the modules, by the modules' ids."""
        return {id(module): path for path, module in self.model.named_modules()}

    @cached_property
    def unregistered(self) -> dict[str, torch.Tensor]:
        """The trainable tensors that model.parameters() lacks, such as tensors in a list, by name."""
        found: dict[str, torch.Tensor] = {}
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                inside = value.values() if isinstance(value, dict) else value
                values = list(inside) if isinstance(value, dict | list | tuple) else [value]
                for each in [] if name.startswith("_") else values:
                    own = list(each.parameters()) if isinstance(each, nn.Module) else [each]
                    tensors = [x for y in own if isinstance(y, torch.Tensor) and y.requires_grad for x in _leaves(y)]
                    found |= {f"{path}.{name}".lstrip("."): x for x in tensors if id(x) not in self.names}
        return found

    @cached_property
    def inner(self) -> nn.Module:
        """The transformers model inside a wrapper such as a LightningModule, otherwise the model itself."""
        count = sum(1 for _ in self.model.parameters())
        known = (m for m in self.model.modules() if hasattr(type(m), "get_input_embeddings"))
        return next((m for m in known if sum(1 for _ in m.parameters()) == count), self.model)

    @property
    def config(self) -> Output:
        return getattr(self.inner, "config", None)

    @property
    def padding(self) -> int | None:
        token = getattr(self.config, "pad_token_id", None)
        return token if isinstance(token, int) else None

    @cached_property
    def ends(self) -> tuple[Output, Output] | None:
        """The input embedding and the output head, or None if the model lacks get_input_embeddings()."""
        model: Output = self.inner
        try:
            table, head = model.get_input_embeddings(), model.get_output_embeddings()
        except (AttributeError, NotImplementedError, TypeError):  # another kind of model
            return None
        return (table, head) if hasattr(table, "weight") and hasattr(head, "weight") else None

    @property
    def settings(self) -> list[tuple[torch.optim.Optimizer, Mapping[str, Output]]]:
        """Each parameter group, with its optimizer."""
        return [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]

    @cached_property
    def groups(self) -> dict[int, list[Mapping[str, Output]]]:
        """The optimizer groups that contain a parameter or its float32 master copy, by the parameter's id."""
        outputs: dict[int, list[Mapping[str, Output]]] = {}
        halves = [p for p in self.trained if p.dtype in (torch.float16, torch.bfloat16)]
        for _, group in self.settings:
            for parameter in group["params"]:
                outputs.setdefault(id(parameter), []).append(group)
                if halves and id(parameter) not in self.names and parameter.dtype == torch.float32:
                    of = (p for p in halves if p.shape == parameter.shape and torch.equal(parameter.to(p.dtype), p))
                    if (half := next((p for p in of if id(p) not in outputs), None)) is not None:
                        outputs[id(half)] = [group]
        return outputs

    @cached_property
    def merged(self) -> dict[int, str]:
        """The names of trainable adapter parameters that are merged into the base weights, by id."""
        parts = [m for m in self.model.modules() if m.training and getattr(m, "merged", False) is True]
        adapters = (p for m in parts for p in adapter_of(m).values() if p.requires_grad)
        return {id(p): self.names[id(p)] for p in adapters}

    @cached_property
    def blocks(self) -> list[tuple[str, list[nn.Module]]]:
        """The path and the modules of each ModuleList that holds several modules of one class."""
        lists = [
            (name, list(module)) for name, module in self.model.named_modules() if isinstance(module, nn.ModuleList)
        ]
        return [(name, layers) for name, layers in lists if len(layers) > 1 and len(set(map(type, layers))) == 1]

    @cached_property
    def vocabularies(self) -> set[int]:
        """The sizes of the model's embedding tables."""
        return {module.num_embeddings for module in self.model.modules() if isinstance(module, nn.Embedding)}

    @cached_property
    def tokens(self) -> torch.Tensor | None:
        """The batch's token ids [batch, tokens]."""
        inputs = (value for name, value in self.batch.items() if "label" not in name and "target" not in name)
        return next((value for value in inputs if value.ndim == 2 and not value.is_floating_point()), None)

    @cached_property
    def labels(self) -> torch.Tensor | None:
        return next((value for name, value in self.batch.items() if "label" in name or "target" in name), None)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(getattr(self.config, "is_encoder_decoder", False))

    @cached_property
    def shift(self) -> int | None:
        """The number of tokens by which the labels are ahead of the input: 1 if each label is the next token."""
        tokens, labels = self.tokens, self.labels
        if tokens is None or labels is None or labels.shape != tokens.shape:
            return None
        found = offset_of(tokens, labels, labels >= 0)
        return None if found is None else found[1]

    def listed(self, parameters: Iterable[torch.Tensor]) -> str:
        return listing([self.names.get(id(parameter), "?") for parameter in parameters])


def adapter_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's adapter parameters by name: PEFT's parameters, or all with "lora" in their names."""
    parts = {*getattr(module, "adapter_layer_names", ())}
    named = module.named_parameters()
    return {name: p for name, p in named if parts & {*name.split(".")} or (not parts and "lora" in name.lower())}


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return [leaf] if only single-input operations computed this tensor from a leaf tensor, otherwise []."""
    node: Output = tensor.grad_fn
    while node is not None and len(of := [x for x, _ in node.next_functions if x is not None]) == 1:
        node = of[0]
    return [tensor] if node is None else [node.variable] if hasattr(node, "variable") else []


Check: TypeAlias = Callable[[BeforeTraining], Iterator[Mistake]]
CHECKS: dict[str, Check] = {}
"""The checks by name, in the order in which Lamina shows their findings."""


def checks(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def listing(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
