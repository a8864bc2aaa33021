"""Ratios over texts, such as tau = tokens / steps, with intervals of 95 % by the jackknife.

Steps of one text are not independent of each other, and neither are texts of one prompt. So a unit is left out: a
prompt with all its texts where there are several prompts, else a text (`units`). With n units and theta[i] the ratio
without unit i, the variance of the ratio is (n - 1) / n * sum (theta[i] - mean)^2, and the interval reaches t(n - 1)
standard errors to either side, by Student's quantile. Of fewer than `LEAST` units there is none: it would say little
but how few they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["LEAST", "NORMAL", "Estimate", "difference", "quantile", "quotient", "ratio", "units", "written"]

NORMAL = 1.959963984540054
"""The normal's 97.5 % quantile."""
LEAST = 5
"""Units that an interval needs; with 4, Student's quantile is half as large again as the normal's already."""
FEW = {1: 12.706204736, 2: 4.302652730, 3: 3.182446305, 4: 2.776445105}
"""Student's, where the expansion is too coarse."""

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of two sums.

    Attributes:
        value: the ratio.
        half: half the width of its interval; None where there are fewer than `LEAST` units.
        least: the smallest that it can be.
        most: the largest.
    """

    value: float
    half: float | None
    least: float = -math.inf
    most: float = math.inf

    @property
    def ends(self) -> tuple[float, float] | None:
        """Where its interval ends, inside what can be; None where there is none."""
        if self.half is None:
            return None
        return max(self.value - self.half, self.least), min(self.value + self.half, self.most)


def units(pairs: Pairs, prompts: Sequence[Hashable]) -> list[tuple[float, float]]:
    """Return the sums of each prompt's texts, where there are several prompts; else the texts as they are.

    Example:
        >>> units([(4, 2), (6, 2), (5, 2)], ["a", "a", "b"])
        [(10, 4), (5, 2)]
        >>> units([(4, 2), (6, 2)], ["a", "a"])
        [(4, 2), (6, 2)]
    """
    sums: dict[Hashable, tuple[float, float]] = {}
    for (one, other), prompt in zip(pairs, prompts, strict=True):
        known = sums.get(prompt, (0, 0))
        sums[prompt] = known[0] + one, known[1] + other
    return list(sums.values()) if len(sums) > 1 else list(pairs)


def ratio(texts: Pairs) -> Estimate | None:
    """Return the ratio of sums of (numerator, denominator) over units; None where the denominators add up to 0.

    Example:
        >>> made = ratio([(4, 2), (6, 2), (5, 2), (4, 2), (6, 2)])
        >>> round(made.value, 3), round(made.half, 3)
        (2.5, 0.621)
    """
    counted = np.array([pair for pair in texts if pair[1]], dtype=np.float64).reshape(-1, 2)
    if not len(counted):
        return None
    return Estimate(_of(counted.sum(axis=0)), _half(np.array([_of(row) for row in counted.sum(axis=0) - counted])))


def difference(texts: Pairs, others: Pairs) -> Estimate | None:
    """Return the ratio of the first less that of the others, unit by unit the same prompt and seeds.

    Left out together, what both have in common cancels, so the interval is that of the difference itself.
    """
    both = [(*one, *other) for one, other in zip(texts, others, strict=True) if one[1] and other[1]]
    if not both:
        return None
    counted = np.array(both, dtype=np.float64)
    whole = counted.sum(axis=0)
    left_out = np.array([_of(row[:2]) - _of(row[2:]) for row in whole - counted])
    return Estimate(_of(whole[:2]) - _of(whole[2:]), _half(left_out))


def quotient(texts: Pairs, others: Pairs) -> Estimate | None:
    """Return the ratio of the first over that of the others, such as a speed-up; unit by unit the same prompts.

    As in `difference` both lose a unit together. None where either has no ratio, or the others' is 0.

    Example:
        >>> made = quotient([(4, 2), (6, 2)], [(4, 4), (6, 4)])
        >>> made.value
        2.0
    """
    both = [(*one, *other) for one, other in zip(texts, others, strict=True) if one[1] and other[1]]
    counted = np.array(both, dtype=np.float64).reshape(-1, 4)
    whole = counted.sum(axis=0)
    if not len(counted) or not whole[2]:
        return None
    left_out = np.array([_of(row[:2]) / _of(row[2:]) if row[2] else math.nan for row in whole - counted])
    return Estimate(_of(whole[:2]) / _of(whole[2:]), _half(left_out))


def _of(pair: np.ndarray) -> float:
    return float(pair[0] / pair[1]) if pair[1] else math.nan


def _half(left_out: np.ndarray) -> float | None:
    count = len(left_out)
    if count < LEAST:
        return None
    variance = (count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum())
    return quantile(count - 1) * math.sqrt(variance)


def quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile.

    Source:
        Abramowitz and Stegun, 26.7.5, three terms; off by less than 0.01 from 5 degrees of freedom on.

    Example:
        >>> [round(quantile(n), 2) for n in (1, 3, 10, 100)]
        [12.71, 3.18, 2.23, 1.98]
    """
    if freedom in FEW:
        return FEW[freedom]
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def written(value: Estimate | None, digits: int, *, scale: float = 1.0, sign: bool = False) -> str:
    """Return a number with its interval.

    Example:
        >>> written(Estimate(2.5, 0.125), 2), written(Estimate(0.5, None), 1, scale=100, sign=True), written(None, 1)
        ('2.50 ± 0.12', '+50.0', '-')
        >>> written(Estimate(0.35, 0.4, least=0.0, most=1.0), 0, scale=100)
        '35 (0 to 75)'
    """
    if value is None:
        return "-"
    number = f"{scale * value.value:{'+' if sign else ''}.{digits}f}"
    if value.half is None or value.ends is None:
        return number
    low, high = value.ends
    if value.ends != (value.value - value.half, value.value + value.half):
        return f"{number} ({scale * low:.{digits}f} to {scale * high:.{digits}f})"
    return f"{number} ± {scale * value.half:.{digits}f}"
