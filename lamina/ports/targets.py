"""The targets: each has a template ``targets/NAME.py.j2`` and a table ``targets/NAME.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from lamina.errors import unknown

FOLDER = Path(__file__).parent / "targets"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trainer, as its table describes it.

    Args:
        name: its name on the command line.
        title: its name in prose.
        code: the expressions of its block: ``attention`` and ``feed_forward`` call a module on ``{x}``, ``ones`` and
            ``full`` make a learned vector and scalar.
        norms: the constructor of each kind of norm, see ``Port.norm_kind``.
        norm_names: each half's norms in the block: those of pre_norm, out_norm and post_norm. With ``in_order`` the
            norms that a plan has take the first names, whatever their positions.
        made: the lines that make norms which the trainer's block has anyway.
        scales: the learned scales' name in the block, with ``{half}`` and ``{scale}``.
        halves: the names of the halves in the block's scales.
        weights: the trainer's name of each of Lamina's weights: ``layers`` has the index ``{layer}``; below
            ``attention`` and ``feed_forward`` are the modules'.
        stacks: weights that the trainer keeps in one tensor: its name, and Lamina's names of the parts.
        layout: how the parts are stacked: "rows", or "groups": each key head's queries, key and value.
        pairs: whether the rotary embedding turns neighboring channels, not those half a head apart.
        roles: the names of the weights with a role, for the initializer; those with the trainer's default are left out.
        test: what its test imports (``standard``: of the standard library), how it builds the model, the model's
            logits, and how it loads weights unless by ``load_state_dict``.
        lacks: the parts of a plan that it has no place for, in words, by the plan's field.
    """

    name: str
    title: str
    code: dict[str, str]
    norms: dict[str, str]
    norm_names: dict[str, list[str]]
    in_order: bool = False
    made: list[str] = field(default_factory=list)
    scales: str = "{half}_{scale}"
    halves: dict[str, str] = field(default_factory=lambda: {"attention": "attention", "feed_forward": "feed_forward"})
    weights: dict = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    layout: str = "rows"
    pairs: bool = False
    roles: dict[str, list[str]] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    test: dict[str, str] = field(default_factory=dict)

    @property
    def template(self) -> str:
        return f"{self.name}.py.j2"


TARGETS = tuple(sorted(path.name.removesuffix(".yaml") for path in FOLDER.glob("*.yaml")))


@cache
def target_of(name: str) -> Target:
    """Read a target's table. Raises UserError that suggests the nearest name."""
    if name not in TARGETS:
        raise unknown("--to", name, TARGETS)
    return Target(name=name, **yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8")))
