"""From a scale to its arms: the combinations of its axes' values, and the settings of each trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.settings import Settings
from lamina.studies.catalog.study import Scale


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
        if str(placement := settings.get("placement", "")).startswith("./"):
            settings["placement"] = str(scale.folder / str(placement)[2:])
        found.append(Arm(values=values, settings=settings))
    if not found:
        raise UserError(f"skip: leaves no arm of the {scale.name} scale (allowed: to skip some combinations)")
    return found


def matches(values: Mapping[str, str], pattern: Json) -> bool:
    """Whether values on the axes are those of a pattern under ``skip``. Raises UserError for what is no axis."""
    for axis, label in pattern.items():
        if axis not in values:
            raise UserError(f"skip: {axis!r} is no axis (allowed: {', '.join(values)})")
        if values[axis] not in ([str(one) for one in label] if isinstance(label, list) else [str(label)]):
            return False
    return True
