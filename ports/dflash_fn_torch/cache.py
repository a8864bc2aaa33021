"""K/V caches that are values and yet are written in place: (buffer, lengths), copied only when someone could tell.

A `Buffer` holds the K and V of all layers and knows, by weak references, which `Cache` values look at it. A cache
sees the slots below its lengths and nothing else. So appending to a cache may write the slots above its lengths in
place as long as no live cache sees any of them; where one does, the buffer is copied first. In the ordinary loop
older states are shorter than newer ones, so nothing is ever copied; forks and kept states pay for what they need.

The attention kernel multiplies slots that nobody sees by a weight of exactly zero, and zero times NaN is NaN. So a pass
finds zeros beyond the slots that it claims: buffers start as zeros, and what a longer, forgotten fork left there is
cleared when a shorter state goes on. In the ordinary loop every pass claims beyond the last, and there is nothing to
clear.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = [
    "Buffer",
    "Cache",
    "CopyCounts",
    "Family",
    "append",
    "join",
    "mark",
    "new",
    "reserve",
    "rewind",
    "select",
    "split",
]

KV_BUCKET = 512
"""Attended lengths are multiples of this, the block in which torch's CPU kernel walks the keys (see docs/notes)."""


@dataclass(slots=True)
class CopyCounts:
    """How often buffers were copied, over all caches that stem from one `new`.

    Attributes:
        copies: because a live cache saw the slots to be written.
        growths: because the buffer was full.
    """

    copies: int = 0
    growths: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Buffer:
    """Storage shared by caches; only this module writes its fields.

    Attributes:
        keys: one [R, Hkv, N, D] tensor a layer.
        values: the same.
        counts: copy counters of this buffer's line.
        written: slots from which on each row holds zeros.
        live: the caches that look at this buffer.
        lock: held while a cache claims slots or joins the live ones, so that threads which fork one state do not claim
            the same slots.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    counts: CopyCounts
    written: tuple[int, ...]
    live: weakref.WeakSet[Cache] = field(default_factory=weakref.WeakSet)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def capacity(self) -> int:
        """Slots a row, N."""
        return self.keys[0].shape[2]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Cache:
    """What one state sees of a buffer.

    Attributes:
        buffer: the storage.
        lengths: tokens that each row sees.
        marks: lengths that `rewind` goes back to.
    """

    buffer: Buffer
    lengths: tuple[int, ...]
    marks: tuple[int, ...]

    def __post_init__(self) -> None:
        with self.buffer.lock:
            self.buffer.live.add(self)


@dataclass(frozen=True, slots=True)
class Family:
    """The caches after 0..S more tokens: `full` sees all S of them, so that none is overwritten while this lives."""

    start: Cache
    full: Cache


def new(layers: int, rows: int, heads: int, dim: int, capacity: int, *, dtype: torch.dtype, device: str) -> Cache:
    """Return an empty cache of [rows, heads, capacity rounded up, dim] for each layer."""
    shape = (rows, heads, _rounded(capacity), dim)
    keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
    values = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
    return Cache(Buffer(keys, values, CopyCounts(), (0,) * rows), (0,) * rows, (0,) * rows)


def append(cache: Cache, count: int) -> Family:
    """Claim `count` slots a row after the cache's lengths; the caller then writes them through `full.buffer`.

    Guarantees:
        P09: every cache that is kept shows what it showed when it was made, in any sequence of operations.
    """
    buffer = cache.buffer
    lengths = tuple(length + count for length in cache.lengths)
    with buffer.lock:
        if max(lengths) <= buffer.capacity and not _seen_beyond(buffer, cache.lengths):
            _clear(buffer, lengths)
            return Family(cache, Cache(buffer, lengths, cache.marks))
    if max(lengths) > buffer.capacity:
        fresh = _copied(cache, max(max(lengths), buffer.capacity * 3 // 2))
        fresh.counts.growths += 1
    else:
        fresh = _copied(cache, buffer.capacity)
        fresh.counts.copies += 1
    _clear(fresh, lengths)
    return Family(Cache(fresh, cache.lengths, cache.marks), Cache(fresh, lengths, cache.marks))


def select(family: Family, counts: tuple[int, ...]) -> Cache:
    """Return the cache after the first `counts[r]` claimed slots of each row r."""
    start = family.start
    lengths = tuple(length + count for length, count in zip(start.lengths, counts, strict=True))
    return Cache(family.full.buffer, lengths, start.marks)


def mark(cache: Cache) -> Cache:
    """Return the same cache, marked at its present lengths."""
    return Cache(cache.buffer, cache.lengths, cache.lengths)


def rewind(cache: Cache) -> Cache:
    """Return the cache as it was at its marks."""
    return Cache(cache.buffer, cache.marks, cache.marks)


def reserve(cache: Cache, capacity: int) -> Cache:
    """Return the same cache in a buffer of at least `capacity` slots."""
    if capacity <= cache.buffer.capacity:
        return cache
    fresh = _copied(cache, capacity)
    fresh.counts.growths += 1
    return Cache(fresh, cache.lengths, cache.marks)


def split(cache: Cache) -> tuple[Cache, ...]:
    """Return one cache a row; a single row is returned as it is, more rows are copied."""
    if len(cache.lengths) == 1:
        return (cache,)
    return tuple(_row(cache, row) for row in range(len(cache.lengths)))


def join(caches: tuple[Cache, ...]) -> Cache:
    """Return one cache of all the rows; a single cache is returned as it is, more are copied."""
    if len(caches) == 1:
        return caches[0]
    lengths = tuple(length for cache in caches for length in cache.lengths)
    marks = tuple(point for cache in caches for point in cache.marks)
    capacity = max(cache.buffer.capacity for cache in caches)
    keys = tuple(_stacked(parts, capacity) for parts in zip(*(cache.buffer.keys for cache in caches), strict=True))
    values = tuple(_stacked(parts, capacity) for parts in zip(*(cache.buffer.values for cache in caches), strict=True))
    written = tuple(end for cache in caches for end in cache.buffer.written)
    return Cache(Buffer(keys, values, CopyCounts(), written), lengths, marks)


def write(store: Tensor, starts: tuple[int, ...], rows: Tensor) -> None:
    """Write [R, S, Hkv, D] into the slots from `starts[r]` on of each row of a [R, Hkv, N, D] store."""
    size = rows.shape[1]
    for row, start in enumerate(starts):
        store[row, :, start : start + size] = rows[row].transpose(0, 1)


def attended(cache: Cache, bucket: int = KV_BUCKET) -> int:
    """Return how many slots a pass attends to: the longest row, rounded up to the bucket."""
    return min(-(-max(cache.lengths) // bucket) * bucket, cache.buffer.capacity)


def _rounded(count: int) -> int:
    return max(1, -(-count // KV_BUCKET)) * KV_BUCKET


def _seen_beyond(buffer: Buffer, lengths: tuple[int, ...]) -> bool:
    return any(seen > length for cache in buffer.live for seen, length in zip(cache.lengths, lengths, strict=True))


def _clear(buffer: Buffer, ends: tuple[int, ...]) -> None:
    """Put zeros beyond the slots that a pass is about to write; what it finds there no live cache sees."""
    for row, (end, written) in enumerate(zip(ends, buffer.written, strict=True)):
        if written > end:
            with torch.inference_mode():
                for store in (*buffer.keys, *buffer.values):
                    store[row, :, end:written].zero_()
    buffer.written = ends


def _copied(cache: Cache, capacity: int) -> Buffer:
    length = max(cache.lengths)
    buffer = cache.buffer
    keys = tuple(_resized(keys, length, _rounded(capacity)) for keys in buffer.keys)
    values = tuple(_resized(values, length, _rounded(capacity)) for values in buffer.values)
    return Buffer(keys, values, buffer.counts, tuple(min(end, length) for end in buffer.written))


def _resized(store: Tensor, length: int, capacity: int) -> Tensor:
    rows, heads, _, dim = store.shape
    fresh = store.new_zeros((rows, heads, capacity, dim))
    fresh[:, :, :length] = store[:, :, :length]
    return fresh


def _row(cache: Cache, row: int) -> Cache:
    buffer = cache.buffer
    keys = tuple(keys[row : row + 1].clone() for keys in buffer.keys)
    values = tuple(values[row : row + 1].clone() for values in buffer.values)
    return Cache(Buffer(keys, values, CopyCounts(), (buffer.written[row],)), (cache.lengths[row],), (cache.marks[row],))


def _stacked(parts: tuple[Tensor, ...], capacity: int) -> Tensor:
    return torch.cat([part if part.shape[2] == capacity else _resized(part, part.shape[2], capacity) for part in parts])
