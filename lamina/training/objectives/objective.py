"""A training objective: what the model predicts, with its data, loss and metrics."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lamina.core.registry import Registry
from lamina.data.blocks import Splits, Stats
from lamina.errors import UserError
from lamina.modeling.modeling_lamina import adapter_of
from lamina.training.objective_rows import modules_of_the_lab

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

    from lamina.training.settings import PretrainSettings

Processor: TypeAlias = "PreTrainedTokenizerBase | BaseImageProcessor"
"""The tokenizer or image processor, which Lamina saves with the model."""
Collate: TypeAlias = Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]
"""A function that collates items into a batch."""


class Objective(ABC):
    """A training objective: what a model learns to predict."""

    head: ClassVar[str]  # the name of the model's head in ``lamina.modeling.modeling_lamina.HEADS``
    guess: ClassVar[str] = "the corpus' unigram entropy"  # the name of the baseline loss, such as the unigram entropy
    # the settings that this objective uses and some other objectives do not use
    own: ClassVar[frozenset[str]] = frozenset()
    without: ClassVar[frozenset[str]] = frozenset()  # the settings that other objectives use, but not this objective

    def check(self, settings: PretrainSettings) -> None:
        """Raise UserError for a setting that is invalid or has no effect on this objective."""
        for name in sorted((all_own() - self.own) | self.without):
            if getattr(settings, name) != settings.default(name):
                users = [other.head for other in objectives() if other.uses(name)]
                raise UserError(
                    f"{name}: {getattr(settings, name)!r} has no effect on the objective {self.head!r}. Only these "
                    f"objectives use {name}: {', '.join(users)}. Leave {name} out."
                )

    def uses(self, name: str) -> bool:
        return name in self.own or (name not in all_own() and name not in self.without)

    def refuse_for(self, command: str, head: str, backbone: str) -> None:
        """Raise UserError if this objective does not train the head that a command needs."""
        if self.head != head:
            raise UserError(
                f"backbone: {backbone!r} is trained on {self.head}, but lamina {command} measures only {head}. "
                f"Choose a backbone for {head}."
            )

    @abstractmethod
    def fit(self, config: PreTrainedConfig, settings: PretrainSettings) -> None:
        """Set the data-dependent sizes of a configuration. Raises UserError if the sizes are impossible."""

    @abstractmethod
    def item_tokens(self, config: PreTrainedConfig, settings: PretrainSettings) -> int:
        """Return the number of tokens per training example in the residual stream."""

    @abstractmethod
    def read(self, settings: PretrainSettings, config: PreTrainedConfig, *, bar: bool) -> tuple[Splits, Processor]:
        """Read the data, and the tokenizer or image processor. Raises UserError if the data are unusable."""

    @abstractmethod
    def complete(
        self, config: PreTrainedConfig, splits: Splits, processor: Processor, from_model: str | None
    ) -> PreTrainedConfig:
        """Return a copy of a configuration with the vocabulary size or the number of classes.

        If the run starts from the checkpoint ``from_model``, the sizes stay unchanged. Raises UserError if the data do
        not fit these sizes.
        """

    def collate(self, settings: PretrainSettings, splits: Splits) -> Collate | None:
        """Return the function that collates training items, or None for transformers' default."""
        return None

    def collate_eval(self) -> Collate | None:
        """Return the function that collates held-out items, or None for transformers' default."""
        return None

    @abstractmethod
    def derived(self, loss: float, stats: Stats) -> dict[str, float]:
        """Return the metrics that follow from the held-out loss and the data, such as the perplexity."""

    @abstractmethod
    def facts(self, settings: PretrainSettings, stats: Stats) -> dict[str, object]:
        """Return facts about the data for the model card, by title."""

    def scores(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return further metrics of held-out items, such as the accuracy: a tensor [batch] for each metric."""
        return {}

    @property
    def is_scored(self) -> bool:
        return type(self).scores is not Objective.scores


_BESIDE = list(pkgutil.iter_modules([str(Path(__file__).parent)]))
_registry: Registry[Objective] = Registry(
    "objective", modules=lambda: (*(f"{__package__}.{module.name}" for module in _BESIDE), *modules_of_the_lab())
)


def objective(cls: type[Objective]) -> type[Objective]:
    """Register a class as an objective, as a decorator."""
    _registry.add(cls.head, cls(), cls.__module__)
    return cls


def objectives() -> list[Objective]:
    return [_registry.get(name) for name in _registry.names()]


def all_own() -> frozenset[str]:
    return frozenset().union(*(each.own for each in objectives()))


def objective_of(config: PreTrainedConfig, requested: str = "auto", backbone: str | None = None) -> Objective:
    """Return the requested objective, or for "auto" the first objective that fits the model's heads."""
    fitting = [head for head in adapter_of(config).heads if head in _registry.names()]
    name = backbone or config.model_type
    if not fitting:
        raise UserError(f"backbone: {name!r} has no head that can be pretrained. See `lamina backbones`.")
    if requested == "auto":
        return _registry.get(fitting[0])
    if requested not in fitting:
        raise UserError(
            f"objective: {requested!r} does not fit the backbone {name!r} (allowed: auto, {', '.join(fitting)})"
        )
    return _registry.get(requested)
