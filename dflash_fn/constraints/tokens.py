"""Tokens that may never come, and tokens that must come at their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dflash_fn.policies import Constraint

__all__ = ["ban", "force"]


def ban(token_ids: Iterable[int]) -> Constraint:
    """Let none of these tokens be emitted."""
    ids = np.array(sorted(set(token_ids)), dtype=np.int64)

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        del tokens, row
        made = logits.copy()
        made[ids] = -np.inf
        return made

    return constraint


def force(token_ids: Sequence[int], *, begin: int | Sequence[int]) -> Constraint:
    """Let these tokens be emitted one after the other, from position `begin` on; nothing else changes.

    Args:
        token_ids: what must come.
        begin: the position of the first, such as the length of the prompt; one number, or one a row.
    """
    wanted = tuple(token_ids)

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        place = len(tokens) - (begin if isinstance(begin, int) else begin[row])
        if not 0 <= place < len(wanted):
            return logits
        made = np.full_like(logits, -np.inf)
        made[wanted[place]] = 0.0
        return made

    return constraint
