"""Caches: a row holds arrays that nobody can change, and how many tokens it saw; a cache is its rows.

Attention holds keys and values. Slots beyond a row's length hold whatever an earlier pass left there; no query sees
them. Of a layer that slides, slot n holds position `base + n`; where its arrays are full, they are moved up by whole
blocks. A gated delta net holds its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_fn.config import DecoderSpec, LayerKind
from dflash_fn.container import Bits
from dflash_fn_jax import gated_delta
from dflash_fn_jax.attention import BLOCK
from dflash_fn_jax.gated_delta import State, Tape
from dflash_fn_jax.ops import STRIDE, from_bits, own, scope, to_bits

__all__ = [
    "Attention",
    "Cache",
    "Family",
    "Held",
    "Row",
    "append",
    "dtype_of",
    "export",
    "mark",
    "new",
    "reserve",
    "restore",
    "rewind",
    "room",
    "select",
]

LEAST_CAPACITY = 512
"""Capacities are this times a power of two: every other one would be compiled for anew."""


@dataclass(frozen=True, eq=False, slots=True)
class Attention:
    """Keys and values of a layer.

    Attributes:
        keys: [N, Hkv, D].
        values: the same.
        base: position of slot 0, a multiple of `BLOCK`.
        window: positions that a query sees; None for all.
    """

    keys: Float[Array, "capacity kv_heads dim"]
    values: Float[Array, "capacity kv_heads dim"]
    base: int = 0
    window: int | None = None

    @property
    def capacity(self) -> int:
        """Slots, N."""
        return self.keys.shape[0]


Held: TypeAlias = Attention | State
"""What a layer remembers."""


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """What a model remembers of one row.

    Attributes:
        held: one a layer.
        length: tokens that the row saw.
        mark: the length that `rewind` goes back to.
        marked: what each layer held at the mark; None for a layer that still holds it.
    """

    held: tuple[Held, ...]
    length: int = 0
    mark: int = 0
    marked: tuple[Held | None, ...] = ()


Cache: TypeAlias = tuple[Row, ...]
"""One `Row` a row."""


@dataclass(frozen=True, slots=True)
class Family:
    """The caches after 0..S more tokens: `full` holds all of them, `start` is what they were added to.

    Attributes:
        start: the cache before.
        full: the cache after.
        tapes: by row and layer, of gated delta nets; None for attention.
    """

    start: Cache
    full: Cache
    tapes: tuple[tuple[Tape | None, ...], ...]


def new(spec: DecoderSpec, capacity: int, *, dtype: str) -> Row:
    """Return an empty row with room for at least `capacity` tokens."""
    with scope(dtype):
        held = tuple(_empty(spec, kind, capacity, dtype) for kind in spec.layer_kinds)
    return Row(held, marked=_forgetful(held))


def _empty(spec: DecoderSpec, kind: LayerKind, capacity: int, dtype: str) -> Held:
    if kind is LayerKind.DELTA:
        assert spec.delta is not None
        return gated_delta.empty(spec.delta, dtype)
    window = spec.sliding_window if kind is LayerKind.SLIDING else None
    zeros = jnp.zeros((_bounded(capacity, window), spec.num_kv_heads, spec.head_dim), dtype)
    return Attention(zeros, zeros, window=window)


def _forgetful(held: Sequence[Held | None]) -> tuple[Held | None, ...]:
    """Return what must be kept at a mark: all but what full attention holds."""
    return tuple(None if isinstance(one, Attention) and one.window is None else one for one in held)


def append(row: Row, count: int, held: Sequence[Held]) -> Row:
    """Return the row after `count` more tokens, which these hold."""
    return replace(row, held=tuple(held), length=row.length + count)


def select(family: Family, counts: tuple[int, ...]) -> Cache:
    """Return the cache after the first `counts[r]` tokens of each row r."""
    return tuple(_selected(*parts) for parts in zip(family.start, family.full, family.tapes, counts, strict=True))


def _selected(start: Row, full: Row, tapes: tuple[Tape | None, ...], count: int) -> Row:
    if start.length + count == full.length:
        return full
    held = (
        one if tape is None else gated_delta.replay(tape, count) for one, tape in zip(full.held, tapes, strict=True)
    )
    return replace(full, held=tuple(held), length=start.length + count)


def mark(cache: Cache) -> Cache:
    """Return the same cache, marked at its present lengths."""
    return tuple(replace(row, mark=row.length, marked=_forgetful(row.held)) for row in cache)


def rewind(cache: Cache) -> Cache:
    """Return the cache as it was at its marks."""
    return tuple(replace(row, length=row.mark, held=_at_mark(row)) for row in cache)


def _at_mark(row: Row) -> tuple[Held, ...]:
    return tuple(one if kept is None else kept for one, kept in zip(row.held, row.marked, strict=True))


def reserve(row: Row, capacity: int) -> Row:
    """Return the same row with room for `capacity` tokens; where a layer slides, for as many as it may need at once."""
    return replace(row, held=tuple(_reserved(one, capacity) for one in row.held))


def _reserved(one: Held, capacity: int) -> Held:
    if isinstance(one, State):
        return one
    return _widened(one, _bounded(capacity - one.base, one.window))


def room(row: Row, count: int) -> Row:
    """Return the same row with room for `count` more tokens."""
    return replace(row, held=tuple(_with_room(one, row.length, count) for one in row.held))


def _with_room(one: Held, length: int, count: int) -> Held:
    if isinstance(one, State):
        return one
    if one.window is None:
        return _widened(one, _rounded(length + count))
    window = one.window
    one = _widened(one, max(_bounded(length + count - one.base, window), _rounded(window + BLOCK + count)))
    if length + count - one.base <= one.capacity:
        return one
    shift = (length - window + 1 - one.base) // BLOCK * BLOCK
    with scope(str(one.keys.dtype)):
        keys, values = (jnp.roll(store, -shift, axis=0) for store in (one.keys, one.values))
    return replace(one, keys=keys, values=values, base=one.base + shift)


def _widened(one: Attention, wanted: int) -> Attention:
    if wanted <= one.capacity:
        return one
    extra = ((0, wanted - one.capacity), (0, 0), (0, 0))
    return replace(one, keys=_padded(one.keys, extra), values=_padded(one.values, extra))


def _padded(store: Array, extra: tuple[tuple[int, int], ...]) -> Array:
    with scope(str(store.dtype)):
        return jnp.pad(store, extra)


def dtype_of(cache: Cache) -> str:
    """Return the dtype that a cache's model runs in."""
    one = cache[0].held[0]
    return str((one.conv if isinstance(one, State) else one.keys).dtype)


