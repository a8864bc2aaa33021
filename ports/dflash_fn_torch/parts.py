"""What a model remembers, by what its layers remember: all keys and values, those of a window, or a state.

A `Cache` is a value made of three. `full` holds K and V of the layers that see everything, and with it the lengths; the
other two are `Recent`. Going back to a mark takes nothing but a length in `full`; what the others held at the mark is
kept as it was, which costs one window and one state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_fn.config import DecoderSpec, LayerKind
from dflash_fn_torch import cache as kv
from dflash_fn_torch import gated_delta

__all__ = [
    "Cache",
    "Family",
    "Recent",
    "append",
    "join",
    "mark",
    "new",
    "places",
    "reserve",
    "rewind",
    "select",
    "split",
]


@dataclass(frozen=True, eq=False, slots=True)
class Recent:
    """What layers hold that do not remember everything.

    Attributes:
        sliding: K and V of the layers that slide; None where none does.
        states: one a gated delta net and row.
    """

    sliding: kv.Cache | None
    states: tuple[tuple[gated_delta.State, ...], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Cache:
    """A cache of all layers.

    Attributes:
        kinds: one a layer.
        full: K and V of the layers that see everything, of which there may be none; its lengths are those of all.
        recent: the rest.
        marked: the rest at the marks of `full`.
    """

    kinds: tuple[LayerKind, ...]
    full: kv.Cache
    recent: Recent
    marked: Recent

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row sees."""
        return self.full.lengths

    @property
    def marks(self) -> tuple[int, ...]:
        """Lengths that `rewind` goes back to."""
        return self.full.marks

    @property
    def buffer(self) -> kv.Buffer:
        """Storage of the layers that see everything."""
        return self.full.buffer


@dataclass(frozen=True, eq=False, slots=True)
class Family:
    """The caches after 0..S more tokens.

    Attributes:
        start: the cache before.
        full: as `append` claimed it.
        sliding: the same.
        tapes: one a gated delta net and row, filled in by the pass.
    """

    start: Cache
    full: kv.Family
    sliding: kv.Family | None
    tapes: list[tuple[gated_delta.Tape, ...]]

    def of(self, kind: LayerKind) -> kv.Family:
        """Return the claimed slots of a kind of attention."""
        return self.sliding if kind is LayerKind.SLIDING and self.sliding else self.full


@functools.lru_cache(maxsize=64)
def places(kinds: tuple[LayerKind, ...]) -> tuple[int, ...]:
    """Number the layers of each kind apart: the place of each layer among those of its kind.

    Example:
        >>> places((LayerKind.DELTA, LayerKind.DELTA, LayerKind.FULL, LayerKind.DELTA))
        (0, 1, 0, 2)
    """
    return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))


def new(spec: DecoderSpec, capacity: int, *, dtype: torch.dtype, places: Sequence[str]) -> Cache:
    """Return an empty cache of one row with room for `capacity` tokens; each layer's part of it is in its place."""

    def store(kind: LayerKind, window: int | None) -> kv.Cache:
        mine = [places[layer] for layer in spec.layers_of(kind)]
        heads, dim = spec.num_kv_heads, spec.head_dim
        return kv.new(len(mine), 1, heads, dim, capacity, dtype=dtype, device=mine, window=window)

    sliding = store(LayerKind.SLIDING, spec.sliding_window) if spec.layers_of(LayerKind.SLIDING) else None
    states = tuple(
        (gated_delta.empty(spec.delta, dtype, places[layer]),)
        for layer in spec.layers_of(LayerKind.DELTA)
        if spec.delta
    )
    recent = Recent(sliding, states)
    return Cache(spec.layer_kinds, store(LayerKind.FULL, None), recent, recent)


def append(cache: Cache, count: int) -> Family:
    """Claim `count` slots a row after the cache's lengths, for the caller to fill, and an empty list for its tapes."""
    sliding = cache.recent.sliding
    return Family(cache, kv.append(cache.full, count), kv.append(sliding, count) if sliding else None, [])


def select(family: Family, counts: tuple[int, ...]) -> Cache:
    """Return the cache after the first `counts[r]` tokens of each row r."""
    sliding = kv.select(family.sliding, counts) if family.sliding else None
    states = _replayed(family.tapes, counts) if family.tapes else ()
    start = family.start
    return Cache(start.kinds, kv.select(family.full, counts), Recent(sliding, states), start.marked)


@torch.inference_mode()
def _replayed(
    tapes: list[tuple[gated_delta.Tape, ...]], counts: tuple[int, ...]
) -> tuple[tuple[gated_delta.State, ...], ...]:
    return tuple(tuple(map(gated_delta.replay, rows, counts)) for rows in tapes)


def mark(cache: Cache) -> Cache:
    """Return the same cache, marked at its present lengths."""
    return Cache(cache.kinds, kv.mark(cache.full), cache.recent, cache.recent)


def rewind(cache: Cache) -> Cache:
    """Return the cache as it was at its marks."""
    return Cache(cache.kinds, kv.rewind(cache.full), cache.marked, cache.marked)


def reserve(cache: Cache, capacity: int) -> Cache:
    """Return the same cache with room for `capacity` tokens a row, where they are all remembered."""
    recent, sliding = cache.recent, cache.recent.sliding
    if sliding:
        recent = Recent(kv.reserve(sliding, capacity), recent.states)
    return Cache(cache.kinds, kv.reserve(cache.full, capacity), recent, cache.marked)


def split(cache: Cache) -> tuple[Cache, ...]:
    """Return one cache a row; states are shared."""
    parts = zip(kv.split(cache.full), _split(cache.recent, cache), _split(cache.marked, cache), strict=True)
    return tuple(Cache(cache.kinds, *part) for part in parts)


def join(caches: Sequence[Cache]) -> Cache:
    """Return one cache of all the rows; states are shared."""
    full = kv.join(tuple(cache.full for cache in caches))
    return Cache(
        caches[0].kinds, full, _join([cache.recent for cache in caches]), _join([cache.marked for cache in caches])
    )


def _split(recent: Recent, cache: Cache) -> list[Recent]:
    rows = len(cache.lengths)
    sliding = kv.split(recent.sliding) if recent.sliding else (None,) * rows
    return [Recent(sliding[row], tuple((states[row],) for states in recent.states)) for row in range(rows)]


def _join(parts: Sequence[Recent]) -> Recent:
    sliding = [part.sliding for part in parts if part.sliding]
    states = zip(*(part.states for part in parts), strict=True)
    joined = tuple(tuple(state for row in layer for state in row) for layer in states)
    return Recent(kv.join(tuple(sliding)) if sliding else None, joined)
