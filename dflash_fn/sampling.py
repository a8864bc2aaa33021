"""How logits become the law that tokens are drawn from: temperature, top-k, top-p and min-p, as pure functions.

One record says it for p and for q, so that both go through the same. Everything is done in float32 (float64 where the
logits are), slot by slot in the sense of `dflash_fn.draws`: a slot's weights have the same bits wherever it stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from dflash_fn import errors
from dflash_fn.draws import first_reaching, one_hot, total, wide
from dflash_fn.records import Array

__all__ = ["GREEDY", "Sampling", "as_sampling", "probabilities", "weights"]

COLDEST = 1e-6
"""The lowest temperature above 0; float32 holds its inverse with room to spare."""


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= float(value) <= most:
        span = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise errors.InputError(f"{name}: got {value!r}, expected a number {span}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The order of what it says is the order in which it is applied.

    Attributes:
        temperature: logits are divided by it; 0 takes the largest, the first of several.
        top_k: keep the k largest logits, and all that equal the k-th.
        top_p: keep the most probable tokens until their share of what top-k left reaches top_p, and all that are as
            probable as the last of them.
        min_p: keep tokens at least min_p times as probable as the most probable one.

    Raises:
        InputError: a number out of range, or a filter at temperature 0, where it could change nothing.

    Source:
        The order and the comparisons are those of transformers' warpers. They differ in ties at the end of top-p alone,
        where theirs keep as many as a sort happens to put first. mlx-lm keeps such ties, as we do; it cuts its top-k
        at k exactly, and applies the temperature last (see docs/explanation/laws-and-couplings.md).

    Example:
        >>> str(Sampling(0.7, top_p=0.9))
        'T=0.7 top_p=0.9'
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf)
        if 0 < self.temperature < COLDEST or math.isinf(self.temperature):
            raise errors.InputError(
                f"temperature: got {self.temperature}, expected 0 (greedy), or a finite number from {COLDEST} on"
            )
        if self.top_k is not None and (not isinstance(self.top_k, Integral) or isinstance(self.top_k, bool)):
            raise errors.InputError(f"top_k: got {self.top_k!r}, expected an integer of at least 1")
        if self.top_k is not None and self.top_k < 1:
            raise errors.InputError(f"top_k: got {self.top_k}, expected an integer of at least 1; None keeps all")
        for name, least in (("top_p", "above 0"), ("min_p", "from 0")):
            value = getattr(self, name)
            if value is not None:
                _check_number(name, value, 0.0, 1.0)
            if value == 0 and name == "top_p":
                raise errors.InputError(f"top_p: got 0, expected a number {least} to 1; temperature 0 is greedy")
        given = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if given and self.temperature == 0:
            raise errors.InputError(
                f"{given[0]}: got one at temperature 0, where only the largest logit counts; give a temperature too"
            )

    def __str__(self) -> str:
        filters = [
            f" {name}={value}"
            for name, value in (("top_k", self.top_k), ("top_p", self.top_p), ("min_p", self.min_p))
            if value is not None
        ]
        return f"T={self.temperature:g}" + "".join(filters)


def as_sampling(value: Sampling) -> Sampling:
    """Return it; InputError for what is none, such as a bare temperature."""
    if not isinstance(value, Sampling):
        raise errors.InputError(
            f"sampling: got {value!r} of type {type(value).__name__}, expected a Sampling, such as "
            "Sampling(temperature=0.7)"
        )
    return value


GREEDY = Sampling()
"""Temperature 0."""


def weights(xp: Any, logits: Array, sampling: Sampling) -> Array:
    """Return what tokens are drawn from, up to a factor: the most probable token has 1, a token left out has 0.

        w = exp((l - max l) / T) where kept, else 0;  at T = 0: 1 at the first largest logit, else 0

    Args:
        xp: the port's array namespace.
        logits: [R, n, V] in any floating type; -infinity bans a token.
        sampling: what to apply.

    Returns:
        [R, n, V] in float32, or float64 where the logits are.

    Guarantees:
        P07: a slot's weights depend on its logits alone, bit for bit.
    """
    x = wide(xp, logits)
    if sampling.temperature == 0:
        return one_hot(xp, xp.argmax(x, axis=-1), x)
    # the largest is taken off first, so that no temperature can make infinity of it
    scaled = (x - xp.max(x, axis=-1, keepdims=True)) / float(sampling.temperature)
    made = xp.exp(scaled)
    lowest = _lowest(xp, scaled, sampling)
    if lowest is not None:
        made = xp.where(scaled >= lowest, made, xp.zeros_like(made))
    if sampling.min_p:
        made = xp.where(made >= float(sampling.min_p), made, xp.zeros_like(made))
    return made


def probabilities(xp: Any, logits: Array, sampling: Sampling) -> Array:
    """Return [R, n, V], the law that tokens are drawn from: `weights` over their sum."""
    made = weights(xp, logits, sampling)
    return made / total(xp, made)


def _lowest(xp: Any, scaled: Array, sampling: Sampling) -> Array | None:
    """Return [R, n, 1], the smallest value that top-k and top-p keep; None where neither is asked for."""
    top_k = min(sampling.top_k or scaled.shape[-1], scaled.shape[-1])
    top_p = 1.0 if sampling.top_p is None else float(sampling.top_p)
    if top_k == scaled.shape[-1] and top_p == 1.0:
        return None
    falling = -xp.sort(-scaled, axis=-1)
    lowest = falling[..., top_k - 1 : top_k]
    if top_p == 1.0:
        return lowest
    shares = xp.exp(falling)
    shares = xp.where(falling >= lowest, shares, xp.zeros_like(shares))
    return xp.take_along_axis(falling, first_reaching(xp, shares, top_p), axis=-1)
