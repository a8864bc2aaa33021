"""Tokens that may never come, and tokens that must come at their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dflash_fn import errors
from dflash_fn.checks import RowCount, check_ids, check_row_counts, of_row
from dflash_fn.policies import Constraint

__all__ = ["ban", "force"]


def ban(token_ids: Iterable[int]) -> Constraint:
    """Let none of these tokens be emitted.

    Raises:
        InputError: what are no token ids; when called, an id that the target does not have.
    """
    ids = np.array(sorted(set(check_ids("ban", token_ids))), dtype=np.int64)

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        del tokens, row
        if len(ids):
            _check_known("ban", int(ids[-1]), len(logits))
        made = logits.copy()
        made[ids] = -np.inf
        return made

    return constraint


def force(token_ids: Sequence[int], *, begin: RowCount) -> Constraint:
    """Let these tokens be emitted one after the other, from position `begin` on; nothing else changes.

    Args:
        token_ids: what must come.
        begin: the position of the first, such as the length of the prompt; one number, or one a row.

    Raises:
        InputError: what are no token ids, or a position below 0; when called, an id that the target does not have, or
            no position for a row.
    """
    wanted, begin = check_ids("force", token_ids), check_row_counts("force: begin", begin)

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        place = len(tokens) - of_row("force: begin", begin, row)
        if not 0 <= place < len(wanted):
            return logits
        _check_known("force", wanted[place], len(logits))
        made = np.full_like(logits, -np.inf)
        made[wanted[place]] = 0.0
        return made

    return constraint


def _check_known(name: str, token: int, vocab_size: int) -> None:
    if token >= vocab_size:
        raise errors.InputError(f"{name}: got token {token}, expected an id from 0 to {vocab_size - 1}")
