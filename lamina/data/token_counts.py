"""Counts of tokens and of pairs, and the cross-entropy of predicting tokens from their frequencies alone."""

from __future__ import annotations

import numpy as np

_AT_ONCE = 2**20  # tokens whose pairs are counted together


def count_tokens(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs in ``ids`` [blocks, sequence_length], which is read a few million at a time."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    rows = max(1, 2**22 // ids.shape[1])
    for start in range(0, len(ids), rows):
        counts += np.bincount(ids[start : start + rows].ravel(), minlength=vocab_size)
    return counts


def smoothed(counts: np.ndarray) -> np.ndarray:
    """The add-one smoothed frequencies for ``counts``, [vocab_size]."""
    return (counts + 1) / (counts.sum() + len(counts))


def unigram_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy of the held-out tokens under the add-one smoothed train frequencies, in nats per token.

    Args:
        train: token ids, [blocks, sequence_length].
        held_out: token ids of the other split.
        vocab_size: the number of ids to smooth over.
    """
    train_counts, eval_counts = count_tokens(train, vocab_size), count_tokens(held_out, vocab_size)
    log_probability = np.log(train_counts + 1) - np.log(train_counts.sum() + vocab_size)
    return float(-(eval_counts * log_probability).sum() / eval_counts.sum())


def bigram_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy of the held-out tokens given the one before each, under a table of the train pairs, in nats.

    Of each block all tokens but the first are predicted, as by a model. The table is smoothed as by Witten and Bell
    (1991), p(v | u) = (c(u, v) + n(u) p(v)) / (c(u) + n(u)), with c the counts of pairs, n(u) the number of different
    tokens after u, and p(v) the add-one smoothed frequency of v. Pairs that start with a token which nothing held out
    starts with are not counted.

    Args:
        train: token ids, [blocks, sequence_length].
        held_out: token ids to predict, of the same shape but for the number of blocks.
        vocab_size: the number of ids to smooth over.
    """
    wanted = held_out.astype(np.int64)
    before, after = wanted[:, :-1].ravel(), wanted[:, 1:].ravel()
    matters = np.zeros(vocab_size, dtype=bool)
    matters[before] = True
    pairs, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    rows = max(1, _AT_ONCE // train.shape[1])
    for start in range(0, len(train), rows):
        ids = train[start : start + rows].astype(np.int64)
        first, second = ids[:, :-1].ravel(), ids[:, 1:].ravel()
        chosen = matters[first]
        more, times = np.unique(first[chosen] * vocab_size + second[chosen], return_counts=True)
        pairs, places = np.unique(np.concatenate([pairs, more]), return_inverse=True)
        counts = np.bincount(places, weights=np.concatenate([counts, times]), minlength=len(pairs))
    known = np.append(pairs, -1)  # so that a pair beyond the last is compared with none
    places = np.searchsorted(pairs, before * vocab_size + after)
    seen = np.where(known[places] == before * vocab_size + after, np.append(counts, 0)[places], 0)
    followed = np.bincount(pairs // vocab_size, weights=counts, minlength=vocab_size)[before]
    different = np.bincount(pairs // vocab_size, minlength=vocab_size)[before]
    alone = smoothed(count_tokens(train, vocab_size))[after]
    probability = np.where(followed > 0, (seen + different * alone) / np.maximum(followed + different, 1), alone)
    return float(-np.log(probability).mean())
