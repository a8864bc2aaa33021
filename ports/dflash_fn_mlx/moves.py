"""Caches as named arrays in the layout that all ports share, and back."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from dflash_fn.config import LayerKind
from dflash_fn_mlx import cache as kv
from dflash_fn_mlx import parts
from dflash_fn_mlx.gated_delta import State

__all__ = ["export", "restore"]

KINDS = ("keys", "values")


def export(cache: parts.Cache) -> dict[str, mx.array]:
    """Return what a cache sees, and what it goes back to; see `dflash_fn.port.Port.export_cache` for the names."""
    made = _attention(cache, LayerKind.FULL, cache.full, "", range(len(cache.lengths)))
    made |= _recent(cache, cache.recent, "", range(len(cache.lengths)))
    back = [row for row, (mark, end) in enumerate(zip(cache.marks, cache.lengths, strict=True)) if 0 < mark < end]
    return made | _recent(cache, cache.marked, "marked_", back)


def _recent(cache: parts.Cache, recent: parts.Recent, prefix: str, rows: range | list[int]) -> dict[str, mx.array]:
    made = {}
    if recent.sliding:
        made |= _attention(cache, LayerKind.SLIDING, recent.sliding, f"{prefix}window_", rows)
    for layer, states in zip(_layers(cache, LayerKind.DELTA), recent.states, strict=True):
        for row in rows:
            made[f"{layer}.{row}.{prefix}conv"] = states[row].conv
            made[f"{layer}.{row}.{prefix}recurrent"] = states[row].recurrent
    return made


def _attention(
    cache: parts.Cache, kind: LayerKind, part: kv.Cache, prefix: str, rows: range | list[int]
) -> dict[str, mx.array]:
    return {
        f"{layer}.{row}.{prefix}{name}": store[row, :, kv.seen_by(part, row)].swapaxes(0, 1)
        for name, stores in zip(KINDS, kv.stores(part.buffer), strict=True)
        for layer, store in zip(_layers(cache, kind), stores, strict=True)
        for row in rows
    }


def restore(
    empty: parts.Cache, arrays: Mapping[str, mx.array], lengths: tuple[int, ...], marks: tuple[int, ...]
) -> parts.Cache:
    """Return a cache that sees what `export` returned, each row in the place of an empty one."""
    rows = []
    for row, (length, mark) in enumerate(zip(lengths, marks, strict=True)):
        full = _filled(empty, LayerKind.FULL, empty.full, arrays, row, length, "")
        recent = _restored(empty, arrays, row, length, "")
        marked = recent if mark == length else _restored(empty, arrays, row, mark, "marked_") if mark else empty.recent
        rows.append(parts.Cache(empty.kinds, kv.Cache(full.buffer, (length,), (mark,)), recent, marked))
    return parts.join(rows)


def _restored(empty: parts.Cache, arrays: Mapping[str, mx.array], row: int, length: int, prefix: str) -> parts.Recent:
    sliding = empty.recent.sliding
    if sliding:
        sliding = _filled(empty, LayerKind.SLIDING, sliding, arrays, row, length, f"{prefix}window_")
    states = tuple(
        (State(arrays[f"{layer}.{row}.{prefix}conv"], arrays[f"{layer}.{row}.{prefix}recurrent"]),)
        for layer in _layers(empty, LayerKind.DELTA)
    )
    return parts.Recent(sliding, states)


def _filled(
    empty: parts.Cache,
    kind: LayerKind,
    part: kv.Cache,
    arrays: Mapping[str, mx.array],
    row: int,
    length: int,
    prefix: str,
) -> kv.Cache:
    """Return a cache of its own with these keys and values, the last of which is at position `length - 1`."""
    made, layers = kv.placed(part, length), _layers(empty, kind)
    end = kv.slots(made)[0]
    stored = []
    for layer, *stores in zip(layers, *kv.stores(made.buffer), strict=True):
        known = [arrays[f"{layer}.{row}.{prefix}{name}"] for name in KINDS]
        keys, values = (kv.write(x, (end - len(new),), new[None]) for x, new in zip(stores, known, strict=True))
        stored.append((keys, values))
    kv.commit(kv.Family(part, made), stored)
    return made


def _layers(cache: parts.Cache, kind: LayerKind) -> list[int]:
    return [layer for layer, other in enumerate(cache.kinds) if other is kind]
