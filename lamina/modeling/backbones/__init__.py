"""Model sizes from the papers, as transformers configurations by name."""

from lamina.core.backbone_presets import PRESETS, Preset, get, names
from lamina.modeling.backbones.presets import Count, count_parameters, preset_config, resolve_backbone

__all__ = ["PRESETS", "Count", "Preset", "count_parameters", "get", "names", "preset_config", "resolve_backbone"]
