"""K/V caches that are values: (buffer, lengths), copied only when someone could tell.

A `Buffer` holds the K and V of all layers and knows, by weak references, which `Cache` values look at it. A cache
sees the slots below its lengths and nothing else. mlx's arrays are values too: a pass computes new arrays, with the
chunk's K and V in the slots above the cache's lengths, and `commit` puts them in the place of the old ones. The older
caches that look at the buffer see the new arrays from then on, and the same tokens in them, as long as no live cache
saw the slots that were filled; where one did, `append` copies the buffer first.

That nobody keeps the old arrays is what makes this cheap: mlx then writes the chunk into their memory (it calls that
donation) and copies nothing. In the ordinary loop older states are shorter than newer ones, so nothing is ever copied;
forks and kept states pay for what they need.

Attention multiplies slots that nobody sees by a weight of exactly zero, and zero times NaN is NaN. So a pass finds
zeros beyond the slots that it claims: buffers start as zeros, and what a longer, forgotten fork left there is cleared
when a shorter state goes on. In the ordinary loop every pass claims beyond the last, and there is nothing to clear.

Layers that slide have a buffer with a window: slot n of a row holds position `bases[r] + n`, and where the buffer is
full, what no query can see any more is left behind with it. That is a copy of the window once in about as many tokens,
and bases are multiples of the bucket, so that keys lie in the blocks in which they would lie without it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

__all__ = [
    "Buffer",
    "Cache",
    "CopyCounts",
    "Family",
    "Span",
    "append",
    "commit",
    "join",
    "mark",
    "new",
    "placed",
    "reserve",
    "rewind",
    "select",
    "slots",
    "split",
    "stores",
    "write",
]

KV_BUCKET = 256
"""Attended lengths are multiples of this, and so of the 16, 32 or 64 keys that Metal's kernel takes at once."""


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
        keys: one [R, Hkv, N, D] array a layer.
        values: the same.
        counts: copy counters of this buffer's line.
        written: slots from which on each row holds zeros.
        bases: the position that each row's slot 0 holds; multiples of `KV_BUCKET`.
        window: positions that a query sees, its own included; None for all.
        live: the caches that look at this buffer.
        lock: held while a cache claims slots or joins the live ones, so that threads which fork one state do not claim
            the same slots, and while arrays are replaced: until the device has them, new ones can only be used
            by their own thread.
    """

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
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
    layers: int, rows: int, heads: int, dim: int, capacity: int, *, dtype: mx.Dtype, window: int | None = None
) -> Cache:
    """Return an empty cache of [rows, heads, capacity rounded up, dim] for each layer; a window bounds the capacity."""
    shape = (rows, heads, _bounded(capacity, window), dim)
    keys = tuple(mx.zeros(shape, dtype=dtype) for _ in range(layers))
    values = tuple(mx.zeros(shape, dtype=dtype) for _ in range(layers))
    zeros = (0,) * rows
    return Cache(_made(keys, values, CopyCounts(), zeros, zeros, window), zeros, zeros)


def append(cache: Cache, count: int) -> Family:
    """Claim `count` slots a row after the cache's lengths; the caller then fills them by `write` and `commit`.

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


def commit(family: Family, stored: Sequence[tuple[mx.array, mx.array]], results: Sequence[mx.array] = ()) -> None:
    """Put what a pass stored, a (K, V) a layer, in the place of the buffer's arrays, and let the device begin.

    After that nothing that the pass made waits for its thread, and no state keeps a graph of operations alive.

    Args:
        family: of which cache.
        stored: one (K, V) a layer of the buffer.
        results: what else the pass made.
    """
    buffer = family.full.buffer
    with buffer.lock:
        mx.eval(buffer.keys, buffer.values)  # arrays that the device still works on are copied, not written into
        buffer.keys, buffer.values = tuple(keys for keys, _ in stored), tuple(values for _, values in stored)
        mx.async_eval(buffer.keys, buffer.values, list(results))


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
    held = [stores(cache.buffer) for cache in caches]
    keys = tuple(_stacked(parts, capacity) for parts in zip(*(keys for keys, _ in held), strict=True))
    values = tuple(_stacked(parts, capacity) for parts in zip(*(values for _, values in held), strict=True))
    written = tuple(end for cache in caches for end in cache.buffer.written)
    return Cache(_made(keys, values, CopyCounts(), written, bases, caches[0].buffer.window), lengths, marks)


def slots(cache: Cache) -> tuple[int, ...]:
    """Return the slot after each row's last token."""
    return tuple(length - base for length, base in zip(cache.lengths, cache.buffer.bases, strict=True))


def write(store: mx.array, starts: tuple[int, ...], rows: mx.array) -> mx.array:
    """Return a [R, Hkv, N, D] store with [R, S, Hkv, D] in the slots from `starts[r]` on of each row."""
    for row, start in enumerate(starts):
        store = mx.slice_update(store, rows[row : row + 1].swapaxes(1, 2), mx.array([row, start]), axes=(0, 2))
    return store


def stores(buffer: Buffer) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    """Return a buffer's arrays, waiting for a thread that is about to replace them."""
    with buffer.lock:
        return buffer.keys, buffer.values


