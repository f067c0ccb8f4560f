"""Counts of tokens, and the cross-entropy of predicting tokens from their frequencies alone."""

from __future__ import annotations

import numpy as np


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
