"""Typed access to the keys of a config.json, with errors that name the key, what was got and what was expected."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from dflash_fn import errors

__all__ = ["Fields", "shown"]

LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True)
class Fields:
    """A config's keys; null counts as absent, since that is how configs write "not set".

    Attributes:
        values: the keys and what they hold.
        name: whose config it is, for messages.
        paths: for keys that were found inside another key, that key with a dot.
        inside: the same for keys that are missing, where one would look for them.

    Example:
        >>> fields = Fields({"hidden_size": 64, "head_dim": None}, "target")
        >>> fields.integer("hidden_size"), fields.integer("head_dim", default=16)
        (64, 16)
        >>> Fields({"block_size": 0}, "draft", {"block_size": "dflash_config."}).integer("block_size")
        Traceback (most recent call last):
        dflash_fn.errors.ConfigError: draft: dflash_config.block_size: got 0, expected an integer of at least 1
    """

    values: Mapping[str, Any]
    name: str
    paths: Mapping[str, str] = field(default_factory=dict)
    inside: str = ""

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return self.values.get(key) is not None

    def label(self, key: str) -> str:
        """Name a key as messages show it: whose config, where in it, and its name."""
        return f"{self.name}: {self.paths.get(key, self.inside)}{key}"

    def bad(self, key: str, expected: str) -> errors.ConfigError:
        """Make the error for a key that is absent or holds a value that makes no sense."""
        if key not in self.values:
            return errors.ConfigError(f"{self.label(key)} is missing, expected {expected}")
        return errors.ConfigError(f"{self.label(key)}: got {shown(self.values[key])}, expected {expected}")

    def unsupported(self, key: str, reason: str) -> errors.UnsupportedModel:
        """Make the error for a key that makes sense but asks for what no code here does."""
        return errors.UnsupportedModel(f"{self.label(key)}: got {shown(self.values.get(key))}; {reason}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Read an integer of at least `minimum`; without a default the key must be there."""
        if not self.has(key) and default is not None:
            return default
        value: Any = self.values.get(key)
        if not is_integer(value) or value < minimum:
            raise self.bad(key, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0, strict: bool = True) -> float:
        """Read a finite number above `minimum`, or equal to it where not `strict`."""
        if not self.has(key) and default is not None:
            return default
        value: Any = self.values.get(key)
        if not is_number(value) or value < minimum or (strict and value == minimum):
            raise self.bad(key, f"a number {'greater than' if strict else 'of at least'} {minimum:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false; null is an error, because libraries disagree on whether it means false or the default."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """Read a nested object; empty where the key is absent."""
        value = self.values.get(key) if self.has(key) else {}
        if not isinstance(value, Mapping):
            raise self.bad(key, "an object")
        return value

    def sequence(self, key: str) -> tuple[Any, ...]:
        """Read a list."""
        value: Any = self.values.get(key)
        if not isinstance(value, list | tuple):
            raise self.bad(key, "a list")
        return tuple(value)


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is an integer or float that is a finite float."""
    if is_integer(value):
        return abs(value) < sys.float_info.max
    return isinstance(value, float) and math.isfinite(value)


def shown(value: Any) -> str:
    """Write a value as config.json has it, cut to a readable length."""
    text = json.dumps(value, default=repr, skipkeys=True, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
