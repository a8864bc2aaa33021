"""K/V caches that are values and yet are written in place: (buffer, lengths), copied only when someone could tell.

A `Buffer` holds the K and V of all layers and knows, by weak references, which `Cache` values look at it. A cache
sees the slots below its lengths and nothing else. So appending to a cache may write the slots above its lengths in
place as long as no live cache sees any of them; where one does, the buffer is copied first. In the ordinary loop
older states are shorter than newer ones, so nothing is ever copied; forks and kept states pay for what they need.

The attention kernel multiplies slots that nobody sees by a weight of exactly zero, and zero times NaN is NaN. So a pass
finds zeros beyond the slots that it claims: buffers start as zeros, and what a longer, forgotten fork left there is
cleared when a shorter state goes on. In the ordinary loop every pass claims beyond the last, and there is nothing to
clear.

Layers that slide have a buffer with a window: slot n of a row holds position `bases[r] + n`, and where the buffer is
full, what no query can see any more is left behind with it. That is a copy of the window once in about as many tokens,
and bases are multiples of the bucket, so that keys lie in the blocks in which they would lie without it.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = [
    "Buffer",
    "Cache",
    "CopyCounts",
    "Family",
    "Span",
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


UNBOUNDED = 1 << 62


@dataclass(slots=True)
class CopyCounts:
    """How often buffers were copied, over all caches that stem from one `new`.

    Attributes:
        copies: because a live cache saw the slots to be written.
        growths: because the buffer was full.
        slides: because a buffer with a window was full.
    """

    copies: int = 0
    growths: int = 0
    slides: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Buffer:
    """Storage shared by caches; only this module writes its fields.

    Attributes:
        keys: one [R, Hkv, N, D] tensor a layer.
        values: the same.
        counts: copy counters of this buffer's line.
        written: slots from which on each row holds zeros.
        bases: the position that each row's slot 0 holds; multiples of `KV_BUCKET`.
        window: positions that a query sees, its own included; None for all.
        live: the caches that look at this buffer.
        lock: held while a cache claims slots or joins the live ones, so that threads which fork one state do not claim
            the same slots.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    counts: CopyCounts
    written: tuple[int, ...]
    bases: tuple[int, ...]
    window: int | None = None
    live: weakref.WeakSet[Cache] = field(default_factory=weakref.WeakSet)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def capacity(self) -> int:
        """Slots a row, N; without layers there is room for everything."""
        return self.keys[0].shape[2] if self.keys else UNBOUNDED


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


@dataclass(frozen=True, slots=True)
class Span:
    """The slots that a pass attends to.

    Attributes:
        firsts: the first slot of each row.
        positions: what those slots hold.
        count: how many slots follow, themselves included.
    """

    firsts: tuple[int, ...]
    positions: tuple[int, ...]
    count: int


def new(
    layers: int,
    rows: int,
    heads: int,
    dim: int,
    capacity: int,
    *,
    dtype: torch.dtype,
    device: str | Sequence[str],
    window: int | None = None,
) -> Cache:
    """Return an empty cache of [rows, heads, capacity rounded up, dim] for each layer; a window bounds the capacity.

    The device is that of all layers, or there is one for each.
    """
    shape = (rows, heads, _bounded(capacity, window), dim)
    places = (device,) * layers if isinstance(device, str) else device
    keys = tuple(torch.zeros(shape, dtype=dtype, device=place) for place in places)
    values = tuple(torch.zeros(shape, dtype=dtype, device=place) for place in places)
    zeros = (0,) * rows
    return Cache(Buffer(keys, values, CopyCounts(), zeros, zeros, window), zeros, zeros)


