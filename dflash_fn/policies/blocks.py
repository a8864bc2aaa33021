"""What rules do with blocks of arrays, over and over: count, pick a slot, pick a token's number."""

from __future__ import annotations

from typing import Any

from dflash_fn.records import Array, Verdict

__all__ = ["at_slot", "at_tokens", "judged", "leading"]


def leading(xp: Any, kept: Array, like: Array) -> Array:
    """Return [R], how many of kept [R, B - 1] (booleans) are true before the first that is not; typed as `like`."""
    return xp.sum(xp.cumulative_prod(xp.astype(kept, like.dtype), axis=-1), axis=-1, dtype=like.dtype)


def at_slot(xp: Any, values: Array, slot: Array) -> Array:
    """Return values[r, slot[r]] for values [R, n] or [R, n, V] and slot [R]."""
    index = slot[:, None] if values.ndim == 2 else slot[:, None, None]
    return xp.take_along_axis(values, index, axis=1)[:, 0, ...]


def at_tokens(xp: Any, values: Array, tokens: Array) -> Array:
    """Return values[r, i, tokens[r, i]] [R, n], for values [R, n or more, V] and tokens [R, n]."""
    return xp.take_along_axis(values[:, : tokens.shape[1], :], tokens[:, :, None], axis=-1)[:, :, 0]


def judged(xp: Any, drafted: Array, kept: Array, choice: Array) -> Verdict:
    """Keep drafted tokens up to the first that `kept` [R, B - 1] is false of; then emit `choice` [R, B] there."""
    choice = xp.astype(choice, drafted.dtype)
    if drafted.shape[1] == 0:  # as in every step of plain decoding
        return Verdict(xp.sum(drafted, axis=-1, dtype=drafted.dtype), choice[:, 0])
    num_accepted = leading(xp, kept, drafted)
    return Verdict(num_accepted, at_slot(xp, choice, num_accepted))
