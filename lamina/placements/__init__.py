"""Norm placements: where the norms sit in each layer, as data. This package imports neither torch nor transformers."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import Placement, get, names, placement
from lamina.placements.resolution import resolve

__all__ = ["Layer", "Norm", "Placement", "Plan", "Sublayer", "get", "names", "placement", "resolve"]
