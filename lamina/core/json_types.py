"""Types of JSON content, and a parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object as it was read: names to values that nobody has checked yet."""
RunState = Mapping[str, Any]
"""The content of a checkpoint's run_state.json: JSON by name. Empty at the beginning of the run."""


def parsed(text: str) -> Json:
    """Parse JSON. Parse JSON. Raises ValueError, also for half of a surrogate pair, which no tokenizer reads."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value
