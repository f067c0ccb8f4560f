"""Find mistakes in a training setup before the first step.

Each check is a function that looks for one mistake. Intentional choices, such as zero-initialized branches, frozen
layers and depth-scaled initializers, are not mistakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lamina.errors import one_line
from lamina.training.monitor import data_mistakes, loss_mistakes, model_mistakes, optimizer_mistakes, structure_mistakes
from lamina.training.monitor.before_training import CHECKS, BeforeTraining, Mistake
from lamina.training.monitor.flat_parameters import FlatParameters
from lamina.training.monitor.zero import is_deepspeeds

__all__ = [
    "CHECKS",
    "BeforeTraining",
    "Mistake",
    "Mistakes",
    "data_mistakes",
    "findings",
    "loss_mistakes",
    "model_mistakes",
    "optimizer_mistakes",
    "structure_mistakes",
]


class Mistakes(list[Mistake]):
    """The mistakes that ``lamina.check`` found. The printed list also shows notes, and checks that were impossible."""

    def __init__(self, findings: Iterable[Mistake], unchecked: Sequence[str] = ()):
        found = list(findings)
        super().__init__(each for each in found if not each.note)
        self.notes, self.unchecked = [each for each in found if each.note], tuple(unchecked)

    def __str__(self) -> str:
        lines = [f"- {finding}" for finding in self] or ["Lamina found no mistake."]
        lines += [f"(note: {note})" for note in self.notes]
        return "\n".join([*lines, *(f"(not checked: {reason})" for reason in self.unchecked)])

    __repr__ = __str__


def findings(setup: BeforeTraining) -> list[Mistake]:
    """Return the mistakes that the checks find, or [] if FSDP1 or DeepSpeed hides the weights or gradients."""
    if FlatParameters(setup.model) or is_deepspeeds(setup.model):
        return []
    found: list[Mistake] = []
    for name, check in CHECKS.items():
        try:
            found += [replace(each, name=name) for each in check(setup)]
        except Exception as error:  # an unusual model may not stop a training
            setup.failed[name] = one_line(error)
    return found
