"""All small blocks, and what the match rule must say of each, worked out one block at a time in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

__all__ = ["all_blocks", "all_ties", "matched"]


def all_blocks(vocab: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return drafted tokens [N, size - 1] and logits [N, size, vocab] for every draft against every choice."""
    pairs = list(itertools.product(_words(vocab, size - 1), _words(vocab, size)))
    drafted = np.array([draft for draft, _ in pairs], dtype=np.int64).reshape(len(pairs), size - 1)
    choices = np.array([choice for _, choice in pairs])
    return drafted, np.eye(vocab, dtype=np.float32)[choices]


def all_ties(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every drafted token against two slots of logits that are 0 or 1, so that most of them tie."""
    rows = list(itertools.product([0.0, 1.0], repeat=vocab))
    cases = list(itertools.product(range(vocab), rows, rows))
    drafted = np.array([[token] for token, *_ in cases], dtype=np.int64)
    return drafted, np.array([slots for _, *slots in cases], dtype=np.float32)


def matched(drafted: Sequence[int], logits: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Return num_accepted and next_token: accept for as long as the first largest logit is the drafted token."""
    choices = [list(row).index(max(row)) for row in logits]
    for count, (token, choice) in enumerate(zip(drafted, choices, strict=False)):
        if token != choice:
            return count, choice
    return len(drafted), choices[len(drafted)]


def _words(vocab: int, length: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(vocab), repeat=length))
