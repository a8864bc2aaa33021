"""Randomness as a function of (seed, stream, counter), never of call order.

Philox4x32-10 on the host, the same numbers on every port and machine. Stream `target` is keyed by the absolute
position of the token that is drawn, and so is `noise`. `draft`, `accept` and `recover` are keyed by (position that the
block begins at, slot): a rule that looks ahead in the block must not reuse a position's number, and no two blocks of a
row begin at the same position, however often it was extended.
"""

from __future__ import annotations

import enum

import numpy as np

from dflash_fn import errors

__all__ = ["Stream", "philox", "uniforms", "words"]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)


class Stream(enum.IntEnum):
    """Independent sequences of one seed; the numbers are part of what a seed means and never change."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3
    NOISE = 4


def philox(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the Philox4x32-10 blocks of these counters.

    Args:
        counters: [n, 4] words of 32 bits, in any unsigned or non-negative integer dtype.
        keys: [2] or [n, 2] words of 32 bits.

    Returns:
        [n, 4] uint32.

    Source:
        Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3; Random123's known answers.

    Example:
        >>> [hex(word) for word in philox(np.zeros((1, 4)), np.zeros(2))[0].tolist()]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c = counters.astype(np.uint64).T
    key = np.broadcast_to(keys.astype(np.uint64), (counters.shape[0], 2)).T
    k0, k1 = key[0], key[1]
    c0, c1, c2, c3 = c
    for _ in range(ROUNDS):
        left, right = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> SHIFT) ^ c1 ^ k0, right & LOW, (left >> SHIFT) ^ c3 ^ k1, left & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seed: int, stream: Stream, counters: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) a counter.

    Args:
        seed: below 2 ** 64.
        stream: which sequence.
        counters: [n] integers below 2 ** 64: a position, or `position << 32 | slot`.

    Returns:
        [n] float64, multiples of 2 ** -53.

    Raises:
        InputError: a seed out of range.

    Guarantees:
        P10: the number at a counter depends on nothing but (seed, stream, counter).
    """
    made = _blocks(seed, stream, counters).astype(np.uint64)
    high, low = made[:, 0] >> np.uint64(5), made[:, 1] >> np.uint64(6)
    return ((high << np.uint64(26)) + low).astype(np.float64) * 2.0**-53


def words(seed: int, stream: Stream, counters: np.ndarray) -> np.ndarray:
    """Return two words of 31 bits a counter, which every port holds in any integer type; else as `uniforms`.

    Returns:
        [n, 2] int64.
    """
    return (_blocks(seed, stream, counters)[:, :2] >> np.uint32(1)).astype(np.int64)


def _blocks(seed: int, stream: Stream, counters: np.ndarray) -> np.ndarray:
    if not 0 <= seed < 2**64:
        raise errors.InputError(f"seed: got {seed}, expected an integer from 0 to 2**64 - 1")
    c = np.asarray(counters).astype(np.uint64)
    zeros = np.zeros_like(c)
    return philox(np.stack([c & LOW, c >> SHIFT, zeros + np.uint64(stream), zeros], axis=1), _key(seed))


def _key(seed: int) -> np.ndarray:
    return np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint64)
