"""Caches as named tensors in the layout that all ports share, and back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dflash_fn.config import LayerKind
from dflash_fn_torch import cache as kv
from dflash_fn_torch import parts
from dflash_fn_torch.gated_delta import State

__all__ = ["export", "restore"]

KINDS = ("keys", "values")


def export(cache: parts.Cache) -> dict[str, Tensor]:
    """Return what a cache sees, and what it goes back to; see `dflash_fn.port.Port.export_cache` for the names."""
    made = _attention(cache, LayerKind.FULL, cache.full, "", range(len(cache.lengths)))
    made |= _recent(cache, cache.recent, "", range(len(cache.lengths)))
    back = [row for row, (mark, end) in enumerate(zip(cache.marks, cache.lengths, strict=True)) if 0 < mark < end]
    return made | _recent(cache, cache.marked, "marked_", back)


def _recent(cache: parts.Cache, recent: parts.Recent, prefix: str, rows: range | list[int]) -> dict[str, Tensor]:
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
) -> dict[str, Tensor]:
    return {
        f"{layer}.{row}.{prefix}{name}": store[row, :, kv.seen_by(part, row)].transpose(0, 1)
        for name, stores in zip(KINDS, (part.buffer.keys, part.buffer.values), strict=True)
        for layer, store in zip(_layers(cache, kind), stores, strict=True)
        for row in rows
    }


def restore(
    empty: parts.Cache, tensors: Mapping[str, Tensor], lengths: tuple[int, ...], marks: tuple[int, ...]
) -> parts.Cache:
    """Return a cache that sees what `export` returned, each row in the place of an empty one."""
    rows = []
    for row, (length, mark) in enumerate(zip(lengths, marks, strict=True)):
        full = _filled(empty, LayerKind.FULL, empty.full, tensors, row, length, "")
        recent = _restored(empty, tensors, row, length, "")
        marked = recent if mark == length else _restored(empty, tensors, row, mark, "marked_") if mark else empty.recent
        rows.append(parts.Cache(empty.kinds, kv.Cache(full.buffer, (length,), (mark,)), recent, marked))
    return parts.join(rows)


def _restored(empty: parts.Cache, tensors: Mapping[str, Tensor], row: int, length: int, prefix: str) -> parts.Recent:
    sliding = empty.recent.sliding
    if sliding:
        sliding = _filled(empty, LayerKind.SLIDING, sliding, tensors, row, length, f"{prefix}window_")
    states = tuple(
        (State(tensors[f"{layer}.{row}.{prefix}conv"], tensors[f"{layer}.{row}.{prefix}recurrent"]),)
        for layer in _layers(empty, LayerKind.DELTA)
    )
    return parts.Recent(sliding, states)


def _filled(
    empty: parts.Cache,
    kind: LayerKind,
    part: kv.Cache,
    tensors: Mapping[str, Tensor],
    row: int,
    length: int,
    prefix: str,
) -> kv.Cache:
    """Return a cache of its own with these keys and values, the last of which is at position `length - 1`."""
    made = kv.placed(part, length)
    for name, stores in zip(KINDS, (made.buffer.keys, made.buffer.values), strict=True):
        for layer, store in zip(_layers(empty, kind), stores, strict=True):
            known = tensors[f"{layer}.{row}.{prefix}{name}"]
            kv.write(store, (kv.slots(made)[0] - len(known),), known[None])
    return made


def _layers(cache: parts.Cache, kind: LayerKind) -> list[int]:
    return [layer for layer, other in enumerate(cache.kinds) if other is kind]
