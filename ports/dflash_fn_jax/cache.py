"""K/V caches: arrays that nobody can change, and how many of their slots each row sees.

Slots beyond a row's length hold whatever an earlier pass left there; no query sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_fn_jax.ops import scope

__all__ = ["Cache", "Family", "family", "join", "mark", "new", "reserve", "rewind", "roomy", "select", "split"]

LEAST_CAPACITY = 512
"""Capacities are this times a power of two: every other one would be compiled for anew."""


@dataclass(frozen=True, eq=False, slots=True)
class Cache:
    """What a model remembers of R rows.

    Attributes:
        keys: one [R, N, Hkv, D] array a layer.
        values: the same.
        lengths: tokens that each row sees.
        marks: lengths that `rewind` goes back to.
    """

    keys: tuple[Float[Array, "rows capacity kv_heads dim"], ...]
    values: tuple[Float[Array, "rows capacity kv_heads dim"], ...]
    lengths: tuple[int, ...]
    marks: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """Slots a row, N."""
        return self.keys[0].shape[1]

    @property
    def dtype(self) -> str:
        """Of keys and values."""
        return str(self.keys[0].dtype)


@dataclass(frozen=True, slots=True)
class Family:
    """The caches after 0..S more tokens: `full` holds all of them, `starts` is where they begin in each row."""

    starts: tuple[int, ...]
    full: Cache


def new(layers: int, rows: int, heads: int, dim: int, capacity: int, *, dtype: str) -> Cache:
    """Return an empty cache of [rows, capacity rounded up, heads, dim] for each layer."""
    with scope(dtype):
        zeros = jnp.zeros((rows, _rounded(capacity), heads, dim), dtype)
    return Cache((zeros,) * layers, (zeros,) * layers, (0,) * rows, (0,) * rows)


def roomy(cache: Cache, count: int) -> Cache:
    """Return the same cache with room for `count` more tokens in every row."""
    return reserve(cache, max(cache.lengths) + count)


def family(cache: Cache, count: int, keys: Sequence[Array], values: Sequence[Array]) -> Family:
    """Return the caches after up to `count` more tokens, whose K and V are in these arrays."""
    lengths = tuple(length + count for length in cache.lengths)
    return Family(cache.lengths, Cache(tuple(keys), tuple(values), lengths, cache.marks))


def select(family: Family, counts: tuple[int, ...]) -> Cache:
    """Return the cache after the first `counts[r]` tokens of each row r."""
    lengths = tuple(start + count for start, count in zip(family.starts, counts, strict=True))
    return replace(family.full, lengths=lengths)


def mark(cache: Cache) -> Cache:
    """Return the same cache, marked at its present lengths."""
    return replace(cache, marks=cache.lengths)


def rewind(cache: Cache) -> Cache:
    """Return the cache as it was at its marks."""
    return replace(cache, lengths=cache.marks)


def reserve(cache: Cache, capacity: int) -> Cache:
    """Return the same cache in arrays of at least `capacity` slots."""
    if capacity <= cache.capacity:
        return cache
    extra = ((0, 0), (0, _rounded(capacity) - cache.capacity), (0, 0), (0, 0))
    with scope(cache.dtype):
        keys, values = (tuple(jnp.pad(store, extra) for store in stores) for stores in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)


def split(cache: Cache) -> tuple[Cache, ...]:
    """Return one cache a row."""
    if len(cache.lengths) == 1:
        return (cache,)
    with scope(cache.dtype):
        return tuple(_row(cache, row) for row in range(len(cache.lengths)))


def join(caches: tuple[Cache, ...]) -> Cache:
    """Return one cache of all the rows."""
    if len(caches) == 1:
        return caches[0]
    capacity = max(cache.capacity for cache in caches)
    caches = tuple(reserve(cache, capacity) for cache in caches)
    lengths = tuple(length for cache in caches for length in cache.lengths)
    marks = tuple(point for cache in caches for point in cache.marks)
    with scope(caches[0].dtype):
        keys = tuple(jnp.concatenate(parts) for parts in zip(*(cache.keys for cache in caches), strict=True))
        values = tuple(jnp.concatenate(parts) for parts in zip(*(cache.values for cache in caches), strict=True))
    return Cache(keys, values, lengths, marks)


def _rounded(count: int) -> int:
    blocks = max(1, -(-count // LEAST_CAPACITY))
    return LEAST_CAPACITY << (blocks - 1).bit_length()


def _row(cache: Cache, row: int) -> Cache:
    keys, values = (tuple(store[row : row + 1] for store in stores) for stores in (cache.keys, cache.values))
    return Cache(keys, values, (cache.lengths[row],), (cache.marks[row],))
