"""The settings that only some objectives use, and the modules of lamina.lab that define more objectives."""

from __future__ import annotations

from lamina.lab.vision.settings import ImageSettings
from lamina.training.setting_groups import ObjectiveSettings


class OwnSettings(ObjectiveSettings, ImageSettings):
    """The settings that only some objectives use."""


def modules_of_the_lab() -> tuple[str, ...]:
    """Return the names of the modules in lamina.lab that register an objective on import."""
    from lamina.lab.vision import image_classification

    return (image_classification.__name__,)
