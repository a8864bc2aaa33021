"""How many bytes states hold: of whole buffers, not of what is seen of them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["bytes_held"]


def bytes_held(*values: Any) -> int:
    """Return the bytes of all arrays below these values, each array once.

    Whatever a port makes its caches of: records and tuples are looked into, and what has `nbytes` is an array. Caches
    that look at one buffer hold it together.

    Args:
        values: caches or whole states.

    Example:
        >>> import numpy as np
        >>> kept, other = np.zeros((4, 8), np.float32), np.zeros(3)
        >>> bytes_held((kept, other), kept)
        152
    """
    found: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, tuple | list):
            left += value
        elif is_dataclass(value):
            left += [getattr(value, field.name) for field in fields(value)]
    return sum(value.nbytes for value in found.values() if hasattr(value, "nbytes"))
