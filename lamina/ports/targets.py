"""The targets of ``emit``: each has a template ``targets/NAME.py.j2`` and a table ``targets/NAME.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from lamina.errors import UserError, unknown

FOLDER = Path(__file__).parent / "targets"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trainer, as its table describes it.

    Args:
        name: the trainer's name on the command line.
        title: the trainer's name in prose.
        code: expressions in the trainer's block: ``attention`` and ``feed_forward`` call a module on ``{x}``;
            ``vector`` and ``scalar`` create learned parameters.
        norms: the constructor of each kind of norm (see ``Port.norm_kind``).
        norm_names: the names of each sub-layer's norms, for pre_norm, out_norm and post_norm. With ``in_order``, a
            plan's norms take the names in the listed order, regardless of position.
        made: the lines that create norms in the trainer's own block.
        halves: the names of the sub-layers in the names of learned scales, such as ``attention_skip_scale``.
        weights: a mapping from Lamina's weight names to the trainer's names. The entry ``layers`` contains the index
            ``{layer}``. The entries ``attention`` and ``feed_forward`` have the names inside the modules.
        stacks: weights that the trainer keeps in one tensor: the tensor's name, and Lamina's names of the parts.
        layout: how the parts are stacked: in "rows", or in "groups" that hold each key head's queries, key and value.
        pairs: whether the rotary embedding rotates neighboring channels (true), or channels half a head apart (false).
        roles: for the initializer, the names of the weights by role. Other weights keep the trainer's default.
        test: the parts of the trainer's test: the imports (``standard``: from the standard library), the code that
            builds the model, its logits, and the code that loads weights (default: ``load_state_dict``).
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
    def template(self) -> str:
        return f"{self.name}.py.j2"


TARGETS = tuple(sorted(path.name.removesuffix(".yaml") for path in FOLDER.glob("*.yaml")))


@cache
def target_of(name: str) -> Target:
    """Read a target's table. Raises UserError for an unknown target, and suggests the nearest name."""
    if name not in TARGETS:
        raise UserError(f"{unknown('--to', name, TARGETS)}. For TRL or transformers, use lamina.build in Python.")
    return Target(name=name, **yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8")))
