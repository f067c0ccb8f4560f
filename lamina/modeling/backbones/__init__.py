"""The papers' model sizes as presets: transformers configurations by name."""

from lamina.modeling.backbones.counting import Count, count_parameters
from lamina.modeling.backbones.presets import PRESETS, Preset, get, names, resolve_backbone

__all__ = ["PRESETS", "Count", "Preset", "count_parameters", "get", "names", "resolve_backbone"]