def export(cache: Cache) -> dict[str, Bits]:
    """Return what a cache sees, as `dflash_fn.port.Port.export_cache` names it."""
    made = {}
    for index, row in enumerate(cache):
        made |= _named(row.held, index, row.length, "")
        if 0 < row.mark < row.length:
            made |= _named(row.marked, index, row.mark, "marked_")
    return made


def _named(held: Sequence[Held | None], row: int, length: int, prefix: str) -> dict[str, Bits]:
    made = {}
    for layer, one in enumerate(held):
        if isinstance(one, Attention):
            first, last = 0 if one.window is None else max(0, length - one.window + 1), length
            for name, store in (("keys", one.keys), ("values", one.values)):
                array = prefix + ("" if one.window is None else "window_") + name
                made[f"{layer}.{row}.{array}"] = to_bits(np.asarray(store)[first - one.base : last - one.base])
        elif one is not None:
            made[f"{layer}.{row}.{prefix}conv"] = to_bits(one.conv)
            made[f"{layer}.{row}.{prefix}recurrent"] = to_bits(one.recurrent)
    return made


def restore(empty: Row, arrays: Mapping[str, Bits], lengths: tuple[int, ...], marks: tuple[int, ...]) -> Cache:
    """Return a cache of what `export` returned, each row in the place of an empty one."""
    rows = []
    for index, (length, mark) in enumerate(zip(lengths, marks, strict=True)):
        held = _restored(empty.held, arrays, index, length, "")
        if mark in (0, length):
            marked = empty.marked if mark == 0 else _forgetful(held)
        else:
            marked = _restored(empty.marked, arrays, index, mark, "marked_")
        rows.append(Row(tuple(one for one in held if one is not None), length, mark, marked))
    return tuple(rows)


def _restored(
    empty: Sequence[Held | None], arrays: Mapping[str, Bits], row: int, length: int, prefix: str
) -> tuple[Held | None, ...]:
    return tuple(
        one if one is None else _filled(one, arrays, f"{layer}.{row}.{prefix}", length)
        for layer, one in enumerate(empty)
    )


def _filled(empty: Held, arrays: Mapping[str, Bits], name: str, length: int) -> Held:
    if isinstance(empty, State):
        with scope(str(empty.conv.dtype)):
            return State(own(from_bits(arrays[f"{name}conv"])), own(from_bits(arrays[f"{name}recurrent"])))
    window = "" if empty.window is None else "window_"
    known = [from_bits(arrays[f"{name}{window}{array}"]) for array in ("keys", "values")]
    first = length - len(known[0])
    base = first // BLOCK * BLOCK
    around = ((first - base, empty.capacity - len(known[0]) - first + base), (0, 0), (0, 0))
    with scope(str(empty.keys.dtype)):
        return replace(empty, keys=own(np.pad(known[0], around)), values=own(np.pad(known[1], around)), base=base)


def _bounded(capacity: int, window: int | None) -> int:
    """Return a capacity; with a window, no more than its blocks twice and room for a pass."""
    return _rounded(capacity if window is None else min(capacity, 2 * window + BLOCK + STRIDE))


def _rounded(count: int) -> int:
    blocks = max(1, -(-count // LEAST_CAPACITY))
    return LEAST_CAPACITY << (blocks - 1).bit_length()
