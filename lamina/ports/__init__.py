"""Placements for other trainers: ``emit`` writes a plan as a trainer's file; ``weights`` converts checkpoints' weights.

A target is two files of ``targets/``: a template, and a table of the expressions and weight names that it uses.
"""

from lamina.ports.emitting import Emitted, emit
from lamina.ports.targets import TARGETS, target_of

__all__ = ["TARGETS", "Emitted", "emit", "target_of"]
