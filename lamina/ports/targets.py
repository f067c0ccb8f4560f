"""The trainers for ``emit``. Each has a template ``targets/NAME.py.j2`` and a table ``targets/NAME.yaml``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from lamina.errors import UserError, unknown

FOLDER = Path(__file__).parent / "targets"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The table of a trainer.

    Args:
        name: the trainer's name on the command line.
        title: the trainer's name in messages.
        code: expressions in the trainer's block. ``attention`` and ``feed_forward`` call a module on ``{x}``, and
            ``vector`` and ``scalar`` create learned parameters.
        norms: the constructor of each kind of norm (see ``Port.norm_kind``).
        norm_names: the names of each sub-layer's norms, for pre_norm, out_norm and post_norm.
        in_order: whether a placement's norms take these names in order, regardless of position.
        made: the lines that create norms in the trainer's own block.
        halves: the names of the sub-layers in the names of learned scales, such as ``attention_skip_scale``.
        weights: a mapping from Lamina's weight names to the trainer's names. The entry ``layers`` contains the index
            ``{layer}``. The entries ``attention`` and ``feed_forward`` have the names inside the modules.
        stacks: a mapping from a tensor that joins several weights to Lamina's names of these weights.
        layout: how the tensor joins the weights: in "rows", or in "groups" with each key head's queries, key and value.
        pairs: whether the rotary embedding rotates neighboring channels (true), or channels half a head apart (false).
        roles: a mapping from a kind of weight, such as "value", to the weights that the initializer draws.
        test: the parts of the test: imports (``standard``: of the standard library), and code to build the model,
            compute its logits and load weights (default: ``load_state_dict``).
    """

    name: str
    title: str
    code: dict[str, str]
    norms: dict[str, str]
    norm_names: dict[str, list[str]]
    in_order: bool = False
    made: list[str] = field(default_factory=list)
    halves: dict[str, str] = field(default_factory=lambda: {"attention": "attention", "feed_forward": "feed_forward"})
    weights: dict = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    layout: str = "rows"
    pairs: bool = False
    roles: dict[str, list[str]] = field(default_factory=dict)
    test: dict[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """What a user must do before the trainer's test can import the trainer; empty without another trainer."""
        imported = set(re.findall(r"(?m)^(?:from|import) (\w+)", self.test.get("imports", "")))
        if "model" in imported:
            return f"put {self.title}'s model.py beside it"
        return f"install {self.title}" if imported - {"torch", "numpy", "transformers", "lamina"} else ""

    @property
    def template(self) -> str:
        return f"{self.name}.py.j2"


TARGETS = tuple(sorted(path.name.removesuffix(".yaml") for path in FOLDER.glob("*.yaml")))


@cache
def target_of(name: str) -> Target:
    """Return a trainer's table. Raises UserError for an unknown trainer, and suggests the most similar name."""
    if name not in TARGETS:
        raise UserError(f"{unknown('--to', name, TARGETS)}. For TRL or transformers, use lamina.build in Python.")
    return Target(name=name, **yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8")))
