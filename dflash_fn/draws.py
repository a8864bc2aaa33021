"""Draws from weights: one uniform by inverse transform, or one race of shared noise. The same bits at every shape.

How a slot is drawn must not depend on the block it stands in, or the text at temperature > 0 would depend on the
block size (P07). Kernels that add up choose their order by the shape of the whole array. So sums are taken here over
a tree of pairs: nothing but additions of one element to another, whose rounding is fixed by IEEE 754, in an order that
depends on the vocabulary alone. What else is used (exp, log1p, maximum, sort, take) goes element by element or has
one right answer.
"""

from __future__ import annotations

from typing import Any

from dflash_fn.records import Array

__all__ = ["draw", "first_reaching", "noise", "one_hot", "race", "token_ids", "total", "tree", "wide"]

MASK = 0xFFFFFFFF
SPREAD, FIRST, SECOND = (word - (word >> 31 << 32) for word in (0x9E3779B1, 0x7FEB352D, 0x846CA68B))
"""Odd words, as signed numbers: no product of one with 32 bits and no sum with 31 more leaves 64, so none wraps."""

BELOW_1 = 2.0**-32 * (1 - 2.0**-24)
"""What a word is multiplied by: in float32 the largest words round up to 2 ** 32, and must not become 1."""


def wide(xp: Any, x: Array) -> Array:
    """Return an array in float32, or as it is where it is in float64."""
    return x if x.dtype == xp.float64 else xp.astype(x, xp.float32)


def token_ids(xp: Any, like: Array) -> Array:
    """Return [V], the numbers from 0 to V - 1, on the device of `like` [R, n, V]."""
    return xp.cumulative_sum(xp.astype(xp.ones_like(like[0, 0, :]), xp.int32), axis=0) - 1


def one_hot(xp: Any, tokens: Array, like: Array) -> Array:
    """Return [R, n, V], 1 at tokens [R, n] and 0 elsewhere, in float32, or float64 where `like` [R, n, V] is."""
    ids = xp.astype(token_ids(xp, like), tokens.dtype)
    return xp.astype(tokens[:, :, None] == ids[None, None, :], wide(xp, like[:, :, :1]).dtype)


def tree(xp: Any, weights: Array) -> list[Array]:
    """Return the sums of neighbours, of pairs of neighbours and so on, from the weights to their total.

    Args:
        xp: the port's array namespace.
        weights: [..., V], none below 0.

    Returns:
        levels: `levels[0]` is the weights, with zeros up to a power of two; `levels[-1]` [..., 1] is the total.
    """
    size = weights.shape[-1]
    depth = (size - 1).bit_length()
    if size < 1 << depth:
        weights = xp.concat([weights, xp.zeros_like(weights[..., : (1 << depth) - size])], axis=-1)
    levels = [weights]
    for _ in range(depth):
        levels.append(levels[-1][..., 0::2] + levels[-1][..., 1::2])
    return levels


def total(xp: Any, weights: Array) -> Array:
    """Return [..., 1], the sum of weights [..., V], by `tree`."""
    return tree(xp, weights)[-1]


def draw(xp: Any, weights: Array, u: Array) -> Array:
    """Return the first index whose cumulative weight exceeds u times the total: the inverse transform.

    Args:
        xp: the port's array namespace.
        weights: [..., V], none below 0, not all 0; they need not add up to 1.
        u: [...] numbers in [0, 1); 1.0 counts as the last number below it, since rounding to float32 makes such.

    Returns:
        [...] int64. An index of weight 0 is never drawn, whatever u is.

    Guarantees:
        P07: the index depends on its own weights and u alone, not on the shape of the array that they stand in.
    """
    levels = tree(xp, weights)
    return _descend(xp, levels, xp.astype(u, weights.dtype)[..., None] * levels[-1], passes=False)[..., 0]


def first_reaching(xp: Any, weights: Array, share: float) -> Array:
    """Return [..., 1] int64, the first index at which the cumulative weight reaches `share` of the total."""
    levels = tree(xp, weights)
    return _descend(xp, levels, share * levels[-1], passes=True)


def _descend(xp: Any, levels: list[Array], left_over: Array, *, passes: bool) -> Array:
    """Walk from the root to a leaf; go right where the left half does not exceed (`passes`: reach) what is left over.

    A half of weight 0 is never entered, so that rounding cannot lead to a leaf of weight 0.
    """
    index = xp.astype(xp.zeros_like(left_over), xp.int64)
    for level in reversed(levels[:-1]):
        left = xp.take_along_axis(level, 2 * index, axis=-1)
        right = xp.take_along_axis(level, 2 * index + 1, axis=-1)
        beyond = ((left_over > left) if passes else (left_over >= left)) & (right > 0)
        index = 2 * index + xp.astype(beyond, xp.int64)
        left_over = xp.where(beyond, left_over - left, left_over)
    return index


def race(xp: Any, weights: Array, words: Array) -> Array:
    """Return the index that wins a race of exponential clocks, each as fast as its weight: the Gumbel-max draw.

        argmax_v  weights[v] / E[v],  E[v] = -log(1 - noise[v])  exponential; equally argmax_v log weights[v] + G[v]

    Whoever races other weights against the same noise gets the same index with probability

        sum_v 1 / sum_w max(p[w] / p[v], q[w] / q[v])  >=  (1 - d) / (1 + d),  d the total variation of p and q

    and no draw that knows only its own weights and the noise has a better bound.

    Args:
        xp: the port's array namespace.
        weights: [R, n, V], none below 0, not all 0.
        words: [R, n, 2] integers below 2 ** 31: the numbers of stream `noise` at the slots' positions.

    Returns:
        [R, n] integers. An index of weight 0 never wins; ties go to the first index.

    Guarantees:
        P07: as for `draw`.

    Source:
        Maddison et al. 2014 (1411.0030); Daliri, Musco and Suresh 2408.07978, section 3, for the bound.
    """
    clocks = -xp.log1p(-noise(xp, weights, words))
    return xp.argmax(weights / clocks, axis=-1)


def noise(xp: Any, like: Array, words: Array) -> Array:
    """Return a number in (0, 1) a token, a function of (seed, position, token id) that all ports compute alike.

        b = id * SPREAD,  x = b ^ words[0]
        x ^= x >> 16,  x = x * FIRST + words[1],  x ^= x >> 15,  x = x * SECOND,  x ^= x >> 16    (all modulo 2**32)
        noise = (x + 1/2) / 2**32 * (1 - 2**-24)

    Two words of Philox stand for seed and position, so a hash that is much cheaper will do for the token id. All of it
    is exact integer arithmetic in 64 bits, for torch has no product of unsigned words.

    Args:
        xp: the port's array namespace.
        like: [R, n, V], whose shape and type are wanted.
        words: as `race` takes them.

    Source:
        Wellons 2018, "Prospecting for hash functions", `lowbias32`; the second word is ours.
    """
    ids, words = xp.astype(token_ids(xp, like), xp.int64), xp.astype(words, xp.int64)
    base, first = (ids * SPREAD) & MASK, words[:, :, 0:1]
    # the first shift is taken of both parts before they meet, where it is cheap: it distributes over ^
    x = (base ^ (base >> 16))[None, None, :] ^ (first ^ (first >> 16))
    x = (x * FIRST + words[:, :, 1:2]) & MASK
    x = ((x ^ (x >> 15)) * SECOND) & MASK
    return (xp.astype(x ^ (x >> 16), wide(xp, like[:, :1, :1]).dtype) + 0.5) * BELOW_1
