"""Attention of a chunk over a cache that already holds the chunk's own K and V."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from jaxtyping import Bool, Float, Integer

__all__ = ["Reach", "attend", "mask"]

MAX_WIDTH = 32
"""Metal's kernel takes queries in tiles of 32; no wider block was measured."""

FULL_FROM = 9
"""From this many queries on Metal has one kernel, which walks the keys in order. Below, the number of keys decides into
how many parts it divides its sums (docs/notes/mlx-bits.md)."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys a layer's queries see.

    Attributes:
        causal: only keys at or before the query's position.
        window: only keys less than this many positions away; None for no limit.
    """

    causal: bool
    window: int | None


def mask(
    reach: Reach,
    starts: Integer[mx.array, " rows"],
    slots: int,
    firsts: Integer[mx.array, " rows"],
    keys: int,
) -> Bool[mx.array, "rows slots keys"]:
    """Return the mask of a reach, true where a key is seen, shared by all layers that have it.

    Args:
        reach: what the layers let queries see.
        starts: position of each row's first query.
        slots: queries a row; a layer that is not causal sees the keys of all of them, and of all before.
        firsts: position of each row's first attended key.
        keys: attended slots, at positions that follow each other.
    """
    key = firsts[:, None, None] + mx.arange(keys, dtype=starts.dtype)
    query = starts[:, None] + mx.arange(slots, dtype=starts.dtype)
    distance = query[:, :, None] - key
    last = query if reach.causal else query[:, -1:]
    seen = mx.broadcast_to(key <= last[:, :, None], distance.shape)
    return seen if reach.window is None else seen & (mx.abs(distance) < reach.window)


def attend(
    q: Float[mx.array, "rows slots heads dim"],
    keys: Float[mx.array, "rows kv_heads capacity dim"],
    values: Float[mx.array, "rows kv_heads capacity dim"],
    firsts: tuple[int, ...],
    mask: Bool[mx.array, "rows slots keys"],
) -> Float[mx.array, "rows slots heads*dim"]:
    """Return softmax(q k / sqrt(dim)) v over the slots that the mask is about, from `firsts[r]` on in row r.

    All rows are taken in one call, whose kernels compute each row apart.
    """
    rows, slots, heads, dim = q.shape
    length = mask.shape[-1]
    query, seen = q.swapaxes(1, 2), mask[:, None]
    if 1 < slots < FULL_FROM and mx.default_device() == mx.gpu:
        query, seen = pad_queries(query, FULL_FROM), pad_queries(seen, FULL_FROM)
    y = mx.fast.scaled_dot_product_attention(
        query, attended(keys, firsts, length), attended(values, firsts, length), scale=dim**-0.5, mask=seen
    )
    return y[:, :, :slots].swapaxes(1, 2).reshape(rows, slots, heads * dim)


def attended(
    store: Float[mx.array, "rows kv_heads capacity dim"], firsts: tuple[int, ...], length: int
) -> Float[mx.array, "rows kv_heads length dim"]:
    """Cut the attended slots out; copied only where rows differ in which they are."""
    if len(set(firsts)) == 1:
        return store[:, :, firsts[0] : firsts[0] + length]
    return mx.stack([rows[:, first : first + length] for rows, first in zip(store, firsts, strict=True)])


def pad_queries(
    x: Float[mx.array, "rows heads slots size"] | Bool[mx.array, "rows heads slots size"], least: int
) -> Float[mx.array, "rows heads least size"] | Bool[mx.array, "rows heads least size"]:
    """Repeat the last slot until there are `least`."""
    slots = [min(slot, x.shape[2] - 1) for slot in range(least)]
    return x[:, :, mx.array(slots)]
