"""Proposers: functions that guess a block in place of the pair's draft, or beside it.

A proposer is any function (state, pair, block size) -> tokens [R, B - 1]. It may guess what it likes: what is emitted
does not depend on it (P01). `decode(..., proposer=...)` asks it; the state that it sees has its context features read,
so that it may ask the draft by `propose(state, pair, block_size=B)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dflash_fn.checks import check_count
from dflash_fn.records import Array, DecodeState, Pair, Proposer
from dflash_fn.steps import propose

__all__ = ["BLOCK", "PROPOSERS", "continuation", "lookup_or_draft", "ngram", "occurred", "own_block"]

BLOCK = 8
"""The block size of a proposer where no draft brings its own."""


def own_block(pair: Pair, *, proposes: bool) -> int:
    """Return the block size where none is named: the draft's; without a draft `BLOCK` for a proposer, and else 1."""
    return BLOCK if proposes and pair.draft is None else pair.block_size


def continuation(tokens: Sequence[int], count: int, *, longest: int = 4) -> list[int]:
    """Guess how a text goes on from the n-grams that occurred in it before.

    Each token is the one that followed the latest earlier occurrence of the longest suffix, of at most `longest`
    tokens, that occurred before; guessed tokens count as text.

    Args:
        tokens: the text so far.
        count: how many to guess.
        longest: tokens of the longest suffix that is looked for.

    Returns:
        `count` tokens, or fewer where no suffix occurred before.

    Source:
        Saxena 2023, prompt lookup decoding; here with every suffix length, and anew for each token.

    Example:
        >>> continuation([7, 1, 2, 3, 9, 1, 2], 4)
        [3, 9, 1, 2]
    """
    text = np.array([*tokens, *[0] * count], dtype=np.int64)
    begun = len(tokens)
    for end in range(begun, begun + count):
        follower = _follower(text[:end], longest)
        if follower is None:
            return text[begun:end].tolist()
        text[end] = follower
    return text[begun:].tolist()


def _follower(text: np.ndarray, longest: int) -> int | None:
    """Return the token after the latest earlier occurrence of the longest suffix that has one."""
    ends = np.flatnonzero(text[:-1] == text[-1]) if len(text) > 1 else np.zeros(0, dtype=np.int64)
    if not len(ends):
        return None
    for back in range(1, min(longest, len(text) - 1)):
        earlier = ends[ends >= back]
        longer = earlier[text[earlier - back] == text[-1 - back]]
        if not len(longer):
            break
        ends = longer
    return int(text[ends[-1] + 1])


def ngram(longest: int = 4) -> Proposer:
    """Return the free baseline: guess by `continuation`, with no model. What it cannot guess repeats the anchor.

    Raises:
        InputError: `longest` is below 1.
    """
    check_count("longest", longest, least=1)

    def ask(state: DecodeState, pair: Pair, size: int) -> Array:
        rows = [_filled(ids, continuation(ids, size - 1, longest=longest), size - 1) for ids in state.tokens]
        return pair.port.asarray(np.array(rows, dtype=np.int64).reshape(len(rows), size - 1), pair.target.device)

    return ask


def _filled(tokens: Sequence[int], guess: list[int], count: int) -> list[int]:
    return guess + [tokens[-1]] * (count - len(guess))


def lookup_or_draft(longest: int = 4, least: int = 2) -> Proposer:
    """Return both together: a row's `continuation` where a suffix of at least `least` tokens occurred, else the draft.

    Args:
        longest: as in `continuation`.
        least: tokens that must have occurred before, in a row, for the lookup to be trusted.

    Raises:
        InputError: `longest` or `least` is below 1.
    """
    check_count("longest", longest, least=1)
    check_count("least", least, least=1)

    def ask(state: DecodeState, pair: Pair, size: int) -> Array:
        xp, device = pair.port.xp, pair.target.device
        rows = [continuation(ids, size - 1, longest=longest) if occurred(ids, least) else [] for ids in state.tokens]
        guessed = pair.port.asarray(np.array([_filled((0,), row, size - 1) for row in rows], dtype=np.int64), device)
        if all(rows):
            return guessed
        drafted = propose(state, pair, block_size=size).tokens
        trusted = pair.port.asarray(np.array([[bool(row)] for row in rows]), device)
        return xp.where(trusted, xp.astype(guessed, drafted.dtype), drafted)

    return ask


def occurred(tokens: Sequence[int], count: int) -> bool:
    """Whether the last `count` tokens stand somewhere before, with a token after them."""
    text = np.array(tokens, dtype=np.int64)
    if len(text) <= count:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(text[:-1], count)
    return bool((windows == text[-count:]).all(axis=1).any())


PROPOSERS: dict[str, Callable[[], Proposer]] = {"ngram": ngram, "both": lookup_or_draft}
"""Words in place of a draft, on the command line and in recipes: `ngram` needs no draft, `both` asks one too."""
