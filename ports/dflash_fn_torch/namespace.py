"""The array API standard over torch, as far as policies need it often, in one call of torch's each.

Every other name is array-api-compat's, which also does these, by several operations or after a look at every argument.
"""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as compat
import torch
from torch import Tensor

__all__ = ["all", "argmax", "astype", "concat", "cumulative_prod", "max", "sum", "take_along_axis"]


def all(x: Tensor, /, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:  # noqa: A001
    """Whether all are true."""
    if not isinstance(axis, int) or x.dtype != torch.bool:
        return compat.all(x, axis=axis, keepdims=keepdims)
    return torch.all(x, axis, keepdim=keepdims)


def argmax(x: Tensor, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the first index of the largest value.

    On a CPU numpy looks for it, in vectors: torch does so element by element, and takes longer than a layer.
    """
    if x.device.type != "cpu" or axis is None or not x.dtype.is_floating_point:
        return compat.argmax(x, axis=axis, keepdims=keepdims)
    known = x.detach()
    host = (known.float() if x.dtype == torch.bfloat16 else known).numpy()
    return torch.from_numpy(host.argmax(axis, keepdims=keepdims))


def astype(x: Tensor, dtype: torch.dtype, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """Cast; what is of this dtype is returned as it is, for nothing here is written to."""
    if device is not None:
        return compat.astype(x, dtype, copy=copy, device=device)
    return x.to(dtype)


def concat(arrays: list[Tensor] | tuple[Tensor, ...], /, *, axis: int | None = 0) -> Tensor:
    """Join along an axis."""
    return compat.concat(arrays, axis=axis) if axis is None else torch.concat(arrays, axis)


def cumulative_prod(x: Tensor, /, *, axis: int | None = None, **options: Any) -> Tensor:
    """Return the products of all leading parts."""
    return compat.cumulative_prod(x, axis=axis, **options) if axis is None or options else torch.cumprod(x, axis)


def max(x: Tensor, /, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:  # noqa: A001
    """Return the largest, which is NaN where one is."""
    return compat.max(x, axis=axis, keepdims=keepdims) if axis is None else torch.amax(x, axis, keepdim=keepdims)


def sum(  # noqa: A001 (the standard's name)
    x: Tensor,
    /,
    *,
    axis: int | tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    keepdims: bool = False,
) -> Tensor:
    """Add up, in `dtype` where one is given."""
    if not isinstance(axis, int):
        return compat.sum(x, axis=axis, dtype=dtype, keepdims=keepdims)
    return torch.sum(x, axis, keepdim=keepdims, dtype=dtype)


def take_along_axis(x: Tensor, indices: Tensor, /, *, axis: int = -1) -> Tensor:
    """Pick by index; negative ones, which torch does not know, count from the end."""
    if x.device.type == "cpu":
        try:
            return torch.take_along_dim(x, indices, axis)
        except (IndexError, RuntimeError):  # at no cost where there is none
            pass
    return compat.take_along_axis(x, indices, axis=axis)


def __getattr__(name: str) -> Any:
    return getattr(compat, name)
