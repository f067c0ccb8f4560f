"""Names for types that a checker can't follow further."""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]  # what json and yaml read: nested dicts, lists and scalars
Frame: TypeAlias = Any  # a pandas DataFrame, or a selection of one: pandas has no types of its own
