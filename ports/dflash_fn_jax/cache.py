"""K/V caches: a row holds arrays that nobody can change, and how many of their slots it sees; a cache is its rows.

Slots beyond a row's length hold whatever an earlier pass left there; no query sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_fn.container import Bits
from dflash_fn_jax.ops import from_bits, own, scope, to_bits

__all__ = ["Cache", "Family", "Row", "append", "export", "mark", "new", "reserve", "restore", "rewind", "select"]

LEAST_CAPACITY = 512
"""Capacities are this times a power of two: every other one would be compiled for anew."""


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """What a model remembers of one row.

    Attributes:
        keys: one [N, Hkv, D] array a layer.
        values: the same.
        length: tokens that the row sees.
        mark: the length that `rewind` goes back to.
    """

    keys: tuple[Float[Array, "capacity kv_heads dim"], ...]
    values: tuple[Float[Array, "capacity kv_heads dim"], ...]
    length: int = 0
    mark: int = 0

    @property
    def capacity(self) -> int:
        """Slots, N."""
        return self.keys[0].shape[0]


Cache: TypeAlias = tuple[Row, ...]
"""One `Row` a row."""


@dataclass(frozen=True, slots=True)
class Family:
    """The caches after 0..S more tokens: `full` holds all of them, `start` is what they were added to."""

    start: Cache
    full: Cache


def new(layers: int, heads: int, dim: int, capacity: int, *, dtype: str) -> Row:
    """Return an empty row of [capacity rounded up, heads, dim] for each layer."""
    with scope(dtype):
        zeros = (jnp.zeros((_rounded(capacity), heads, dim), dtype),) * layers
    return Row(zeros, zeros)


def append(row: Row, count: int, keys: Sequence[Array], values: Sequence[Array]) -> Row:
    """Return the row after `count` more tokens, whose K and V are in these arrays."""
    return Row(tuple(keys), tuple(values), row.length + count, row.mark)


def select(family: Family, counts: tuple[int, ...]) -> Cache:
    """Return the cache after the first `counts[r]` tokens of each row r."""
    parts = zip(family.start, family.full, counts, strict=True)
    return tuple(replace(full, length=start.length + count) for start, full, count in parts)


def mark(cache: Cache) -> Cache:
    """Return the same cache, marked at its present lengths."""
    return tuple(replace(row, mark=row.length) for row in cache)


def rewind(cache: Cache) -> Cache:
    """Return the cache as it was at its marks."""
    return tuple(replace(row, length=row.mark) for row in cache)


def reserve(row: Row, capacity: int) -> Row:
    """Return the same row in arrays of at least `capacity` slots."""
    if capacity <= row.capacity:
        return row
    extra = ((0, _rounded(capacity) - row.capacity), (0, 0), (0, 0))
    with scope(str(row.keys[0].dtype)):
        keys, values = (tuple(jnp.pad(store, extra) for store in stores) for stores in (row.keys, row.values))
    return replace(row, keys=keys, values=values)


def export(cache: Cache) -> dict[str, Bits]:
    """Return the visible slots, as `dflash_fn.port.Port.export_cache` names them."""
    return {
        f"{layer}.{index}.{kind}": to_bits(np.asarray(store)[: row.length])
        for index, row in enumerate(cache)
        for kind, stores in (("keys", row.keys), ("values", row.values))
        for layer, store in enumerate(stores)
    }


def restore(empty: Row, arrays: Mapping[str, Bits], lengths: tuple[int, ...], marks: tuple[int, ...]) -> Cache:
    """Return a cache of what `export` returned, each row in the place of an empty one."""
    rows = []
    with scope(str(empty.keys[0].dtype)):
        for index, (length, mark) in enumerate(zip(lengths, marks, strict=True)):
            keys, values = (
                tuple(_filled(empty, arrays[f"{layer}.{index}.{kind}"]) for layer in range(len(empty.keys)))
                for kind in ("keys", "values")
            )
            rows.append(Row(keys, values, length, mark))
    return tuple(rows)


def _filled(empty: Row, bits: Bits) -> Array:
    known = from_bits(bits)
    return own(np.pad(known, ((0, empty.capacity - len(known)), (0, 0), (0, 0))))


def _rounded(count: int) -> int:
    blocks = max(1, -(-count // LEAST_CAPACITY))
    return LEAST_CAPACITY << (blocks - 1).bit_length()
