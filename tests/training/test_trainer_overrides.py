"""What LaminaTrainer overrides of transformers' Trainer is there, takes what we pass, and is on docs/trainer.md."""

import inspect
import re
from pathlib import Path

import pytest
from transformers import Trainer

from lamina.training.trainer import LaminaTrainer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trainer.md").read_text(encoding="utf-8")
OVERRIDDEN, USED = PAGE.split("## Overridden")[1].split("## Used, not overridden")


def names(section: str) -> set[str]:
    first = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    return set(re.findall(r"`([\w.]+)`", first))


def overrides() -> set[str]:
    """The names that Trainer has and our classes define again."""
    own = {name for kind in LaminaTrainer.__mro__ for name in vars(kind) if kind.__module__.startswith("lamina.")}
    return {name for name in own if hasattr(Trainer, name) and not name.startswith("__")}


def test_the_page_lists_every_override():
    assert names(OVERRIDDEN) == overrides()


@pytest.mark.parametrize("name", sorted(names(OVERRIDDEN)))
def test_an_override_takes_what_trainer_passes(name):
    theirs = inspect.signature(getattr(Trainer, name)).parameters
    ours = inspect.signature(getattr(LaminaTrainer, name)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values()):
        return
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("name", sorted(names(USED)))
def test_what_we_use_of_trainer_is_there(name):
    assert hasattr(Trainer, name) or f"self.{name}" in inspect.getsource(Trainer)
