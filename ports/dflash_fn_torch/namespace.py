"""The array API standard over torch, as far as policies need it in every step: one call of torch's for each.

On a CPU, numpy looks for an argmax and for what is not finite, in the same memory: it does so in vectors, where torch
goes element by element, or takes four operations. Every other name is array-api-compat's, and so is every other case.
"""

from __future__ import annotations

import contextlib
from typing import Any

import array_api_compat.torch as compat
import numpy as np
import torch
from torch import Tensor

__all__ = ["all", "argmax", "astype", "concat", "cumulative_prod", "isfinite", "max", "sum", "take_along_axis"]

Axis = int | tuple[int, ...] | None


def all(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:  # noqa: A001 (the standard's name)
    """Whether all are true."""
    if not isinstance(axis, int) or x.dtype != torch.bool:
        return compat.all(x, axis=axis, keepdims=keepdims)
    return torch.all(x, axis, keepdim=keepdims)


def argmax(x: Tensor, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the first index of the largest value."""
    host = _host(x.float() if x.dtype == torch.bfloat16 else x)
    if host is None or axis is None:
        return torch.argmax(x, axis, keepdim=keepdims)
    return _torch(host.argmax(axis=axis, keepdims=keepdims))


def astype(x: Tensor, dtype: torch.dtype, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """Cast; without a copy of what is of this dtype, for policies write to nothing."""
    return x.to(dtype) if device is None else compat.astype(x, dtype, copy=copy, device=device)


def concat(arrays: list[Tensor] | tuple[Tensor, ...], /, *, axis: int | None = 0) -> Tensor:
    """Join along an axis."""
    return compat.concat(arrays, axis=axis) if axis is None else torch.concat(arrays, axis)


def cumulative_prod(x: Tensor, /, *, axis: int | None = None, **options: Any) -> Tensor:
    """Return the products of all leading parts."""
    return compat.cumulative_prod(x, axis=axis, **options) if axis is None or options else torch.cumprod(x, axis)


def isfinite(x: Tensor, /) -> Tensor:
    """Whether each is neither NaN nor infinite."""
    host = _host(x)
    return torch.isfinite(x) if host is None else _torch(np.isfinite(host))


def max(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:  # noqa: A001
    """Return the largest, which is NaN where one is."""
    return compat.max(x, axis=axis, keepdims=keepdims) if axis is None else torch.amax(x, axis, keepdim=keepdims)


def sum(  # noqa: A001
    x: Tensor, /, *, axis: Axis = None, dtype: torch.dtype | None = None, keepdims: bool = False
) -> Tensor:
    """Add up, in `dtype` where one is given."""
    if not isinstance(axis, int):
        return compat.sum(x, axis=axis, dtype=dtype, keepdims=keepdims)
    return torch.sum(x, axis, keepdim=keepdims, dtype=dtype)


def take_along_axis(x: Tensor, indices: Tensor, /, *, axis: int = -1) -> Tensor:
    """Pick by index; negative ones count from the end."""
    if x.device.type == "cpu" and x.shape[:axis] == indices.shape[:axis] and axis in (-1, x.ndim - 1):
        with contextlib.suppress(RuntimeError):  # of a negative index, which torch does not know
            return torch.gather(x, axis, indices)
    return compat.take_along_axis(x, indices, axis=axis)


def _host(x: Tensor) -> np.ndarray | None:
    """Return numpy's look at a tensor; None where it cannot see it."""
    return None if x.device.type != "cpu" or x.dtype == torch.bfloat16 or x.requires_grad else x.numpy()


def _torch(made: Any) -> Tensor:
    return torch.from_numpy(np.asarray(made))


def __getattr__(name: str) -> Any:
    return getattr(compat, name)
