"""Small numbers that say what large arrays hold, for ports whose bits differ; and digests, for those whose bits do not.

A summary of numbers x[0] .. x[n - 1] is four float32: the peak, max |x[i]|; the mean; the root mean square; and the
wave, the mean of x[i] cos(i), which an exchange of two elements changes and the others do not see. Where every x[i]
is off by at most e, none of the four is off by more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dflash_fn.container import Bits
from dflash_fn.port import Port
from dflash_fn.records import Array, Cache
from dflash_fn.trace.records import CacheView, LogitsView

__all__ = ["STATISTICS", "best", "digest_of", "floats", "row_bits", "summarize", "view_cache", "view_logits"]

STATISTICS = ("peak", "mean", "rms", "wave")
"""The four numbers of a summary, in order."""

PER_TOKEN = ("keys", "values")
"""Kinds of cache arrays that grow by a row a token; any other is a state, or a window, and summed up whole."""

MARKED = "marked_"
"""How the kinds begin that a cache goes back to and does not see."""


def summarize(values: np.ndarray) -> np.ndarray:
    """Return [..., 4] summaries of [..., n] numbers.

    Example:
        >>> [round(float(x), 3) for x in summarize(np.array([3.0, -4.0]))]
        [4.0, -0.5, 3.536, 0.419]
    """
    x = values.astype(np.float64)
    if x.shape[-1] == 0:
        return np.zeros((*x.shape[:-1], len(STATISTICS)), dtype=np.float32)
    wave = np.cos(np.arange(x.shape[-1]))
    numbers = [np.abs(x).max(axis=-1), x.mean(axis=-1), np.sqrt((x * x).mean(axis=-1)), (x * wave).mean(axis=-1)]
    return np.stack(numbers, axis=-1).astype(np.float32)


def floats(bits: Bits) -> np.ndarray:
    """Return the numbers that bits stand for; bfloat16 as float32, which holds every value of it."""
    if bits.dtype != "bfloat16":
        return bits.values
    return (np.ascontiguousarray(bits.values).astype(np.uint32) << np.uint32(16)).view(np.float32)


def digest_of(parts: Mapping[str, Bits]) -> str:
    """Return the blake2b digest (16 bytes, in hexadecimal) of arrays: of each `name dtype shape `, then its bytes."""
    made = hashlib.blake2b(digest_size=16)
    for name, (dtype, values) in parts.items():
        made.update(f"{name} {dtype} {list(values.shape)} ".encode())
        made.update(np.ascontiguousarray(values).tobytes())
    return made.hexdigest()


def row_bits(port: Port, array: Array, counts: Sequence[int]) -> list[Bits]:
    """Fetch an array [R, S, ...] and return the first `counts[r]` slots of each row r."""
    dtype, values = port.to_bits(array)
    return [Bits(dtype, values[row, :count].copy()) for row, count in enumerate(counts)]


def view_cache(port: Port, cache: Cache, starts: Sequence[int]) -> list[CacheView]:
    """Look at each row of a cache, and closer at its tokens from `starts[r]` on."""
    arrays: list[dict[tuple[int, str], Bits]] = [{} for _ in starts]
    for name, bits in port.export_cache(cache).items():
        layer, row, kind = name.split(".")
        if not kind.startswith(MARKED):
            arrays[int(row)][int(layer), kind] = bits
    rows = zip(arrays, port.lengths(cache), starts, strict=True)
    return [_view(dict(sorted(found.items())), length, start) for found, length, start in rows]


def _view(arrays: Mapping[tuple[int, str], Bits], length: int, start: int) -> CacheView:
    fresh: dict[str, list[np.ndarray]] = {}
    for (_, kind), bits in arrays.items():
        values = floats(bits)
        rows = values[start:] if kind in PER_TOKEN else values[None]
        fresh.setdefault(kind, []).append(summarize(rows.reshape(len(rows), math.prod(rows.shape[1:]))))
    digest = digest_of({f"{layer}.{kind}": bits for (layer, kind), bits in arrays.items()})
    return CacheView(length, digest, {kind: np.stack(layers) for kind, layers in fresh.items()})


def view_logits(bits: Bits, top_k: int | None) -> LogitsView:
    """Keep the `top_k` best of each slot's logits, or all of them where it is None."""
    values = floats(bits)
    digest, summary = digest_of({"logits": bits}), summarize(values)
    if top_k is None or top_k >= values.shape[-1]:
        return LogitsView(bits, None, summary, digest)
    ids = best(values)[:, :top_k]
    return LogitsView(Bits(bits.dtype, np.take_along_axis(bits.values, ids, axis=-1)), ids, summary, digest)


def best(values: np.ndarray) -> np.ndarray:
    """Return the ids of [..., V] logits, best first, the first of equals first."""
    return np.argsort(-values.astype(np.float64), axis=-1, kind="stable")
