"""Settings that only some objectives read, and the names of the lab's modules with further objectives."""

from __future__ import annotations

from lamina.lab.vision.settings import ImageSettings
from lamina.training.setting_groups import ObjectiveSettings


class OwnSettings(ObjectiveSettings, ImageSettings):
    """The settings of single objectives."""


def modules_of_the_lab() -> tuple[str, ...]:
    """Return the names of the lab's modules that register an objective on import."""
    from lamina.lab.vision import image_classification

    return (image_classification.__name__,)
