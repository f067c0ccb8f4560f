"""A type for pandas tables."""

from __future__ import annotations

from typing import Any, TypeAlias

Frame: TypeAlias = Any
"""A pandas DataFrame, or a selection of rows or columns. A type checker can't follow pandas' own types."""
