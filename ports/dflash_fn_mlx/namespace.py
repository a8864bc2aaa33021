"""The array API standard over `mlx.core`, as far as policies need it: what mlx has under another name or not at all.

Every other name is mlx's own, for `where`, `exp`, `maximum` and the like mean the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

__all__ = [
    "all",
    "any",
    "argmax",
    "asarray",
    "astype",
    "concat",
    "cumulative_prod",
    "cumulative_sum",
    "sum",
    "take_along_axis",
]


def argmax(x: mx.array, /, *, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """Return the first index of the largest value, signed as the standard has it."""
    return mx.argmax(x, axis=axis, keepdims=keepdims).astype(mx.int32)


def asarray(values: Any, /, *, dtype: mx.Dtype | None = None) -> mx.array:
    """Make an array in a type that every kernel of mlx knows.

    Integers become int32 unless a type is asked for: token ids fit, and some of Metal's kernels have no 64-bit form.
    float64, which a GPU has not, is rounded down to float32, so that what is below 1 stays below 1.
    """
    if dtype is not None or isinstance(values, mx.array):
        return mx.array(values, dtype=dtype)
    host = np.asarray(values)
    if host.dtype.kind in "iu":
        return mx.array(host.astype(np.int32))
    if host.dtype == np.float64:
        near = host.astype(np.float32)
        return mx.array(np.where(near > host, np.nextafter(near, np.float32(-np.inf)), near))
    return mx.array(host)


def astype(x: mx.array, dtype: mx.Dtype, /) -> mx.array:
    """Cast."""
    return x.astype(dtype)


def concat(arrays: list[mx.array] | tuple[mx.array, ...], /, *, axis: int = 0) -> mx.array:
    """Join along an axis."""
    return mx.concatenate(list(arrays), axis=axis)


def cumulative_prod(x: mx.array, /, *, axis: int) -> mx.array:
    """Return the products of all leading parts."""
    return mx.cumprod(x, axis=axis)


def cumulative_sum(x: mx.array, /, *, axis: int) -> mx.array:
    """Return the sums of all leading parts."""
    return mx.cumsum(x, axis=axis)


def sum(  # noqa: A001 (the standard's name)
    x: mx.array, /, *, axis: int | tuple[int, ...] | None = None, dtype: mx.Dtype | None = None, keepdims: bool = False
) -> mx.array:
    """Add up, in `dtype` where one is given; nothing adds up to 0."""
    known = x if dtype is None else x.astype(dtype)
    return _reduced(mx.sum, known, axis, keepdims, 0)


def all(x: mx.array, /, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> mx.array:  # noqa: A001
    """Whether all are true; of nothing, they are."""
    return _reduced(mx.all, x, axis, keepdims, True)


def any(x: mx.array, /, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> mx.array:  # noqa: A001
    """Whether one is true; of nothing, none is."""
    return _reduced(mx.any, x, axis, keepdims, False)


def take_along_axis(x: mx.array, indices: mx.array, /, *, axis: int = -1) -> mx.array:
    """Pick by index."""
    return mx.take_along_axis(x, indices, axis=axis)


def _reduced(
    reduce: Callable[..., mx.array], x: mx.array, axis: int | tuple[int, ...] | None, keepdims: bool, nothing: int
) -> mx.array:
    """Reduce, but never hand mlx an empty array: its CPU build may then loop over whatever its plan's memory held."""
    if x.size:
        return reduce(x, axis=axis, keepdims=keepdims)
    shape = np.sum(np.empty(x.shape), axis=axis, keepdims=keepdims).shape
    return mx.full(shape, nothing, dtype=reduce(mx.zeros((1,), dtype=x.dtype)).dtype)


def __getattr__(name: str) -> Any:
    return getattr(mx, "bool_" if name == "bool" else name)
