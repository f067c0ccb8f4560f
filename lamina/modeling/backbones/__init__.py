"""The papers' model sizes as presets: transformers configurations by name."""

from lamina.modeling.backbones.presets import PRESETS, Preset, get, names, resolve_backbone

__all__ = ["PRESETS", "Preset", "get", "names", "resolve_backbone"]
