"""A type for pandas tables."""

from __future__ import annotations

from typing import Any, TypeAlias

Frame: TypeAlias = Any
"""A pandas DataFrame, or a selection of one: pandas has no types that a checker could follow through a selection."""