def attended(family: Family) -> Span:
    """Return which slots a pass attends to: whole buckets, from the first position that a query sees to the last.

    The buckets are those of positions, whatever the bases are. One number of slots serves all rows.
    """
    buffer = family.full.buffer
    lasts = [_rounded(slot) for slot in slots(family.full)]
    firsts = [0] * len(lasts)
    if buffer.window is not None:
        seen = [slot - buffer.window + 1 for slot in slots(family.start)]
        firsts = [max(0, slot) // KV_BUCKET * KV_BUCKET for slot in seen]
    count = min(max(last - first for first, last in zip(firsts, lasts, strict=True)), buffer.capacity)
    firsts = tuple(min(first, buffer.capacity - count) for first in firsts)
    return Span(firsts, tuple(first + base for first, base in zip(firsts, buffer.bases, strict=True)), count)


def placed(empty: Cache, length: int) -> Cache:
    """Return a single-row cache of `length` tokens in a buffer of its own, whose visible slots are still to be written.

    Args:
        empty: a cache of no tokens, whose capacity is enough.
        length: tokens.
    """
    window = empty.buffer.window
    keys, values = (tuple(mx.zeros_like(store) for store in held) for held in stores(empty.buffer))
    first = 0 if window is None else max(0, length - window + 1)
    base = first // KV_BUCKET * KV_BUCKET
    fresh = _made(keys, values, CopyCounts(), (length - base,), (base,), window)
    return Cache(fresh, (length,), (0,))


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
    return any(seen > length for cache in buffer.live for seen, length in zip(cache.lengths, lengths, strict=True))


def _clear(buffer: Buffer, lengths: tuple[int, ...]) -> None:
    """Put zeros beyond the slots that a pass is about to write; what it finds there no live cache sees."""
    ends = tuple(length - base for length, base in zip(lengths, buffer.bases, strict=True))
    for row, (end, written) in enumerate(zip(ends, buffer.written, strict=True)):
        if written > end:
            mx.eval(buffer.keys, buffer.values)
            buffer.keys, buffer.values = (
                tuple(_cleared(store, row, end, written) for store in held) for held in (buffer.keys, buffer.values)
            )
            mx.async_eval(buffer.keys, buffer.values)
    buffer.written = ends


def _cleared(store: mx.array, row: int, first: int, end: int) -> mx.array:
    zeros = mx.zeros((1, store.shape[1], end - first, store.shape[3]), dtype=store.dtype)
    return mx.slice_update(store, zeros, mx.array([row, first]), axes=(0, 2))


def _made(
    keys: tuple[mx.array, ...],
    values: tuple[mx.array, ...],
    counts: CopyCounts,
    written: tuple[int, ...],
    bases: tuple[int, ...],
    window: int | None = None,
) -> Buffer:
    mx.eval(keys, values)
    return Buffer(keys, values, counts, written, bases, window)


def _copied(cache: Cache, capacity: int) -> Buffer:
    """Copy what a cache sees into a buffer of its own; with a window, what it can still see."""
    buffer = cache.buffer
    if buffer.window is not None:
        return _slid(cache, capacity)
    length = max(cache.lengths)
    keys, values = (tuple(_resized(x, length, _rounded(capacity)) for x in held) for held in stores(buffer))
    written = tuple(min(end, length) for end in buffer.written)
    return _made(keys, values, buffer.counts, written, buffer.bases)


def _slid(cache: Cache, capacity: int) -> Buffer:
    buffer, ends = cache.buffer, slots(cache)
    shifts = tuple(seen_by(cache, row).start // KV_BUCKET * KV_BUCKET for row in range(len(ends)))

    def moved(store: mx.array) -> mx.array:
        kept = [store[row : row + 1, :, first:end] for row, (first, end) in enumerate(zip(shifts, ends, strict=True))]
        return mx.concatenate([_resized(part, part.shape[2], _rounded(capacity)) for part in kept])

    bases = tuple(base + shift for base, shift in zip(buffer.bases, shifts, strict=True))
    written = tuple(end - shift for end, shift in zip(ends, shifts, strict=True))
    keys, values = (tuple(moved(store) for store in held) for held in stores(buffer))
    return _made(keys, values, buffer.counts, written, bases, buffer.window)


def _resized(store: mx.array, length: int, capacity: int) -> mx.array:
    rows, heads, _, dim = store.shape
    rest = mx.zeros((rows, heads, capacity - length, dim), dtype=store.dtype)
    return mx.concatenate([store[:, :, :length], rest], axis=2)


def _row(cache: Cache, row: int) -> Cache:
    buffer, end = cache.buffer, slots(cache)[row]
    keys, values = (tuple(_resized(x[row : row + 1], end, buffer.capacity) for x in held) for held in stores(buffer))
    fresh = _made(keys, values, CopyCounts(), (end,), (buffer.bases[row],), buffer.window)
    return Cache(fresh, (cache.lengths[row],), (cache.marks[row],))


def _stacked(parts: tuple[mx.array, ...], capacity: int) -> mx.array:
    return mx.concatenate(
        [part if part.shape[2] == capacity else _resized(part, part.shape[2], capacity) for part in parts]
    )
