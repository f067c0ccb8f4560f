"""Types of JSON content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object as it was read: names to values that nobody has checked yet."""
RunState = Mapping[str, Any]
"""The content of a checkpoint's run_state.json: JSON by name. Empty at the beginning of the run."""
