"""The numbers of an evaluation as columns of a trial's row."""

from __future__ import annotations

import re

from lamina.core.json_types import Json

SCORE = "score"
"""The column of the average over the tasks, in percent; each task's is ``score_TASK``."""


def columns_of(result: Json) -> Json:
    """``score``, the average of a table's shares in percent, and ``score_HEADING`` of each column.

    A result that a study's records hold has its columns already, and stays as it is.
    """
    if "table" not in result:
        return result
    kept = {name: result[name] for name in ("status", "seconds", "reason") if name in result}
    table = result["table"]
    lines = table["lines"]
    if not lines:
        return kept
    values = list(zip(table["headings"], lines[0]["mean"], table["shares"], strict=True))
    shares = [value for _, value, share in values if share]
    # a table of several shares ends with their average, one of a single share has none
    several = len(shares) > 1
    named = {f"{SCORE}_{_slug(heading)}": value for heading, value, _ in (values[:-1] if several else values)}
    return {**kept, **({SCORE: shares[-1]} if shares else {}), **named}


def _slug(heading: str) -> str:
    return re.sub(r"\W+", "_", heading).strip("_").lower()