def append(cache: Cache, count: int) -> Family:
    """Claim `count` slots a row after the cache's lengths; the caller then writes them through `full.buffer`.

    Guarantees:
        P09: every cache that is kept shows what it showed when it was made, in any sequence of operations.
    """
    buffer = cache.buffer
    lengths = tuple(length + count for length in cache.lengths)
    needed = max(length - base for length, base in zip(lengths, buffer.bases, strict=True))
    with buffer.lock:
        if needed <= buffer.capacity and not _seen_beyond(buffer, cache.lengths):
            _clear(buffer, lengths)
            return Family(cache, Cache(buffer, lengths, cache.marks))
    if needed > buffer.capacity and buffer.window is not None:
        fresh = _copied(cache, max(_bounded(UNBOUNDED, buffer.window), buffer.window + KV_BUCKET + count))
        fresh.counts.slides += 1
    elif needed > buffer.capacity:
        fresh = _copied(cache, max(needed, buffer.capacity * 3 // 2))
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
    buffer = cache.buffer
    wanted = _bounded(capacity - min(buffer.bases), buffer.window) if buffer.keys else 0
    if wanted <= buffer.capacity:
        return cache
    fresh = _copied(cache, wanted)
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
    bases = tuple(base for cache in caches for base in cache.buffer.bases)
    capacity = max(cache.buffer.capacity for cache in caches)
    keys = tuple(_stacked(parts, capacity) for parts in zip(*(cache.buffer.keys for cache in caches), strict=True))
    values = tuple(_stacked(parts, capacity) for parts in zip(*(cache.buffer.values for cache in caches), strict=True))
    written = tuple(end for cache in caches for end in cache.buffer.written)
    return Cache(Buffer(keys, values, CopyCounts(), written, bases, caches[0].buffer.window), lengths, marks)


def slots(cache: Cache) -> tuple[int, ...]:
    """Return the slot after each row's last token."""
    return tuple(length - base for length, base in zip(cache.lengths, cache.buffer.bases, strict=True))


def write(store: Tensor, starts: tuple[int, ...], rows: Tensor) -> None:
    """Write [R, S, Hkv, D] into the slots from `starts[r]` on of each row of a [R, Hkv, N, D] store."""
    size = rows.shape[1]
    for row, start in enumerate(starts):
        store[row, :, start : start + size] = rows[row].transpose(0, 1)


def attended(family: Family, bucket: int = KV_BUCKET) -> Span:
    """Return which slots a pass attends to: whole buckets, from the first position that a query sees to the last.

    The buckets are those of positions, whatever the bases are. One number of slots serves all rows.
    """
    buffer = family.full.buffer
    lasts = [-(-slot // bucket) * bucket for slot in slots(family.full)]
    firsts = [0] * len(lasts)
    if buffer.window is not None:
        seen = [slot - buffer.window + 1 for slot in slots(family.start)]
        firsts = [max(0, slot) // bucket * bucket for slot in seen]
    count = min(max(last - first for first, last in zip(firsts, lasts, strict=True)), buffer.capacity)
    firsts = tuple(min(first, buffer.capacity - count) for first in firsts)
    return Span(firsts, tuple(first + base for first, base in zip(firsts, buffer.bases, strict=True)), count)


def placed(empty: Cache, length: int) -> Cache:
    """Return a single-row cache of `length` tokens in a buffer of its own, whose visible slots are still to be written.

    Args:
        empty: a cache of no tokens, whose capacity is enough.
        length: tokens.
    """
    buffer, window = empty.buffer, empty.buffer.window
    keys, values = (tuple(torch.zeros_like(store) for store in stores) for stores in (buffer.keys, buffer.values))
    first = 0 if window is None else max(0, length - window + 1)
    base = first // KV_BUCKET * KV_BUCKET
    return Cache(Buffer(keys, values, CopyCounts(), (length - base,), (base,), window), (length,), (0,))


def seen_by(cache: Cache, row: int) -> slice:
    """Return the slots of a row that queries after it can see."""
    end = slots(cache)[row]
    window = cache.buffer.window
    return slice(0 if window is None else max(0, end - window + 1), end)


def _bounded(capacity: int, window: int | None) -> int:
    """Return a capacity in buckets; with a window no more than twice its buckets, and one for a pass."""
    return _rounded(capacity if window is None else min(capacity, 2 * _rounded(window) + KV_BUCKET))


def _rounded(count: int) -> int:
    return max(1, -(-count // KV_BUCKET)) * KV_BUCKET


def _seen_beyond(buffer: Buffer, lengths: tuple[int, ...]) -> bool:
    return any(cache.lengths != lengths and any(map(operator.gt, cache.lengths, lengths)) for cache in buffer.live)


def _clear(buffer: Buffer, lengths: tuple[int, ...]) -> None:
    """Put zeros beyond the slots that a pass is about to write; what it finds there no live cache sees."""
    ends = tuple(length - base for length, base in zip(lengths, buffer.bases, strict=True))
    for row, (end, written) in enumerate(zip(ends, buffer.written, strict=True)):
        if written > end:
            with torch.inference_mode():
                for store in (*buffer.keys, *buffer.values):
                    store[row, :, end:written].zero_()
    buffer.written = ends


def _copied(cache: Cache, capacity: int) -> Buffer:
    """Copy what a cache sees into a buffer of its own; with a window, what it can still see."""
    buffer = cache.buffer
    if buffer.window is not None:
        return _slid(cache, capacity)
    length = max(cache.lengths)
    keys = tuple(_resized(keys, length, _rounded(capacity)) for keys in buffer.keys)
    values = tuple(_resized(values, length, _rounded(capacity)) for values in buffer.values)
    written = tuple(min(end, length) for end in buffer.written)
    return Buffer(keys, values, buffer.counts, written, buffer.bases)


def _slid(cache: Cache, capacity: int) -> Buffer:
    buffer, ends = cache.buffer, slots(cache)
    shifts = tuple(seen_by(cache, row).start // KV_BUCKET * KV_BUCKET for row in range(len(ends)))

    def moved(store: Tensor) -> Tensor:
        rows, heads, _, dim = store.shape
        fresh = store.new_zeros((rows, heads, _rounded(capacity), dim))
        for row, (shift, end) in enumerate(zip(shifts, ends, strict=True)):
            fresh[row, :, : end - shift] = store[row, :, shift:end]
        return fresh

    bases = tuple(base + shift for base, shift in zip(buffer.bases, shifts, strict=True))
    written = tuple(end - shift for end, shift in zip(ends, shifts, strict=True))
    keys, values = (tuple(moved(store) for store in stores) for stores in (buffer.keys, buffer.values))
    return Buffer(keys, values, buffer.counts, written, bases, buffer.window)


def _resized(store: Tensor, length: int, capacity: int) -> Tensor:
    rows, heads, _, dim = store.shape
    fresh = store.new_zeros((rows, heads, capacity, dim))
    fresh[:, :, :length] = store[:, :, :length]
    return fresh


def _row(cache: Cache, row: int) -> Cache:
    buffer = cache.buffer
    keys = tuple(keys[row : row + 1].clone() for keys in buffer.keys)
    values = tuple(values[row : row + 1].clone() for values in buffer.values)
    fresh = Buffer(keys, values, CopyCounts(), (buffer.written[row],), (buffer.bases[row],), buffer.window)
    return Cache(fresh, (cache.lengths[row],), (cache.marks[row],))


def _stacked(parts: tuple[Tensor, ...], capacity: int) -> Tensor:
    return torch.cat([part if part.shape[2] == capacity else _resized(part, part.shape[2], capacity) for part in parts])
