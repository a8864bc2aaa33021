"""Attention of a chunk over a cache that already holds the chunk's own K and V."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from jaxtyping import Bool, Float, Integer

__all__ = ["Reach", "attend", "masks"]

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


def masks(
    reaches: set[Reach],
    starts: Integer[mx.array, " rows"],
    slots: int,
    keys: int,
) -> dict[Reach, Bool[mx.array, "rows slots keys"]]:
    """Return one mask a reach, true where a key is seen, shared by all layers that have it.

    Args:
        reaches: what the layers need.
        starts: position of each row's first query.
        slots: queries a row; a layer that is not causal sees the keys of all of them, and of all before.
        keys: attended slots; key n stands at position n.
    """
    key = mx.arange(keys, dtype=starts.dtype)
    query = starts[:, None] + mx.arange(slots, dtype=starts.dtype)
    distance = query[:, :, None] - key
    made = {}
    for reach in reaches:
        last = query if reach.causal else query[:, -1:]
        seen = mx.broadcast_to(key <= last[:, :, None], distance.shape)
        if reach.window is not None:
            seen = seen & (mx.abs(distance) < reach.window)
        made[reach] = seen
    return made


def attend(
    q: Float[mx.array, "rows slots heads dim"],
    keys: Float[mx.array, "rows kv_heads capacity dim"],
    values: Float[mx.array, "rows kv_heads capacity dim"],
    mask: Bool[mx.array, "rows slots keys"],
) -> Float[mx.array, "rows slots heads*dim"]:
    """Return softmax(q k / sqrt(dim) + mask) v; all rows in one call, whose kernels compute each row apart."""
    rows, slots, heads, dim = q.shape
    length = mask.shape[-1]
    query, seen = q.swapaxes(1, 2), mask[:, None]
    if 1 < slots < FULL_FROM and mx.default_device() == mx.gpu:
        query, seen = pad_queries(query, FULL_FROM), pad_queries(seen, FULL_FROM)
    y = mx.fast.scaled_dot_product_attention(
        query, keys[:, :, :length], values[:, :, :length], scale=dim**-0.5, mask=seen
    )
    return y[:, :, :slots].swapaxes(1, 2).reshape(rows, slots, heads * dim)


def pad_queries(
    x: Float[mx.array, "rows heads slots size"] | Bool[mx.array, "rows heads slots size"], least: int
) -> Float[mx.array, "rows heads least size"] | Bool[mx.array, "rows heads least size"]:
    """Repeat the last slot until there are `least`."""
    slots = [min(slot, x.shape[2] - 1) for slot in range(least)]
    return x[:, :, mx.array(slots)]
