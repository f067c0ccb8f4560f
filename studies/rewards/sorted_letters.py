"""A verifiable reward for the generated task of sorting letters."""


def in_place(prompt: str, answer: str, row: dict[str, str]) -> float:
    """The share of the right answer's letters that stand at their places; an answer that goes on loses as much."""
    right, given = row["completion"].split(), answer.split()
    hits = sum(a == b for a, b in zip(right, given, strict=False))
    return hits / max(len(right), len(given))
