"""The model, its layers and the inputs that a probe works with."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lamina.errors import UserError
from lamina.probes.engine.losses import token_losses
from lamina.probes.structure.hooks import Output, forward
from lamina.probes.structure.sites import Structure
from lamina.probes.structure.token_rows import text_config

logger = logging.getLogger(__name__)


class RunState(TypedDict, total=False):
    """The step and the folder of a run, if the model belongs to a run."""

    step: int
    run: Path


@dataclass(kw_only=True)
class Context:
    """The model, its layers and the inputs that a probe works with."""

    model: nn.Module
    """The model in evaluation mode."""
    base: nn.Module
    """The model without its head."""
    structure: Structure
    batches: Sequence[Mapping[str, torch.Tensor]]
    """The inputs of each forward pass: {"input_ids": [batch, tokens]}, with attention_mask if texts differ in length,
    or {"pixel_values": [batch, channels, height, width]}.
    """
    tokenizer: PreTrainedTokenizerBase | None = None
    """The checkpoint's tokenizer, if it has one."""
    notes: list[str] = field(default_factory=list)
    """Notes for the page, to which probes append."""
    authors: dict[str, str] = field(default_factory=dict)
    """The name of the probe that added a note, by note."""
    forwards: int = 0
    """The number of batches in the shared forward passes. Lamina sets this number before ``finish``."""
    progress: Callable[[int, int, str], None] = lambda done, total, label: None
    """A function that slow probes call with (done, total, label), to show progress."""
    strict: bool = True
    """Whether a probe that cannot measure everything raises an error. Otherwise, the probe adds a note."""
    state: RunState = field(default_factory=RunState)
    """The training step and the run's folder, if the model belongs to a run."""
    warnings: list[str] = field(default_factory=list)
    """Reasons to doubt the results, which the page shows first."""
    new_weights: Sequence[str] = ()
    """The head's weights that the checkpoint lacks. If the list has names, the model's predictions are random."""
    whole: bool = False
    """Whether the inputs are the user's own. Probes measure all of these inputs, unless an option sets a limit."""
    requested: bool = False
    """Whether the user set ``sequences`` or ``tolerance``. Probes with a small default then measure all sequences."""
    tolerance: float | None = None
    """The relative standard error at which the user wants measurements to stop (0: measure all inputs)."""
    unread: Sequence[str] = ()
    """Notes on parts of the user's own text that Lamina does not measure."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def reads_tokens(self) -> bool:
        return "input_ids" in self.batches[0]

    @property
    def roots(self) -> list[nn.Module]:
        """Return the modules at which a forward pass may start: the model, and the model without its head."""
        return [self.model] if self.base is self.model else [self.model, self.base]

    def on_device(self, batch: Mapping[str, torch.Tensor], sequences: int | None = None) -> dict[str, torch.Tensor]:
        return {name: tensor[:sequences].to(self.device) for name, tensor in batch.items()}

    def warn(self) -> None:
        """Log the warnings that a page would show first, for commands and functions without a page."""
        for note in (*self.warnings, *self.unread):
            logger.warning(note)

    @contextmanager
    def credit(self, name: str) -> Iterator[None]:
        """Record the probe ``name`` as the author of each note that is added meanwhile."""
        before = len(self.notes)
        try:
            yield
        finally:
            for note in self.notes[before:]:
                self.authors.setdefault(note, name)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def most(self, option: int | None, sample: int) -> int:
        """Return the number of inputs to measure: ``option``, or 0 (all) for the user's own inputs, or ``sample``."""
        return option if option is not None else 0 if self.whole else sample

    def most_sequences(self, option: int | None, sample: int) -> int:
        """Return ``most``, but 0 (all) instead of ``sample`` if the user set ``sequences`` or ``tolerance``."""
        return self.most(option, 0 if self.requested else sample)

    def first(self, sequences: int) -> list[Mapping[str, torch.Tensor]]:
        """Return the batches of the first ``sequences`` inputs (0: all)."""
        if not sequences:
            return list(self.batches)
        batches: list[Mapping[str, torch.Tensor]] = []
        for batch in self.batches:
            if sequences <= 0:
                break
            batches.append({name: tensor[:sequences] for name, tensor in batch.items()})
            sequences -= len(next(iter(batch.values())))
        return batches

    def tokens(self, sequences: int = 0) -> float:
        """Return the number of tokens in the first ``sequences`` inputs (0: all). An image counts as 256 tokens."""
        total = 0.0
        for batch in self.first(sequences):
            first = next(iter(batch.values()))
            total += first.numel() if first.ndim == 2 else 256.0 * len(first)
        return total

    def forward(self, inputs: Mapping[str, torch.Tensor], *, head: bool = True) -> Output:
        return forward(self.model if head else self.base, inputs)

    def loss(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a batch's mean cross-entropy in nats per token (float32). Raises UserError if there is no head."""
        # a masked model predicts 15 % of the tokens, at the same positions each time
        return self.token_losses(inputs).mean()

    def token_losses(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropy of each predicted token in nats, [batch, predicted]."""
        self.check_head()
        return token_losses(self.model, inputs, self.tokenizer)

    def no_better_than_guessing(self, loss: float) -> str:
        """Return a sentence if a loss is about the loss of uniform guessing, or "" otherwise."""
        size = getattr(text_config(self.model), "vocab_size", 0)
        if not isinstance(size, int) or size < 2 or loss < 0.99 * math.log(size):
            return ""
        return (
            f"The model is no better than guessing: its loss is {loss:.2f} nats, and ln(vocabulary size) is "
            f"{math.log(size):.2f}. So these numbers do not show which layers matter."
        )

    def check_head(self) -> None:
        """Raise UserError if the checkpoint lacks the head's weights, because the predictions would be random."""
        if self.new_weights:
            raise UserError(
                f"head: the checkpoint lacks the weights {self.new_weights[0]!r}, so the predictions are random. "
                "Choose a checkpoint with its head."
            )
