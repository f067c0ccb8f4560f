"""Types of JSON content, and a parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object as Lamina read it, with values that nobody has checked yet."""
RunState = Mapping[str, Any]
"""The content of a checkpoint's run_state.json, by name. The content is empty at the beginning of the run."""


def parsed(text: str) -> Json:
    """Parse JSON. Raises ValueError for invalid JSON and for a lone surrogate, which no tokenizer reads."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value
