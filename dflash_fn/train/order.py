"""What is drawn while training, as a function of (seed, what for, step): never of call order, so that runs resume.

All numbers come from Philox (`dflash_fn.rng`); the key is the digest of the seed and of what the numbers are for.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from dflash_fn.rng import philox

__all__ = ["anchors", "batch", "normal", "numbers", "permutation", "subseed"]


def subseed(seed: int, purpose: str) -> int:
    """Return a seed of 64 bits for one purpose of a run.

    Example:
        >>> subseed(0, "anchors") == subseed(0, "anchors") != subseed(0, "order")
        True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest(), "little")


def numbers(seed: int, purpose: str, index: int, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1), float64, for one purpose at one index (a step, an epoch)."""
    key = subseed(seed, purpose)
    counters = np.zeros((count, 4), dtype=np.uint64)
    counters[:, 0] = np.arange(count)
    counters[:, 1:3] = [index & 0xFFFFFFFF, index >> 32]
    made = philox(counters, np.array([key & 0xFFFFFFFF, key >> 32], dtype=np.uint64)).astype(np.uint64)
    return ((made[:, 0] >> np.uint64(5)) * 2.0**26 + (made[:, 1] >> np.uint64(6))) * 2.0**-53


def normal(seed: int, purpose: str, *shape: int) -> np.ndarray:
    """Return float32 numbers of a standard normal law, by the Box-Muller transform of `numbers`."""
    size = int(np.prod(shape))
    drawn = numbers(seed, purpose, 0, 2 * size).reshape(2, size)
    made = np.sqrt(-2.0 * np.log(1.0 - drawn[0])) * np.cos(2.0 * np.pi * drawn[1])
    return made.reshape(shape).astype(np.float32)


@functools.lru_cache(maxsize=4)
def permutation(seed: int, purpose: str, epoch: int, count: int) -> np.ndarray:
    """Return the order of `count` things in an epoch; read only, as it is remembered."""
    made = np.argsort(numbers(seed, purpose, epoch, count), kind="stable")
    made.flags.writeable = False
    return made


def batch(seed: int, purpose: str, step: int, size: int, count: int) -> np.ndarray:
    """Return which of `count` things step `step` takes: epochs follow one another without a gap.

    Returns:
        [size] int64.
    """
    places = np.arange(step * size, (step + 1) * size)
    epochs, made = places // count, np.empty(size, dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        made[here] = permutation(seed, purpose, epoch, count)[places[here] % count]
    return made


def anchors(seed: int, step: int, starts: np.ndarray, lengths: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw anchors: different positions of each answer that have at least one token after them.

    Args:
        seed: of the run.
        step: of the optimiser.
        starts: [S] position of each answer's first token.
        lengths: [S] tokens of each sequence.
        count: N anchors a sequence.

    Returns:
        [S, N] positions, ascending, and [S, N] whether they count: a short answer has fewer anchors than N, and the
        places left over repeat its first one.

    Source:
        arXiv 2602.06036, section 4: random anchors. There up to 512 a sequence; a block then often holds the next
        anchor, which is no leak, as blocks do not see one another.
    """
    rows, longest = len(starts), int(lengths.max())
    drawn = numbers(seed, "anchors", step, rows * longest).reshape(rows, longest)
    places = np.arange(longest)
    free = (places >= starts[:, None]) & (places < lengths[:, None] - 1)
    drawn = np.pad(np.where(free, drawn, 2.0), ((0, 0), (0, max(0, count - longest))), constant_values=2.0)
    chosen = np.argsort(drawn, axis=1, kind="stable")[:, :count]
    real = np.take_along_axis(drawn, chosen, axis=1) < 2.0
    chosen = np.where(real, chosen, np.minimum(starts, lengths - 1)[:, None])
    ordered = np.argsort(chosen, axis=1, kind="stable")
    return np.take_along_axis(chosen, ordered, axis=1), np.take_along_axis(real, ordered, axis=1)
