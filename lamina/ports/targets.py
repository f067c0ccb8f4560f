"""The trainers for ``emit``. Each trainer has a template ``targets/NAME.py.j2`` and a table ``targets/NAME.yaml``."""

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
    """A trainer's code expressions and weight names, from ``targets/NAME.yaml``."""

    name: str  # of the trainer on the command line
    title: str  # the trainer's name in messages
    # Expressions in the trainer's block. ``attention`` and ``feed_forward`` call a module on ``{x}``. ``vector`` and
    # ``scalar`` create learned parameters.
    code: dict[str, str]
    norms: dict[str, str]  # the constructor of each kind of norm (see ``Port.norm_kind``)
    norm_names: dict[str, list[str]]  # the names of each sub-layer's pre_norm, out_norm and post_norm
    in_order: bool = False  # whether a placement's norms use these names in order, regardless of position
    made: list[str] = field(default_factory=list)  # the lines that create norms in the trainer's own block
    # The names of the sub-layers in the names of learned scales, such as ``attention_skip_scale``.
    halves: dict[str, str] = field(default_factory=lambda: {"attention": "attention", "feed_forward": "feed_forward"})
    # The trainer's name for each of Lamina's weights. The entry ``layers`` contains the index ``{layer}``. The entries
    # ``attention`` and ``feed_forward`` have the names inside the modules.
    weights: dict = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)  # Lamina's names of the weights that a tensor joins
    layout: str = "rows"  # or "groups": for each key head, its queries, its key and its value
    pairs: bool = False  # whether rotary embeddings rotate neighboring channels, not channels half a head apart
    roles: dict[str, list[str]] = field(default_factory=dict)  # for the initializer: kinds of weights, and their names
    # The parts of the test: imports (``standard``: of the standard library), and code to build the model, to compute
    # its logits and to load weights (default: ``load_state_dict``).
    test: dict[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """Return what the user has to do before the test, such as "install Megatron-Core", or ""."""
        imported = set(re.findall(r"(?m)^(?:from|import) (\w+)", self.test.get("imports", "")))
        if "model" in imported:
            return f"put {self.title}'s model.py beside the test"
        return f"install {self.title}" if imported - {"torch", "numpy", "transformers", "lamina"} else ""

    @property
    def template(self) -> str:
        return f"{self.name}.py.j2"


TARGETS = tuple(sorted(path.name.removesuffix(".yaml") for path in FOLDER.glob("*.yaml")))


@cache
def target_of(name: str) -> Target:
    """Return a trainer's table. Raises UserError for an unknown trainer."""
    if name not in TARGETS:
        raise UserError(f"{unknown('--to', name, TARGETS)}. For TRL or transformers, use lamina.build in Python.")
    return Target(name=name, **yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8")))
