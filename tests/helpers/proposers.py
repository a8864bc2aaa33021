"""Proposers that know the continuation: always right, always wrong, right for as many tokens as a script says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dflash_fn.records import Array, DecodeState, Pair, Proposer

__all__ = ["at_random", "constant", "corrupted", "right", "scripted", "wrong"]

Choice = Callable[[DecodeState, int, np.ndarray], np.ndarray]
"""A function (state, row, true tokens) -> for each drafted slot, whether to spoil it."""


def _knowing(texts: Sequence[Sequence[int]], spoil: Choice) -> Proposer:
    def propose(state: DecodeState, pair: Pair, size: int) -> Array:
        rows = [_true(text, len(ids), size - 1) for text, ids in zip(texts, state.tokens, strict=True)]
        bad = [spoil(state, row, tokens) for row, tokens in enumerate(rows)]
        drafted = np.where(np.array(bad), np.array(rows) + 1, np.array(rows)) % pair.target.spec.vocab_size
        return pair.port.asarray(drafted.astype(np.int64), pair.target.device)

    return propose


def _true(text: Sequence[int], position: int, count: int) -> np.ndarray:
    known = list(text[position : position + count])
    return np.array(known + [0] * (count - len(known)), dtype=np.int64)


def right(texts: Sequence[Sequence[int]]) -> Proposer:
    """Propose what follows in `texts` (prompt included, one a row); token 0 beyond their ends."""
    return _knowing(texts, lambda state, row, tokens: np.zeros(len(tokens), dtype=bool))


def wrong(texts: Sequence[Sequence[int]]) -> Proposer:
    """Propose in every slot another token than the one that follows."""
    return _knowing(texts, lambda state, row, tokens: np.ones(len(tokens), dtype=bool))


def scripted(texts: Sequence[Sequence[int]], plan: Sequence[Sequence[int]]) -> Proposer:
    """Be right for `plan[step - 1][row]` tokens and then wrong; beyond the plan's end, right for all."""

    def spoil(state: DecodeState, row: int, tokens: np.ndarray) -> np.ndarray:
        step = state.step - 1
        return np.arange(len(tokens)) == plan[step][row] if step < len(plan) else np.zeros(len(tokens), dtype=bool)

    return _knowing(texts, spoil)


def corrupted(texts: Sequence[Sequence[int]], seed: int, rate: float) -> Proposer:
    """Be wrong in a share of the slots, as a function of (seed, row, position)."""

    def spoil(state: DecodeState, row: int, tokens: np.ndarray) -> np.ndarray:
        return np.random.default_rng([seed, row, len(state.tokens[row])]).random(len(tokens)) < rate

    return _knowing(texts, spoil)


def at_random(seed: int) -> Proposer:
    """Propose anything."""

    def propose(state: DecodeState, pair: Pair, size: int) -> Array:
        rng = np.random.default_rng([seed, state.step, sum(map(len, state.tokens))])
        drafted = rng.integers(0, pair.target.spec.vocab_size, (len(state.tokens), size - 1))
        return pair.port.asarray(drafted, pair.target.device)

    return propose


def constant(token: int) -> Proposer:
    """Propose one token, always."""

    def propose(state: DecodeState, pair: Pair, size: int) -> Array:
        return pair.port.asarray(np.full((len(state.tokens), size - 1), token, dtype=np.int64), pair.target.device)

    return propose
