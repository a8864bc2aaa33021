"""Checks of single numbers, for modules that stand below `dflash_fn.inputs`: no array, pair or policy is named here."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np

from dflash_fn import errors

__all__ = ["RowCount", "check_count", "check_ids", "check_number", "check_row_counts", "of_row"]

RowCount: TypeAlias = int | Sequence[int]
"""One count for all rows, or one a row."""


def check_count(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Return `value` as an int, or raise InputError if it is none or out of range."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise errors.InputError(f"{name}: got {reprlib.repr(value)}, expected an integer")
    if int(value) < least or (most is not None and int(value) > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise errors.InputError(f"{name}: got {value}, expected an integer {span}")
    return int(value)


def check_number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Return `value` as a float, or raise InputError if it is no finite number or out of range."""
    known = isinstance(value, Real) and not isinstance(value, bool)
    if not known or not math.isfinite(float(value)) or not least <= float(value) <= most:
        span = f" from {least:g} to {most:g}" if math.isfinite(most) else f" of at least {least:g}"
        shown = span if math.isfinite(least) else ""
        raise errors.InputError(f"{name}: got {reprlib.repr(value)}, expected a finite number{shown}")
    return float(value)


def check_ids(name: str, values: Any) -> tuple[int, ...]:
    """Return token ids as ints, or raise InputError; how many there are in the vocabulary is not known here."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise errors.InputError(f"{name}: got {reprlib.repr(values)}, expected token ids, such as [1, 2]")
    return tuple(check_count(f"{name}, token {index}", value, least=0) for index, value in enumerate(values))


def check_row_counts(name: str, value: Any) -> RowCount:
    """Return one count of at least 0, or one a row, or raise InputError."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(check_count(f"{name}, row {row}", one, least=0) for row, one in enumerate(value))
    return check_count(name, value, least=0)


def of_row(name: str, counts: RowCount, row: int) -> int:
    """Return the count of a row, or raise InputError if there is none for it."""
    if isinstance(counts, int):
        return counts
    if row >= len(counts):
        raise errors.InputError(f"{name}: got {len(counts)} numbers, expected one a row; row {row} has none")
    return counts[row]
