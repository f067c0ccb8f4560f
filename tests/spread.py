"""What is run always, and what `make test-all` adds, of tests over all placements and of large products."""

from collections.abc import Iterable

import pytest

# One of each kind: norms before and after the branch or around the sum, none at all, and inside; blocks of two kinds;
# a scale by layer, learned, between stream and branch, on the embeddings; norms of queries, keys and values.
KINDS = ("pre_ln", "post_ln", "keel", "mix_ln", "fusenorm", "hybridnorm", "layernorm_scaling", "muse_spark", "rezero")


def spread(values: Iterable, always: Iterable = KINDS) -> list:
    """All the values as parameters, a tuple's parts as several; those that are not among ``always`` are slow."""
    always = list(always)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else [value]), marks=[] if value in always else pytest.mark.slow
        )
        for value in values
    ]


def rotated(firsts: Iterable, seconds: Iterable, every: int = 6) -> list:
    """All pairs as parameters: each first one always with some of the second, in turn; the other pairs are slow."""
    pairs = [(i + j, (first, second)) for i, first in enumerate(firsts) for j, second in enumerate(seconds)]
    return spread([pair for _, pair in pairs], [pair for place, pair in pairs if place % every == 0])
