"""Types of JSON content, and a parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object whose values Lamina has not checked."""
RunState = Mapping[str, Any]
"""The content of a checkpoint's run_state.json, or an empty mapping at the beginning of a run."""


def parsed(text: str) -> Json:
    """Parse JSON. Raises ValueError for invalid JSON and for lone surrogate characters, which tokenizers can't read."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value
