"""From a scale to its arms: the combinations of its axes' values, and the settings of each trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.settings import Settings
from lamina.papers.catalog.stages import ENGINE
from lamina.papers.catalog.study import Scale


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is compared: a value on each axis but those of the learning rate and the seed.

    Attributes:
        values: the label of each axis's value.
        settings: those that differ from the job's defaults.
    """

    values: Mapping[str, str]
    settings: Json

    def trial(self, scale: Scale, learning_rate: float | None, seed: int) -> Settings:
        """The settings of one trial. Raises UserError that names the setting."""
        varied = {"seed": seed} if learning_rate is None else {"seed": seed, "learning_rate": learning_rate}
        return scale.record.settings_class().from_dict({**self.settings, **varied})


def arms(scale: Scale, changes: Json | None = None) -> list[Arm]:
    """The arms of a scale in the order of its axes. ``changes``: settings over the scale's own, under the axes'."""
    found = []
    for labels in product(*(scale.axes[axis] for axis in scale.axes)):
        values = dict(zip(scale.axes, labels, strict=True))
        if any(matches(values, pattern) for pattern in scale.skip):
            continue
        settings = {**scale.settings, **(changes or {})}
        for axis, label in values.items():
            settings |= scale.axes[axis][label]
        found.append(Arm(values=values, settings=resolved(settings, scale)))
    if not found:
        raise UserError(f"skip: leaves no arm of the {scale.name} scale (allowed: to skip some combinations)")
    return found


def resolved(settings: Json, scale: Scale) -> Json:
    """Settings with a placement that begins with ``./`` relative to the study's file."""
    placement = str(settings.get("placement", ""))
    return {**settings, "placement": str(scale.folder / placement[2:])} if placement.startswith("./") else settings


def refuse_without_effect(scale: Scale, changes: Json) -> None:
    """Raise UserError for a change of what each arm or trial says itself."""
    own: dict[str, str] = {**ENGINE, "seed": "--seeds"}
    if scale.rates or scale.tuning is not None:
        own["learning_rate"] = "a copy of the study with other rates"
    every = [set.intersection(*({*point} for point in points.values())) for points in scale.axes.values()]
    own |= {name: "a copy of the study with another axis" for names in every for name in names}
    for name in changes:
        if name in own:
            raise UserError(f"set.{name}: has no effect: the study's trials say it themselves (allowed: {own[name]})")


def matches(values: Mapping[str, str], pattern: Json) -> bool:
    """Whether values on the axes are those of a pattern under ``skip``."""
    for axis, label in pattern.items():
        if values[axis] not in ([str(one) for one in label] if isinstance(label, list) else [str(label)]):
            return False
    return True
