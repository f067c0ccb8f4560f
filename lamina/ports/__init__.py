"""Norm placements for other trainers: ``emit`` writes a placement as code, and ``weights`` converts the weights.

The folder ``targets`` has two files for each trainer: a template, and a table of code expressions and weight names.
"""

from lamina.ports.emitting import Emitted, emit
from lamina.ports.targets import TARGETS, target_of

__all__ = ["TARGETS", "Emitted", "emit", "target_of"]
