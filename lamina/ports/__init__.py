"""Placements for other trainers: ``emit`` writes a plan as a trainer's file; ``weights`` converts checkpoints' weights.

Each target has two files in ``targets/``: a template, and a table of the trainer's expressions and weight names.
"""

from lamina.ports.emitting import Emitted, emit
from lamina.ports.targets import TARGETS, target_of

__all__ = ["TARGETS", "Emitted", "emit", "target_of"]
