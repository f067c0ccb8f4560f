"""What JSON holds."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
"""A JSON object as it was read: names to values that nobody has checked yet."""
